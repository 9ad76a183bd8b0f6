"""Linear layers of one to FEW tokens on the GPU: y[m, n] = sum over k of w[n, k] * x[m, k], and the first half of a
feed-forward layer. Float weights of few rows, such as routers, take up to SOME tokens, FEW at a time.

In: `state` int32[4], activations (int8 formats: A and S of `quantize.py`'s layout "rows"; float formats: X float32 [m,
k]), weights in the layout "rows" (`planes.py`). Out: Y float32 [m, n padded to 16], bias and residual added; or
f(gate) * up, quantized on request.

`lanes` lanes of a wave process a row's units (`load.py`) interleaved, so that a load instruction reads contiguous
memory; their sums are reduced by lane shuffles at the end. A group of lanes works on several rows at once, which share
the activations' registers. Nothing goes through LDS but the block of results that `gate_up_swiglu` quantizes. Memory
bound: what matters is that enough 128-bit loads are in flight. So are a few tokens: weights are loaded and decoded
once, then multiplied with each token's activations, which caches keep. All m tokens are computed, live or not.
"""

from collections.abc import Callable
from contextlib import ExitStack

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.activations import gated
from mlc_amd.schedules.gpu.base.device import barrier, launch, uniform
from mlc_amd.schedules.gpu.base.planes import BLOCK, padded
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import LANES, WIDTH, columns, emit_store, load_columns
from mlc_amd.schedules.gpu.base.registers import lane_of
from mlc_amd.schedules.gpu.base.step import FEW, if_live, is_live, kernel, when
from mlc_amd.schedules.gpu.experts.experts import expert_at
from mlc_amd.schedules.gpu.linear import gemv_plan, load
from mlc_amd.schedules.gpu.linear.gemm_dot import EXACT_TILES
from mlc_amd.schedules.gpu.linear.gemv_plan import Plan, Split, gate_up_plan, gate_up_tokens, linear_splits
from mlc_amd.schedules.gpu.linear.gemv_rows import Strip, Tokens, emit_acts, emit_norm, emit_products, span_of
from mlc_amd.schedules.gpu.linear.linear_args import Segment, check_blocks, declare_gate_up, declare_linear
from mlc_amd.schedules.gpu.linear.load import Planes
from mlc_amd.schedules.operators import ExpertDown, ExpertGateUp, GateUp, HeadLinear, Linear
from mlc_amd.schedules.tir import Buffer, Expr

VECTORS = ("rows", "")  # layouts of activations that it multiplies; others of few tokens are for matrix units
SOME = 64  # tokens of float weights that do not fill the GPU as a GEMM

plans = gemv_plan.plans


def suits(op: Linear | GateUp | ExpertGateUp, arch: Device) -> bool:
    """Whether the operator is a GEMV: of few tokens, or a linear of float weights whose GEMM has fewer tiles than the
    GPU has compute units. Each of these would go through all columns alone: on an H100, a router of 128 x 2048 takes 31
    us."""
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
    some = isinstance(op, Linear) and FEW < m <= SOME and m % FEW == 0 and kinds == {"float"}
    layouts = {"rows" if kind == "int8" else "" for kind in kinds}
    if ((m > FEW or m & (m - 1)) and not some) or len(kinds) != 1 or layouts != {op.layout_read}:
        raise ValueError(
            f"{op.name} of {m} tokens in the layout {op.layout_read!r} with {[f.name for f, _ in op.weights]} is no "
            "GEMV"
        )


Thread = tuple[Expr, Expr, Expr]  # number of a workgroup among those of a segment; lane and wave within it


def _group(arch: Device, lane: Expr, wave: Expr, lanes: int, waves: int) -> Expr:
    """Number of this lane's group of `lanes` in the workgroup."""
    wave = uniform(arch, wave) if waves > 1 else T.int32(0)
    return wave if lanes == arch.wave else T.Bind(wave * (arch.wave // lanes) + lane // lanes)


def emit_segment(
    arch: Device, split: Split, segment: Segment, views: Planes, tokens: Callable[[Expr], Tokens], thread: Thread,
    residual: Buffer | None = None, first_token: Expr = 0,
) -> None:  # fmt: skip
    """A workgroup's rows of a segment. tokens(row): what a group of rows from `row` on is multiplied with; first_token:
    the number of the first of them."""
    fmt, n, _, bias, Y = segment
    rows, count, (workgroup, lane, wave) = padded(n), split.plan.rows, thread
    first = T.Bind(workgroup * split.rows + _group(arch, lane, wave, split.lanes, split.plan.waves) * count)
    inside = None if rows % split.rows == 0 else first < rows
    row = first if inside is None else T.Bind(T.min(first, T.int32(rows - count)))
    part = T.Bind(lane % split.lanes)
    strips = [Strip(fmt, views, row + i) for i in range(count)]
    y, writes = emit_products(strips, tokens(row), part, split.lanes, split.plan.unroll, arch)
    with T.If(writes if inside is None else writes & inside), T.Then():
        for number, i, total in y:
            token = first_token + number
            if bias is not None:
                total = total + bias[row + i if n % count == 0 and n == rows else T.min(row + i, T.int32(n - 1))]
            if residual is not None:
                total = residual[token, row + i] + total
            T.buffer_store(Y, total, [token, row + i])


def linear(op: Linear, arch: Device, name: str, plan: Plan | None = None) -> tirx.PrimFunc:
    """Kernel with the parameters of `linear_args`.

    Segments are all int8 (layout "rows") or all float (layout ""). m: 1, 2, 4 or FEW, of float segments also a multiple
    of FEW up to SOME, of which those after the live ones are left as they are. The columns of Y from n on are
    undefined. eps: for one token, in int8 formats. ValueError for segments that cannot share a launch.
    """
    check(op)
    k, m = op.k, op.m
    splits = linear_splits(op, arch, plan)
    waves = splits[0].plan.waves
    with kernel(name) as ir:
        args = declare_linear(op)
        grid = (sum(s.groups for s in splits), *([m // FEW] if m > FEW else []))
        with launch(grid, (arch.wave, waves)) as (workgroup, *part, lane, wave):
            first_token = T.Bind(part[0] * FEW) if part else 0
            if op.eps is None:
                acts = emit_acts(args.acts, k, m)
                tokens = [acts.of(first_token + i) for i in range(FEW)] if part else acts.first(m)
            else:
                tokens = [emit_norm(arch, args.acts, k, op.eps, lane, wave, waves)]
            first = 0
            for segment, split in zip(args.segments, splits, strict=True):
                last = first + split.groups
                views = load.views(segment.fmt, segment.planes, span_of([segment.fmt], k))
                here = (workgroup >= first) & (workgroup < last) if len(splits) > 1 else None
                live = is_live(args.state, first_token) if part else None
                with when(here), when(live):
                    thread = workgroup - first, lane, wave
                    emit_segment(arch, split, segment, views, lambda _: tokens, thread, args.residual, first_token)
                first = last
    return ir.get()


def gate_up_swiglu(op: GateUp | ExpertGateUp, arch: Device, name: str, plan: Plan | None = None) -> tirx.PrimFunc:
    """Kernel with the parameters of `linear_args`.

    y = f(gate * x) * (up * x). n: a multiple of 32; both weights int8 (layout_in "rows") or both float (layout_in "").
    m: 1, 2, 4 or FEW. A workgroup makes one block of 32 columns of y. eps: as of `linear`. Experts are not sorted: each
    slot is a GEMV of one token and a row of the outputs. ValueError for weights that cannot share a launch.
    """
    check(op)
    check_blocks(op.n)
    fmts, n, k, m = [fmt for fmt, _ in op.weights], op.n, op.k, gate_up_tokens(op)
    eps, x_rows, slots = (op.eps, m, []) if isinstance(op, GateUp) else (None, op.x_rows, [op.of.slots(op.m)])
    plan = gate_up_plan(op, arch, plan)
    rows, waves, lanes = plan.rows, plan.waves, plan.lanes
    groups = waves * arch.wave // lanes
    with kernel(name) as ir:
        args = declare_gate_up(op)
        grid = (n // BLOCK, *slots)
        # of several tokens: slots of one expert read its rows at the same time, all but the first from caches
        turn = -1 if slots and op.m > 1 else 1
        with launch(grid[::turn], (arch.wave, waves)) as (*places, lane, wave), ExitStack() as if_slot_live:
            (block, *slot), token = places[::turn], 0
            if slot:
                token = slot[0] if op.m == 1 else T.Bind(slot[0] // op.used)
                if_slot_live.enter_context(if_live(args.state, op.m, token))
            acts = emit_acts(args.acts, k, x_rows) if eps is None else None
            views = [load.views(fmt, bufs, span_of(fmts, k)) for fmt, bufs in zip(fmts, args.planes, strict=True)]
            products = T.alloc_buffer((2 * m, BLOCK), "float32", scope="shared")  # gate and up of each token
            group, part = _group(arch, lane, wave, lanes, waves), T.Bind(lane % lanes)
            first = block * BLOCK
            if isinstance(op, ExpertGateUp):
                own = [0, *slot] if op.m == 1 else [token, T.Bind(slot[0] % op.used)]
                first = T.Bind(expert_at(args.ids, own, op.of) * n + first)
                acts = acts if acts is None or x_rows == 1 else acts.of(token if op.shared else slot[0])
            tokens = acts.first(m) if acts else [emit_norm(arch, args.acts, k, eps or 0.0, lane, wave, waves)]
            with T.serial(BLOCK // (groups * rows)) as i:
                row = T.Bind((i * groups + group) * rows)
                weights = zip(fmts, views, strict=True)
                strips = [Strip(*weight, first + row + i) for weight in weights for i in range(rows)]
                found, writes = emit_products(strips, tokens, part, lanes, plan.unroll, arch)
                with T.If(writes), T.Then():
                    for token, i, total in found:
                        T.buffer_store(products, total, [token * 2 + i // rows, row + i % rows])
            barrier()
            # eight lanes have a token's block; after the last token they repeat it
            column = T.Bind(lane % LANES * WIDTH)
            for thread in range(0, m * LANES, waves * arch.wave):
                token, live = 0, (wave == 0) & (lane < LANES)
                if m > 1:
                    token = T.Bind((thread + wave * arch.wave + lane) // LANES)
                    live, token = T.Bind(token < m), T.Bind(T.min(token, T.int32(m - 1)))
                gate, up = (load_columns(products, token * 2 + i, column) for i in range(2))
                if args.biases:
                    biases = [T.Bind(bias[columns(first + column)]) for bias in args.biases]
                    gate, up = (
                        [T.Bind(v + lane_of(bias, i)) for i, v in enumerate(x)]
                        for x, bias in zip((gate, up), biases, strict=True)
                    )
                y = [gated(op.act, g, u) for g, u in zip(gate, up, strict=True)]
                emit_store(
                    arch, op.layout, args.out, y, slot[0] if slot else token, T.Bind(block * BLOCK + column), live
                )
    return ir.get()
