"""Linear layers of 8, 16 and 32 tokens on AMD's int8 matrix units: as `gemv.py`, y[m, n] = sum over k of w[n, k] * x[m,
k], and the first half of a feed-forward layer.

In: `state` int32[4], activations A and S of `quantize.py`'s layout "rows", weights of int8 formats in the layout "rows"
(`planes.py`). Out: as `gemv.py`.

A workgroup computes all tokens' results of a few tiles of 16 rows; its waves share out the columns, a step of some
blocks of 32 at a time (`gemv_matrix_tiles.py`), and their sums meet in LDS. All m tokens are computed, live or not.
"""

from dataclasses import dataclass, replace

from tvm.tirx.script import builder as T

from mlc_amd.schedules.formats import PLANE_BITS, lookup
from mlc_amd.schedules.gpu.base.activations import gated
from mlc_amd.schedules.gpu.base.device import barrier, launch, uniform
from mlc_amd.schedules.gpu.base.planes import BLOCK, padded
from mlc_amd.schedules.gpu.base.quantize import LANES, WIDTH, emit_store
from mlc_amd.schedules.gpu.base.registers import at, lane_of, vector
from mlc_amd.schedules.gpu.base.step import kernel, when
from mlc_amd.schedules.gpu.linear import gemv_share
from mlc_amd.schedules.gpu.linear.gemv_matrix_tiles import Meeting, Sums, Tile, Tokens, emit_sums, fields_of, set_of
from mlc_amd.schedules.gpu.linear.linear_args import check_blocks, declare_gate_up, declare_linear, segments_of
from mlc_amd.schedules.gpu.linear.matrix_int8 import SIDE, unit_of

ROWS = (8, 16, 32)  # numbers of tokens
STEPS = (8, 4, 2, 1)  # blocks of a step
FULL = 6  # waves for each compute unit, as many as hide the latency of memory
GATE_UP_TILES = 2 * BLOCK // SIDE
HELD = 64  # words of weights that a lane loads at once, at most, of one set of tokens: more spill on gfx11


@dataclass(frozen=True)
class Plan:
    """How a GEMV is spread over the GPU. Powers of two.

    tiles   of 16 rows that a workgroup computes; gate_up_swiglu: always a block of 32 rows of each weight
    waves   of a workgroup, at most: they share out the columns
    """

    tiles: int
    waves: int


def suits(fmts, m, layout, arch) -> bool:
    """Whether the kernels here are those for m tokens in that `layout` and weights of these formats (or names)."""
    return m in ROWS and layout == "rows" and unit_of(arch) is not None and all(lookup(f).kind == "int8" for f in fmts)


def default_plan(arch, rows: int, tiles=None) -> Plan:
    """The plan for `rows` rows in all: fewer at once where there would be too few workgroups to fill the GPU. tiles:
    where the kernel has no choice."""
    plan = Plan(tiles or 2, arch.threads // arch.wave)
    while not tiles and plan.tiles > 1 and rows // (plan.tiles * SIDE) * plan.waves < FULL * arch.units:
        plan = replace(plan, tiles=plan.tiles // 2)
    return plan


def fitted(plan: Plan, fmts, k, m, arch) -> tuple[Plan, int]:
    """(the plan with as many waves as there is work for, blocks of a step: as many as fit registers beside the sums of
    m tokens). fmts: of all weights; those of gate and up share the tiles."""
    words = plan.tiles * (m // set_of(m)) * max(_words(fmt, arch) for fmt in fmts)
    most = max(1, HELD // words)
    blocks = next(n for n in STEPS if k // BLOCK % n == 0 and n <= most)
    waves = min(plan.waves, arch.threads // arch.wave)
    while waves > k // BLOCK // blocks:
        waves //= 2
    return replace(plan, waves=waves), blocks


def _words(fmt, arch) -> int:
    """Of a block's codes, in the registers of a lane."""
    parts = unit_of(arch).parts
    return sum(bits if bits <= 2 else bits // parts for bits in (PLANE_BITS[plane] for plane in fmt.codes))


def lds_bytes(fmts, plan, blocks, m) -> int:
    """LDS of a workgroup that computes tiles of these formats."""
    return plan.waves * 4 * (len(fields_of(fmts)) * blocks * m + plan.tiles * SIDE * set_of(m))


def _wave(arch, wave, waves):
    """Number of this wave out of `waves`, as a scalar that LLVM knows to be no less than 0."""
    return T.Bind(uniform(arch, wave) & T.int32(waves - 1)) if waves > 1 else T.int32(0)


def linear(segments, k, m, layout, biases, residual, arch, name, plan=None):
    """PrimFunc with the parameters of `linear_args`. m: of ROWS; formats: int8, layout: "rows". ValueError for what
    `suits` refuses, or cannot share a launch."""
    segments = segments_of(segments, biases, residual)
    fmts = [fmt for fmt, _ in segments]
    _check(fmts, m, layout, arch)
    plan, blocks = fitted(plan or default_plan(arch, sum(padded(n) for _, n in segments)), fmts, k, m, arch)
    rows, threads = plan.tiles * SIDE, plan.waves * arch.wave
    counts = [-(-padded(n) // rows) for _, n in segments]
    with kernel(name) as ir:
        args = declare_linear(segments, k, m, layout, biases, residual)
        with launch((sum(counts),), (arch.wave, plan.waves)) as (workgroup, lane, thread_wave):
            wave = _wave(arch, thread_wave, plan.waves)
            tokens = Tokens(arch, args.acts, k, m, fields_of(fmts), blocks, lane, wave, plan.waves)
            meeting, sums = Meeting(plan.waves, tokens.size, plan.tiles), [Sums(tokens) for _ in range(plan.tiles)]
            places, first = [], 0
            for segment, count in zip(args.segments, counts, strict=True):
                views = gemv_share.views(segment.fmt, segment.planes, blocks)
                here = (workgroup >= first) & (workgroup < first + count)
                row0, high = T.Bind((workgroup - first) * rows), padded(segment.n)
                places.append((here, row0))
                with when(here if len(segments) > 1 else None):
                    starts = [row0 + t * SIDE if high % rows == 0 else T.min(row0 + t * SIDE, T.int32(high - SIDE))
                              for t in range(plan.tiles)]  # fmt: skip
                    tiles = [
                        Tile(segment.fmt, views, T.Bind(start + lane % SIDE), tokens, own)
                        for start, own in zip(starts, sums, strict=True)
                    ]
                    emit_sums(arch, tiles, tokens, k, blocks, wave, plan.waves)
                first += count
            for number in range(tokens.sets):
                if number:
                    barrier()
                meeting.keep(sums, tokens, number, wave, lane)
                barrier()
                for segment, (here, row0) in zip(args.segments, places, strict=True):
                    with when(here if len(segments) > 1 else None):
                        thread = wave * arch.wave + lane
                        _finish(
                            meeting, segment, args.residual, number * tokens.size, tokens.size, thread, threads, row0
                        )
    return ir.get()


def _finish(meeting, segment, residual, token0, count, thread, threads, row0):
    """Writes a segment's results of tokens token0 .. token0 + count - 1, four rows of a token at a time."""
    n, high, quads = segment.n, padded(segment.n), meeting.rows // WIDTH
    for start in range(0, count * quads, threads):
        item = T.Bind(start + thread)
        token, row = T.Bind(item // quads), T.Bind(item % quads * WIDTH)
        conditions = [item < count * quads] if start + threads > count * quads else []
        conditions += [row0 + row < high] if high % meeting.rows else []
        inside = conditions[0] & conditions[1] if len(conditions) > 1 else next(iter(conditions), None)
        with when(inside):
            first, bias = T.Bind(row0 + row), segment.bias
            y, token = meeting.take(token, row), token + token0
            if bias is not None:
                own = [bias[first + i if n == high else T.min(first + i, T.int32(n - 1))] for i in range(WIDTH)]
                y = y + (bias[at(first, WIDTH)] if n == high else vector(own))
            if residual is not None:
                y = residual[token, at(first, WIDTH)] + y
            T.buffer_store(segment.Y, y, [token, at(first, WIDTH)])


def gate_up_swiglu(fmt_gate, fmt_up, f, k, m, layout_in, layout, arch, name, plan=None, act="silu"):
    """PrimFunc with the parameters of `linear_args`, without experts. m: of ROWS; formats: int8, layout_in: "rows".
    ValueError for what `suits` refuses, or has no whole blocks."""
    fmts = [lookup(fmt_gate), lookup(fmt_up)]
    _check(fmts, m, layout_in, arch)
    check_blocks(f)
    plan, blocks = fitted(plan or default_plan(arch, 2 * f, GATE_UP_TILES), fmts, k, m, arch)
    waves, half = plan.waves, GATE_UP_TILES // 2
    with kernel(name) as ir:
        args = declare_gate_up(fmts, f, k, (m, m), layout_in, layout)
        with launch((f // BLOCK,), (arch.wave, waves)) as (block, lane, thread_wave):
            wave = _wave(arch, thread_wave, waves)
            tokens = Tokens(arch, args.acts, k, m, fields_of(fmts), blocks, lane, wave, waves)
            meeting, sums = Meeting(waves, tokens.size, GATE_UP_TILES), [Sums(tokens) for _ in range(GATE_UP_TILES)]
            views = [gemv_share.views(fmt, planes, blocks) for fmt, planes in zip(fmts, args.planes, strict=True)]
            rows = [T.Bind(block * BLOCK + t * SIDE + lane % SIDE) for t in range(half)]
            parts = [(fmt, planes, row) for fmt, planes in zip(fmts, views, strict=True) for row in rows]
            tiles = [Tile(*part, tokens, own) for part, own in zip(parts, sums, strict=True)]
            emit_sums(arch, tiles, tokens, k, blocks, wave, waves)
            for number in range(tokens.sets):
                if number:
                    barrier()
                meeting.keep(sums, tokens, number, wave, lane)
                barrier()
                # eight lanes have a token's block; all lanes of a wave have one
                for start in range(0, tokens.size * LANES // arch.wave, waves):
                    with T.If(wave + start < tokens.size * LANES // arch.wave), T.Then():
                        item = T.Bind((wave + start) * arch.wave + lane)
                        token, column = T.Bind(item // LANES), T.Bind(item % LANES * WIDTH)
                        gate, up = (meeting.take(token, column + own) for own in (0, BLOCK))
                        y = [gated(act, T.Bind(lane_of(gate, i)), T.Bind(lane_of(up, i))) for i in range(WIDTH)]
                        place = T.Bind(token + number * tokens.size)
                        emit_store(arch, layout, args.out, y, place, T.Bind(block * BLOCK + column))
    return ir.get()


def _check(fmts, m, layout, arch):
    if not suits(fmts, m, layout, arch):
        raise ValueError(
            f"{arch.name} has no matrix units for {m} tokens in the layout {layout!r} with {[f.name for f in fmts]}"
        )
