"""Rows on their way to the experts and back: their order by expert, the copies in that order, the weighted sums.

    expert_order    (state, Ids) to Slots, Pairs and Groups (schedules/operators/experts.py)
    gather          rows of X float32 [m, k] in slots, as float32 or int8 blocks in tiles
    combine         sums of a row's slots

Live rows only; slots that are padding get zeros.
"""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.base.arch import Arch
from mlc_amd.schedules.cpu.base.kernel import kernel, live_rows, row_loop
from mlc_amd.schedules.cpu.base.vector import LANES, at, f32, local, registers, splat, store
from mlc_amd.schedules.cpu.linear.quantize import BLOCK, Output
from mlc_amd.schedules.operators import Combine, ExpertOrder, Gather
from mlc_amd.schedules.operators.experts import Experts
from mlc_amd.schedules.tir import Buffer, Expr


@registry.builds(ExpertOrder)
def expert_order(op: ExpertOrder, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], Ids int32 [m, used], Slots, Pairs, Groups). It takes the time of a few thousand memory
    accesses, in one thread. Slots of rows that are not live are 0."""
    of, m, used, count = op.of, op.m, op.used, op.experts
    tiles, tile = of.tiles(m), of.tile
    with kernel(name) as (builder, state):
        Ids = T.arg("Ids", T.buffer((m, used), "int32"))
        Slots = T.arg("Slots", T.buffer((m, used), "int32"))
        Pairs = T.arg("Pairs", T.buffer((of.slots(m),), "int32"))
        Groups = T.arg("Groups", T.buffer((of.groups(m),), "int32"))
        next_slot, number, last = local(count, dtype="int32"), local(count, dtype="int32"), local(1, dtype="int32")
        live = live_rows(state, m)
        _fill(Pairs, -1)
        _fill(number, 0)
        with T.serial(live) as row, T.serial(used) as j:
            store(number, number[Ids[row, j]] + 1, Ids[row, j])
        store(last, T.int32(0), 0)
        with T.serial(count) as e:
            first = T.Bind(last[0])
            T.buffer_store(Groups, first, [tiles + e])
            T.buffer_store(Groups, number[e], [tiles + count + 1 + e])
            store(next_slot, first * tile, e)
            with T.serial((number[e] + (tile - 1)) // tile) as i:
                T.buffer_store(Groups, e, [first + i])
                store(last, first + i + 1, 0)
        T.buffer_store(Groups, last[0], [tiles + count])
        with T.serial(tiles - last[0]) as i:
            T.buffer_store(Groups, T.int32(-1), [last[0] + i])
        with T.serial(live) as row, T.serial(used) as j:
            e = T.Bind(Ids[row, j])
            slot = T.Bind(next_slot[e])
            store(next_slot, slot + 1, e)
            T.buffer_store(Slots, slot, [row, j])
            T.buffer_store(Pairs, row * used + j, [slot])
        with T.serial(m - live) as row, T.serial(used) as j:
            T.buffer_store(Slots, T.int32(0), [live + row, j])
    return builder.get()


def _fill(buffer: Buffer, value: int) -> None:
    with T.serial(int(buffer.shape[0])) as i:
        T.buffer_store(buffer, T.int32(value), [i])


@registry.builds(Gather)
def gather(op: Gather, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], X float32 [m, k], [Pairs int32 [slots], for several rows], [Weights float32 [m, used], if
    `weighted`], then A, S of [slots, k] in tiles of of.tile slots if `layout`, else Y float32 [slots, k])."""
    k, m, of, tile, used = op.k, op.m, op.of, op.tile, op.used
    slots = of.slots(m)
    with kernel(name) as (builder, _):
        X = T.arg("X", T.buffer((m, k), "float32"))
        Pairs: Buffer = T.arg("Pairs", T.buffer((slots,), "int32")) if m > 1 else None
        Weights = T.arg("Weights", T.buffer((m, used), "float32")) if op.weighted else None
        output = Output(slots, k, tile, bool(op.layout), "Y")
        if m == 1:
            with T.parallel(used) as j, T.serial(k // BLOCK) as block:
                columns = (at(block * BLOCK + half) for half in (0, LANES))
                low, high = (X[0, c] if Weights is None else X[0, c] * splat(Weights[0, j]) for c in columns)
                output.store_block(low, high, j, block)
        else:
            with T.parallel(of.tiles(m)) as t, T.If(Pairs[t * tile] >= 0), T.Then():
                _emit_tile(X, Pairs, Weights, t, of, output)
    return builder.get()


def _emit_tile(X: Buffer, Pairs: Buffer, Weights: Buffer | None, t: Expr, of: Experts, output: Output) -> None:
    rows, factors = registers(of.tile, kind="int32"), registers(of.tile)
    with T.serial(of.tile) as i:
        live = Pairs[t * of.tile + i] >= 0
        pair = T.Bind(T.max(Pairs[t * of.tile + i], T.int32(0)))
        weight = T.float32(1) if Weights is None else Weights[pair // of.used, pair % of.used]
        store(rows, pair // of.used, i)
        store(factors, T.Select(live, weight, T.float32(0)), i)
    with T.serial(int(X.shape[1]) // BLOCK) as block:
        output.store_tile(lambda i, c: X[rows[i], at(block * BLOCK + c)] * splat(factors[i]), t, block, of.tile)


@registry.builds(Combine)
def combine(op: Combine, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], X float32 [slots, n], Slots int32 [m, used], [Weights float32 [m, used], if `weighted`],
    [R float32 [m, n], if `residual`], Y float32 [m, n]): Y = R + the sum of X[slot] * weight, in the order of a row's
    slots."""
    n, m, of = op.n, op.m, op.of
    with kernel(name) as (builder, state):
        X = T.arg("X", T.buffer((of.slots(m), n), "float32"))
        Slots = T.arg("Slots", T.buffer((m, of.used), "int32"))
        Weights = T.arg("Weights", T.buffer((m, of.used), "float32")) if op.weighted else None
        R = T.arg("R", T.buffer((m, n), "float32")) if op.residual else None
        Y = T.arg("Y", T.buffer((m, n), "float32"))
        with row_loop(state, m) as row, T.serial(n // LANES) as step:
            columns, total = at(step * LANES), f32(0.0)
            for j in range(of.used):
                x = X[Slots[row, j], columns]
                total = T.Bind(total + (x if Weights is None else x * splat(Weights[row, j])))
            store(Y, total if R is None else R[row, columns] + total, row, columns)
    return builder.get()
