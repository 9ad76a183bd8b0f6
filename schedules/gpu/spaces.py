"""The plans of GPU kernels. The fields of a plan are described by its dataclass, in the kernel's module."""

from functools import partial

from mlc_amd.schedules import operators
from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.attention import rope_kv_write
from mlc_amd.schedules.gpu.attention.spaces import SUMS, WAVES, attention, decode
from mlc_amd.schedules.gpu.base.planes import padded
from mlc_amd.schedules.gpu.experts.expert_gemm import expert_engine
from mlc_amd.schedules.gpu.linear import gemm_coop, gemm_dot, gemm_lanes, gemm_matrix
from mlc_amd.schedules.gpu.linear.gemm import engine
from mlc_amd.schedules.gpu.linear.load import block_bytes
from mlc_amd.schedules.space import Kernel, Space

BLOCKS = 32  # of 32 columns that a lane has loaded, at most
ACTIVATIONS = 128  # that a thread has on the way to shared memory, at most
SCALES = 4  # of a byte each that a thread takes at once, at most: a word (schedules/gpu/linear/load.py)
# How much more than the default tiles' limits a thread may hold and unroll: beyond that compilers take minutes.
CODE = 2

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


@registry.plans(operators.ExpertLinear)
def gemm_plans(op, arch) -> Space:
    """Of a Linear, GateUp, ExpertLinear or ExpertGateUp; slots of experts stand in the place of tokens."""
    formats, m, k, shares = [fmt for fmt, _ in op.weights], op.m, op.k, 1
    rows = [padded(n) for _, n in op.weights]
    if isinstance(op, operators.GateUp | operators.ExpertGateUp):
        rows, shares = [op.n], 2
    if isinstance(op, operators.ExpertGateUp | operators.ExpertLinear):
        make, m = partial(expert_engine, op, arch), op.of.slots(m)
    else:
        make = partial(engine, op.layout_read, formats, m, k, arch, sum(rows), together=shares)
    default = make()

    def kernel(tile) -> Kernel:
        if m % tile.tokens and m > gemm_lanes.TOKENS:
            raise ValueError(f"{tile} does not divide {m} tokens")
        gemm = make(tile=tile)
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
    return mine * block_bytes(formats[0]) / gemm_coop.BLOCK + 2 * count


def _matrix_limits(gemm, tile, formats, arch) -> float:
    pieces = [tile.tokens * (tile.columns // 8), tile.rows * (tile.columns // gemm_matrix.PIECE)]
    if any(total % gemm.threads and gemm.threads % total for total in pieces):
        raise ValueError(f"{tile}: {pieces} pieces do not divide among {gemm.threads} threads")
    return _held(gemm, tile, formats, CODE * gemm_coop.HELD * 2, gemm.unit.acc, gemm.unit.columns)


def _dot_limits(gemm, tile, formats, arch) -> float:
    sums = gemm.weights * gemm.token_count * gemm.row_count
    if sums > SUMS // 2 or gemm.lds_bytes > arch.lds:
        raise ValueError(f"{tile}: {sums} sums a thread, {gemm.lds_bytes} bytes of shared memory")
    return (gemm.weights * tile.rows * block_bytes(formats[0]) + tile.tokens * gemm_dot.BLOCK) / gemm.threads


def _lane_limits(gemm, tile, formats, arch) -> float:
    blocks = gemm.weights * gemm.tiles_n * 2 * (2 if tile.ahead else 1)
    if blocks > BLOCKS // 2:
        raise ValueError(f"{tile}: a lane would load {blocks} blocks at once")
    return blocks * block_bytes(formats[0])


LIMITS = {gemm_coop.CoopTile: _coop_limits, gemm_matrix.MatrixTile: _matrix_limits, gemm_dot.DotTile: _dot_limits}
LIMITS[gemm_lanes.LaneTile] = _lane_limits
CHOICES = {gemm_coop.CoopTile: COOP, gemm_matrix.MatrixTile: MATRIX, gemm_dot.DotTile: DOT}
CHOICES[gemm_lanes.LaneTile] = LANE_TILE


# ---- attention


@registry.plans(operators.RopeKvWrite)
def _rope_kv_write(op, arch) -> Space:
    heads = rope_kv_write.wave_heads(op.layer, op.rope)

    def kernel(plan) -> Kernel:
        waves = min(plan.waves, arch.threads // arch.wave)
        return Kernel(waves, -(-heads // waves) * op.m, waves * arch.wave, op.layer.d * 4 / arch.wave)

    return Space(rope_kv_write.Plan, {"waves": WAVES}, rope_kv_write.PLAN, kernel)


registry.plans(operators.CausalAttention)(attention)
registry.plans(operators.RopeAttention)(decode)
