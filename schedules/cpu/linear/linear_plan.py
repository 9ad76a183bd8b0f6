"""Plans of the CPU's linear layers: how a kernel divides its work into tasks, register blocks and prefetches."""

from dataclasses import dataclass

from mlc_amd.schedules.cpu.base.vector import largest_divisor
from mlc_amd.schedules.cpu.linear.load import groups
from mlc_amd.schedules.cpu.linear.planes import ROWS, plane_bytes
from mlc_amd.schedules.cpu.linear.unpack import unpacked_bytes

FLOAT_TOKENS = 8  # rows of a float kernel's tile: rows of X a power of two apart share the 8 ways of a level 1 cache
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
                FLOAT_TOKENS
    interleave  of these, rows whose int8 dot products are interleaved, a divisor of `tokens`: independent sums hide the
                latency of multiply-add instructions where the out-of-order window is too short; float formats: of no
                effect; formats with two scales a block: at most 2, for they need more registers and have two dot
                products for each row to begin with
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


def default_plan(isa, m, p, segments, k):
    """The plan for m tokens in activation tiles of p and weights of these (format, rows) by k columns: a Plan in decode
    (m = 1), else a PrefillPlan."""
    if m == 1:
        # Prefetches past the end of a thread's share are wasted: they should be few of all.
        large = sum(plane_bytes(fmt, n, k) for fmt, n in segments) >= LARGE
        return Plan(unroll=1, ahead=isa.ahead * 2 if large else isa.ahead, locality=2)
    return PrefillPlan(
        tokens=p, interleave=min(isa.interleave, p), task=isa.task, tasks=32, unpack=_unpack_choices(isa, m, p)[-1]
    )


def few_plan(isa, segments, k):
    """The plan by which a kernel of many rows prefetches: with few live ones it is bound by memory as decode is."""
    return default_plan(isa, 1, 1, segments, k)


def parts(p):
    """Sizes of the parts of a tile of p rows that a kernel can compute: it takes the smallest that holds the live
    rows, for the cost of a tile is that of its rows, and of less than half a tile that of reading the weights."""
    return [p // n for n in (16, 8, 4, 2) if p % n == 0] + [p]


def _unpack_choices(isa, m, p):
    """Values of PrefillPlan.unpack: never, and, where m tokens are ever enough, the machine's number of tiles."""
    return (0, isa.unpack) if m >= isa.unpack * p else (0,)


def choices(isa, m, p):
    """Values of the plan's fields to try, by name."""
    if m == 1:
        return {"unroll": (1, 2, 4), "ahead": (0, 1024, 2048, 4096, 8192, 16384), "locality": (0, 2, 3)}
    return {
        "tokens": tuple(t for t in (4, 8, 16) if t <= p),
        "interleave": tuple(t for t in (1, 2, 4, 8) if t <= min(p, isa.registers // 4)),
        "task": (64, 128, 256, 512, 1024),
        "tasks": (8, 16, 32, 64),
        "unpack": _unpack_choices(isa, m, p),
    }


def row_tiles(fmt, n, k, plan):
    """Tiles of 16 rows that a task works on, a divisor of all tiles. Decode: 1; prefill: as many as the plan's `task`
    holds, unless that makes too few tasks."""
    tiles = -(-n // ROWS)
    if isinstance(plan, Plan):
        return 1
    size = unpacked_bytes(fmt, ROWS, k) if unpacks(fmt, plan) else plane_bytes(fmt, ROWS, k)
    return largest_divisor(min((plan.task << 10) // size, tiles // plan.tasks), tiles)


def interleave_of(fmt, plan):
    """The plan's `interleave` for a format."""
    return min(plan.interleave, 2) if groups(fmt) > 1 else plan.interleave


def unpacks(fmt, plan):
    """Whether a weight may be unpacked before its products."""
    return fmt.kind == "int8" and isinstance(plan, PrefillPlan) and bool(plan.unpack)
