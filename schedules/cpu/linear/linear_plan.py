"""The plans of matrix products on the CPU: how a kernel divides its work into tasks and register blocks, and how it
prefetches. Also the rules that decide plans, and the plans that tuning measures."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.base.arch import Arch, Isa, tile_rows
from mlc_amd.schedules.cpu.base.vector import largest_divisor
from mlc_amd.schedules.cpu.linear.load import groups, unpacked_bytes
from mlc_amd.schedules.cpu.linear.planes import BLOCK, ROWS, plane_bytes
from mlc_amd.schedules.formats import Format
from mlc_amd.schedules.operators import ExpertDown, ExpertGateUp, ExpertLinear, GateUp, HeadLinear, Linear
from mlc_amd.schedules.space import Kernel, Space

MatrixProduct = Linear | HeadLinear | GateUp | ExpertGateUp | ExpertLinear
# Largest number of rows whose sums a kernel of a float format keeps in registers. If rows of X are a power of two
# apart, their elements compete for the 8 ways of a set of the L1 cache.
FLOAT_TOKENS = 8
UNROLLED = 4  # the sums of up to so many rows are in registers, even if those of more rows are in memory
LARGE = 512 << 10  # bytes of weights from which on a decode kernel prefetches further ahead


@dataclass(frozen=True)
class Plan:
    """The plan of a product of one row (decode). No plan changes the order of additions.

    unroll    blocks of 32 columns in a step of the loop
    ahead     bytes that are prefetched ahead of the loads; 0: none
    locality  cache levels that the prefetch fills, see `vector.prefetch`; with 0 L2 and L3 keep other data of the model
    """

    unroll: int
    ahead: int
    locality: int


@dataclass(frozen=True)
class PrefillPlan:
    """The plan of a product of several rows (prefill). No plan changes the order of additions. "Rows" are those of the
    activations.

    tokens      number of rows whose sums are in registers at the same time, at most the rows of an activation tile;
                float formats: at most FLOAT_TOKENS. 0: the sums of more than UNROLLED rows are in memory
    interleave  number of rows whose int8 dot products are interleaved, a divisor of `tokens`. Independent sums hide the
                latency of multiply-add instructions that the out-of-order window does not hide. Formats with two
                scales in a block use at most 2 if sums are in registers, because they need more registers and already
                have two independent dot products for each row. No effect for float formats
    task        KB of weights in a task (of unpacked weights, if they are unpacked), a share of the L2 cache
    tasks       number of tasks that a kernel should have at least; with fewer, tasks get smaller than `task`. No effect
                for gate/up, whose tasks are always 32 rows of both weights
    unpack      number of tiles of tokens from which on a task unpacks its int8 weights once for all tiles, instead of
                once for each tile; 0: never
    """

    tokens: int
    interleave: int
    task: int
    tasks: int
    unpack: int


AnyPlan = Plan | PrefillPlan


def token_tile(op: MatrixProduct, arch: Arch) -> int:
    """The rows of a tile of the operator's activations."""
    return op.tile if isinstance(op, ExpertGateUp | ExpertLinear) else tile_rows(op.m, arch)


def _decode_plan(op: MatrixProduct, isa: Isa, matrices: int = 1) -> Plan:
    # A thread's prefetches after the end of its weights are wasted, so it prefetches far ahead only in large weights.
    large = sum(plane_bytes(fmt, matrices * n, op.k) for fmt, n in op.weights) >= LARGE
    return Plan(unroll=1, ahead=isa.ahead * 2 if large else isa.ahead, locality=2)


def default_plan(op: MatrixProduct, arch: Arch) -> AnyPlan:
    """The plan without tuning: a Plan for m = 1, otherwise a PrefillPlan."""
    isa, p = arch.isa, token_tile(op, arch)
    if op.m == 1:
        return _decode_plan(op, isa)
    unpack = _unpack_choices(isa, op.m, p)[-1]
    tokens = p if isa.sums_in_registers else 0
    return PrefillPlan(tokens=tokens, interleave=min(isa.interleave, p), task=isa.task, tasks=32, unpack=unpack)


def prefetch_plan(op: MatrixProduct, isa: Isa, plan: AnyPlan) -> Plan:
    """The plan from which a kernel takes `ahead` and `locality`. Prefill kernels prefetch as decode kernels do, because
    they are also bound by memory if few rows are live."""
    return plan if isinstance(plan, Plan) else _decode_plan(op, isa, op.heads if isinstance(op, HeadLinear) else 1)


def parts(p: int) -> list[int]:
    """The sizes of the parts of a tile of p rows for which a kernel has code, ascending. A kernel uses the smallest
    part that holds the live rows, since the time of a tile grows with its rows, down to the time of reading weights."""
    return [p // n for n in (16, 8, 4, 2) if p % n == 0] + [p]


def _unpack_choices(isa: Isa, m: int, p: int) -> tuple[int, ...]:
    """The values of PrefillPlan.unpack to try: 0, and isa.unpack if m rows can have so many tiles."""
    return (0, isa.unpack) if m >= isa.unpack * p else (0,)


def row_tiles(fmt: Format, n: int, k: int, plan: AnyPlan) -> int:
    """The number of tiles of 16 rows of a weight in a task, a divisor of the number of all tiles. Decode: 1. Prefill:
    as many as plan.task holds, but fewer if there would be less than plan.tasks tasks."""
    tiles = -(-n // ROWS)
    if isinstance(plan, Plan):
        return 1
    size = unpacked_bytes(fmt, ROWS, k) if unpacks(fmt, plan) else plane_bytes(fmt, ROWS, k)
    return largest_divisor(min((plan.task << 10) // size, tiles // plan.tasks), tiles)


def interleave_of(fmt: Format, plan: PrefillPlan) -> int:
    """The value of plan.interleave that a kernel uses for a format."""
    return min(plan.interleave, 2) if groups(fmt) > 1 and plan.tokens else plan.interleave


def float_tokens(plan: PrefillPlan) -> int:
    """The number of rows whose sums a kernel of a float format keeps in registers."""
    return min(plan.tokens or FLOAT_TOKENS, FLOAT_TOKENS)


def loops_over_tokens(fmt: Format, plan: AnyPlan) -> bool:
    """Whether a kernel has a loop over the rows of an activation tile, with their sums in memory."""
    return fmt.kind == "int8" and isinstance(plan, PrefillPlan) and not plan.tokens


def unpacks(fmt: Format, plan: AnyPlan) -> bool:
    """Whether a kernel may unpack the weight before its products."""
    return fmt.kind == "int8" and isinstance(plan, PrefillPlan) and bool(plan.unpack)


# ---- plans that tuning measures


def _choices(isa: Isa, m: int, p: int) -> dict[str, tuple[int, ...]]:
    if m == 1:
        return {"unroll": (1, 2, 4), "ahead": (0, 1024, 2048, 4096, 8192, 16384), "locality": (0, 2, 3)}
    return {
        "tokens": tuple(t for t in (0, 4, 8, 16) if t <= p),
        "interleave": tuple(t for t in (1, 2, 4, 8) if t <= min(p, isa.registers // 4)),
        "task": (64, 128, 256, 512, 1024),
        "tasks": (8, 16, 32, 64),
        "unpack": _unpack_choices(isa, m, p),
    }


def _space(op: MatrixProduct, arch: Arch, tasks: Callable[[AnyPlan], tuple[Hashable, int]]) -> Space:
    """The space of a product. tasks(plan): (a key that is equal for plans with the same tasks, the number of tasks)."""
    p, default = token_tile(op, arch), default_plan(op, arch)
    whole = op.weights[0][0].kind == "int8"

    def decode(plan: Plan) -> Kernel:
        if whole and op.k // BLOCK % plan.unroll:
            raise ValueError(f"{op.k} columns are not a multiple of the step of {plan}")
        ahead = plan.ahead and (plan.ahead, plan.locality)
        return Kernel((plan.unroll if whole else 0, ahead), tasks(plan)[1], 1, plan.ahead)

    def prefill(plan: PrefillPlan) -> Kernel:
        if plan.tokens > p:
            raise ValueError(f"{plan} has more tokens than a tile, which has {p}")
        if plan.tokens % plan.interleave:
            raise ValueError(f"tokens of {plan} are not a multiple of interleave")
        held, count = tasks(plan)
        interleaved = tuple(interleave_of(fmt, plan) for fmt, _ in op.weights)
        tokens = (plan.tokens, interleaved, plan.unpack) if whole else float_tokens(plan)
        return Kernel((tokens, held), count, 1, plan.tokens or plan.interleave)

    return Space(type(default), _choices(arch.isa, op.m, p), default, decode if op.m == 1 else prefill)


@registry.plans(Linear, ExpertLinear, ExpertDown)
def linear_plans(op: Linear | ExpertLinear, arch: Arch) -> Space:
    def tasks(plan: AnyPlan) -> tuple[Hashable, int]:
        held = tuple(row_tiles(fmt, n, op.k, plan) for fmt, n in op.weights)
        return held, sum(-(-n // ROWS) // tiles for (_, n), tiles in zip(op.weights, held, strict=True))

    return _space(op, arch, tasks)


@registry.plans(GateUp, ExpertGateUp)
def gate_up_plans(op: GateUp | ExpertGateUp, arch: Arch) -> Space:
    """The space of gate/up. For experts the number of tasks is that of one row; several rows have at least as many."""
    blocks = op.n // BLOCK * (op.used if isinstance(op, ExpertGateUp) else 1)
    return _space(op, arch, lambda plan: (None, blocks))
