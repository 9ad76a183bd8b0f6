"""Linear layers of 8, 16 and 32 tokens on AMD's int8 matrix units: as `gemv.py`, y[m, n] = sum over k of w[n, k] * x[m,
k], and the first half of a feed-forward layer.

In: `state` int32[4], activations A and S of `quantize.py`'s layout "rows", weights of int8 formats in the layout "rows"
(`planes.py`). Out: as `gemv.py`.

A workgroup computes all tokens' results of a few tiles of 16 rows; its waves share out the columns, a step of some
blocks of 32 at a time (`gemv_matrix_tiles.py`), and their sums meet in LDS. All m tokens are computed, live or not.
"""

from dataclasses import dataclass, replace

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.formats import PLANE_BITS, Format
from mlc_amd.schedules.gpu.base.activations import gated
from mlc_amd.schedules.gpu.base.device import launch
from mlc_amd.schedules.gpu.base.planes import BLOCK, padded
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import LANES, WIDTH, emit_store
from mlc_amd.schedules.gpu.base.registers import at, lane_of, vector
from mlc_amd.schedules.gpu.base.step import all_of, kernel, when
from mlc_amd.schedules.gpu.linear import load
from mlc_amd.schedules.gpu.linear.deferred_norm import RowFactors, row_factors
from mlc_amd.schedules.gpu.linear.gemv_matrix_tiles import SIDE, Tile, Work, fields_of, has_unit, unit_of
from mlc_amd.schedules.gpu.linear.linear_args import (
    LinearBuffers,
    Segment,
    check_blocks,
    declare_gate_up,
    declare_linear,
)
from mlc_amd.schedules.operators import ExpertGateUp, GateUp, Linear
from mlc_amd.schedules.space import Kernel, Space
from mlc_amd.schedules.tir import Expr

ROWS = (8, 16, 32)  # numbers of tokens
STEPS = (8, 4, 2, 1)  # blocks of a step
FULL = 6  # waves for each compute unit, as many as hide the latency of memory
MOST_LDS = 64 << 10  # bytes of a workgroup: LLVM ends the process above
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


CHOICES = {"tiles": (1, 2, 4), "waves": (1, 2, 4, 8)}


def suits(op: Linear | GateUp | ExpertGateUp, arch: Device) -> bool:
    """Whether the kernels here are those of the operator."""
    if isinstance(op, ExpertGateUp) or op.m not in ROWS or op.layout_read != "rows" or not has_unit(arch):
        return False
    return all(fmt.kind == "int8" for fmt, _ in op.weights)


def default_plan(op: Linear | GateUp, arch: Device) -> Plan:
    """Fewer tiles where there would be too few workgroups to fill the GPU."""
    waves = arch.threads // arch.wave
    if isinstance(op, GateUp):
        return Plan(GATE_UP_TILES, waves)
    rows = sum(padded(n) for _, n in op.segments)
    return Plan(1 if rows // (2 * SIDE) * waves < FULL * arch.units else 2, waves)


def fitted(plan: Plan, op: Linear | GateUp, arch: Device) -> tuple[Plan, int]:
    """(the plan with as many waves as there is work for, blocks of a step: as many as fit registers beside the sums of
    all tokens)."""
    if isinstance(op, Linear) and op.norm_out:  # whole blocks
        plan = replace(plan, tiles=max(plan.tiles, BLOCK // SIDE))
    words = plan.tiles * (op.m // min(op.m, SIDE)) * max(_words(fmt, arch) for fmt, _ in op.weights)
    most, count = max(1, HELD // words), op.k // BLOCK
    blocks = next(n for n in STEPS if count % n == 0 and n <= most)
    waves = min(plan.waves, arch.threads // arch.wave)
    while waves > count // blocks:
        waves //= 2
    return replace(plan, waves=waves), blocks


def _words(fmt: Format, arch: Device) -> int:
    """Of a block's codes, in the registers of a lane."""
    parts = unit_of(arch).parts
    return sum(bits if bits <= 2 else bits // parts for bits in (PLANE_BITS[plane] for plane in fmt.codes))


def lds_bytes(op: Linear | GateUp, plan: Plan, blocks: int) -> int:
    """LDS of a workgroup, for a plan and blocks of `fitted`."""
    fields = fields_of([fmt for fmt, _ in op.weights])
    factors = op.m if op.norm_in is not None else 0
    return 4 * (plan.waves * (len(fields) * blocks * op.m + plan.tiles * SIDE * min(op.m, SIDE)) + factors)


def plans(op: Linear | GateUp, arch: Device) -> Space:
    rows = [2 * op.n] if isinstance(op, GateUp) else [padded(n) for _, n in op.segments]
    choices = CHOICES | ({"tiles": (GATE_UP_TILES,)} if isinstance(op, GateUp) else {})

    def kernel(plan: Plan) -> Kernel:
        used, blocks = fitted(plan, op, arch)
        lds = lds_bytes(op, used, blocks)
        if lds > min(arch.lds, MOST_LDS):
            raise ValueError(f"{plan} takes {lds} bytes of LDS")
        groups = sum(-(-n // (used.tiles * SIDE)) for n in rows)
        loads = used.tiles * blocks * load.block_bytes(op.weights[0][0]) * SIDE / arch.wave
        return Kernel(used, groups, used.waves * arch.wave, loads)

    return Space(Plan, choices, default_plan(op, arch), kernel)


def linear(op: Linear, arch: Device, name: str, plan: Plan | None = None) -> tirx.PrimFunc:
    """Kernel with the parameters of `linear_args`. ValueError for what `suits` refuses, or cannot share a launch."""
    _check(op, arch)
    if op.norm_out:
        check_blocks(op.segments[0][1])
    plan, blocks = fitted(plan or default_plan(op, arch), op, arch)
    rows = plan.tiles * SIDE
    counts = [-(-padded(n) // rows) for _, n in op.segments]
    with kernel(name) as ir:
        args = declare_linear(op)
        with launch((sum(counts),), (arch.wave, plan.waves)) as (workgroup, lane, number):
            work = Work(op, args.acts, arch, (lane, number), plan.waves, plan.tiles, blocks)
            factors = row_factors(args.completed, arch, lane, work.wave, plan.waves)
            places, first = [], 0
            for segment, count in zip(args.segments, counts, strict=True):
                views = load.views(segment.fmt, segment.planes, blocks)
                here = (workgroup >= first) & (workgroup < first + count)
                row0, high = T.Bind((workgroup - first) * rows), padded(segment.n)
                places.append((here, row0))
                with when(here if len(counts) > 1 else None):
                    starts = [row0 + t * SIDE if high % rows == 0 else T.min(row0 + t * SIDE, T.int32(high - SIDE))
                              for t in range(plan.tiles)]  # fmt: skip
                    rows_of = [(T.Bind(start + lane % SIDE), own) for start, own in zip(starts, work.sums, strict=True)]
                    work.sum_up([Tile(segment.fmt, views, row, work, own) for row, own in rows_of])
                first += count
            for token0 in work.meet(factors):
                for segment, (here, row0) in zip(args.segments, places, strict=True):
                    with when(here if len(counts) > 1 else None):
                        _finish(work, segment, args, factors, token0, row0)
    return ir.get()


def _finish(
    work: Work, segment: Segment, args: LinearBuffers, factors: RowFactors | None, token0: int, row0: Expr
) -> None:
    """Writes a segment's results of a set of tokens from token0 on, four rows of a token at a time."""
    n, high, quads = segment.n, padded(segment.n), work.rows // WIDTH
    count, wave = work.size * quads, work.arch.wave
    thread, threads = work.wave * wave + work.lane, work.waves * wave
    for start in range(0, count, threads):
        item = T.Bind(start + thread)
        token, row = T.Bind(item // quads), T.Bind(item % quads * WIDTH)
        conditions = [item < count] if start + threads > count else []
        conditions += [row0 + row < high] if high % work.rows else []
        with when(all_of(conditions)):
            first, bias = T.Bind(row0 + row), segment.bias
            y, token = work.take(token, row), token + token0
            if factors is not None:
                y = factors.scaled(token, y)
            if bias is not None:
                own = [bias[first + i if n == high else T.min(first + i, T.int32(n - 1))] for i in range(WIDTH)]
                y = y + (bias[at(first, WIDTH)] if n == high else vector(own))
            if args.residual is not None:
                y = args.residual[token, at(first, WIDTH)] + y
            y = T.Bind(y)
            T.buffer_store(segment.Y, y, [token, at(first, WIDTH)])
            if args.prepared is not None:
                args.prepared.store(work.arch, token, first, [y], args.prepared.load(token, [first]))


def gate_up_swiglu(op: GateUp, arch: Device, name: str, plan: Plan | None = None) -> tirx.PrimFunc:
    """Kernel with the parameters of `linear_args`. ValueError for what `suits` refuses, or has no whole blocks."""
    _check(op, arch)
    check_blocks(op.n)
    plan, blocks = fitted(plan or default_plan(op, arch), op, arch)
    with kernel(name) as ir:
        args = declare_gate_up(op)
        with launch((op.n // BLOCK,), (arch.wave, plan.waves)) as (block, lane, number):
            work = Work(op, args.acts, arch, (lane, number), plan.waves, GATE_UP_TILES, blocks)
            factors = row_factors(args.completed, arch, lane, work.wave, plan.waves)
            views = [load.views(fmt, planes, blocks) for (fmt, _), planes in zip(op.weights, args.planes, strict=True)]
            rows = [T.Bind(block * BLOCK + t * SIDE + lane % SIDE) for t in range(GATE_UP_TILES // 2)]
            parts = [(fmt, planes, row) for (fmt, _), planes in zip(op.weights, views, strict=True) for row in rows]
            work.sum_up([Tile(*part, work, own) for part, own in zip(parts, work.sums, strict=True)])
            for token0 in work.meet(factors):
                # eight lanes have a token's block; all lanes of a wave have one
                steps = work.size * LANES // arch.wave
                for start in range(0, steps, plan.waves):
                    with T.If(work.wave + start < steps), T.Then():
                        item = T.Bind((work.wave + start) * arch.wave + lane)
                        token, column = T.Bind(item // LANES), T.Bind(item % LANES * WIDTH)
                        gate, up = (work.take(token, column + own) for own in (0, BLOCK))
                        place = T.Bind(token + token0)
                        if factors is not None:
                            gate, up = (factors.scaled(place, x) for x in (gate, up))
                        y = [gated(op.act, T.Bind(lane_of(gate, i)), T.Bind(lane_of(up, i))) for i in range(WIDTH)]
                        emit_store(arch, op.layout, args.out, y, place, T.Bind(block * BLOCK + column))
    return ir.get()


def _check(op: Linear | GateUp, arch: Device) -> None:
    if not suits(op, arch):
        raise ValueError(
            f"{arch.name} has no matrix units for {op.m} tokens in the layout {op.layout_read!r} with {op.formats}"
        )
