"""Which function builds an operator's kernel on a target, and which plans the kernel can be built with.

The modules of schedules/cpu and schedules/gpu register theirs, each package in a `Registry` of its own:

    @registry.builds(Gate)
    def gate(op: Gate, arch: Device, name: str, plan: GatePlan | None) -> tirx.PrimFunc: ...

    @registry.plans(Gate)
    def plans(op: Gate, arch: Device) -> Space | None: ...

(Of the GPU's kernels `gpu/base/step.builds` does the former, and declares their first parameter.) A builder's `plan` is
None for the plan that the kernel's rule makes. The kernel's parameters are the operator's `slots`. ValueError or
UserError for what the arch cannot run. An operator without a space has one plan only.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mlc_amd.schedules.operators import Operator

Function = TypeVar("Function", bound=Callable[..., Any])


class Registry:
    """package: the full name of the package whose modules register kernels; all are imported on first use."""

    def __init__(self, package: str):
        self._package, self._imported = package, False
        self._builders: dict[type[Operator], Callable[..., Any]] = {}
        self._spaces: dict[type[Operator], Callable[..., Any]] = {}

    def builds(self, *operators: type[Operator]) -> Callable[[Function], Function]:
        return self._adder(self._builders, operators)

    def plans(self, *operators: type[Operator]) -> Callable[[Function], Function]:
        return self._adder(self._spaces, operators)

    @property
    def builders(self) -> Mapping[type[Operator], Callable[..., Any]]:
        """Operator to function (op, arch, name, plan) that makes its PrimFunc."""
        self._import()
        return self._builders

    @property
    def spaces(self) -> Mapping[type[Operator], Callable[..., Any]]:
        """Operator to function (op, arch) that makes its Space, or None for a single plan."""
        self._import()
        return self._spaces

    @staticmethod
    def _adder(table: dict, operators: tuple[type[Operator], ...]) -> Callable[[Function], Function]:
        def add(function: Function) -> Function:
            for operator in operators:
                if operator in table:
                    raise ValueError(f"{operator.name} is registered twice: {table[operator]} and {function}")
                table[operator] = function
            return function

        return add

    def _import(self) -> None:
        if not self._imported:
            package = importlib.import_module(self._package)
            for module in pkgutil.walk_packages(package.__path__, f"{self._package}."):
                importlib.import_module(module.name)
            self._imported = True
