"""Plans of the CPU's matrix products: how a kernel divides its work into tasks, register blocks and prefetches."""

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
FLOAT_TOKENS = 8  # rows of a float kernel's tile: rows of X a power of two apart share the 8 ways of a level 1 cache
UNROLLED = 4  # rows whose sums are in registers even where those of more are in memory
LARGE = 512 << 10  # bytes of weights from which on a decode kernel prefetches further ahead


@dataclass(frozen=True)
class Plan:
    """How a linear layer of one row, or a gate/up, goes through its weights. No plan changes the order of additions.

    unroll    blocks of 32 columns in a step of the loop
    ahead     bytes that are prefetched ahead of the loads, 0: none
    locality  cache levels that the prefetch fills, see `vector.prefetch`; 0 leaves L2 and L3 to the rest of the model
    """

    unroll: int
    ahead: int
    locality: int


@dataclass(frozen=True)
class PrefillPlan:
    """How a linear layer of many rows, or a gate/up, is divided into tasks and register blocks. No plan changes the
    order of additions.

    tokens      rows whose sums are in registers at once, at most a tile of the activations; float formats: at most
                FLOAT_TOKENS; 0: sums of more than UNROLLED rows are in memory
    interleave  of these, or of those with sums in memory, rows whose int8 dot products are interleaved, a divisor of
                `tokens`: independent sums hide the latency of multiply-add instructions where the out-of-order window
                is too short; float formats: of no effect; formats with two scales a block: at most 2 with sums in
                registers, for they need more of them and have two dot products for each row to begin with
    task        KB of weights of a task, unpacked ones if they are: a share of the L2 cache
    tasks       tasks below which they become smaller than `task`; gate/up: its tasks are always 32 rows of both weights
    unpack      tiles of tokens from which on int8 weights of a task are unpacked once for all of them, and not for
                each; 0: never
    """

    tokens: int
    interleave: int
    task: int
    tasks: int
    unpack: int


AnyPlan = Plan | PrefillPlan


def token_tile(op: MatrixProduct, arch: Arch) -> int:
    """Rows of a tile of its activations."""
    return op.tile if isinstance(op, ExpertGateUp | ExpertLinear) else tile_rows(op.m, arch)


def _decode_plan(op: MatrixProduct, isa: Isa, matrices: int = 1) -> Plan:
    # Prefetches past the end of a thread's share are wasted: they should be few of all.
    large = sum(plane_bytes(fmt, matrices * n, op.k) for fmt, n in op.weights) >= LARGE
    return Plan(unroll=1, ahead=isa.ahead * 2 if large else isa.ahead, locality=2)


def default_plan(op: MatrixProduct, arch: Arch) -> AnyPlan:
    """A Plan for one row, else a PrefillPlan."""
    isa, p = arch.isa, token_tile(op, arch)
    if op.m == 1:
        return _decode_plan(op, isa)
    unpack = _unpack_choices(isa, op.m, p)[-1]
    tokens = p if isa.sums_in_registers else 0
    return PrefillPlan(tokens=tokens, interleave=min(isa.interleave, p), task=isa.task, tasks=32, unpack=unpack)


def prefetch_plan(op: MatrixProduct, isa: Isa, plan: AnyPlan) -> Plan:
    """The plan by which a kernel prefetches: with few live ones of many rows it is bound by memory as decode is."""
    return plan if isinstance(plan, Plan) else _decode_plan(op, isa, op.heads if isinstance(op, HeadLinear) else 1)


def parts(p: int) -> list[int]:
    """Sizes of the parts of a tile of p rows that a kernel can compute: it takes the smallest that holds the live
    rows, for the cost of a tile is that of its rows, and of less than half a tile that of reading the weights."""
    return [p // n for n in (16, 8, 4, 2) if p % n == 0] + [p]


def _unpack_choices(isa: Isa, m: int, p: int) -> tuple[int, ...]:
    """Values of PrefillPlan.unpack: never, and, where m tokens are ever enough, the machine's number of tiles."""
    return (0, isa.unpack) if m >= isa.unpack * p else (0,)


def row_tiles(fmt: Format, n: int, k: int, plan: AnyPlan) -> int:
    """Tiles of 16 rows that a task works on, a divisor of all tiles. Decode: 1; prefill: as many as the plan's `task`
    holds, unless that makes too few tasks."""
    tiles = -(-n // ROWS)
    if isinstance(plan, Plan):
        return 1
    size = unpacked_bytes(fmt, ROWS, k) if unpacks(fmt, plan) else plane_bytes(fmt, ROWS, k)
    return largest_divisor(min((plan.task << 10) // size, tiles // plan.tasks), tiles)


def interleave_of(fmt: Format, plan: PrefillPlan) -> int:
    """The plan's `interleave` for a format."""
    return min(plan.interleave, 2) if groups(fmt) > 1 and plan.tokens else plan.interleave


def float_tokens(plan: PrefillPlan) -> int:
    """Rows whose sums a kernel of a float format has in registers at once."""
    return min(plan.tokens or FLOAT_TOKENS, FLOAT_TOKENS)


def loops_over_tokens(fmt: Format, plan: AnyPlan) -> bool:
    """Whether a kernel goes through the rows of a tile in a loop, with their sums in memory."""
    return fmt.kind == "int8" and isinstance(plan, PrefillPlan) and not plan.tokens


def unpacks(fmt: Format, plan: AnyPlan) -> bool:
    """Whether a weight may be unpacked before its products."""
    return fmt.kind == "int8" and isinstance(plan, PrefillPlan) and bool(plan.unpack)


# ---- plans worth measuring


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
    """tasks(plan): what decides how a kernel's rows are divided, and the number of tasks."""
    p, default = token_tile(op, arch), default_plan(op, arch)
    whole = op.weights[0][0].kind == "int8"

    def decode(plan: Plan) -> Kernel:
        if whole and op.k // BLOCK % plan.unroll:
            raise ValueError(f"{plan} does not divide {op.k} columns")
        ahead = plan.ahead and (plan.ahead, plan.locality)
        return Kernel((plan.unroll if whole else 0, ahead), tasks(plan)[1], 1, plan.ahead)

    def prefill(plan: PrefillPlan) -> Kernel:
        if plan.tokens > p:
            raise ValueError(f"{plan} has more than the {p} tokens of a tile")
        if plan.tokens % plan.interleave:
            raise ValueError(f"{plan} does not divide its tokens")
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
    """Tasks of experts are counted by one row's experts: many rows have at least that many."""
    blocks = op.n // BLOCK * (op.used if isinstance(op, ExpertGateUp) else 1)
    return _space(op, arch, lambda plan: (None, blocks))
