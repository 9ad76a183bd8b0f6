"""Plans as MetaSchedule's traces: each number is drawn from its choices and written as an annotation on the reference's
block."""

import tvm
from tvm import s_tir
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.database import TuningRecord

from mlc_amd.schedules.tuning.spaces import Space
from mlc_amd.schedules.tuning.workload import BLOCK

PREFIX = "plan."  # of annotations
FAILED = 1e10  # seconds that stand for a plan that could not be measured, as in MetaSchedule's own databases
TARGET = {"kind": "llvm"}  # what MetaSchedule believes the kernels are for: it compiles nothing


def target() -> tvm.target.Target:
    return tvm.target.Target(TARGET)


def draw(schedule: s_tir.Schedule, space: Space, plan=None) -> None:
    """Draws the plan's numbers, or any."""
    block = schedule.get_sblock(BLOCK)
    for name, values in space.choices.items():
        decision = None if plan is None else values.index(getattr(plan, name))
        drawn = schedule.sample_categorical(list(values), [1 / len(values)] * len(values), decision=decision)
        schedule.annotate(block, PREFIX + name, drawn)


def schedule_of(mod: tvm.IRModule, space: Space, plan) -> s_tir.Schedule:
    """A schedule of the reference whose trace draws that plan."""
    schedule = s_tir.Schedule(mod)
    draw(schedule, space, plan)
    return schedule


def plan_of(schedule: s_tir.Schedule, space: Space):
    """The plan that a schedule's annotations say."""
    found = schedule.get(schedule.get_sblock(BLOCK)).annotations
    return space.plan({name: int(found[PREFIX + name]) for name in space.choices})


def record(mod: tvm.IRModule, entry, space: Space, plan, seconds: float | None) -> TuningRecord:
    """A measurement of the reference `mod`; entry: what the database's commit_workload gave for it."""
    arguments = ms.arg_info.ArgInfo.from_prim_func(mod["main"])
    return TuningRecord(
        schedule_of(mod, space, plan).trace, entry, [FAILED if seconds is None else seconds], target(), arguments
    )
