"""A wave's operands and sums on AMD's matrix units (`matrix_unit.py`): in LLVM's registers, or as Vulkan's cooperative
matrices, whose lanes the runtime checks (runtime/matrix_lanes.py).

Weights are operand A (rows x columns), activations operand B (columns x tokens), in float16; sums are float32.
"""

import math
from collections.abc import Callable, Sequence

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.coop_fragments import Fragments
from mlc_amd.schedules.gpu.base.matrix_unit import SIDE, UNITS, MatrixUnit
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import RUN
from mlc_amd.schedules.gpu.base.registers import at, elements, local, put, vector
from mlc_amd.schedules.tir import Buffer, Expr


class Registers:
    """A wave's matrices on AMD's own API: `sums` of them are results."""

    def __init__(self, unit: MatrixUnit, rows: int, tokens: int, sums: int):
        self.unit, self.count, self.sums = unit, sums, local(sums * unit.acc)

    def clear(self) -> None:
        for i in range(self.count):
            put(self.sums, T.broadcast(T.float32(0), self.unit.acc), self._slice(i))

    def _slice(self, i: int) -> Expr:
        return at(i * self.unit.acc, self.unit.acc)

    def operands(self, kind: str, i: int, runs: list[Expr]) -> Sequence[Expr]:
        """Operand number i of the kind "a" or "b" ("rows" or "tokens" of them), of as many instructions as these runs
        of eight halves are for."""
        return self.unit.of_units(runs)

    def add_product(self, i: int, a: Expr, b: Expr) -> None:
        """To result i; operands of `operands`."""
        where = self._slice(i)
        put(self.sums, self.unit.multiply(a, b, self.sums[where]), where)

    def result(self, i: int) -> Expr:
        """The accumulators that a lane has of it."""
        return T.Bind(self.sums[self._slice(i)])

    @staticmethod
    def activations(X: Buffer, group: Expr) -> Callable[[Expr], Expr]:
        """load(place): a run of X in the layout "lanes", of a group of columns; place: in halves, from the group's
        first ones of all tokens. LLVM adds places of 32 bits to a scalar address."""
        base = T.Bind(T.address_of(X[0, group, 0]))
        view = T.decl_buffer((math.prod(int(size) for size in X.shape),), "float16", data=base)
        return lambda place: T.Bind(view[at(place, RUN)])


class Matrices:
    """The same on Vulkan, whose instructions take 16 columns: operands are set when they are about to be multiplied."""

    def __init__(self, unit: MatrixUnit, rows: int, tokens: int, sums: int):
        self.unit, counts = unit, {"a": rows, "b": tokens, "sum": sums}
        self.fragments = {kind: Fragments(kind, count, (SIDE, SIDE, SIDE)) for kind, count in counts.items()}

    def clear(self) -> None:
        for fragments in self.fragments.values():
            for i in range(fragments.count):
                fragments.fill(i, 0)

    def operands(self, kind: str, i: int, runs: list[Expr]) -> list[int]:
        for e, half in enumerate(half for run in runs for half in elements(run)):
            self.fragments[kind].set(i, e, half)
        return [i]

    def add_product(self, i: int, a: int, b: int) -> None:
        self.fragments["sum"].add_product(i, self.fragments["a"], a, self.fragments["b"], b)

    def result(self, i: int) -> Expr:
        return T.Bind(vector([self.fragments["sum"].get(i, e) for e in range(self.unit.acc)]))

    @staticmethod
    def activations(X: Buffer, group: Expr) -> Callable[[Expr], Expr]:
        return lambda place: T.Bind(X[0, group, at(place, RUN)])


def wave_matrices(arch: Device, rows: int, tokens: int, sums: int) -> Registers | Matrices:
    """Of a wave, for so many operands of rows and of tokens at once, and results."""
    return (Matrices if arch.api == "vulkan" else Registers)(UNITS[arch.lane_unit], rows, tokens, sums)
