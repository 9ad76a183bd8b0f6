"""The kernels of a mixture of experts on the CPU besides its matrix products: `Route`, `ExpertOrder`, `Gather` and
`Combine` of schedules/operators/experts.py. They process only live rows."""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.base.arch import Arch, Isa
from mlc_amd.schedules.cpu.base.kernel import kernel, live_rows, row_loop
from mlc_amd.schedules.cpu.base.vector import LANES, at, exp, f32, i32, local, reduce, registers, splat, store
from mlc_amd.schedules.cpu.linear.quantize import BLOCK, Output
from mlc_amd.schedules.operators import Combine, ExpertOrder, Gather, Route
from mlc_amd.schedules.operators.experts import GATINGS, MIN_SUM, Experts
from mlc_amd.schedules.runs import softplus
from mlc_amd.schedules.tir import Buffer, Expr, declared

# Scores of experts that must not be chosen. EXCLUDED: experts of groups that were not chosen; a row with NaNs may get
# them. LOWEST: experts that are chosen already, and the padding of vectors.
EXCLUDED, LOWEST = -1e30, -3e38


@registry.builds(Route)
def route(op: Route, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], L float32 [m, n], [B float32 [n]], [F float32 [n]], Ids, Weights), n = experts rounded up
    to a multiple of 16.

    An expert's score is its probability, plus B if `bias`. The `used` experts with the largest scores are chosen. With
    groups > 1 only experts of the best `groups_used` groups can be chosen, those with the largest sums of their two
    best scores; a group is consecutive experts. The weights are the probabilities of the chosen experts, divided by
    their sum if `normalize`, times `scale`, times F[expert] if `factors`. Raises ValueError for an unknown gating, and
    for groups of different sizes.
    """
    n, m, experts, used, isa = op.n, op.m, op.experts, op.used, arch.isa
    if op.gating not in GATINGS or experts % op.groups:
        raise ValueError(f"no kernel for a router with gating {op.gating}, and {experts} experts in {op.groups} groups")
    with kernel(name) as (builder, state):
        L, B, F = declared(L=(m, n), B=(n,) if op.bias else None, F=(n,) if op.factors else None)
        Ids, Weights = *declared("int32", Ids=(m, used)), *declared(Weights=(m, used))
        with row_loop(state, m) as row:
            values, scores = local(n), local(n)  # probabilities, and scores by which experts are chosen
            _emit_probabilities(op, L, row, values, isa)
            _emit_scores(values, B, scores, n, experts)
            if op.groups > 1:
                _emit_groups(scores, experts, op.groups, op.groups_used)
            padded = -(-used // LANES) * LANES
            weights = local(padded)
            if op.gating == "softmax_used":
                for i in range(0, used, LANES):
                    store(weights, f32(LOWEST), at(i))
            with T.serial(used) as j:
                chosen = _emit_best(scores, n, experts)
                T.buffer_store(Ids, chosen, [row, j])
                store(weights, values[chosen], j)
                store(scores, T.float32(LOWEST), chosen)
            if op.gating == "softmax_used":
                _emit_softmax(weights, padded, isa)
            factor = _emit_factor(op, weights)
            with T.serial(used) as j:
                weight = weights[j] * factor[0]
                T.buffer_store(Weights, weight if F is None else weight * F[Ids[row, j]], [row, j])
    return builder.get()


def _lane(step: Expr) -> Expr:
    """The column numbers of vector number `step`, int32."""
    return T.Cast(f"int32x{LANES}", at(step * LANES))


def _emit_probabilities(op: Route, L: Buffer, row: Expr, values: Buffer, isa: Isa) -> None:
    """Stores the experts' probabilities to values; with the gating "softmax_used" their logits."""
    if op.gating == "sqrt_softplus":
        with T.serial(op.n) as e:
            store(values, T.Select(e < op.experts, T.sqrt(softplus(L[row, e])), T.float32(LOWEST)), e)
        return
    with T.serial(op.n // LANES) as step:
        x = T.Bind(L[row, at(step * LANES)])
        if op.gating == "sigmoid":
            # `exp` is valid up to 88 only
            x = T.Bind(f32(1.0) / (f32(1.0) + exp(T.min(f32(0.0) - x, f32(87.0)), isa)))
        store(values, T.Select(_lane(step) < i32(op.experts), x, f32(LOWEST)), at(step * LANES))
    if op.gating == "softmax":
        _emit_softmax(values, op.n, isa)


def _emit_softmax(values: Buffer, n: int, isa: Isa) -> None:
    """Softmax of n values, in place. Padding with the value LOWEST becomes 0."""
    top, total = local(LANES), local(LANES)
    store(top, f32(LOWEST), at(0))
    store(total, f32(0.0), at(0))
    with T.serial(n // LANES) as step:
        store(top, T.max(top[at(0)], values[at(step * LANES)]), at(0))
    largest = reduce("fmax", T.Bind(top[at(0)]))
    with T.serial(n // LANES) as step:
        x = T.Bind(values[at(step * LANES)] - splat(largest))
        y = T.Bind(T.Select(x < f32(-87.0), f32(0.0), exp(T.max(x, f32(-87.0)), isa)))
        store(values, y, at(step * LANES))
        store(total, total[at(0)] + y, at(0))
    whole = reduce("fadd", T.Bind(total[at(0)]))
    with T.serial(n // LANES) as step:
        store(values, values[at(step * LANES)] / splat(whole), at(step * LANES))


def _emit_scores(values: Buffer, B: Buffer | None, scores: Buffer, n: int, experts: int) -> None:
    with T.serial(n // LANES) as step:
        x = values[at(step * LANES)]
        x = x if B is None else x + B[at(step * LANES)]
        store(scores, T.Select(_lane(step) < i32(experts), x, f32(LOWEST)), at(step * LANES))


def _emit_groups(scores: Buffer, experts: int, groups: int, groups_used: int) -> None:
    """Sets the scores of experts outside the best groups to EXCLUDED."""
    size = experts // groups
    sums, first, second = local(groups), local(1), local(1)
    with T.serial(groups) as group:
        store(first, T.float32(LOWEST), 0)
        store(second, T.float32(0 if size == 1 else LOWEST), 0)
        with T.serial(size) as i:
            x = T.Bind(scores[group * size + i])
            if size > 1:
                store(second, T.max(second[0], T.min(first[0], x)), 0)
            store(first, T.max(first[0], x), 0)
        store(sums, first[0] + second[0], group)
    # A group is kept if fewer than groups_used groups are better. Of equal groups the first one is better.
    better = local(1, dtype="int32")
    with T.serial(groups) as group:
        store(better, T.int32(0), 0)
        mine = T.Bind(sums[group])
        with T.serial(groups) as other:
            ahead = (sums[other] > mine) | ((sums[other] == mine) & (other < group))
            store(better, better[0] + T.Cast("int32", ahead), 0)
        with T.If(better[0] >= groups_used), T.Then(), T.serial(size) as i:
            store(scores, T.float32(EXCLUDED), group * size + i)


def _emit_best(scores: Buffer, n: int, experts: int) -> Expr:
    """The expert with the largest score; of equal scores, the first."""
    top, place = local(LANES), local(LANES, dtype="int32")
    store(top, f32(LOWEST), at(0))
    with T.serial(n // LANES) as step:
        store(top, T.max(top[at(0)], scores[at(step * LANES)]), at(0))
    largest = reduce("fmax", T.Bind(top[at(0)]))
    # With NaNs it may be that no score equals the largest: then any expert is chosen.
    store(place, i32(experts - 1), at(0))
    with T.serial(n // LANES) as step:
        found = T.Select(scores[at(step * LANES)] == splat(largest), _lane(step), i32(experts - 1))
        store(place, T.min(place[at(0)], found), at(0))
    return reduce("smin", T.Bind(place[at(0)]))


def _emit_factor(op: Route, weights: Buffer) -> Buffer:
    """The factor of the chosen experts' probabilities, float32 [1]: scale, with `normalize` divided by their sum."""
    factor = local(1)
    store(factor, T.float32(op.scale), 0)
    if op.normalize:
        store(factor, T.float32(0), 0)
        with T.serial(op.used) as j:
            store(factor, factor[0] + weights[j], 0)
        store(factor, T.float32(op.scale) / T.max(factor[0], T.float32(MIN_SUM)), 0)
    return factor


@registry.builds(ExpertOrder)
def expert_order(op: ExpertOrder, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], Ids int32 [m, used], Slots, Pairs, Groups). It runs in one thread, as it takes only the
    time of a few thousand memory accesses. Slots of rows that are not live are 0."""
    of, m, used, count = op.of, op.m, op.used, op.experts
    tiles, tile = of.tiles(m), of.tile
    with kernel(name) as (builder, state):
        shapes = {"Ids": (m, used), "Slots": (m, used), "Pairs": (of.slots(m),), "Groups": (of.groups(m),)}
        Ids, Slots, Pairs, Groups = declared("int32", **shapes)
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
    `weighted`], then A, S of [slots, k] in tiles of op.tile slots if `layout`, else Y float32 [slots, k])."""
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
    [R float32 [m, n], if `residual`], Y float32 [m, n]): Y = R + the sum over the slots of a row of X[slot] * weight,
    in their order."""
    n, m, of = op.n, op.m, op.of
    with kernel(name) as (builder, state):
        X = T.arg("X", T.buffer((of.slots(m), n), "float32"))
        Slots = T.arg("Slots", T.buffer((m, of.used), "int32"))
        shapes = {"Weights": (m, of.used) if op.weighted else None, "R": (m, n) if op.residual else None, "Y": (m, n)}
        Weights, R, Y = declared(**shapes)
        with row_loop(state, m) as row, T.serial(n // LANES) as step:
            columns, total = at(step * LANES), f32(0.0)
            for j in range(of.used):
                x = X[Slots[row, j], columns]
                total = T.Bind(total + (x if Weights is None else x * splat(Weights[row, j])))
            store(Y, total if R is None else R[row, columns] + total, row, columns)
    return builder.get()
