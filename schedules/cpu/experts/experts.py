"""Matrix products of a mixture of experts on the CPU: the rows in each slot by the weights of the slot's expert.

In: activations of slots as in `linear.py`, in tiles of `tile` slots; `Groups` (Ids for one row) of
schedules/operators/experts.py; the planes of stacks, matrices of experts * n rows, n a multiple of 16. Out: the results
of live slots; those of other slots have no meaning.

Several rows: a task is a block of rows of one expert's matrix, for all of its tiles of slots, so that weights are read
once. An expert's tasks lie evenly in a range of numbers as long as its share of all tiles, so that threads which take
equal shares of the numbers have equal work. Of a tile with few live slots only a part is computed; then memory is the
bound, as for one row, and weights are prefetched.

One row: a task is a block of rows of gate and up for one slot, or a tile of rows of down for all slots, which it adds
up in the order of `combine`: results do not depend on the number of rows.
"""

from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.cpu.base.activation import ACTIVATIONS
from mlc_amd.schedules.cpu.base.kernel import kernel
from mlc_amd.schedules.cpu.base.vector import at, f32, registers, splat, store
from mlc_amd.schedules.cpu.linear.gate_up import TILES, emit_block
from mlc_amd.schedules.cpu.linear.linear import emit_results
from mlc_amd.schedules.cpu.linear.linear_plan import default_plan, few_plan, row_tiles
from mlc_amd.schedules.cpu.linear.linear_tile import (
    Packed,
    act_params,
    emit_acts,
    emit_part,
    emit_tile,
    emit_weights,
    weight_args,
)
from mlc_amd.schedules.cpu.linear.planes import BLOCK, ROWS
from mlc_amd.schedules.cpu.linear.quantize import Output
from mlc_amd.schedules.formats import lookup
from mlc_amd.schedules.operators.experts import Experts


def _stack(fmt, of: Experts, n, k, prefix, rows=ROWS):
    """The planes of a stack. UserError unless `rows` divides n."""
    if n % rows:
        raise UserError(f"experts need matrices of a multiple of {rows} rows, this model has {n}")
    return weight_args(fmt, of.count * n, k, prefix)


def _bias(of: Experts, n, name):
    return T.arg(name, T.buffer((of.count * n,), "float32"))


def _groups(of: Experts, m):
    return T.arg("Groups", T.buffer((1, of.used) if m == 1 else (of.groups(m),), "int32"))


def _emit_tasks(Groups, of: Experts, m, blocks, emit):
    """The parallel loop over `blocks` blocks of rows of each expert that has rows. Calls emit(expert, block, tiles,
    each): `each(body)` emits the loop over its `tiles` tiles, as body(tile, live slots)."""
    tiles = of.tiles(m)
    with T.parallel(T.Bind(Groups[tiles + of.count]) * blocks) as number:
        expert = T.Bind(Groups[number // blocks])
        first = T.Bind(Groups[tiles + expert])
        count, place = T.Bind(Groups[tiles + expert + 1] - first), T.Bind(number - first * blocks)
        pairs = T.Bind(Groups[tiles + of.count + 1 + expert])

        def each(body):
            with T.serial(count) as i:
                body(T.Bind(first + i), T.Bind(T.min(pairs - i * of.tile, T.int32(of.tile))))

        with T.If(place % count == 0), T.Then():
            emit(expert, T.Bind(place // count), count, each)


def expert_gate_up(fmt_gate, fmt_up, n, k, m, of, biases, act, quantize, shared, isa, name, plan=None):
    """PrimFunc (state, A, S | X, Groups, planes of gate, planes of up, [GB, UB float32 [experts * n]], then A, S of
    [slots, n] | Y float32 [slots, n]).

    Formats, act, quantize and plan as in `gate_up`. shared: one row of activations for all slots (m = 1). UserError
    unless 32 divides n.
    """
    fmt_gate, fmt_up, activation = lookup(fmt_gate), lookup(fmt_up), ACTIVATIONS[act]
    if fmt_gate.kind != fmt_up.kind:
        raise ValueError(f"gate {fmt_gate.name} and up {fmt_up.name} do not make one launch")
    plan = plan or default_plan(isa, m, of.tile, [(fmt_gate, n), (fmt_up, n)], k)
    few = plan if m == 1 else few_plan(isa, [(fmt_gate, n), (fmt_up, n)], k)
    shared, blocks = shared and m == 1, n // BLOCK
    with kernel(name) as (builder, _):
        params = act_params(1 if shared else of.slots(m), k, of.tile, fmt_gate.kind)
        Groups = _groups(of, m)
        weights = [(fmt, _stack(fmt, of, n, k, prefix, BLOCK)) for fmt, prefix in ((fmt_gate, "G_"), (fmt_up, "U_"))]
        added = [_bias(of, n, which) for which in ("GB", "UB")] if biases else None
        output = Output(of.slots(m), n, of.tile, quantize, "Y", "_out")
        acts = emit_acts(params, of.tile, k)

        def emit(expert, block, tiles, each):
            bias = None if added is None else lambda c, i: added[i][at(expert * n + block * BLOCK + c)]

            def products(sources, sizes):
                def body(tile, live):
                    rows = T.int32(0) if shared else tile
                    emit_block(
                        weights, sources, acts, rows, live, sizes, output, tile, block, activation, bias, plan, few, isa
                    )

                each(body)

            first = T.Bind(expert * (n // ROWS) + block * TILES)
            emit_weights(weights, first, TILES, acts, plan, isa, tiles, products)

        if m > 1:
            _emit_tasks(Groups, of, m, blocks, emit)
        else:
            with T.parallel(of.used * blocks) as task:
                slot = T.Bind(task // blocks)
                emit(T.Bind(Groups[0, slot]), T.Bind(task % blocks), 1, lambda body: body(slot, 1))
    return builder.get()


def expert_linear(fmt, n, k, m, of, biased, isa, name, plan=None):
    """PrimFunc (state, A, S | X, Groups, planes, [WB float32 [experts * n]], Y float32 [slots, n]) of several rows.

    plan: as in `linear`. UserError unless 16 divides n.
    """
    fmt = lookup(fmt)
    plan = plan or default_plan(isa, m, of.tile, [(fmt, n)], k)
    held, few = row_tiles(fmt, n, k, plan), few_plan(isa, [(fmt, n)], k)
    with kernel(name) as (builder, _):
        params, Groups = act_params(of.slots(m), k, of.tile, fmt.kind), _groups(of, m)
        bufs = _stack(fmt, of, n, k, "W_")
        WB = _bias(of, n, "WB") if biased else None
        Y = T.arg("Y", T.buffer((of.slots(m), n), "float32"))
        acts = emit_acts(params, of.tile, k)

        def emit(expert, block, tiles, each):
            bias = None if WB is None else lambda column: WB[at(expert * n + column, isa.lanes)]
            first = T.Bind(block * held)

            def products(sources, sizes):
                def body(tile, live):
                    def part(slots):
                        with T.serial(held) as t:
                            weights, rows = sources[0](t), T.Bind(first + t)
                            emit_results(fmt, weights, bias, None, Y, acts, rows, tile, slots, plan, few, isa)

                    emit_part(live, sizes, part)

                each(body)

            emit_weights([(fmt, bufs)], T.Bind(expert * (n // ROWS) + first), held, acts, plan, isa, tiles, products)

        _emit_tasks(Groups, of, m, n // ROWS // held, emit)
    return builder.get()


def expert_down(fmt, n, k, of, biased, weighted, residual, isa, name, plan=None):
    """PrimFunc (state, A, S | X, Groups, planes, [WB float32 [experts * n]], [Weights float32 [1, used]], [R float32
    [1, n]], Y float32 [1, n]) of one row: Y = R + the sum over its slots of their results times Weights.

    plan: as in `linear`. UserError unless 16 divides n.
    """
    fmt = lookup(fmt)
    plan = plan or default_plan(isa, 1, 1, [(fmt, n)], k)
    with kernel(name) as (builder, _):
        params, Groups = act_params(of.used, k, 1, fmt.kind), _groups(of, 1)
        bufs = _stack(fmt, of, n, k, "W_")
        WB = _bias(of, n, "WB") if biased else None
        Weights = T.arg("Weights", T.buffer((1, of.used), "float32")) if weighted else None
        R = T.arg("R", T.buffer((1, n), "float32")) if residual else None
        Y = T.arg("Y", T.buffer((1, n), "float32"))
        acts = emit_acts(params, 1, k)
        with T.parallel(n // ROWS) as tile:
            total = registers(ROWS)
            for row in range(0, ROWS, isa.lanes):
                store(total, f32(0.0, isa.lanes), at(row, isa.lanes))
            with T.serial(of.used) as slot:
                expert = T.Bind(Groups[0, slot])
                weights = Packed(fmt, bufs, T.Bind(expert * (n // ROWS) + tile), isa)

                def add(_, row, x, expert=expert, slot=slot):
                    if WB is not None:
                        x = x + WB[at(expert * n + tile * ROWS + row, isa.lanes)]
                    if Weights is not None:
                        x = x * splat(Weights[0, slot], isa.lanes)
                    store(total, total[at(row, isa.lanes)] + x, at(row, isa.lanes))

                emit_tile(fmt, weights, acts, slot, 1, plan, plan, isa, add)
            for row in range(0, ROWS, isa.lanes):
                place = at(tile * ROWS + row, isa.lanes)
                y = total[at(row, isa.lanes)]
                store(Y, R[0, place] + y if residual else y, 0, place)
    return builder.get()
