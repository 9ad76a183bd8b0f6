"""The plans of GPU kernels. The fields of a plan are described by its dataclass, in the kernel's module."""

from mlc_amd.schedules import operators
from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.attention import rope_kv_write
from mlc_amd.schedules.gpu.attention.spaces import WAVES, attention, decode
from mlc_amd.schedules.gpu.base.planes import padded
from mlc_amd.schedules.gpu.base.step import FEW
from mlc_amd.schedules.gpu.experts import expert_gemv
from mlc_amd.schedules.gpu.linear import gemm, gemv, gemv_matrix
from mlc_amd.schedules.space import Kernel, Space

MAX_SUMS = 64  # of a GEMV, likewise
BLOCKS = 32  # of 32 columns that a lane has loaded, at most
GEMV = {"rows": (1, 2, 4, 8, 16), "waves": (1, 2, 4, 8), "lanes": (8, 16, 32, 64), "unroll": (1, 2, 4, 8)}
MATRIX_TILES = (1, 2, 4)

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


# ---- operators


@registry.plans(operators.Linear)
def _linear(op, arch) -> Space:
    rows = [padded(n) for _, n in op.weights]
    if gemv_matrix.suits([fmt for fmt, _ in op.weights], op.m, op.layout, arch):
        return _gemv_matrix(rows, op.weights, op.k, op.m, MATRIX_TILES, arch)
    if gemv.suits([fmt for fmt, _ in op.weights], sum(rows), op.m, op.layout, arch):
        return _gemv_linear(op, arch)
    return gemm.plans(op, arch)


@registry.plans(operators.GateUp, operators.ExpertGateUp)
def _gate_up(op, arch) -> Space:
    experts = isinstance(op, operators.ExpertGateUp)
    if not experts and gemv_matrix.suits([op.gate, op.up], op.m, op.layout_in, arch):
        tiles = (gemv_matrix.GATE_UP_TILES,)
        return _gemv_matrix([2 * op.n], op.weights, op.k, op.m, tiles, arch)
    few = op.m <= FEW and op.layout_in in gemv.VECTORS
    if op.tile == 1 if experts else few:
        return _gemv_gate_up(op, arch)
    return gemm.plans(op, arch)


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
