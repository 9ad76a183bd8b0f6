"""Linear layers of one to FEW tokens on the GPU: y[m, n] = sum over k of w[n, k] * x[m, k], and the first half of a
feed-forward layer. Float weights of few rows, such as routers, take up to SOME tokens, FEW at a time.

Parameters are those of `linear_args.py`: activations are in the layout "rows" for int8 formats, float32 for float ones.

`lanes` lanes of a wave process a row's units (`load.py`) interleaved, so that a load instruction reads contiguous
memory; their sums are reduced by lane shuffles at the end. A group of lanes works on several rows at once, which share
the activations' registers. Nothing goes through LDS but blocks of 32 results that are quantized: those of
`gate_up_swiglu`, and of a linear that prepares a norm. Memory bound: what matters is that enough 128-bit loads are in
flight. So are a few tokens: weights are loaded and decoded once, then multiplied with each token's activations, which
caches keep. All m tokens are computed, live or not.

The second half of a mixture of experts is y = R + the sum over a token's slots of weight * (D h + bias), D being the
down projection of the slot's expert. Each token has workgroups of its own: the experts of a few tokens are different
ones, mostly. Workgroups of the same rows run side by side, so where experts are the same, their rows come from memory
once. Slots side by side belong to different waves of a workgroup, whose sums meet in LDS and are added in the order of
slots.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

from tvm.tirx.script import builder as T

from mlc_amd.schedules.formats import Format
from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.base.activations import gated
from mlc_amd.schedules.gpu.base.device import barrier, fma, launch, uniform, wave_sum
from mlc_amd.schedules.gpu.base.planes import BLOCK, Planes, padded, plane_args
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import LANES, WIDTH, act_args, emit_store, load_columns
from mlc_amd.schedules.gpu.base.registers import at, filled, lane_of, put
from mlc_amd.schedules.gpu.base.step import FEW, builder, builds, if_live, is_live, when
from mlc_amd.schedules.gpu.experts.experts import bias_args, check_rows, expert_at, ids_arg
from mlc_amd.schedules.gpu.linear import gemv_plan, gemv_rows, load
from mlc_amd.schedules.gpu.linear.deferred_norm import RowFactors, row_factors
from mlc_amd.schedules.gpu.linear.gemm_dot import EXACT_TILES
from mlc_amd.schedules.gpu.linear.gemv_plan import CHOICES, Plan, Split
from mlc_amd.schedules.gpu.linear.gemv_rows import Strip, Tokens, emit_acts, emit_products, span_of
from mlc_amd.schedules.gpu.linear.linear_args import (
    LinearBuffers,
    Segment,
    check_blocks,
    declare_gate_up,
    declare_linear,
)
from mlc_amd.schedules.operators import ExpertDown, ExpertGateUp, GateUp, HeadLinear, Linear
from mlc_amd.schedules.space import Kernel, planned
from mlc_amd.schedules.tir import Buffer, Expr, declared

VECTORS = ("rows", "")  # layouts of activations that it multiplies; others of few tokens are for matrix units
SOME = 64  # tokens of float weights that do not fill the GPU as a GEMM

# Of `expert_down`: workgroups for each compute unit, with fewer an H200 is slower; rows of a plan, where these are
# enough; waves that compute different slots' parts of the same rows.
DOWN_FULL, DOWN_ROWS, DOWN_WAVES = 2, 2, 8

plans = gemv_plan.plans


def suits(op: Linear | GateUp | ExpertGateUp, arch: Device) -> bool:
    """Whether the operator is a GEMV: of few tokens, or a linear of float weights whose GEMM has fewer tiles than the
    GPU compute units, each to go through all columns alone: on an H100, a router of 128 x 2048 takes 31 us."""
    if isinstance(op, ExpertGateUp):
        return op.tile == 1
    if op.m <= FEW:
        return op.layout_read in VECTORS
    if isinstance(op, GateUp) or op.layout or op.m > SOME or op.m % FEW or _kinds(op) != {"float"}:
        return False
    tile, rows = EXACT_TILES[-1], sum(padded(n) for _, n in op.segments)
    return -(-op.m // tile.tokens) * -(-rows // tile.rows) < arch.units


def _kinds(op: Linear | HeadLinear | GateUp | ExpertGateUp | ExpertDown) -> set[str]:
    return {fmt.kind for fmt, _ in op.weights}


def check(op: Linear | HeadLinear | GateUp | ExpertGateUp | ExpertDown) -> None:
    """ValueError for what is no GEMV."""
    kinds, m = _kinds(op), 1 if isinstance(op, ExpertGateUp | ExpertDown) else op.m
    some = isinstance(op, Linear) and FEW < m <= SOME and m % FEW == 0 and kinds == {"float"} and not op.norm_out
    layouts = {"rows" if kind == "int8" else "" for kind in kinds}
    if ((m > FEW or m & (m - 1)) and not some) or len(kinds) != 1 or layouts != {op.layout_read}:
        raise ValueError(
            f"{op.name} of {m} tokens in the layout {op.layout_read!r} with {[f.name for f, _ in op.weights]} is no "
            "GEMV"
        )


def _group(arch: Device, lane: Expr, wave: Expr, lanes: int, waves: int) -> Expr:
    """Number of this lane's group of `lanes` in the workgroup."""
    wave = uniform(arch, wave) if waves > 1 else T.int32(0)
    return wave if lanes == arch.wave else T.Bind(wave * (arch.wave // lanes) + lane // lanes)


def emit_segment(
    arch: Device, split: Split, segment: Segment, views: Planes, tokens: Callable[[Expr], Tokens],
    thread: tuple[Expr, ...], residual: Buffer | None = None, first_token: Expr = 0, factors: RowFactors | None = None,
) -> None:  # fmt: skip
    """A workgroup's rows of a segment. tokens(row): what a group of rows from `row` on is multiplied with; thread:
    number of the workgroup among those of the segment, lane, wave; first_token: number of the first of the tokens;
    factors: of a norm that is completed, of several tokens already computed."""
    fmt, n, _, bias, Y = segment
    rows, count, (workgroup, lane, wave) = padded(n), split.plan.rows, thread
    first = T.Bind(workgroup * split.rows + _group(arch, lane, wave, split.lanes, split.plan.waves) * count)
    inside = None if rows % split.rows == 0 else first < rows
    row = first if inside is None else T.Bind(T.min(first, T.int32(rows - count)))
    part = T.Bind(lane % split.lanes)
    strips = [Strip(fmt, views, row + i) for i in range(count)]
    y, writes = emit_products(strips, tokens(row), part, split.lanes, split.plan.unroll, arch)
    if factors is not None and factors.tokens == 1:
        factors.compute()
    with T.If(writes if inside is None else writes & inside), T.Then():
        for number, i, total in y:
            token = first_token + number
            if factors is not None:
                total = total * factors.of(token)
            if bias is not None:
                total = total + bias[row + i if n % count == 0 and n == rows else T.min(row + i, T.int32(n - 1))]
            if residual is not None:
                total = residual[token, row + i] + total
            T.buffer_store(Y, total, [token, row + i])


def _emit_block(
    arch: Device, plan: Plan, weights: Sequence[tuple[Format, Planes]], first: Expr, tokens: Tokens, lane: Expr,
    wave: Expr,
) -> Buffer:  # fmt: skip
    """The products of 32 rows from `first` on of each weight with each token, in shared memory: [tokens * weights, 32].
    A barrier must follow."""
    rows, lanes, groups = plan.rows, plan.lanes, plan.waves * arch.wave // plan.lanes
    products = T.alloc_buffer((len(tokens) * len(weights), BLOCK), "float32", scope="shared")
    group, part = _group(arch, lane, wave, lanes, plan.waves), T.Bind(lane % lanes)
    with T.serial(BLOCK // (groups * rows)) as i:
        row = T.Bind((i * groups + group) * rows)
        strips = [Strip(*weight, first + row + i) for weight in weights for i in range(rows)]
        found, writes = emit_products(strips, tokens, part, lanes, plan.unroll, arch)
        with T.If(writes), T.Then():
            for token, i, total in found:
                T.buffer_store(products, total, [token * len(weights) + i // rows, row + i % rows])
    return products


def _block_parts(arch: Device, m: int, lane: Expr, wave: Expr, waves: int) -> Iterator[tuple[Expr, Expr, Expr]]:
    """What a thread takes of the tokens' blocks, eight lanes one each: (token, first of four columns, whether it is
    its own). After the last token they repeat it."""
    column = T.Bind(lane % LANES * WIDTH)
    for thread in range(0, m * LANES, waves * arch.wave):
        token, live = 0, (wave == 0) & (lane < LANES)
        if m > 1:
            token = T.Bind((thread + wave * arch.wave + lane) // LANES)
            live, token = T.Bind(token < m), T.Bind(T.min(token, T.int32(m - 1)))
        yield token, column, live


def _has_parts(arch: Device, m: int, wave: Expr, waves: int) -> Expr | None:
    """Whether any of a wave's parts is its own; None: of each wave."""
    busy = -(-m * LANES // arch.wave)
    return uniform(arch, wave) < busy if busy < waves else None


def _emit_prepared(
    arch: Device, plan: Plan, args: LinearBuffers, tokens: Tokens, factors: RowFactors | None,
    place: tuple[Expr, Expr, Expr],
) -> None:  # fmt: skip
    """A block of a linear that prepares a norm. place: number of the block, lane, wave."""
    ((fmt, _, planes, bias, Y),), norm, (block, lane, wave) = args.segments, args.prepared, place
    assert norm
    first, m, parts = T.Bind(block * BLOCK), len(tokens), []
    weights = [(fmt, load.views(fmt, planes, span_of([fmt], tokens[0].k)))]
    products = _emit_block(arch, plan, weights, first, tokens, lane, wave)
    if factors is not None and m == 1:
        factors.compute()
    for token, column, live in _block_parts(arch, m, lane, wave, plan.waves):  # loads before the barrier
        row = T.Bind(first + column)
        others = [] if bias is None else [T.Bind(bias[at(row, WIDTH)])]
        others += [] if args.residual is None else [T.Bind(args.residual[token, at(row, WIDTH)])]
        parts.append((token, row, column, live, others, norm.load(token, row)))
    barrier()
    with when(_has_parts(arch, m, wave, plan.waves)):
        for token, row, column, live, others, loaded in parts:
            y = products[token, at(column, WIDTH)]
            y = T.Bind(sum(others, y if factors is None else factors.scaled(token, T.Bind(y))))
            with when(live):
                T.buffer_store(Y, y, [token, at(row, WIDTH)])
            norm.store(arch, token, row, y, loaded, live)


@builder
def linear(op: Linear, arch: Device, state: Buffer, plan: Plan | None) -> None:
    """Kernel with the parameters of `linear_args`. Segments are all int8 (layout "rows") or all float (layout ""). m:
    1, 2, 4 or FEW, of float segments also a multiple of FEW up to SOME, of which those after the live ones are left as
    they are. The columns of Y from n on are undefined. eps: for one token, in int8 formats. ValueError for segments
    that cannot share a launch."""
    check(op)
    k, m = op.k, op.m
    if op.norm_out:
        check_blocks(op.segments[0][1])
    splits = gemv_plan.linear_splits(op, arch, plan)
    waves = splits[0].plan.waves
    args = declare_linear(op)
    grid = (sum(s.groups for s in splits), *([m // FEW] if m > FEW else []))
    with launch(grid, (arch.wave, waves)) as (workgroup, *part, lane, wave):
        first_token = T.Bind(part[0] * FEW) if part else 0
        if op.eps is None:
            acts = emit_acts(args.acts, k, m)
            tokens = [acts.of(first_token + i) for i in range(FEW)] if part else acts.first(m)
        else:
            tokens = [gemv_rows.emit_norm(arch, args.acts, k, op.eps, lane, wave, waves)]
        factors = row_factors(args.completed, arch, lane, wave, waves)
        if factors is not None and m > 1:  # segments are in an `if`, where no barrier may be
            factors.compute()
            barrier()
        if op.norm_out:
            _emit_prepared(arch, splits[0].plan, args, tokens, factors, (workgroup, lane, wave))
            splits = []
        first = 0
        for segment, split in zip(args.segments, splits, strict=not op.norm_out):
            last = first + split.groups
            views = load.views(segment.fmt, segment.planes, span_of([segment.fmt], k))
            here = (workgroup >= first) & (workgroup < last) if len(splits) > 1 else None
            live = is_live(state, first_token) if part else None
            with when(here), when(live):
                thread = workgroup - first, lane, wave
                emit_segment(arch, split, segment, views, lambda _: tokens, thread, args.residual, first_token, factors)
            first = last


@builder
def gate_up_swiglu(op: GateUp | ExpertGateUp, arch: Device, state: Buffer, plan: Plan | None) -> None:
    """Kernel with the parameters of `linear_args`. y = f(gate * x) * (up * x). n: a multiple of 32; both weights int8
    (layout_in "rows") or both float (layout_in ""). m: 1, 2, 4 or FEW. A workgroup makes one block of 32 columns of y.
    eps: as of `linear`. Experts are not sorted: each slot is a GEMV of one token and a row of the outputs. ValueError
    for weights that cannot share a launch."""
    check(op)
    check_blocks(op.n)
    fmts, n, k, m = [fmt for fmt, _ in op.weights], op.n, op.k, gemv_plan.gate_up_tokens(op)
    eps, x_rows, slots = (op.eps, m, []) if isinstance(op, GateUp) else (None, op.x_rows, [op.of.slots(op.m)])
    plan = gemv_plan.block_plan(op, arch, plan)
    waves = plan.waves
    args = declare_gate_up(op)
    grid = (n // BLOCK, *slots)
    # of several tokens: slots of one expert read its rows at the same time, all but the first from caches
    turn = -1 if slots and op.m > 1 else 1
    with launch(grid[::turn], (arch.wave, waves)) as (*places, lane, wave), ExitStack() as if_slot_live:
        (block, *slot), token = places[::turn], 0
        if isinstance(op, ExpertGateUp):
            token = slot[0] if op.m == 1 else T.Bind(slot[0] // op.used)
            if_slot_live.enter_context(if_live(state, op.m, token))
        acts = emit_acts(args.acts, k, x_rows) if eps is None else None
        views = [load.views(fmt, bufs, span_of(fmts, k)) for fmt, bufs in zip(fmts, args.planes, strict=True)]
        first = block * BLOCK
        if isinstance(op, ExpertGateUp):
            own = [0, *slot] if op.m == 1 else [token, T.Bind(slot[0] % op.used)]
            first = T.Bind(expert_at(args.ids, own, op.of) * n + first)
            acts = acts if acts is None or x_rows == 1 else acts.of(token if op.shared else slot[0])
        tokens = acts.first(m) if acts else [gemv_rows.emit_norm(arch, args.acts, k, eps or 0.0, lane, wave, waves)]
        factors = row_factors(args.completed, arch, lane, wave, waves)
        products = _emit_block(arch, plan, list(zip(fmts, views, strict=True)), first, tokens, lane, wave)
        if factors is not None:
            factors.compute()
        barrier()
        with when(_has_parts(arch, m, wave, waves)):
            for token, column, live in _block_parts(arch, m, lane, wave, waves):
                gate, up = (load_columns(products, token * 2 + i, column) for i in range(2))
                if factors is not None:
                    gate, up = ([T.Bind(v * factors.of(token)) for v in x] for x in (gate, up))
                if args.biases:
                    biases = [T.Bind(bias[at(first + column, WIDTH)]) for bias in args.biases]
                    pairs = zip((gate, up), biases, strict=True)
                    gate, up = ([T.Bind(v + lane_of(b, i)) for i, v in enumerate(x)] for x, b in pairs)
                y = [gated(op.act, g, u) for g, u in zip(gate, up, strict=True)]
                row = slot[0] if slot else token
                emit_store(arch, op.layout, args.out, y, row, T.Bind(block * BLOCK + column), live)


def down_default(op: ExpertDown, arch: Device) -> Plan:
    """The plan with fewer rows at once where there would be too few workgroups to fill the GPU."""
    plan = gemv_plan.full_plan(arch, DOWN_ROWS, DOWN_WAVES)
    while plan.rows > 1 and down_split(op, arch, plan).groups < DOWN_FULL * arch.units:
        plan = replace(plan, rows=plan.rows // 2)
    return plan


def down_split(op: ExpertDown, arch: Device, plan: Plan | None = None) -> Split:
    """How `expert_down` is spread over the GPU; two plans that give the same make the same kernel. Waves of a workgroup
    are a multiple of the slots side by side."""
    fmts = [fmt for fmt, _ in op.weights]
    plan = gemv_plan.fitted(plan or down_default(op, arch), fmts, op.k, arch)
    lanes = gemv_plan.lanes_of(gemv_rows.units_of(fmts, op.k), min(plan.lanes, arch.wave))
    waves = min(plan.waves, arch.threads // arch.wave)
    side, _ = _slots(op, waves)
    rows = waves // side * (arch.wave // lanes) * plan.rows
    return Split(replace(plan, waves=waves - waves % side), lanes, rows, -(-op.n // rows))


def _slots(op: ExpertDown, waves: int) -> tuple[int, int]:
    """(slots side by side, steps of a wave, each with a slot)."""
    steps = -(-op.used // waves)
    return -(-op.used // steps), steps


@registry.plans(ExpertDown)
@planned(CHOICES, down_default)
def down_plans(op: ExpertDown, arch: Device, plan: Plan) -> Kernel:
    fmts, split = [fmt for fmt, _ in op.weights], down_split(op, arch, plan)
    unroll = gemv_plan.steps_at_once(fmts, op.k, split.lanes, split.plan.unroll)
    same = split._replace(plan=replace(split.plan, lanes=0, unroll=unroll))
    loads = gemv_plan.loads(fmts, op.k, replace(split.plan, waves=plan.waves))
    return Kernel(same, split.groups * op.m, split.plan.waves * arch.wave, loads)


@builds(ExpertDown)
def expert_down(op: ExpertDown, arch: Device, state: Buffer, plan: Plan | None) -> None:
    """Kernel (state, A, S | X of m * used rows, Groups, planes of the [count * n, k] stack, [WB], [Weights], [R], Y).
    UserError unless n is a multiple of 16, ValueError for activations in another layout than the format's."""
    ((fmt, n),), k, experts, used, m = op.weights, op.k, op.of, op.used, op.m
    check_rows(n)
    check(op)
    plan, lanes, rows, groups = down_split(op, arch, plan)
    waves, (side, steps) = plan.waves, _slots(op, plan.waves)
    params, ids = act_args(m * used, k, op.layout), ids_arg(experts, m)
    bufs = plane_args(fmt, op.experts * n, k, "W_")
    biases = bias_args(op.experts * n, "WB") if op.bias else []
    weights, residual = (m, used) if op.weighted else None, (m, n) if op.residual else None
    Weights, R, Y = declared(Weights=weights, R=residual, Y=(m, n))
    with (
        launch((m, groups) if m > 1 else (groups,), (arch.wave, waves)) as (*rest, workgroup, lane, wave),
        if_live(state, m, *rest or [0]),
    ):
        token = rest[0] if rest else 0
        acts, views = emit_acts(params, k, m * used), load.views(fmt, bufs, span_of([fmt], k))
        wave = uniform(arch, wave) if waves > 1 else T.int32(0)
        beside = T.Bind(wave % side)
        group = T.Bind(wave // side * (arch.wave // lanes) + lane // lanes)
        row = T.Bind(T.min(workgroup * rows + group * plan.rows, T.int32(n - plan.rows)))
        part, sums = T.Bind(lane % lanes), filled(T.float32(0), plan.rows)
        # the last step has a slot for some of the waves only
        count = steps if side * steps == used else T.Bind((used - 1 - beside) // side + 1)
        with T.serial(count) as step:
            slot = T.Bind(step * side + beside)
            first = T.Bind(expert_at(ids, [token, slot], experts) * n)
            strips = [Strip(fmt, views, first + row + i) for i in range(plan.rows)]
            found = gemv_rows.emit_sums(strips, [acts.of(token * used + slot)], part, lanes, plan.unroll, arch)
            for i in range(plan.rows):
                weight = Weights[token, slot] if Weights is not None else T.float32(1)
                put(sums, fma(T.Bind(found[i]), weight, sums[i]), i)
        totals = [wave_sum(arch, T.Bind(sums[i]), lanes) for i in range(plan.rows)]

        def store(row: Expr, total: Expr) -> None:
            """One row's result."""
            for bias in biases:
                for j in range(used):
                    own = bias[expert_at(ids, [token, j], experts) * n + row]
                    total = fma(own, Weights[token, j], total) if Weights is not None else T.Bind(total + own)
            T.buffer_store(Y, total if R is None else R[token, row] + total, [token, row])

        if side == 1:
            with T.If(part == 0), T.Then():
                for i, total in enumerate(totals):
                    store(row + i, total)
        else:
            parts = T.alloc_buffer((side, rows), "float32", scope="shared")
            with T.If(part == 0), T.Then():
                for i, total in enumerate(totals):
                    put(parts, total, beside, group * plan.rows + i)
            barrier()
            for c in range(0, rows, waves * arch.wave):
                own = T.Bind(wave * arch.wave + lane + c)
                # the last workgroup's rows were moved to the last ones, as groups of lanes computed them
                last = T.int32(n - plan.rows)
                moved = T.Bind(T.min(workgroup * rows + own // plan.rows * plan.rows, last) + own % plan.rows)
                with T.If(own < rows), T.Then():
                    total = T.Bind(parts[0, own])
                    for j in range(1, side):
                        total = T.Bind(total + parts[j, own])
                    store(moved, total)
