"""Which plans are worth trying: for each operator of a target, the values of each number of its kernel's plan.

In: a workload and an arch. Out: a `Space`, or None for what has nothing to choose. Plans that the arch cannot run are
left out, and of plans that make the same kernel all but one.
"""

import importlib
import itertools
from collections.abc import Callable, Hashable
from dataclasses import asdict, astuple, dataclass, fields
from functools import cached_property
from typing import NamedTuple

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.tuning.workload import Workload

# api of an arch: the module that has its `SPACES`, {operator: function (workload, arch) -> Space or None}
MODULES = {"rocm": "gpu_spaces", "vulkan": "gpu_spaces", "cpu": "cpu_spaces"}


class Kernel(NamedTuple):
    """What a plan comes to, as far as it can be told without building it.

    same        plans with equal ones make the same kernel
    workgroups  or tasks, on a CPU
    threads     of a workgroup
    loads       bytes that a thread has under way, roughly
    """

    same: Hashable
    workgroups: int
    threads: int
    loads: float = 0


@dataclass(frozen=True)
class Space:
    """The plans of one workload on one arch.

    plan_type  frozen dataclass whose fields are all integers
    choices    field name: values, ascending; in the order in which they are drawn. All fields are there
    default    the plan that is used without tuning; its values are among the choices
    kernel     what a plan comes to; ValueError or UserError for a plan that the arch cannot run
    """

    plan_type: type
    choices: dict[str, tuple[int, ...]]
    default: object
    kernel: Callable[[object], Kernel]

    def __post_init__(self):
        names = [field.name for field in fields(self.plan_type)]
        if list(self.choices) != names:
            raise ValueError(f"a space of {self.plan_type.__name__} draws {list(self.choices)}, not its fields {names}")
        merged = {name: tuple(sorted({*values, getattr(self.default, name)})) for name, values in self.choices.items()}
        object.__setattr__(self, "choices", merged)

    def plan(self, values) -> object:
        """The plan of a dict by field name, as JSON keeps it, or of values in the fields' order. TypeError for wrong
        names."""
        return self.plan_type(**values) if isinstance(values, dict) else self.plan_type(*values)

    def valid(self, plan) -> str | None:
        """None, or why the arch cannot run the plan."""
        try:
            self.kernel(plan)
        except (ValueError, UserError) as error:
            return str(error)
        return None

    @cached_property
    def plans(self) -> list:
        """Every plan that is worth measuring, the default first; of those that make the same kernel, the first one."""
        return list(self._distinct())

    def _distinct(self):
        known = set()
        for values in itertools.chain([astuple(self.default)], itertools.product(*self.choices.values())):
            plan = self.plan_type(*values)
            try:
                same = self.kernel(plan).same
            except (ValueError, UserError):
                continue
            if same not in known:
                known.add(same)
                yield plan

    @property
    def open(self) -> bool:
        """Whether there is more than one plan."""
        return len(list(itertools.islice(self._distinct(), 2))) > 1

    def equal(self, plan):
        """The plan of `plans` that makes the same kernel as this one. KeyError if there is none."""
        return self._by_kernel[self.kernel(plan).same]

    @cached_property
    def _by_kernel(self) -> dict:
        return {self.kernel(plan).same: plan for plan in self.plans}


def space(workload: Workload, arch) -> Space | None:
    """The workload's space on an arch (a GpuArch, Profile or cpu Arch), None if its kernel has no choices or only one
    plan fits."""
    module = importlib.import_module(f"mlc_amd.schedules.tuning.{MODULES[arch.api]}")
    make = module.SPACES.get(workload.op)
    found = make(workload, arch) if make else None
    return found if found and found.open else None


def as_dict(plan) -> dict:
    """A plan as JSON keeps it; `Space.plan` reads it."""
    return asdict(plan)
