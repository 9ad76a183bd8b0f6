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

from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.schedules.formats import lookup
from mlc_amd.schedules.gpu.base.activations import gated
from mlc_amd.schedules.gpu.base.device import barrier, launch, uniform
from mlc_amd.schedules.gpu.base.planes import BLOCK, padded
from mlc_amd.schedules.gpu.base.quantize import LANES, WIDTH, columns, emit_store
from mlc_amd.schedules.gpu.base.registers import lane_of
from mlc_amd.schedules.gpu.base.step import FEW, if_live, is_live, kernel, when
from mlc_amd.schedules.gpu.experts.experts import expert_at
from mlc_amd.schedules.gpu.linear import load
from mlc_amd.schedules.gpu.linear.gemm_dot import EXACT_TILES
from mlc_amd.schedules.gpu.linear.gemv_norm import NORM_WAVES, emit_norm
from mlc_amd.schedules.gpu.linear.gemv_rows import Strip, emit_acts, emit_products, span_of, units_of
from mlc_amd.schedules.gpu.linear.linear_args import check_blocks, declare_gate_up, declare_linear, segments_of

FULL = 6  # groups of lanes for each compute unit, as many as hide the latency of memory with two loads of each lane
MIN_USE = 0.9  # of the lanes, over all steps of a row
VECTORS = ("rows", "")  # layouts of activations that it multiplies; others of few tokens are for matrix units
SOME = 64  # tokens of float weights that do not fill the GPU as a GEMM
LINEAR_WAVES = 4  # of a workgroup
MOST_ROWS = 4  # that a group of lanes works on at once
MAX_SUMS = 32  # products that a group of lanes adds up at once: as many registers


@dataclass(frozen=True)
class Plan:
    """How a GEMV is spread over the GPU. Powers of two.

    rows    rows that a group of lanes works on at once (at most 16); gate_up_swiglu: of each weight
    waves   waves of a workgroup, at most
    lanes   maximum of lanes that share a row
    unroll  steps of a row whose loads are issued before the first is used; fewer where a step loads more (`fitted`)
    """

    rows: int
    waves: int
    lanes: int
    unroll: int


def full_plan(arch, rows: int, waves: int) -> Plan:
    """The plan where there is work for all of the GPU: all lanes of a wave share a row, and load as many steps of it at
    once as the device has loads in flight."""
    return Plan(rows, waves, arch.wave, arch.loads)


def few_plan(plan: Plan, m: int, weights: int) -> Plan:
    """The plan of one token for m > 1: at least four rows, which share the loads of activations, as far as there are
    registers."""
    return replace(plan, rows=min(max(plan.rows, 4), MAX_SUMS // (m * weights)), unroll=1)


def fitted(plan: Plan, fmts, k, arch, weights=1) -> Plan:
    """The plan for rows of so many weights at once. Each weight shortens `unroll`. On Vulkan so does each block of 32
    columns in a unit, then `rows`: drivers keep all that is loaded in registers (AMD's spill, or few waves fit), where
    LLVM for AMD spreads loads out."""
    if arch.api == "rocm":
        return replace(plan, unroll=max(1, plan.unroll // weights))
    share = weights * (span_of(fmts, k) if fmts[0].kind == "int8" else 1)
    unroll = max(1, plan.unroll // share)
    return replace(plan, unroll=unroll, rows=max(1, min(plan.rows, plan.rows * plan.unroll // (share * unroll))))


def lanes_of(units, maximum) -> int:
    """Lanes that share a row of that many units: as many as have work at least MIN_USE of the time."""
    return next(
        n for n in (64, 32, 16, 8, 4, 2, 1) if n <= maximum and (units >= MIN_USE * n * -(-units // n) or n == 1)
    )


# ---- kernels


def _layout_of(kind):
    """Layout of the activations for formats of that kind."""
    return "rows" if kind == "int8" else ""


def suits(fmts, rows, m, layout, arch) -> bool:
    """Whether a linear of that many rows and tokens is a GEMV: of few tokens, or of float weights whose GEMM has fewer
    tiles than the GPU has compute units. Each of these would go through all columns alone: on an H100, a router of 128
    x 2048 takes 31 us."""
    if m <= FEW:
        return layout in VECTORS
    if layout or m > SOME or m % FEW or any(fmt.kind != "float" for fmt in fmts):
        return False
    tile = EXACT_TILES[-1]
    return -(-m // tile.tokens) * -(-rows // tile.rows) < arch.units


def check(fmts, m, layout, what):
    kinds = {fmt.kind for fmt in fmts}
    some = FEW < m <= SOME and m % FEW == 0 and kinds == {"float"} and what == "linear"
    if ((m > FEW or m & (m - 1)) and not some) or len(kinds) != 1 or layout != _layout_of(fmts[0].kind):
        raise ValueError(f"{what} of {m} tokens in the layout {layout!r} with {[fmt.name for fmt in fmts]} is no GEMV")


class _Split(NamedTuple):
    """A segment's share of the grid: lanes that share a row, rows of a workgroup, workgroups."""

    lanes: int
    rows: int
    groups: int


def _split(fmt, n, k, plan, arch):
    lanes = lanes_of(units_of([fmt], k), min(plan.lanes, arch.wave))
    rows = plan.waves * (arch.wave // lanes) * plan.rows
    return _Split(lanes, rows, -(-padded(n) // rows))


def _group(wave, lane, lanes, arch, waves):
    """Number of this lane's group of `lanes` in the workgroup."""
    wave = uniform(arch, wave) if waves > 1 else T.int32(0)
    return wave if lanes == arch.wave else T.Bind(wave * (arch.wave // lanes) + lane // lanes)


def emit_segment(segment, residual, views, tokens, split, workgroup, lane, wave, plan, arch, first_token=0):
    """A workgroup's rows of a segment. tokens(row): the Acts that a group of rows from `row` on is multiplied with;
    first_token: the number of the first of them."""
    fmt, n, _, bias, Y = segment
    rows = padded(n)
    first = T.Bind(workgroup * split.rows + _group(wave, lane, split.lanes, arch, plan.waves) * plan.rows)
    inside = None if rows % split.rows == 0 else first < rows
    row = first if inside is None else T.Bind(T.min(first, T.int32(rows - plan.rows)))
    part = T.Bind(lane % split.lanes)
    strips = [Strip(fmt, views, row + i) for i in range(plan.rows)]
    y, writes = emit_products(strips, tokens(row), part, split.lanes, plan.unroll, arch)
    with T.If(writes if inside is None else writes & inside), T.Then():
        for number, i, total in y:
            token = first_token + number
            if bias is not None:
                total = total + bias[row + i if n % plan.rows == 0 and n == rows else T.min(row + i, T.int32(n - 1))]
            if residual is not None:
                total = residual[token, row + i] + total
            T.buffer_store(Y, total, [token, row + i])


def linear_plans(segments, k, arch, plan=None, m=1, normed=False):
    """(plan, split) of each segment [(Format, n)] as `linear` uses them: two lists. Two plans that give the same make
    the same kernel. normed: whether the kernel computes the norm of its input."""
    plan = plan or linear_default(segments, arch, m, normed)
    plan = replace(plan, waves=min(plan.waves, arch.threads // arch.wave))
    plans = [fitted(plan, [fmt], k, arch) for fmt, _ in segments]
    return plans, [_split(fmt, n, k, used, arch) for (fmt, n), used in zip(segments, plans, strict=True)]


def linear_default(segments, arch, m=1, normed=False) -> Plan:
    """The plan of `linear`, with fewer rows at once where there would be too few groups of lanes to fill the GPU. A
    norm is computed once in each workgroup: the fewer there are, the better."""
    waves, rows = 1 if arch.lone_waves else LINEAR_WAVES, sum(padded(n) for _, n in segments)
    plan = full_plan(arch, MOST_ROWS, waves)
    plan = plan if m == 1 else few_plan(plan, min(m, FEW), 1)
    full = max(FULL, 5 * arch.loads // 2)  # what takes more loads of a lane takes more lanes, too
    while plan.rows > 1 and rows // plan.rows < full * arch.units:
        plan = replace(plan, rows=plan.rows // 2)
    return replace(plan, waves=max(plan.waves, NORM_WAVES)) if normed else plan


def linear(segments, k, m, layout, biases, residual, arch, name, plan=None, eps=None):
    """PrimFunc with the parameters of `linear_args`.

    segments: list of (format name or Format, n), all int8 (layout "rows") or all float (layout ""); they share the
    activations (q, k and v of a layer) and the launch. m: 1, 2, 4 or FEW, of float segments also a multiple of FEW up
    to SOME, of which those behind the live ones are left as they are. biases: one flag per segment. residual: Y = R +
    result, for one segment. The columns of Y from n on are undefined. eps: of a norm of the input of one token, in
    int8 formats, which the kernel computes. ValueError for segments that cannot share a launch.
    """
    segments = segments_of(segments, biases, residual)
    check([fmt for fmt, _ in segments], m, layout, "linear")
    plans, splits = linear_plans(segments, k, arch, plan, m, eps is not None)
    plan = plans[0]
    with kernel(name) as ir:
        args = declare_linear(segments, k, m, layout, biases, residual, eps)
        grid = (sum(s.groups for s in splits), *([m // FEW] if m > FEW else []))
        with launch(grid, (arch.wave, plan.waves)) as (workgroup, *part, lane, wave):
            first_token = T.Bind(part[0] * FEW) if part else 0
            if eps is None:
                acts = emit_acts(args.acts, k, m)
                tokens = [acts.of(first_token + i) for i in range(FEW)] if part else acts.first(m)
            else:
                tokens = [emit_norm(arch, *args.acts, k, eps, lane, wave, plan.waves)]
            first = 0
            for segment, split, used in zip(args.segments, splits, plans, strict=True):
                last = first + split.groups
                views = load.views(segment.fmt, segment.planes, span_of([segment.fmt], k))
                here = (workgroup >= first) & (workgroup < last) if len(segments) > 1 else None
                live = is_live(args.state, first_token) if part else None
                with when(here), when(live):
                    emit_segment(
                        segment,
                        args.residual,
                        views,
                        lambda _: tokens,
                        split,
                        workgroup - first,
                        lane,
                        wave,
                        used,
                        arch,
                        first_token,
                    )
                first = last
    return ir.get()


def workgroups(formats, n, k, arch) -> int:
    """Of the kernel of one token that computes the norm of its input, by its default plan: of `linear` with segments of
    n rows each (a list), or of `gate_up_swiglu` with n rows of both weights."""
    if isinstance(n, int):
        return n // BLOCK
    _, splits = linear_plans(list(zip(formats, n, strict=True)), k, arch, normed=True)
    return sum(split.groups for split in splits)


def gate_up_default(arch, m=1) -> Plan:
    """The plan of `gate_up_swiglu` for m tokens: as many waves as share a workgroup's block of rows. It has a block
    however few there are: with fewer rows at once, they would only come one after the other."""
    plan = full_plan(arch, MOST_ROWS, BLOCK)
    return plan if m == 1 else few_plan(plan, m, 2)


def gate_up_plan(fmts, k, arch, plan=None, m=1) -> Plan:
    """The plan as `gate_up_swiglu` uses it: two plans that give the same make the same kernel."""
    plan = fitted(plan or gate_up_default(arch, m), fmts, k, arch, weights=2)
    # all of a workgroup's groups of lanes have rows
    lanes = max(lanes_of(units_of(fmts, k), min(plan.lanes, arch.wave)), arch.wave // BLOCK)
    waves = min(plan.waves, arch.threads // arch.wave, BLOCK * lanes // arch.wave)
    return Plan(min(plan.rows, BLOCK * lanes // (waves * arch.wave)), waves, lanes, plan.unroll)


@contextmanager
def _of_live(state, of, index):
    """`with _of_live(..) as (slot, token):` around what is done for slots of live tokens; (None, 0) without experts.
    index: of the slot, of a workgroup."""
    if not of:
        yield None, 0
        return
    (slot,) = index
    token = slot if of.m == 1 else T.Bind(slot // of.experts.used)
    with if_live(state, of.m, token):
        yield slot, token


def gate_up_swiglu(fmt_gate, fmt_up, f, k, m, layout_in, layout, arch, name, plan=None, act="silu", of=None, eps=None):
    """PrimFunc with the parameters of `linear_args`.

    y = f(gate * x) * (up * x), f being `act` of `activations.py`. The weights are f x k, f a multiple of 32, both
    int8 (layout_in "rows") or both float (layout_in ""). m: 1, 2, 4 or FEW. A workgroup makes one block of 32 columns
    of y. ValueError for weights that cannot share a launch.

    of: a `Slots` of experts.py, not sorted, with m = 1: the weights are stacks, and each slot is a GEMV of one token
    and a row of the outputs. eps: as of `linear`, without `of`.
    """
    fmts = [lookup(fmt_gate), lookup(fmt_up)]
    check(fmts, m, layout_in, "gate_up")
    check_blocks(f)
    slots, x_rows = (of.experts.slots(of.m), of.x_rows) if of else (1, m)
    rows, waves, lanes, unroll = astuple(gate_up_plan(fmts, k, arch, plan, m))
    groups = waves * arch.wave // lanes
    with kernel(name) as ir:
        state, params, ids, planes, biases, out, _ = declare_gate_up(
            fmts, f, k, (x_rows, slots * m), layout_in, layout, of, eps
        )
        grid = (f // BLOCK, slots) if of else (f // BLOCK,)
        # of several tokens: slots of one expert read its rows at the same time, all but the first from caches
        turn = -1 if of and of.m > 1 else 1
        with (
            launch(grid[::turn], (arch.wave, waves)) as (*places, lane, wave),
            _of_live(state, of, places[::turn][1:]) as (slot, token),
        ):
            block = places[::turn][0]
            acts = None if eps is not None else emit_acts(params, k, x_rows)
            views = [load.views(fmt, bufs, span_of(fmts, k)) for fmt, bufs in zip(fmts, planes, strict=True)]
            made = T.alloc_buffer((2 * m, BLOCK), "float32", scope="shared")  # gate and up of each token
            group, part = _group(wave, lane, lanes, arch, waves), T.Bind(lane % lanes)
            first = block * BLOCK
            if of:
                own = [0, slot] if of.m == 1 else [token, T.Bind(slot % of.experts.used)]
                first = T.Bind(expert_at(ids, own, of.experts) * f + first)
                acts = acts if x_rows == 1 else acts.of(token if of.shared else slot)
            tokens = acts.first(m) if acts else [emit_norm(arch, *params, k, eps, lane, wave, waves)]
            with T.serial(BLOCK // (groups * rows)) as i:
                row = T.Bind((i * groups + group) * rows)
                strips = [
                    Strip(fmt, bufs, first + row + i)
                    for fmt, bufs in zip(fmts, views, strict=True)
                    for i in range(rows)
                ]
                found, writes = emit_products(strips, tokens, part, lanes, unroll, arch)
                with T.If(writes), T.Then():
                    for token, i, total in found:
                        T.buffer_store(made, total, [token * 2 + i // rows, row + i % rows])
            barrier()
            # eight lanes have a token's block; behind the last token they repeat it
            column = T.Bind(lane % LANES * WIDTH)
            for thread in range(0, m * LANES, waves * arch.wave):
                token, live = 0, (wave == 0) & (lane < LANES)
                if m > 1:
                    token = T.Bind((thread + wave * arch.wave + lane) // LANES)
                    live, token = T.Bind(token < m), T.Bind(T.min(token, T.int32(m - 1)))
                gate, up = (
                    [T.Bind(lane_of(x, i)) for i in range(WIDTH)]
                    for x in (T.Bind(made[token * 2 + i, columns(column)]) for i in range(2))
                )
                if biases:
                    gate, up = (
                        [T.Bind(v + lane_of(b, i)) for i, v in enumerate(values)]
                        for values, b in zip(
                            (gate, up), [T.Bind(b[columns(first + column)]) for b in biases], strict=True
                        )
                    )
                y = [gated(act, g, u) for g, u in zip(gate, up, strict=True)]
                out_row = slot if of else token
                emit_store(arch, layout, out, y, out_row, T.Bind(block * BLOCK + column), live)
    return ir.get()
