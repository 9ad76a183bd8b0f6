"""`Space`: the plans of an operator's kernel that tuning measures on an arch. A plan is a dataclass of integers; a
space has the values to try for each of its fields.

Left out are plans that the arch cannot run, and all but one of the plans that produce the same kernel.
"""

import functools
import importlib
import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import astuple, dataclass, fields
from typing import Any, NamedTuple

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.operators import Operator

PACKAGES = {"rocm": "gpu", "vulkan": "gpu", "cpu": "cpu"}  # an arch's `api` to the package with its Registry


class Kernel(NamedTuple):
    """Facts about the kernel of a plan, which are known without building it.

    same        a key; plans with equal keys produce the same kernel
    workgroups  number of workgroups; on a CPU, of tasks
    threads     threads of a workgroup
    loads       approximate number of bytes that a thread has in flight
    """

    same: Hashable
    workgroups: int
    threads: int
    loads: float = 0


@dataclass(frozen=True)
class Space:
    """The plans of one workload on one arch.

    plan_type  a frozen dataclass whose fields are all integers
    choices    name of each field, in their order, to the values to try, ascending
    default    the plan without tuning; its values are added to the choices
    kernel     a function that returns the Kernel of a plan; raises ValueError or UserError if the arch cannot run it
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
        """None if the arch can run the plan, otherwise the reason why it cannot."""
        try:
            self.kernel(plan)
        except (ValueError, UserError) as error:
            return str(error)
        return None

    def parse(self, values: dict):
        """The plan with these values. values: field name to value. Raises ValueError with the reason if the space has
        no such plan."""
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
        """All plans to measure, the default first. Of plans that produce the same kernel, only the first."""
        return list(self._by_kernel.values())

    def _distinct(self) -> Iterator[tuple[Hashable, Any]]:
        """(`Kernel.same`, plan) of each plan of `plans`."""
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
        """The plan of `plans` that produces the same kernel as this plan. Raises KeyError if there is none."""
        return self._by_kernel[self.kernel(plan).same]

    @functools.cached_property
    def _by_kernel(self) -> dict:
        return dict(self._distinct())


def planned(choices: dict[str, tuple[int, ...]], default: Callable[[Any, Any], Any]) -> Callable[..., Callable]:
    """A decorator for a function kernel(op, arch, plan) that returns a Kernel: makes it a function (op, arch) that
    returns the Space. choices: see `Space`. default(op, arch): returns the plan without tuning."""

    def decorated(kernel: Callable[[Any, Any, Any], Kernel]) -> Callable[[Any, Any], Space]:
        def found(op: Any, arch: Any) -> Space:
            plan = default(op, arch)
            return Space(type(plan), choices, plan, functools.partial(kernel, op, arch))

        return found

    return decorated


@functools.cache
def space(op: Operator, arch) -> Space | None:
    """The operator's space on an arch (a GpuArch, Profile or cpu Arch); None if there is only one plan. Cached, because
    it takes long to enumerate a space's plans. Raises ValueError or UserError if the arch cannot run the operator."""
    spaces = importlib.import_module(f"mlc_amd.schedules.{PACKAGES[arch.api]}").registry.spaces
    found = spaces[type(op)](op, arch) if type(op) in spaces else None
    return found if found and found.open else None
