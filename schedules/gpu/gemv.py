"""Linear layers of one token on the GPU: y[n] = sum over k of w[n, k] * x[k], and the first half of a feed-forward
layer.

In: `state` int32[4], activations (int8 formats: A and S of `quantize.py`'s layout "rows"; float formats: X float32 [1,
k]), weights in the layout "rows" (`planes.py`). Out: Y float32 [1, n padded to 16], bias and residual added; or
f(gate) * up, quantized on request.

`lanes` lanes of a wave take a row's units (`load.py`) in turn, so that a load instruction reads contiguous memory; the
lanes' sums meet by lane shuffles at the end. A group of lanes works on several rows at once, which share the
activations' registers. Nothing goes through LDS but the block of results that `gate_up_swiglu` quantizes. Memory bound:
what counts is that enough 128-bit loads are under way.
"""

from contextlib import nullcontext
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.schedules.formats import lookup
from mlc_amd.schedules.gpu import load
from mlc_amd.schedules.gpu.activations import gated
from mlc_amd.schedules.gpu.device import barrier, dot4, fma, launch, uniform, wave_sum
from mlc_amd.schedules.gpu.load import QUADS
from mlc_amd.schedules.gpu.planes import BLOCK, padded, plane_args
from mlc_amd.schedules.gpu.quantize import FIELDS, LANES, WIDTH, act_args, columns, emit_store
from mlc_amd.schedules.gpu.registers import at, lane_of
from mlc_amd.schedules.gpu.step import kernel, state_arg

FULL = 6  # groups of lanes for each compute unit, as many as hide the latency of memory
MIN_USE = 0.9  # of the lanes, over all steps of a row


@dataclass(frozen=True)
class Plan:
    """How a GEMV is spread over the GPU. Powers of two.

    rows    rows that a group of lanes works on at once (at most 16); gate_up_swiglu: of each weight
    waves   waves of a workgroup, at most
    lanes   most lanes that share a row
    unroll  steps of a row whose loads are issued before the first is used; fewer where a step loads more (`_fit`)
    """

    rows: int
    waves: int
    lanes: int
    unroll: int


PLANS = {
    "gcn5": Plan(rows=4, waves=4, lanes=64, unroll=1),
    "cdna": Plan(rows=4, waves=4, lanes=64, unroll=2),
    "rdna1": Plan(rows=4, waves=4, lanes=32, unroll=2),
    "rdna2": Plan(rows=4, waves=4, lanes=32, unroll=2),
    "rdna3": Plan(rows=4, waves=4, lanes=32, unroll=2),
    "rdna4": Plan(rows=4, waves=4, lanes=32, unroll=2),
    "nvidia": Plan(rows=2, waves=1, lanes=32, unroll=4),
    "generic": Plan(rows=4, waves=4, lanes=64, unroll=1),
}
# a workgroup has a block of 32 rows: as many waves as there can be
GATE_UP_PLANS = {family: replace(plan, waves=BLOCK) for family, plan in PLANS.items()}
GATE_UP_PLANS["nvidia"] = Plan(rows=4, waves=8, lanes=32, unroll=2)


def default_plan(arch, rows: int, plans=PLANS) -> Plan:
    """The plan for `rows` rows in all: the arch's, with fewer rows at once where there would be too few groups to fill
    the GPU."""
    plan = plans[arch.family]
    while plan.rows > 1 and rows // plan.rows < FULL * arch.units:
        plan = replace(plan, rows=plan.rows // 2)
    return plan


def _fit(plan: Plan, fmts, k, arch, weights=1) -> Plan:
    """The plan for rows of so many weights at once. Each weight shortens `unroll`. On Vulkan so does each block of 32
    columns in a unit, then `rows`: drivers keep all that is loaded in registers (AMD's spill, or few waves fit), where
    LLVM for AMD spreads loads out."""
    if arch.api == "rocm":
        return replace(plan, unroll=max(1, plan.unroll // weights))
    share = weights * (span_of(fmts, k) if fmts[0].kind == "int8" else 1)
    unroll = max(1, plan.unroll // share)
    return replace(plan, unroll=unroll, rows=max(1, min(plan.rows, plan.rows * plan.unroll // (share * unroll))))


class Strip(NamedTuple):
    """One row of a weight: what the lanes of a group multiply."""

    fmt: object
    planes: dict
    row: object


class Acts(NamedTuple):
    """One token's activations. Int8: `quads` int32 [1, k / 4], `s` float32 [KB, 4]. Float: `x` float32 [1, k]."""

    k: int
    quads: object = None
    s: object = None
    x: object = None


class Block(NamedTuple):
    """A block's activations in registers: eight words, d, and d * sum(q) of all 32 columns or of both halves."""

    quads: list
    d: object
    sums: dict


def emit_acts(params, k) -> Acts:
    """Acts of the parameters (A, S) or (X,). To be called after the last parameter: it declares views."""
    if len(params) == 1:
        return Acts(k, x=params[0])
    A, S = params
    return Acts(
        k, T.decl_buffer((1, k // 4), "int32", data=A.data), T.decl_buffer((k // BLOCK, FIELDS), "float32", data=S.data)
    )


def span_of(fmts, k) -> int:
    """Columns of a unit divided by 32, for int8 formats; columns for float formats, which all take the narrowest."""
    return load.blocks(*fmts) if fmts[0].kind == "int8" else min(load.columns(fmt, k) for fmt in fmts)


def units_of(fmts, k) -> int:
    """Units of a row."""
    return k // (span_of(fmts, k) * (BLOCK if fmts[0].kind == "int8" else 1))


def lanes_of(units, most) -> int:
    """Lanes that share a row of that many units: as many as have work at least MIN_USE of the time."""
    return next(n for n in (64, 32, 16, 8, 4, 2, 1) if n <= most and (units >= MIN_USE * n * -(-units // n) or n == 1))


# ---- a group of lanes times several rows


def emit_rows(strips, acts: Acts, lane, lanes, unroll, arch):
    """The products of each strip's row with the activations, a float32 register per strip, the same in all lanes of the
    group.

    lane: this lane's number in its group of `lanes`. Strips are all int8 or all float.
    """
    fmts = [strip.fmt for strip in strips]
    span, units = span_of(fmts, acts.k), units_of(fmts, acts.k)
    multiply = _multiply_int8 if fmts[0].kind == "int8" else _multiply_float
    sums = T.alloc_buffer((len(strips),), "float32", scope="local")
    for i in range(len(strips)):
        T.buffer_store(sums, T.float32(0), [i])

    def steps(first, count, partial):
        """Steps first..first+count. partial: the last of them has units for some of the lanes only."""
        places = []
        for i in range(count):
            unit = (first + i) * lanes + lane
            whole = not partial or i < count - 1
            places.append((T.Bind(unit if whole else T.min(unit, T.int32(units - 1))), None if whole else unit < units))
        multiply(strips, acts, places, span, sums, arch)

    total = -(-units // lanes)
    partial = units % lanes != 0
    loops, rest = divmod(total - partial, unroll)
    if loops > 1:
        with T.serial(loops) as step:
            steps(step * unroll, unroll, False)
    elif loops:
        steps(0, unroll, False)
    if rest + partial:
        steps(loops * unroll, rest + partial, partial)
    return [wave_sum(arch, T.Bind(sums[i]), lanes) for i in range(len(strips))]


def _zero_unless(live, x):
    return T.Bind(x if live is None else T.Select(live, x, T.float32(0)))


def _act_blocks(acts, unit, live, span, halves) -> list[Block]:
    """The unit's activations. halves: whether the sums of 16 columns are wanted. Without `live` factors are 0, and so
    is what they make."""
    out = []
    for i in range(span):
        block = unit * span + i
        quads = [T.Bind(acts.quads[0, at(block * QUADS + j, 4)]) for j in (0, 4)]
        fields = T.Bind(acts.s[block, at(0, FIELDS)])
        d, whole, low, high = (_zero_unless(live, lane_of(fields, j)) for j in range(FIELDS))
        sums = {1: [whole]} | ({2: [low, high]} if halves else {})
        out.append(Block([T.Bind(lane_of(x, j)) for x in quads for j in range(4)], d, sums))
    return out


def _multiply_int8(strips, acts, places, span, sums, arch):
    """Adds to sums[i] what strip i makes of the units of `places`: (unit, condition or None)."""
    fmts = [strip.fmt for strip in strips]
    halves = any(load.groups(fmt) == 2 for fmt in fmts)
    loaded = [
        ([load.fetch(s.fmt, s.planes, s.row, unit, span) for s in strips], _act_blocks(acts, unit, live, span, halves))
        for unit, live in places
    ]
    for units, blocks in loaded:
        # d * dot - zero * d * sum(q): the products are shared by all rows
        zeros = {
            fmt.name: [[T.Bind(x * T.float32(-fmt.zero)) for x in block.sums[load.groups(fmt)]] for block in blocks]
            for fmt in fmts
            if fmt.zero
        }
        for i, (strip, unit) in enumerate(zip(strips, units, strict=True)):
            total = sums[i]
            for term in _terms(strip.fmt, unit, blocks, zeros.get(strip.fmt.name), arch):
                total = fma(*term, total)
            T.buffer_store(sums, total, [i])


def _terms(fmt, unit, blocks, zeros, arch):
    """The pairs of factors whose products a unit of a row adds to its sum. Blocks of one super-block share them."""
    count, out = load.groups(fmt), []
    value = minimum = None
    for b, block in enumerate(blocks):
        words, scales = load.codes(arch, fmt, unit, b), load.scales(fmt, unit, b)
        if fmt.block == BLOCK:
            value = minimum = None
        for g in range(count):
            dot = T.int32(0)
            for j in range(g * QUADS // count, (g + 1) * QUADS // count):
                dot = dot4(arch, words[j], block.quads[j], dot)
            dot = T.cast(dot, "float32")
            part = fma(dot, block.d, zeros[b][g]) if zeros else T.Bind(dot * block.d)
            value = _add(scales.sub[g], part, value)
            if fmt.minimum:
                minimum = _add(scales.sub_minimum[g], block.sums[count][g], minimum)
        if fmt.block == BLOCK or b == len(blocks) - 1:
            out.append((scales.d, value))
            if fmt.minimum:
                out.append((scales.minimum if fmt.minimum == "M" else T.Bind(T.float32(0) - scales.minimum), minimum))
    return out


def _add(scale, x, total):
    """total + scale * x, where total and scale may be None (0 and 1)."""
    if scale is None:
        return x if total is None else T.Bind(total + x)
    return T.Bind(scale * x) if total is None else fma(scale, x, total)


def _multiply_float(strips, acts, places, width, sums, arch):
    """As `_multiply_int8`, for float formats."""
    loaded = []
    for unit, live in places:
        weights = [load.fetch_float(s.fmt, s.planes, s.row, unit, width) for s in strips]
        step = min(width, load.LOAD_WORDS)
        x = [T.Bind(acts.x[0, at(unit * width + j, step)]) for j in range(0, width, step)]
        x = [_zero_unless(live, lane_of(v, j) if step > 1 else v) for v in x for j in range(step)]
        loaded.append((weights, x))
    for weights, x in loaded:
        for i, w in enumerate(weights):
            total = sums[i]
            for a, b in zip(w, x, strict=True):
                total = fma(a, b, total)
            T.buffer_store(sums, total, [i])


# ---- kernels


def _act_kind(kind):
    """Layout of the activations for formats of that kind."""
    return "rows" if kind == "int8" else ""


def _check(fmts, m, act_in, what):
    kinds = {fmt.kind for fmt in fmts}
    if m != 1 or len(kinds) != 1 or act_in != _act_kind(fmts[0].kind):
        raise ValueError(f"{what} of {m} tokens in the layout {act_in!r} with {[fmt.name for fmt in fmts]} is no GEMV")


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


def _emit_segment(fmt, n, views, bias, residual, Y, acts, split, workgroup, lane, wave, plan, arch):
    rows = padded(n)
    first = T.Bind(workgroup * split.rows + _group(wave, lane, split.lanes, arch, plan.waves) * plan.rows)
    inside = None if rows % split.rows == 0 else first < rows
    row = first if inside is None else T.Bind(T.min(first, T.int32(rows - plan.rows)))
    part = T.Bind(lane % split.lanes)
    strips = [Strip(fmt, views, row + i) for i in range(plan.rows)]
    y = emit_rows(strips, acts, part, split.lanes, plan.unroll, arch)
    writes = part == 0 if inside is None else (part == 0) & inside
    with T.If(writes), T.Then():
        for i, total in enumerate(y):
            if bias is not None:
                total = total + bias[row + i if n % plan.rows == 0 and n == rows else T.min(row + i, T.int32(n - 1))]
            if residual is not None:
                total = residual[0, row + i] + total
            T.buffer_store(Y, total, [0, row + i])


def linear_plans(segments, k, arch, plan=None):
    """(plan, split) of each segment [(Format, n)] as `linear` uses them: two lists. Two plans that give the same make
    the same kernel."""
    plan = plan or default_plan(arch, sum(padded(n) for _, n in segments))
    plan = replace(plan, waves=min(plan.waves, arch.threads // arch.wave))
    plans = [_fit(plan, [fmt], k, arch) for fmt, _ in segments]
    return plans, [_split(fmt, n, k, fitted, arch) for (fmt, n), fitted in zip(segments, plans, strict=True)]


def linear(segments, k, m, act_in, biases, residual, arch, name, plan=None):
    """PrimFunc (state, A, S | X, planes of segment 0, [bias f32 [n]], planes of segment 1, ..., [R f32 [1, npad]], Y_0
    f32 [1, npad], ...).

    segments: list of (format name or Format, n), all int8 (act_in "rows") or all float (act_in ""); they share the
    activations (q, k and v of a layer) and the launch. m: 1. biases: one flag per segment. residual: Y = R + result,
    for one segment. npad = n rounded up to a multiple of 16; the columns from n on hold no meaning. ValueError for
    segments that cannot share a launch.
    """
    segments = [(lookup(fmt), n) for fmt, n in segments]
    _check([fmt for fmt, _ in segments], m, act_in, "linear")
    if len(biases) != len(segments) or (residual and len(segments) > 1):
        raise ValueError(
            f"segments {[(f.name, n) for f, n in segments]}, biases {biases}, residual {residual} do not make one "
            "launch"
        )
    plans, splits = linear_plans(segments, k, arch, plan)
    plan = plans[0]
    with kernel(name) as ir:
        state_arg()
        params, weights = act_args(1, k, act_in), []
        for i, ((fmt, n), has_bias) in enumerate(zip(segments, biases, strict=True)):
            bufs = plane_args(fmt, n, k, f"W{i}_")
            weights.append((bufs, T.arg(f"bias{i}", T.buffer((n,), "float32")) if has_bias else None))
        R = T.arg("R", T.buffer((1, padded(segments[0][1])), "float32")) if residual else None
        outputs = [T.arg(f"Y{i}", T.buffer((1, padded(n)), "float32")) for i, (_, n) in enumerate(segments)]
        with launch((sum(s.groups for s in splits),), (arch.wave, plan.waves)) as (workgroup, lane, wave):
            acts, first = emit_acts(params, k), 0
            for (fmt, n), (bufs, bias), Y, split, fitted in zip(segments, weights, outputs, splits, plans, strict=True):
                last = first + split.groups
                views = load.views(fmt, bufs, span_of([fmt], k))
                here = (workgroup >= first) & (workgroup < last)
                with (
                    T.If(here) if len(segments) > 1 else nullcontext(),
                    T.Then() if len(segments) > 1 else nullcontext(),
                ):
                    _emit_segment(fmt, n, views, bias, R, Y, acts, split, workgroup - first, lane, wave, fitted, arch)
                first = last
    return ir.get()


def gate_up_plan(fmts, f, k, arch, plan=None) -> Plan:
    """The plan as `gate_up_swiglu` uses it: two plans that give the same make the same kernel."""
    plan = _fit(plan or default_plan(arch, f, GATE_UP_PLANS), fmts, k, arch, weights=2)
    # all of a workgroup's groups of lanes have rows
    lanes = max(lanes_of(units_of(fmts, k), min(plan.lanes, arch.wave)), arch.wave // BLOCK)
    waves = min(plan.waves, arch.threads // arch.wave, BLOCK * lanes // arch.wave)
    return Plan(min(plan.rows, BLOCK * lanes // (waves * arch.wave)), waves, lanes, plan.unroll)


def gate_up_swiglu(fmt_gate, fmt_up, f, k, m, act_in, act_out, arch, name, plan=None, act_fn="silu"):
    """PrimFunc (state, A, S | X, planes of gate, planes of up, then A_out, S_out | H_out | Y of [1, f] in the layout
    act_out).

    y = f(gate * x) * (up * x), f being `act_fn` of `activations.py`. The weights are f x k, f a multiple of 32, both
    int8 (act_in "rows") or both float (act_in ""). m: 1. A workgroup makes one block of 32 columns of y. ValueError for
    weights that cannot share a launch.
    """
    fmts = [lookup(fmt_gate), lookup(fmt_up)]
    _check(fmts, m, act_in, "gate_up_swiglu")
    if f % BLOCK:
        raise ValueError(f"a feed-forward layer of {f} columns does not make whole blocks of {BLOCK}")
    rows, waves, lanes, unroll = astuple(gate_up_plan(fmts, f, k, arch, plan))
    groups = waves * arch.wave // lanes
    with kernel(name) as ir:
        state_arg()
        params = act_args(1, k, act_in)
        weights = [plane_args(fmt, f, k, prefix) for fmt, prefix in zip(fmts, ("G_", "U_"), strict=True)]
        out = act_args(1, f, act_out, {"": ["Y"], "half": ["H_out"], "rows": ["A_out", "S_out"]}[act_out])
        with launch((f // BLOCK,), (arch.wave, waves)) as (block, lane, wave):
            acts = emit_acts(params, k)
            views = [load.views(fmt, bufs, span_of(fmts, k)) for fmt, bufs in zip(fmts, weights, strict=True)]
            made = T.alloc_buffer((2, BLOCK), "float32", scope="shared")
            group, part = _group(wave, lane, lanes, arch, waves), T.Bind(lane % lanes)
            with T.serial(BLOCK // (groups * rows)) as turn:
                row = T.Bind((turn * groups + group) * rows)
                strips = [
                    Strip(fmt, bufs, block * BLOCK + row + i)
                    for fmt, bufs in zip(fmts, views, strict=True)
                    for i in range(rows)
                ]
                sums = emit_rows(strips, acts, part, lanes, unroll, arch)
                with T.If(part == 0), T.Then():
                    for i, total in enumerate(sums):
                        T.buffer_store(made, total, [i // rows, row + i % rows])
            barrier()
            # the block's eight lanes repeat themselves over the first wave
            column = T.Bind(lane % LANES * WIDTH)
            gate, up = (
                [T.Bind(lane_of(x, i)) for i in range(WIDTH)]
                for x in (T.Bind(made[i, columns(column)]) for i in range(2))
            )
            y = [gated(act_fn, g, u) for g, u in zip(gate, up, strict=True)]
            emit_store(arch, act_out, out, y, 0, T.Bind(block * BLOCK + column), (wave == 0) & (lane < LANES))
    return ir.get()
