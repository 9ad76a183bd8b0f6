"""The plans of GPU kernels. The fields of a plan are described by its dataclass, in the kernel's module."""

from functools import partial

from mlc_amd.schedules import operators
from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.base.planes import padded
from mlc_amd.schedules.gpu.base.step import FEW
from mlc_amd.schedules.gpu.base.threads import SUMS, WAVES
from mlc_amd.schedules.gpu.experts import expert_gemv
from mlc_amd.schedules.gpu.experts.expert_gemm import expert_engine
from mlc_amd.schedules.gpu.experts.experts import Slots
from mlc_amd.schedules.gpu.linear import gemm_coop, gemm_dot, gemm_lanes, gemm_matrix, gemv, gemv_matrix
from mlc_amd.schedules.gpu.linear.gemm import engine
from mlc_amd.schedules.space import Kernel, Space

MAX_SUMS = 64  # of a GEMV, likewise
BLOCKS = 32  # of 32 columns that a lane has loaded, at most
ACTIVATIONS = 128  # that a thread has on the way to shared memory, at most
SCALES = 4  # of a byte each that a thread takes at once, at most: a word (schedules/gpu/linear/load.py)
# How much more than the default tiles' limits a thread may hold and unroll: beyond that compilers take minutes.
CODE = 2

GEMV = {"rows": (1, 2, 4, 8, 16), "waves": (1, 2, 4, 8), "lanes": (8, 16, 32, 64), "unroll": (1, 2, 4, 8)}
TOKENS = ROWS = (16, 32, 64, 128, 256)
COLUMNS = (32, 64, 128, 256, 512)
TILE = {"tokens": TOKENS, "rows": ROWS, "columns": COLUMNS, "waves_m": WAVES, "waves_n": WAVES}
COOP = TILE | {"waves_k": (1, 2, 4), "span": (1, 2, 4)}
MATRIX = TILE | {"buffers": (1, 2), "waves_k": (1, 2, 4)}
LANE_TILE = {
    "tokens": (8, 16, 32, 64, 128), "rows": (16, 32, 48, 64, 80, 96, 112, 128, 256), "waves_m": (1, 2, 4),
    "waves_n": (1, 2, 3, 4, 5, 6, 7, 8),
    "waves_k": (1, 2, 4, 8, 16), "ahead": (0, 1, 2), "hidden": (0, 1), "staged": (0, 1),
}  # fmt: skip
DOT = {"tokens": (16, 32, 64, 128), "rows": (32, 64, 128), "threads_m": (1, 2, 4, 8)}
MATRIX_TILES = (1, 2, 4)


_EXPERTS = operators.ExpertGateUp, operators.ExpertLinear

# ---- few tokens


def _gemv_linear(op, arch) -> Space:
    segments, k, m = op.weights, op.k, op.m
    normed = op.eps is not None

    def kernel(plan) -> Kernel:
        plans, splits = gemv.linear_plans(segments, k, arch, plan, m, normed)
        _check_sums(min(m, FEW) * plans[0].rows, plan)
        parts = [([fmt], used, split) for (fmt, _), used, split in zip(segments, plans, splits, strict=True)]
        loads = max(_loads(fmts, k, used, plan) for fmts, used, _ in parts)
        same = tuple(
            (used.rows, used.waves, _unroll(fmts, k, split.lanes, used.unroll), split) for fmts, used, split in parts
        )
        groups = sum(split.groups for split in splits) * max(1, m // FEW)
        return Kernel(same, groups, plans[0].waves * arch.wave, loads)

    return Space(gemv.Plan, GEMV, gemv.linear_default(segments, arch, m, normed), kernel)


def _gemv_gate_up(op, arch) -> Space:
    """Of one weight or, where there are experts, of those that a row uses."""
    fmts, f, k, m, slots = [fmt for fmt, _ in op.weights], op.n, op.k, op.m, 1
    if isinstance(op, operators.ExpertGateUp):
        m, slots = 1, op.used * m

    def kernel(plan) -> Kernel:
        used = gemv.gate_up_plan(fmts, k, arch, plan, m)
        _check_sums(2 * m * used.rows, plan)
        loads = _loads(fmts, k, used, plan)
        same = used.rows, used.waves, used.lanes, _unroll(fmts, k, used.lanes, used.unroll)
        return Kernel(same, f // gemv.BLOCK * slots, used.waves * arch.wave, loads)

    return Space(gemv.Plan, GEMV, gemv.gate_up_default(arch, m), kernel)


@registry.plans(operators.ExpertDown)
def _expert_down(op, arch) -> Space:
    ((fmt, n),), k, used = op.weights, op.k, op.used

    def kernel(plan) -> Kernel:
        split = expert_gemv.down_split(fmt, n, k, used, arch, plan)
        loads = _loads([fmt], k, split.plan, plan)
        same = split._replace(plan=(split.plan.rows, _unroll([fmt], k, split.lanes, split.plan.unroll)))
        return Kernel(same, split.groups * op.m, split.waves * arch.wave, loads)

    return Space(gemv.Plan, GEMV, expert_gemv.down_default(fmt, n, k, used, arch), kernel)


def _loads(fmts, k, used, plan) -> float:
    """Bytes of weights that a lane has in flight. ValueError if they are too many."""
    blocks = len(fmts) * used.rows * used.unroll * (gemv.span_of(fmts, k) if fmts[0].kind == "int8" else 1)
    if blocks > BLOCKS:
        raise ValueError(f"{plan}: a lane would load {blocks} blocks at once")
    return blocks * _block_bytes(fmts[0])


def _check_sums(count, plan) -> None:
    """ValueError if a lane would add up too many products at once: compilers take minutes."""
    if count > MAX_SUMS:
        raise ValueError(f"{plan}: {count} sums of a lane are too many")


def _unroll(fmts, k, lanes, unroll) -> int:
    """Steps of a row that really come together: there may be fewer."""
    return min(unroll, -(-gemv.units_of(fmts, k) // lanes))


def _block_bytes(fmt) -> float:
    """Of 32 columns."""
    return fmt.block_bytes * gemv.BLOCK / fmt.block


def _gemv_matrix(rows, weights, k, m, tiles, arch) -> Space:
    """rows: of each segment; tiles: choices of how many a workgroup has."""
    fmts = [fmt for fmt, _ in weights]

    def kernel(plan) -> Kernel:
        used, blocks = gemv_matrix.fitted(plan, fmts, k, m, arch)
        lds = gemv_matrix.lds_bytes(fmts, used, blocks, m)
        if lds > min(arch.lds, 64 << 10):  # LLVM ends the process above 64 KiB
            raise ValueError(f"{plan} takes {lds} bytes of LDS")
        groups = sum(-(-n // (used.tiles * gemv_matrix.SIDE)) for n in rows)
        loads = used.tiles * blocks * _block_bytes(fmts[0]) * gemv_matrix.SIDE / arch.wave
        return Kernel(used, groups, used.waves * arch.wave, loads)

    choices = {"tiles": tiles, "waves": WAVES}
    default = gemv_matrix.default_plan(arch, sum(rows), tiles[-1] if len(tiles) == 1 else None)
    return Space(gemv_matrix.Plan, choices, default, kernel)


# ---- many tokens


def _gemm(op, arch, rows, shares, layout) -> Space:
    """rows: of each segment; shares: weights that share a tile's accumulators. For workloads with experts, slots stand
    in the place of tokens."""
    formats, m, k, total = [fmt for fmt, _ in op.weights], op.m, op.k, sum(rows)
    make = partial(engine, layout, formats, m)
    if isinstance(op, _EXPERTS):
        make, m = partial(expert_engine, Slots(op.of, m, False, False), layout, formats), op.of.slots(m)
    default = make(k, arch, total, together=shares)

    def kernel(tile) -> Kernel:
        if m % tile.tokens and m > gemm_lanes.TOKENS:
            raise ValueError(f"{tile} does not divide {m} tokens")
        gemm = make(k, arch, total, tile, shares)
        loads = LIMITS[type(tile)](gemm, tile, formats, arch)
        return Kernel(tile, -(-m // tile.tokens) * sum(-(-n // tile.rows) for n in rows), gemm.threads, loads)

    return Space(type(default.tile), CHOICES[type(default.tile)], default.tile, kernel)


def _coop_limits(gemm, tile, formats, arch) -> float:
    held = gemm_coop.HELD_FLOAT if any(fmt.kind == "float" for fmt in formats) else gemm_coop.HELD
    scales = max((tile.span * gemm_coop.BLOCK // fmt.group for fmt in formats if "S" in fmt.scales), default=0)
    if scales > SCALES:
        raise ValueError(f"{tile}: {scales} bytes of scales of a thread's blocks do not fit a word")
    fm, fn, fk = arch.fragment
    return _held(gemm, tile, formats, max(CODE * held, gemm.weights * gemm_coop.BLOCK), fm * fn // arch.wave, fk)


def _held(gemm, tile, formats, most: int, acc: int, columns: int) -> float:
    """Bytes of weights and activations that a thread has on the way to shared memory. most: of its weights; acc: sums
    of a lane in a matrix instruction, columns: of that. ValueError if a thread would hold or unroll too much."""
    mine = gemm.weights * tile.rows * tile.columns // gemm.threads
    sums = gemm.tiles_m * gemm.weights * gemm.tiles_n * acc
    if mine > most or sums > SUMS or gemm.share > CODE * gemm_coop.CHUNKS * columns:
        raise ValueError(f"{tile}: {mine} weights and {sums} sums a thread, {gemm.share} columns unrolled are too many")
    count = tile.tokens * tile.columns // gemm.threads
    if count > ACTIVATIONS:
        raise ValueError(f"{tile}: a thread would load {count} activations at once")
    return mine * _block_bytes(formats[0]) / gemm_coop.BLOCK + 2 * count


def _matrix_limits(gemm, tile, formats, arch) -> float:
    pieces = [tile.tokens * (tile.columns // 8), tile.rows * (tile.columns // gemm_matrix.PIECE)]
    if any(total % gemm.threads and gemm.threads % total for total in pieces):
        raise ValueError(f"{tile}: {pieces} pieces do not divide among {gemm.threads} threads")
    return _held(gemm, tile, formats, CODE * gemm_coop.HELD * 2, gemm.unit.acc, gemm.unit.columns)


def _dot_limits(gemm, tile, formats, arch) -> float:
    sums = gemm.weights * gemm.token_count * gemm.row_count
    if sums > SUMS // 2 or gemm.lds_bytes > arch.lds:
        raise ValueError(f"{tile}: {sums} sums a thread, {gemm.lds_bytes} bytes of shared memory")
    return (gemm.weights * tile.rows * _block_bytes(formats[0]) + tile.tokens * gemm_dot.BLOCK) / gemm.threads


def _lane_limits(gemm, tile, formats, arch) -> float:
    blocks = gemm.weights * gemm.tiles_n * 2 * (2 if tile.ahead else 1)
    if blocks > BLOCKS // 2:
        raise ValueError(f"{tile}: a lane would load {blocks} blocks at once")
    return blocks * _block_bytes(formats[0])


LIMITS = {gemm_coop.CoopTile: _coop_limits, gemm_matrix.MatrixTile: _matrix_limits, gemm_dot.DotTile: _dot_limits}
LIMITS[gemm_lanes.LaneTile] = _lane_limits
CHOICES = {gemm_coop.CoopTile: COOP, gemm_matrix.MatrixTile: MATRIX, gemm_dot.DotTile: DOT}
CHOICES[gemm_lanes.LaneTile] = LANE_TILE


# ---- operators


@registry.plans(operators.Linear, operators.ExpertLinear)
def _linear(op, arch) -> Space:
    rows = [padded(n) for _, n in op.weights]
    if gemv_matrix.suits([fmt for fmt, _ in op.weights], op.m, op.layout, arch):
        return _gemv_matrix(rows, op.weights, op.k, op.m, MATRIX_TILES, arch)
    if gemv.suits([fmt for fmt, _ in op.weights], sum(rows), op.m, op.layout, arch):
        return _gemv_linear(op, arch)
    return _gemm(op, arch, rows, 1, op.layout)


@registry.plans(operators.GateUp, operators.ExpertGateUp)
def _gate_up(op, arch) -> Space:
    experts = isinstance(op, operators.ExpertGateUp)
    if not experts and gemv_matrix.suits([op.gate, op.up], op.m, op.layout_in, arch):
        tiles = (gemv_matrix.GATE_UP_TILES,)
        return _gemv_matrix([2 * op.n], op.weights, op.k, op.m, tiles, arch)
    few = op.m <= FEW and op.layout_in in gemv.VECTORS
    if op.tile == 1 if experts else few:
        return _gemv_gate_up(op, arch)
    return _gemm(op, arch, [op.n], 2, op.layout_in)
