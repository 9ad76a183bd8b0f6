"""`Registry`: for each operator, the function that builds its kernel on a target, and the function that returns the
plans with which the kernel can be built.

schedules/cpu and schedules/gpu have a `Registry` each, to which their modules add functions:

    @registry.builds(Gate)
    def gate(op: Gate, arch: Device, name: str, plan: GatePlan | None) -> tirx.PrimFunc: ...

    @registry.plans(Gate)
    def plans(op: Gate, arch: Device) -> Space | None: ...

For GPU kernels, gpu/base/step.py has its own `builds`, which also declares the first parameter, `state`.

A builder returns a kernel whose parameters are those of the operator's `slots`. For plan None it uses the plan that its
rule decides. It raises ValueError or UserError if the arch cannot run the operator or the plan. An operator without a
function for plans has only one plan.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mlc_amd.schedules.operators import Operator

Function = TypeVar("Function", bound=Callable[..., Any])


class Registry:
    """package: the full name of the package whose modules register functions. All its modules are imported on first
    use."""

    def __init__(self, package: str):
        self._package, self._imported = package, False
        self._builders: dict[type[Operator], Callable[..., Any]] = {}
        self._spaces: dict[type[Operator], Callable[..., Any]] = {}

    def builds(self, *operators: type[Operator]) -> Callable[[Function], Function]:
        """A decorator that registers a function of `builders` for these operators. Raises ValueError if an operator has
        one already; so does `plans`."""
        return self._adder(self._builders, operators)

    def plans(self, *operators: type[Operator]) -> Callable[[Function], Function]:
        """A decorator that registers a function of `spaces` for these operators."""
        return self._adder(self._spaces, operators)

    @property
    def builders(self) -> Mapping[type[Operator], Callable[..., Any]]:
        """Operator class to a function (op, arch, name, plan) that returns its PrimFunc."""
        self._import()
        return self._builders

    @property
    def spaces(self) -> Mapping[type[Operator], Callable[..., Any]]:
        """Operator class to a function (op, arch) that returns its Space, or None for a single plan."""
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
