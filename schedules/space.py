"""The plans worth measuring: for each operator of a target, the values of each field of its kernel's plan.

Plans that the arch cannot run are left out, and all but one of those that make the same kernel.
"""

import functools
import importlib
import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import astuple, dataclass, fields
from typing import Any, NamedTuple

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.operators import Operator

PACKAGES = {"rocm": "gpu", "vulkan": "gpu", "cpu": "cpu"}  # by an arch's api: where its kernels are registered


class Kernel(NamedTuple):
    """What a plan comes to, as far as it can be told without building it.

    same        plans with equal ones make the same kernel
    workgroups  tasks, on a CPU
    threads     of a workgroup
    loads       bytes that a thread has in flight, roughly
    """

    same: Hashable
    workgroups: int
    threads: int
    loads: float = 0


@dataclass(frozen=True)
class Space:
    """The plans of one workload on one arch.

    plan_type  frozen dataclass whose fields are all integers
    choices    field name: values, ascending; all fields, in their order
    default    the plan without tuning; its values are added to the choices
    kernel     what a plan comes to; ValueError or UserError for a plan that the arch cannot run
    """

    plan_type: type
    choices: dict[str, tuple[int, ...]]
    default: Any
    kernel: Callable[[Any], Kernel]

    def __post_init__(self):
        names = [field.name for field in fields(self.plan_type)]
        if list(self.choices) != names:
            raise ValueError(f"choices of {list(self.choices)} for {self.plan_type.__name__}, whose fields are {names}")
        merged = {name: tuple(sorted({*values, getattr(self.default, name)})) for name, values in self.choices.items()}
        object.__setattr__(self, "choices", merged)

    def valid(self, plan) -> str | None:
        """None, or why the arch cannot run the plan."""
        try:
            self.kernel(plan)
        except (ValueError, UserError) as error:
            return str(error)
        return None

    def parse(self, values: dict):
        """The plan with these values by field name. ValueError, which says why, if the space has no such plan."""
        if values.keys() != self.choices.keys():
            raise ValueError(f"its plan has the fields {', '.join(values)}, not {', '.join(self.choices)}")
        if outside := [name for name, choices in self.choices.items() if values[name] not in choices]:
            raise ValueError(f"{', '.join(outside)} of its plan is not among the choices")
        plan = self.plan_type(**values)
        if reason := self.valid(plan):
            raise ValueError(reason)
        return plan

    @functools.cached_property
    def plans(self) -> list:
        """Every plan worth measuring, the default first; of those that make the same kernel, the first one."""
        return list(self._by_kernel.values())

    def _distinct(self) -> Iterator[tuple[Hashable, Any]]:
        """(what tells its kernel from others, plan)."""
        known = set()
        for values in itertools.chain([astuple(self.default)], itertools.product(*self.choices.values())):
            plan = self.plan_type(*values)
            try:
                same = self.kernel(plan).same
            except (ValueError, UserError):
                continue
            if same not in known:
                known.add(same)
                yield same, plan

    @property
    def open(self) -> bool:
        """Whether there is more than one plan."""
        return len(list(itertools.islice(self._distinct(), 2))) > 1

    def equal(self, plan):
        """The plan of `plans` that makes the same kernel as this one. KeyError if there is none."""
        return self._by_kernel[self.kernel(plan).same]

    @functools.cached_property
    def _by_kernel(self) -> dict:
        return dict(self._distinct())


def planned(choices: dict[str, tuple[int, ...]], default: Callable[[Any, Any], Any]) -> Callable[..., Callable]:
    """A decorator: of kernel(op, arch, plan), which says what a plan comes to, it makes the function (op, arch) that
    returns the Space. default: of (op, arch), the plan without tuning."""

    def decorated(kernel: Callable[[Any, Any, Any], Kernel]) -> Callable[[Any, Any], Space]:
        def found(op: Any, arch: Any) -> Space:
            plan = default(op, arch)
            return Space(type(plan), choices, plan, functools.partial(kernel, op, arch))

        return found

    return decorated


@functools.cache
def space(op: Operator, arch) -> Space | None:
    """The operator's space on an arch (a GpuArch, Profile or cpu Arch); None if there is only one plan. Cached, since
    listing a space's plans takes long. ValueError or UserError for one without kernels."""
    spaces = importlib.import_module(f"mlc_amd.schedules.{PACKAGES[arch.api]}").registry.spaces
    found = spaces[type(op)](op, arch) if type(op) in spaces else None
    return found if found and found.open else None
