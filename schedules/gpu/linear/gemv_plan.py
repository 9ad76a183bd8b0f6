"""The distribution of GEMVs over the GPU: the rules for plans, and the spaces of plans for tuning. In: an operator and
an arch. Out: a `Plan`, and a `Split` for each segment."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mlc_amd.schedules.formats import Format
from mlc_amd.schedules.gpu.base.planes import BLOCK, padded
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.step import FEW
from mlc_amd.schedules.gpu.linear.gemv_rows import NORM_WAVES, span_of, units_of
from mlc_amd.schedules.gpu.linear.load import block_bytes
from mlc_amd.schedules.operators import ExpertGateUp, GateUp, Linear
from mlc_amd.schedules.space import Kernel, Space, planned

FULL = 6  # groups of lanes for each compute unit, as many as hide the latency of memory with two loads of each lane
MIN_USE = 0.9  # least fraction of lanes that must have work, on average over the steps of a row
LINEAR_WAVES = 4  # waves of a workgroup
MOST_ROWS = 4  # upper limit of the rows of a group of lanes at the same time
SUMS = 32  # default limit of the sums of a group of lanes at the same time, each of which needs a register
MAX_SUMS = 64  # limit for tuning; with more, compilers take minutes
MAX_BLOCKS = 32  # upper limit of the blocks of 32 columns that a lane has loaded


@dataclass(frozen=True)
class Plan:
    """The plan of a GEMV. All fields are powers of two."""

    rows: int  # rows of a group of lanes at the same time, at most 16; for gate_up_swiglu rows of each weight
    waves: int  # upper limit of the waves of a workgroup
    lanes: int  # upper limit of the lanes that share a row
    unroll: int  # steps whose loads are issued before the first one is used; `fitted` may reduce it


CHOICES = {"rows": (1, 2, 4, 8, 16), "waves": (1, 2, 4, 8), "lanes": (8, 16, 32, 64), "unroll": (1, 2, 4, 8)}


def full_plan(arch: Device, rows: int, waves: int) -> Plan:
    """The plan if there is enough work for the GPU: all lanes of a wave share a row, and each issues as many loads as
    the device can have in flight."""
    return Plan(rows, waves, arch.wave, arch.loads)


def _few_plan(plan: Plan, m: int, weights: int) -> Plan:
    """A plan for one token changed to m tokens: with several tokens at least four rows, which share the loads of
    activations, as long as there are registers."""
    return plan if m == 1 else replace(plan, rows=min(max(plan.rows, 4), SUMS // (m * weights)), unroll=1)


def fitted(plan: Plan, fmts: Sequence[Format], k: int, arch: Device) -> Plan:
    """The plan as it is used for a row of each of these weights. `unroll` is divided by the number of weights; on
    Vulkan also by the blocks of 32 columns of a unit, and then `rows`: Vulkan drivers keep all loaded values in
    registers, so that AMD's spill or hold few waves, whereas LLVM for rocm distributes the loads."""
    if arch.api == "rocm":
        return replace(plan, unroll=max(1, plan.unroll // len(fmts)))
    share = len(fmts) * _blocks(fmts, k)
    unroll = max(1, plan.unroll // share)
    return replace(plan, unroll=unroll, rows=max(1, min(plan.rows, plan.rows * plan.unroll // (share * unroll))))


def lanes_of(units: int, maximum: int) -> int:
    """The number of lanes that share a row of so many units: the largest one with which at least MIN_USE of the lanes
    have work."""
    return next(
        n for n in (64, 32, 16, 8, 4, 2, 1) if n <= maximum and (units >= MIN_USE * n * -(-units // n) or n == 1)
    )


def _blocks(fmts: Sequence[Format], k: int) -> int:
    """The loads of a unit; for int8 formats its blocks of 32 columns."""
    return span_of(fmts, k) if fmts[0].kind == "int8" else 1


def loads(fmts: Sequence[Format], k: int, used: Plan) -> float:
    """The bytes of weights that a lane has in flight. Raises ValueError if they are too many."""
    blocks = len(fmts) * used.rows * used.unroll * _blocks(fmts, k)
    if blocks > MAX_BLOCKS:
        raise ValueError(f"{used}: a lane would load {blocks} blocks at once")
    return blocks * block_bytes(fmts[0])


def steps_at_once(fmts: Sequence[Format], k: int, lanes: int, unroll: int) -> int:
    """The number of steps whose loads are issued together: `unroll`, or fewer if a row has fewer."""
    return min(unroll, -(-units_of(fmts, k) // lanes))


def _check_sums(count: int, plan: Plan) -> None:
    """Raises ValueError if a lane would have too many sums at the same time."""
    if count > MAX_SUMS:
        raise ValueError(f"{plan}: {count} sums of a lane are too many")


# ---- linear layers


class Split(NamedTuple):
    """The distribution of a segment."""

    plan: Plan  # as the kernel uses it
    lanes: int  # lanes that share a row
    rows: int  # rows of a workgroup
    groups: int  # workgroups


def linear_splits(op: Linear, arch: Device, plan: Plan | None = None) -> list[Split]:
    """The distribution of each segment."""
    plan = plan or linear_default(op, arch)
    plan = replace(plan, waves=min(plan.waves, arch.threads // arch.wave))
    splits = []
    if op.norm_out:
        used = block_plan(op, arch, plan)
        return [Split(used, used.lanes, BLOCK, op.segments[0][1] // BLOCK)]
    for fmt, n in op.weights:
        lanes = lanes_of(units_of([fmt], op.k), min(plan.lanes, arch.wave))
        used = fitted(plan, [fmt], op.k, arch)
        rows = used.waves * (arch.wave // lanes) * used.rows
        splits.append(Split(used, lanes, rows, -(-padded(n) // rows)))
    return splits


def linear_default(op: Linear, arch: Device) -> Plan:
    """The plan of the rule for `gemv.linear`: fewer rows at the same time if there would be too few groups of lanes for
    the GPU. A norm is computed in each workgroup, so there should be few of them. If the linear prepares a norm,
    workgroups have blocks of rows: as many waves as can share a block, with all rows at the same time if possible."""
    if op.norm_out:
        return _few_plan(full_plan(arch, 2 * MOST_ROWS, BLOCK), op.m, 1)
    waves, rows = 1 if arch.lone_waves else LINEAR_WAVES, sum(padded(n) for _, n in op.segments)
    plan = _few_plan(full_plan(arch, MOST_ROWS, waves), min(op.m, FEW), 1)
    full = max(FULL, 5 * arch.loads // 2)  # devices that need more loads in flight need more groups of lanes, too
    while plan.rows > 1 and rows // plan.rows < full * arch.units:
        plan = replace(plan, rows=plan.rows // 2)
    return plan if op.eps is None else replace(plan, waves=max(plan.waves, NORM_WAVES))


@planned(CHOICES, linear_default)
def _linear_space(op: Linear, arch: Device, plan: Plan) -> Kernel:
    splits = linear_splits(op, arch, plan)
    _check_sums(min(op.m, FEW) * splits[0].plan.rows, plan)
    same, loaded = [], []
    for (fmt, _), split in zip(op.weights, splits, strict=True):
        unroll = steps_at_once([fmt], op.k, split.lanes, split.plan.unroll)
        same.append(split._replace(plan=replace(split.plan, lanes=0, unroll=unroll)))
        loaded.append(loads([fmt], op.k, split.plan))
    groups = sum(split.groups for split in splits) * max(1, op.m // FEW)
    return Kernel(tuple(same), groups, splits[0].plan.waves * arch.wave, max(loaded))


# ---- gate and up


def gate_up_tokens(op: GateUp | ExpertGateUp) -> int:
    """The tokens of a workgroup: all; but with experts 1, because slots have workgroups of their own."""
    return op.m if isinstance(op, GateUp) else 1


def gate_up_default(op: GateUp | ExpertGateUp, arch: Device) -> Plan:
    """The plan of the rule for `gemv.gate_up_swiglu`: as many waves as can share a workgroup's block of rows. A
    workgroup always has a whole block, so fewer rows at the same time would not make more workgroups."""
    return _few_plan(full_plan(arch, MOST_ROWS, BLOCK), gate_up_tokens(op), 2)


def block_plan(op: Linear | GateUp | ExpertGateUp, arch: Device, plan: Plan | None = None) -> Plan:
    """The plan as it is used by a kernel whose workgroups have a block of 32 rows (`gemv.gate_up_swiglu`, or a linear
    that prepares a norm). Plans with the same result make the same kernel."""
    fmts = [fmt for fmt, _ in op.weights]
    default = linear_default if isinstance(op, Linear) else gate_up_default
    plan = fitted(plan or default(op, arch), fmts, op.k, arch)  # type: ignore[arg-type]
    # so many lanes that all groups of lanes of a workgroup have rows
    lanes = max(lanes_of(units_of(fmts, op.k), min(plan.lanes, arch.wave)), arch.wave // BLOCK)
    waves = min(plan.waves, arch.threads // arch.wave, BLOCK * lanes // arch.wave)
    return Plan(min(plan.rows, BLOCK * lanes // (waves * arch.wave)), waves, lanes, plan.unroll)


@planned(CHOICES, gate_up_default)
def _gate_up_space(op: GateUp | ExpertGateUp, arch: Device, plan: Plan) -> Kernel:
    fmts, slots = [fmt for fmt, _ in op.weights], op.used * op.m if isinstance(op, ExpertGateUp) else 1
    used = block_plan(op, arch, plan)
    _check_sums(2 * gate_up_tokens(op) * used.rows, plan)
    same = replace(used, unroll=steps_at_once(fmts, op.k, used.lanes, used.unroll))
    return Kernel(same, op.n // BLOCK * slots, used.waves * arch.wave, loads(fmts, op.k, used))


def plans(op: Linear | GateUp | ExpertGateUp, arch: Device) -> Space:
    return _linear_space(op, arch) if isinstance(op, Linear) else _gate_up_space(op, arch)
