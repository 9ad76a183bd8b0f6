"""Linear layers of 1 to FEW tokens on the GPU (GEMV): y[m, n] = sum over k of w[n, k] * x[m, k], and the first half of
a feed-forward layer. Float weights with few rows, such as routers, take up to SOME tokens, FEW at a time.

Parameters are those of `linear_args.py`. Activations are in the layout "rows" for int8 formats, and float32 for float
formats.

A group of `lanes` lanes of a wave processes the units (`load.py`) of a row, interleaved, so that a load instruction
reads contiguous memory. At the end lane shuffles reduce the sums. A group works on several rows at the same time, which
share the registers of activations. LDS is used only for norms, and for blocks of 32 results that are
quantized (those of `gate_up_swiglu`, and of a linear that prepares a norm) or exchanged with other GPUs.

GEMVs are bound by memory: enough 128-bit loads must be in flight. This also holds for a few tokens: weights are loaded
and decoded once, and multiplied with the activations of each token, which are in caches. All m tokens are computed,
whether live or not.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

from tvm.tirx.script import builder as T

from mlc_amd.schedules.formats import Format
from mlc_amd.schedules.gpu.base.activations import gated
from mlc_amd.schedules.gpu.base.device import barrier, launch, uniform
from mlc_amd.schedules.gpu.base.planes import BLOCK, Planes, padded
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH, emit_store, load_columns
from mlc_amd.schedules.gpu.base.registers import at, lane_of, vector
from mlc_amd.schedules.gpu.base.step import FEW, builder, if_live, is_live, when
from mlc_amd.schedules.gpu.exchange.exchange import PAIR, Sum
from mlc_amd.schedules.gpu.experts.experts import expert_at
from mlc_amd.schedules.gpu.linear import gemv_plan, gemv_rows, load
from mlc_amd.schedules.gpu.linear.deferred_norm import RowFactors, row_factors
from mlc_amd.schedules.gpu.linear.gemm_dot import EXACT_TILES
from mlc_amd.schedules.gpu.linear.gemv_plan import Plan, Split
from mlc_amd.schedules.gpu.linear.gemv_rows import Strip, Tokens, emit_acts, emit_products, span_of
from mlc_amd.schedules.gpu.linear.linear_args import (
    LinearBuffers,
    Segment,
    check_blocks,
    declare_gate_up,
    declare_linear,
)
from mlc_amd.schedules.operators import ExpertDown, ExpertGateUp, GateUp, HeadLinear, Linear
from mlc_amd.schedules.tir import Buffer, Expr

VECTORS = ("rows", "")  # layouts of activations that GEMVs take; the other layouts are for matrix units
SOME = 64  # upper limit of the tokens for float weights whose GEMM would not fill the GPU

plans = gemv_plan.plans


def suits(op: Linear | GateUp | ExpertGateUp, arch: Device) -> bool:
    """Whether the operator is computed by a GEMV: it has few tokens; or it is a linear of float weights whose GEMM
    would have fewer tiles than the GPU has compute units, where each tile has to go through all columns (on an H100, a
    router of 128 x 2048 then takes 31 us)."""
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
    """Raises ValueError for an operator that no GEMV computes."""
    kinds, m = _kinds(op), 1 if isinstance(op, ExpertGateUp | ExpertDown) else op.m
    some = isinstance(op, Linear) and FEW < m <= SOME and m % FEW == 0 and kinds == {"float"} and not op.norm_out
    layouts = {"rows" if kind == "int8" else "" for kind in kinds}
    if ((m > FEW or m & (m - 1)) and not some) or len(kinds) != 1 or layouts != {op.layout_read}:
        raise ValueError(
            f"{op.name} of {m} tokens in the layout {op.layout_read!r} with {[f.name for f, _ in op.weights]} is no "
            "GEMV"
        )


def _group(arch: Device, lane: Expr, wave: Expr, lanes: int, waves: int) -> Expr:
    """The number of this lane's group of `lanes` lanes in the workgroup."""
    wave = uniform(arch, wave) if waves > 1 else T.int32(0)
    return wave if lanes == arch.wave else T.Bind(wave * (arch.wave // lanes) + lane // lanes)


def emit_segment(
    arch: Device, split: Split, segment: Segment, views: Planes, tokens: Callable[[Expr], Tokens],
    thread: tuple[Expr, ...], residual: Buffer | None = None, first_token: Expr = 0, factors: RowFactors | None = None,
) -> None:  # fmt: skip
    """Emits the code for a workgroup's rows of a segment. tokens(row): the activations for the group of rows from `row`
    on. thread: (number of the workgroup among those of the segment, lane, wave). first_token: number of the first
    token. factors: of a norm to complete; for several tokens they must be computed already."""
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
    """Computes the products of 32 rows from `first` on of each weight with each token. Returns shared memory [tokens *
    weights, 32] with them. A barrier must follow."""
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


def _block_parts(
    arch: Device, m: int, lane: Expr, wave: Expr, waves: int, width: int = WIDTH
) -> Iterator[tuple[Expr, Expr, Expr]]:
    """Distributes the blocks of tokens over threads; BLOCK / width lanes take a block. Yields (token, first of `width`
    columns, whether the thread has a block; otherwise it gets the last token)."""
    lanes = BLOCK // width
    column = T.Bind(lane % lanes * width)
    for thread in range(0, m * lanes, waves * arch.wave):
        token, live = 0, (wave == 0) & (lane < lanes)
        if m > 1:
            token = T.Bind((thread + wave * arch.wave + lane) // lanes)
            live, token = T.Bind(token < m), T.Bind(T.min(token, T.int32(m - 1)))
        yield token, column, live


def _has_parts(arch: Device, m: int, wave: Expr, waves: int, width: int = WIDTH) -> Expr | None:
    """Whether a wave has any parts of `_block_parts`; None if all waves do."""
    busy = -(-m * BLOCK // width // arch.wave)
    return uniform(arch, wave) < busy if busy < waves else None


def _emit_prepared(
    arch: Device, plan: Plan, args: LinearBuffers, tokens: Tokens, factors: RowFactors | None,
    place: tuple[Expr, Expr, Expr],
) -> None:  # fmt: skip
    """Emits the code for a block of a linear that prepares a norm. place: (number of the block, lane, wave)."""
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


def emit_added(
    arch: Device, added: Sum, Y: Buffer, waves: int, place: tuple[Expr, Expr, Expr],
    compute: Callable[[], Callable[[Expr, Expr, Expr], list[Expr]]],
) -> None:  # fmt: skip
    """Emits the code for a block of 32 columns of products whose all-reduce the kernel computes, too: the products are
    sent to the workgroups with the same number on the other GPUs. place: (number of the block, lane, wave). compute():
    emits the products of all tokens, and returns result(token, column of the block, row), which returns PAIR of them
    and may only be called after a barrier. Y: the parameter for the products."""
    (block, lane, wave), (m, n) = place, (int(size) for size in Y.shape)
    added.round.begin(wave * arch.wave + lane, waves * arch.wave)
    result, parts = compute(), []
    for token, column, live in _block_parts(arch, m, lane, wave, waves, PAIR):  # loads before the barrier
        row, pair = T.Bind(block * BLOCK + column), T.Bind((block * m + token) * (BLOCK // PAIR) + column // PAIR)
        mine = T.Bind(live & added.round.alive)
        parts.append((token, column, row, pair, added.load(token, row), mine))
    barrier()
    with when(_has_parts(arch, m, wave, waves, PAIR)):
        for token, column, row, pair, _, mine in parts:
            y = result(token, column, row)
            added.round.send(pair, y, mine)
            with when(mine):
                for j in range(0, PAIR, WIDTH):
                    T.buffer_store(Y, vector(y[j : j + WIDTH]), [token, at(row + j, WIDTH)])
    barrier()  # all threads of the workgroup have sent their pairs, and have read the number of the round
    with when(_has_parts(arch, m, wave, waves, PAIR)):
        for token, column, row, pair, loaded, mine in parts:
            added.store(pair, token, row, result(token, column, row), loaded, mine)
    added.round.end((wave == 0) & (lane == 0), block, n // BLOCK)


def _emit_added_linear(
    arch: Device, plan: Plan, args: LinearBuffers, tokens: Tokens, factors: RowFactors | None,
    place: tuple[Expr, Expr, Expr], added: Sum,
) -> None:  # fmt: skip
    """`emit_added` for a linear. place: see `_emit_prepared`."""
    ((fmt, _, planes, bias, Y),), (block, lane, wave) = args.segments, place

    def compute() -> Callable[[Expr, Expr, Expr], list[Expr]]:
        weights = [(fmt, load.views(fmt, planes, span_of([fmt], tokens[0].k)))]
        products = _emit_block(arch, plan, weights, T.Bind(block * BLOCK), tokens, lane, wave)
        if factors is not None and len(tokens) == 1:
            factors.compute()

        def result(token: Expr, column: Expr, row: Expr) -> list[Expr]:
            y = load_columns(products, token, column) + load_columns(products, token, column + WIDTH)
            y = y if factors is None else [factors.scaled(token, v) for v in y]
            biases = [] if bias is None else load_columns(bias, row) + load_columns(bias, row + WIDTH)
            return [T.Bind(v + b) for v, b in zip(y, biases, strict=True)] if biases else y

        return result

    emit_added(arch, added, Y, plan.waves, place, compute)


@builder
def linear(op: Linear, arch: Device, state: Buffer, plan: Plan | None) -> None:
    """Kernel with the parameters of `linear_args`. Segments must all be int8 (layout "rows") or all float (layout "").
    m: 1, 2, 4 or FEW; for float segments also a multiple of FEW up to SOME, of which tokens that are not live are not
    written. Columns of Y from n on are undefined. op.eps: only for one token and int8 formats. Raises ValueError for
    segments that cannot share a launch."""
    emit_linear(op, arch, state, plan)


def emit_linear(
    op: Linear, arch: Device, state: Buffer, plan: Plan | None, adds: Callable[[], Sum] | None = None
) -> None:
    """Emits the code of `linear`. adds: declares an all-reduce of the linear's result, which the kernel then also
    computes; None without one. plan: with `adds`, that of a linear that prepares a norm."""
    check(op)
    k, m, blocks = op.k, op.m, bool(op.norm_out or adds)
    if blocks:
        check_blocks(op.segments[0][1])
    splits = gemv_plan.linear_splits(replace(op, norm_out="rows") if adds else op, arch, plan)
    waves = splits[0].plan.waves
    args, added = declare_linear(op), adds() if adds else None
    grid = (sum(s.groups for s in splits), *([m // FEW] if m > FEW else []))
    with launch(grid, (arch.wave, waves)) as (workgroup, *part, lane, wave):
        first_token = T.Bind(part[0] * FEW) if part else 0
        if op.eps is None:
            acts = emit_acts(args.acts, k, m)
            tokens = [acts.of(first_token + i) for i in range(FEW)] if part else acts.first(m)
        else:
            tokens = [gemv_rows.emit_norm(arch, args.acts, k, op.eps, lane, wave, waves)]
        factors = row_factors(args.completed, arch, lane, wave, waves)
        if factors is not None and m > 1:  # here, because segments are in an `if`, in which no barrier is allowed
            factors.compute()
            barrier()
        if blocks:
            own = arch, splits[0].plan, args, tokens, factors, (workgroup, lane, wave)
            _emit_added_linear(*own, added) if added else _emit_prepared(*own)
            splits = []
        first = 0
        for segment, split in zip(args.segments, splits, strict=not blocks):
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
    """Kernel with the parameters of `linear_args`: y = f(gate * x) * (up * x). n: a multiple of 32. Both weights must
    be int8 (layout_in "rows") or float (layout_in ""). m: 1, 2, 4 or FEW. A workgroup computes one block of 32 columns
    of y. op.eps: see `linear`. Experts are not sorted: each slot is a GEMV of one token, and a row of the outputs.
    Raises ValueError for weights that cannot share a launch."""
    check(op)
    check_blocks(op.n)
    fmts, n, k, m = [fmt for fmt, _ in op.weights], op.n, op.k, gemv_plan.gate_up_tokens(op)
    eps, x_rows, slots = (op.eps, m, []) if isinstance(op, GateUp) else (None, op.x_rows, [op.of.slots(op.m)])
    plan = gemv_plan.block_plan(op, arch, plan)
    waves = plan.waves
    args = declare_gate_up(op)
    grid = (n // BLOCK, *slots)
    # with several tokens, slots of the same expert read its rows at the same time, all but the first from caches
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
