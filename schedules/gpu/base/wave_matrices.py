"""A wave's operands and sums on matrix units (`matrix_unit.py`): in LLVM's registers, or as Vulkan's cooperative
matrices, whose lanes the runtime checks (runtime/matrix_lanes.py).

Weights are operand A (rows x columns), activations operand B (columns x tokens), in float16; sums are float32.
"""

import math
from collections.abc import Callable, Iterator, Sequence

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.coop_fragments import Fragments
from mlc_amd.schedules.gpu.base.matrix_unit import SIDE, MatrixUnit, known_unit
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import RUN
from mlc_amd.schedules.gpu.base.registers import at, elements, local, put, vector
from mlc_amd.schedules.tir import Buffer, Expr

Run = Expr | list[Expr]  # eight halves: a vector, or one by one
WORDS = RUN // 2  # of a run


class Registers:
    """A wave's matrices on AMD's own API: `sums` of them are results."""

    def __init__(self, unit: MatrixUnit, rows: int, tokens: int, sums: int):
        self.unit, self.count, self.sums = unit, sums, local(sums * unit.acc)
        self._words: dict[int, Buffer] = {}  # of operands that are kept

    def clear(self) -> None:
        for i in range(self.count):
            put(self.sums, T.broadcast(T.float32(0), self.unit.acc), self._slice(i))

    clear_sums = clear

    def _slice(self, i: int) -> Expr:
        return at(i * self.unit.acc, self.unit.acc)

    def operands(self, kind: str, i: int, runs: Sequence[Run]) -> Sequence[Expr]:
        """Operand number i of the kind "a" or "b" ("rows" or "tokens" of them), of as many instructions as these runs
        of eight halves are for."""
        return self.unit.of_units([vector(run) if isinstance(run, list) else run for run in runs])

    each = operands

    def keep(self, i: int, runs: Sequence[Expr]) -> None:
        """Operand B number i stays in registers, for `kept`."""
        words = self._words[i] = local(len(runs) * WORDS, "uint32")
        for n, run in enumerate(runs):
            put(words, T.reinterpret(f"uint32x{WORDS}", run), at(n * WORDS, WORDS))

    def kept(self, i: int) -> Sequence[Expr]:
        runs = [self._words[i][at(n * WORDS, WORDS)] for n in range(self.unit.units)]
        return self.unit.of_units([T.Bind(T.reinterpret(f"float16x{RUN}", run)) for run in runs])

    def add_product(self, i: int, a: Expr, b: Expr) -> None:
        """To result i; operands of `operands`."""
        where = self._slice(i)
        put(self.sums, self.unit.multiply(a, b, self.sums[where]), where)

    def result(self, i: int) -> Expr:
        """The accumulators that a lane has of it."""
        return T.Bind(self.sums[self._slice(i)])

    def scale(self, i: int, factor: Expr) -> None:
        """Multiplies them by a factor of the lane."""
        where = self._slice(i)
        put(self.sums, self.sums[where] * T.broadcast(factor, self.unit.acc), where)

    @staticmethod
    def activations(X: Buffer, group: Expr) -> Callable[[Expr], Expr]:
        """load(place): a run of X in the layout "lanes", of a group of columns; place: in halves, from the group's
        first ones of all tokens. LLVM adds places of 32 bits to a scalar address."""
        base = T.Bind(T.address_of(X[0, group, 0]))
        view = T.decl_buffer((math.prod(int(size) for size in X.shape),), "float16", data=base)
        return lambda place: T.Bind(view[at(place, RUN)])


class Matrices:
    """The same on Vulkan: operands are set when they are about to be multiplied."""

    def __init__(self, unit: MatrixUnit, rows: int, tokens: int, sums: int):
        self.unit, counts = unit, {"a": rows, "b": tokens * unit.steps, "sum": sums}
        shape = SIDE, unit.side, SIDE
        self.fragments = {kind: Fragments(kind, count, shape) for kind, count in counts.items()}

    def clear(self) -> None:
        for fragments in self.fragments.values():
            fragments.clear()

    def clear_sums(self) -> None:
        self.fragments["sum"].clear()

    def each(self, kind: str, i: int, runs: Sequence[Run]) -> Iterator[int]:
        """As `operands`, set one after the other; each of the kind "a" takes the place of the one before."""
        size = RUN // self.unit.steps
        for step in range(self.unit.steps):
            place = i if kind == "a" else i * self.unit.steps + step
            halves = [run if isinstance(run, list) else elements(run) for run in runs]
            for e, half in enumerate(half for of in halves for half in of[step * size : (step + 1) * size]):
                self.fragments[kind].set(place, e, half)
            yield place

    def operands(self, kind: str, i: int, runs: Sequence[Run]) -> list[int]:
        return list(self.each(kind, i, runs))

    def keep(self, i: int, runs: Sequence[Run]) -> None:
        self.operands("b", i, runs)

    def kept(self, i: int) -> range:
        return range(i * self.unit.steps, (i + 1) * self.unit.steps)

    def add_product(self, i: int, a: int, b: int) -> None:
        self.fragments["sum"].add_product(i, self.fragments["a"], a, self.fragments["b"], b)

    def result(self, i: int) -> Expr:
        return T.Bind(vector([self.fragments["sum"].get(i, e) for e in range(self.unit.acc)]))

    def scale(self, i: int, factor: Expr) -> None:
        for e in range(self.unit.acc):
            self.fragments["sum"].set(i, e, self.fragments["sum"].get(i, e) * factor)

    @staticmethod
    def activations(X: Buffer, group: Expr) -> Callable[[Expr], Expr]:
        return lambda place: T.Bind(X[0, group, at(place, RUN)])


def wave_matrices(arch: Device, rows: int, tokens: int, sums: int) -> Registers | Matrices:
    """Of a wave on an arch with a `known_unit`, for so many operands of rows and of tokens at once, and results."""
    return (Matrices if arch.api == "vulkan" else Registers)(known_unit(arch), rows, tokens, sums)
