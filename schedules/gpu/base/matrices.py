"""Matrix units as kernels use them.

Cooperative matrices (KHR_cooperative_matrix of Vulkan) are `Fragments`, whose elements are distributed over the lanes
of a wave. Which lane holds which element is implementation-defined: operations on elements treat all of them alike, or
combine elements of several fragments of one kind, which have the same layout.

A `MatrixUnit` is one of which kernels know which lane of a wave has what: float16 operands A and B, float32 sums of
tiles of 16 rows. AMD's (WMMA of gfx11 and gfx12, MFMA of gfx9) with layouts as in AMD's ISA manuals, NVIDIA's with what
its Vulkan driver does; on Vulkan the runtime checks that (runtime/matrix_lanes.py). Some lanes share a row of operand A
(on NVIDIA's unit two rows) and a column of operand B. Along what is summed each takes eight consecutive elements at a
time, 16 bytes, or where both half-waves hold all of an operand twice as many. Where an instruction sums over four
elements of each lane, two of them do that: which elements a lane has does not matter, as long as both operands agree.

`wave_matrices` has a wave's operands and sums on such a unit: in LLVM's registers, or as fragments. Weights are operand
A (rows x columns), activations operand B (columns x tokens).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import RUN
from mlc_amd.schedules.gpu.base.registers import at, elements, local, put, vector
from mlc_amd.schedules.tir import Buffer, Expr, Frame

Shape = tuple[int, int, int]  # rows and columns of the product, and what the sums are over: m, n, k

# kind: (TVM's scope, element type). "a" and "b" are operands, "sum" and "half" results
KINDS = {
    "a": ("wmma.matrix_a", "float16"),
    "b": ("wmma.matrix_b", "float16"),
    "sum": ("wmma.accumulator", "float32"),
    "half": ("wmma.accumulator", "float16"),
}


class Fragments:
    """`count` fragments of one kind (of KINDS), for matrices of that shape."""

    def __init__(self, kind: str, count: int, shape: Shape):
        scope, self.dtype = KINDS[kind]
        self.shape, self.count = shape, count
        m, n, k = shape
        size = {"a": m * k, "b": k * n}.get(kind, m * n)
        self.buffer = T.alloc_buffer((count * size,), self.dtype, scope=scope)

    def fill(self, i: Expr, value: float) -> None:
        """All elements of fragment i; the first thing that happens to it, or `load`."""
        T.evaluate(T.tvm_fill_fragment(self.buffer.data, *self.shape, i, tirx.const(value, self.dtype)))

    def clear(self) -> None:
        """All of them become 0."""
        for i in range(self.count):
            self.fill(i, 0)

    def load(self, i: Expr, place: Expr, stride: int, layout: str) -> None:
        """From buffer[index] on; the stride is in elements of the buffer's type. Sums of 16 x 8 are loaded by columns:
        by rows, NVIDIA's driver 580 reads other memory in large kernels (`attention_rows_shared.py`)."""
        T.evaluate(T.tvm_load_matrix_sync(self.buffer.data, *self.shape, i, T.address_of(place), stride, layout))

    def store(self, i: Expr, place: Expr, stride: int, layout: str) -> None:
        """As `load`, to there."""
        T.evaluate(T.tvm_store_matrix_sync(self.buffer.data, *self.shape, i, T.address_of(place), stride, layout))

    def add_product(self, i: Expr, a: "Fragments", ai: Expr, b: "Fragments", bi: Expr) -> None:
        """self[i] += a[ai] @ b[bi]."""
        T.evaluate(T.tvm_mma_sync(self.buffer.data, i, a.buffer.data, ai, b.buffer.data, bi, self.buffer.data, i))

    def convert(self, i: Expr, other: "Fragments", oi: Expr) -> None:
        """self[i] = other[oi] in this type; self[i] was filled before."""
        T.evaluate(T.call_extern("void", "fragment_cast", self.buffer.data, i, other.buffer.data, oi))

    def elements(self, i: Expr) -> Frame:
        """`with f.elements(i) as e:` for each element that the lane holds; all fragments of one kind have the same."""
        return T.serial(T.call_extern("int32", "fragment_length", self.buffer.data, i))

    def get(self, i: Expr, e: Expr) -> Expr:
        """Element e of fragment i."""
        return T.Bind(T.call_extern(self.dtype, "fragment_get", self.buffer.data, i, e))

    def set(self, i: Expr, e: Expr, value: Expr) -> None:
        T.evaluate(T.call_extern("void", "fragment_set", self.buffer.data, i, e, value))


# ---- units whose lanes are known

SIDE = 16  # rows of an instruction's product
EIGHT = 8  # elements that a lane has of 16 bytes


@dataclass(frozen=True)
class MatrixUnit:
    """Instructions on tiles of 16 x `side`."""

    columns: int  # that one load of 16 bytes per lane, or of 32 where a lane holds them all, is of
    acc: int  # accumulators of a lane. Accumulator i of group g of 16 lanes: row acc*g + i
    instruction: str = ""  # LLVM's name
    zeros: int = 0  # that follow its operands
    whole: bool = False  # a lane holds all 16 columns, all groups alike, and accumulator i of group g is of row 2*i + g
    # Columns of operand B. 16: lane r of each group of 16 has row r of A, column r of B and of the sums. 8: neighbours
    # have the rows r and r + 8 of A and the column r of B, and nothing is known of the sums.
    side: int = SIDE

    units = property(lambda self: 2 if self.whole else 1)  # of eight elements, that a lane holds of `columns`
    steps = property(lambda self: self.columns // SIDE)  # instructions that multiply `columns` of both operands
    knows_sums = property(lambda self: self.side == SIDE)

    def place(self, lane: Expr, wave: int) -> tuple[Expr, Expr]:
        """(r, the number of the lane among those that share it) of a lane in a wave of so many."""
        if self.knows_sums:
            return lane % SIDE, lane // SIDE
        return lane // (wave // self.side), lane % (wave // self.side)

    def sharing(self, wave: int) -> list[int]:
        """Distances of the exchanges in which the lanes that share r reduce a value."""
        first, count = (SIDE, wave // SIDE) if self.knows_sums else (1, wave // self.side)
        return [first << i for i in range(count.bit_length() - 1)]

    def unit(self, n: Expr, i: int, group: Expr) -> Expr:
        """The number of the lane's unit i of the columns n*columns .."""
        return n * self.units + i if self.whole else n * (self.columns // EIGHT) + group

    def row(self, r: Expr) -> Expr:
        """The row of a tile that row r of A takes, so that accumulators are of consecutive rows."""
        return r // 2 + r % 2 * 8 if self.whole else r

    def rows(self, r: Expr, tile: int = 0) -> list[Expr]:
        """The rows of A of a lane in that tile, of those that tiles have in order."""
        return [tile * SIDE + self.row(r)] if self.knows_sums else [tile * SIDE + i + r for i in (0, self.side)]

    def eighth_rows(self, r: Expr, tile: int) -> list[Expr]:
        """As `rows`, among 8 * columns / 8 rows in 8 / acc tiles: so that the accumulators of group g in all of these
        tiles are of rows 8*g .. 8*g + 7, a lane's part of the next product's operand."""
        if self.knows_sums and self.acc < EIGHT:
            return [r // self.acc * EIGHT + tile * self.acc + r % self.acc]
        return self.rows(r, tile)

    def of_units(self, found: Sequence[Expr]) -> Sequence[Expr]:
        """A tile's operands, one for each instruction, of the lane's units of `columns` columns, float16x8
        registers."""
        if self.whole:
            return [T.Bind(T.Shuffle(list(found), [T.int32(i) for i in range(self.units * EIGHT)]))]
        if self.steps == 1:
            return found
        return [half for x in found for half in (T.vectorlow("float16x4", x), T.vectorhigh("float16x4", x))]

    def multiply(self, a: Expr, b: Expr, c: Expr) -> Expr:
        zeros = [T.int32(0)] * self.zeros
        return T.call_llvm_pure_intrin(f"float32x{self.acc}", f"llvm.amdgcn.{self.instruction}", a, b, c, *zeros)


WMMA = "wmma.f32.16x16x16.f16"
UNITS = {
    "wmma11": MatrixUnit(16, 8, WMMA, whole=True),
    "wmma12": MatrixUnit(16, 8, WMMA),
    "mfma": MatrixUnit(32, 4, "mfma.f32.16x16x16f16", zeros=3),
}
NVIDIA = {"mma": MatrixUnit(32, 4, side=8)}


def known_unit(arch: Device) -> MatrixUnit:
    """The matrix unit of an arch with lane_blocks, whose lanes are known."""
    return (UNITS | NVIDIA)[arch.lane_unit]


# ---- a wave's operands and sums

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
