"""The plans of GPU kernels. What a plan's numbers mean stands with its dataclass, in the kernel's module."""

from mlc_amd.schedules.formats import lookup
from mlc_amd.schedules.gpu import gemm_coop, gemm_dot, gemm_matrix, gemv
from mlc_amd.schedules.gpu.attention_prefill_coop import Tile, lds_bytes, tile_of
from mlc_amd.schedules.gpu.gemm import engine
from mlc_amd.schedules.gpu.planes import padded
from mlc_amd.schedules.tuning.spaces import Kernel, Space

SUMS = 256  # float32 accumulators of a lane, at most: more leave no registers for anything else
CODE = 2  # how much more than the default tiles' limits a thread may hold and unroll: beyond that compilers take minutes

GEMV = {"rows": (1, 2, 4, 8, 16), "waves": (1, 2, 4, 8), "lanes": (8, 16, 32, 64), "unroll": (1, 2, 4, 8)}
TOKENS = ROWS = (16, 32, 64, 128, 256)
COLUMNS = (32, 64, 128, 256, 512)
WAVES = (1, 2, 4, 8)
COOP = {"tokens": TOKENS, "rows": ROWS, "columns": COLUMNS, "waves_m": WAVES, "waves_n": WAVES, "waves_k": (1, 2, 4), "span": (1, 2, 4)}
MATRIX = {"tokens": TOKENS, "rows": ROWS, "columns": COLUMNS, "waves_m": WAVES, "waves_n": WAVES, "buffers": (1, 2), "waves_k": (1, 2, 4)}
DOT = {"tokens": (16, 32, 64, 128), "rows": (32, 64, 128), "threads_m": (1, 2, 4, 8)}
ATTENTION = {"waves": WAVES, "fragments": (1, 2), "keys": (16, 32, 64, 128), "parts": (1, 2, 4)}


# ---- one token


def _gemv_linear(args, arch) -> Space:
    segments, k = [(lookup(fmt), n) for fmt, n in args["segments"]], args["k"]

    def kernel(plan) -> Kernel:
        plans, splits = gemv.linear_plans(segments, k, arch, plan)
        loads = max(used.rows * used.unroll for used in plans) * gemv.span_of([segments[0][0]], k) * _block_bytes(segments[0][0])
        unrolls = [_unroll([fmt], k, split.lanes, used.unroll) for (fmt, _), used, split in zip(segments, plans, splits, strict=True)]
        same = tuple((used.rows, used.waves, unroll, split) for used, unroll, split in zip(plans, unrolls, splits, strict=True))
        return Kernel(same, sum(split.groups for split in splits), plans[0].waves * arch.wave, loads)

    default = gemv.default_plan(arch, sum(padded(n) for _, n in segments))
    return Space(gemv.Plan, GEMV, default, kernel)


def _gemv_gate_up(args, arch) -> Space:
    fmts, f, k = [lookup(args["gate"]), lookup(args["up"])], args["n"], args["k"]

    def kernel(plan) -> Kernel:
        used = gemv.gate_up_plan(fmts, f, k, arch, plan)
        loads = len(fmts) * used.rows * used.unroll * gemv.span_of(fmts, k) * _block_bytes(fmts[0])
        return Kernel((used.rows, used.lanes, _unroll(fmts, k, used.lanes, used.unroll)), f // gemv.BLOCK, used.waves * arch.wave, loads)

    return Space(gemv.Plan, GEMV, gemv.default_plan(arch, f), kernel)


def _unroll(fmts, k, lanes, unroll) -> int:
    """Steps of a row that really come together: there may be fewer."""
    return min(unroll, -(-gemv.units_of(fmts, k) // lanes))


def _block_bytes(fmt) -> float:
    """Of 32 columns."""
    return fmt.block_bytes * gemv.BLOCK / fmt.block


# ---- several tokens


def _gemm(formats, rows, shares, args, arch, act) -> Space:
    """rows: of each segment; shares: weights that share a tile's accumulators."""
    m, k, total = args["m"], args["k"], sum(rows)
    default = engine(act, formats, m, k, arch, total, together=shares)

    def kernel(tile) -> Kernel:
        if m % tile.tokens:
            raise ValueError(f"{tile} does not divide {m} tokens")
        gemm = engine(act, formats, m, k, arch, total, tile, shares)
        loads = LIMITS[type(tile)](gemm, tile, formats, arch)
        return Kernel(tile, m // tile.tokens * sum(-(-n // tile.rows) for n in rows), gemm.threads, loads)

    return Space(type(default.tile), CHOICES[type(default.tile)], default.tile, kernel)


def _coop_limits(gemm, tile, formats, arch) -> float:
    held = gemm_coop.HELD_FLOAT if any(fmt.kind == "float" for fmt in formats) else gemm_coop.HELD
    mine = gemm.weights * tile.rows * tile.columns // gemm.threads
    fm, fn, fk = arch.fragment
    sums = gemm.tiles_m * gemm.weights * gemm.tiles_n * fm * fn // arch.wave
    if mine > max(CODE * held, gemm.weights * gemm_coop.BLOCK) or sums > SUMS or gemm.share > CODE * gemm_coop.CHUNKS * fk:
        raise ValueError(f"{tile}: {mine} weights and {sums} sums a thread, {gemm.share} columns unrolled are too many")
    return mine * _block_bytes(formats[0]) / gemm_coop.BLOCK + 2 * tile.tokens * tile.columns / gemm.threads


def _matrix_limits(gemm, tile, formats, arch) -> float:
    pieces = [tile.tokens * (tile.columns // 8), tile.rows * (tile.columns // gemm_matrix.PIECE)]
    if any(total % gemm.threads and gemm.threads % total for total in pieces):
        raise ValueError(f"{tile}: {pieces} pieces do not divide among {gemm.threads} threads")
    mine = gemm.weights * tile.rows * tile.columns // gemm.threads
    sums = gemm.tiles_m * gemm.weights * gemm.tiles_n * gemm.unit.acc
    if mine > CODE * gemm_coop.HELD * 2 or sums > SUMS or gemm.share > CODE * gemm_coop.CHUNKS * gemm.unit.columns:
        raise ValueError(f"{tile}: {mine} weights and {sums} sums a thread, {gemm.share} columns unrolled are too many")
    return mine * _block_bytes(formats[0]) / gemm_matrix.BLOCK + 2 * tile.tokens * tile.columns / gemm.threads


def _dot_limits(gemm, tile, formats, arch) -> float:
    sums = gemm.weights * gemm.token_count * gemm.row_count
    if sums > SUMS // 2 or gemm.lds_bytes > arch.lds:
        raise ValueError(f"{tile}: {sums} sums a thread, {gemm.lds_bytes} bytes of shared memory")
    return (gemm.weights * tile.rows * _block_bytes(formats[0]) + tile.tokens * gemm_dot.BLOCK) / gemm.threads


LIMITS = {gemm_coop.CoopTile: _coop_limits, gemm_matrix.MatrixTile: _matrix_limits, gemm_dot.DotTile: _dot_limits}
CHOICES = {gemm_coop.CoopTile: COOP, gemm_matrix.MatrixTile: MATRIX, gemm_dot.DotTile: DOT}


# ---- operators


def _linear(workload, arch) -> Space:
    args = workload.args
    if args["m"] == 1:
        return _gemv_linear(args, arch)
    formats, rows = [lookup(fmt) for fmt, _ in args["segments"]], [padded(n) for _, n in args["segments"]]
    return _gemm(formats, rows, 1, args, arch, args["act"])


def _gate_up(workload, arch) -> Space:
    args = workload.args
    if args["m"] == 1:
        return _gemv_gate_up(args, arch)
    return _gemm([lookup(args["gate"]), lookup(args["up"])], [args["n"]], 2, args, arch, args["act_in"])


def _attention(workload, arch) -> Space | None:
    m, heads, kv_heads, d = (workload.args[name] for name in ("m", "heads", "kv_heads", "d"))
    if arch.matrix != "coop" or m == 1:
        return None

    def kernel(tile) -> Kernel:
        rows, columns, step = arch.fragment
        own = tile.own_keys
        whole = tile.waves % tile.parts == 0 and tile.keys % tile.parts == 0 and own % columns == 0 and own % step == 0
        if not whole or tile.waves * arch.wave > arch.threads or lds_bytes(tile, d, arch.fragment) > arch.lds:
            raise ValueError(f"{tile} does not fit {arch.name}")
        if tile.fragments * (own + d) * rows // arch.wave > SUMS:
            raise ValueError(f"{tile} takes more registers than {arch.name} has")
        fragments = m // rows * (heads // kv_heads)
        threads = tile.waves * arch.wave
        return Kernel(tile, kv_heads * -(-fragments // tile.row_fragments), threads, tile.keys * d * 4 / threads)

    return Space(Tile, ATTENTION, tile_of(d, arch), kernel)


SPACES = {"linear": _linear, "gate_up_swiglu": _gate_up, "attention": _attention}
