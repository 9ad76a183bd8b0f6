"""Matrix units. A matrix instruction computes sums += A x B for a wave, with float16 operands A and B and float32 sums.
There are two ways to use them.

1. `Fragments`: cooperative matrices (KHR_cooperative_matrix of Vulkan). Their elements are distributed over the lanes
   of a wave in an implementation-defined way. So kernels can only apply the same operation to all elements, or combine
   corresponding elements of several fragments of one kind, which have the same distribution.

2. `MatrixUnit`: a unit for which kernels know which lane holds which element, so that lanes load their elements
   directly. For AMD's units (WMMA of gfx11 and gfx12, MFMA of gfx9) the layouts are those of AMD's ISA manuals. For
   NVIDIA's unit they are what its Vulkan driver does. On Vulkan the runtime checks the layout
   (runtime/matrix_lanes.py).

   Several lanes share a row of A (on NVIDIA's unit two rows) and a column of B. Along k, each of these lanes takes
   eight consecutive elements, 16 bytes; on gfx11, where both half-waves hold the whole operand, 16 elements. If an
   instruction takes only four elements of a lane, two instructions take the eight elements. Which elements along k a
   lane has does not matter, as long as A and B agree.

`wave_matrices` returns the operands and sums of a wave on such a unit: in registers (rocm), or as fragments (Vulkan).
Weights are operand A (rows x columns), activations are operand B (columns x tokens).
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

Shape = tuple[int, int, int]  # m, n, k: the product is m x n, and sums are over k

# {kind: (TVM's scope, element type)}; "a" and "b" are operands, "sum" and "half" results
KINDS = {
    "a": ("wmma.matrix_a", "float16"),
    "b": ("wmma.matrix_b", "float16"),
    "sum": ("wmma.accumulator", "float32"),
    "half": ("wmma.accumulator", "float16"),
}


class Fragments:
    """`count` fragments of a kind (a key of KINDS), for products of a shape."""

    def __init__(self, kind: str, count: int, shape: Shape):
        scope, self.dtype = KINDS[kind]
        self.shape, self.count = shape, count
        m, n, k = shape
        size = {"a": m * k, "b": k * n}.get(kind, m * n)
        self.buffer = T.alloc_buffer((count * size,), self.dtype, scope=scope)

    def fill(self, i: Expr, value: float) -> None:
        """Sets all elements of fragment i. The first operation on a fragment must be `fill` or `load`."""
        T.evaluate(T.tvm_fill_fragment(self.buffer.data, *self.shape, i, tirx.const(value, self.dtype)))

    def clear(self) -> None:
        """Sets all elements of all fragments to 0."""
        for i in range(self.count):
            self.fill(i, 0)

    def load(self, i: Expr, place: Expr, stride: int, layout: str) -> None:
        """Loads fragment i from memory. place: its first element, buffer[index]. stride: in elements of the buffer's
        type. layout: "row_major" or "col_major". Sums of 16 x 8 must be loaded by columns: by rows, NVIDIA's driver 580
        reads wrong memory in large kernels (`attention_rows_shared.py`)."""
        T.evaluate(T.tvm_load_matrix_sync(self.buffer.data, *self.shape, i, T.address_of(place), stride, layout))

    def store(self, i: Expr, place: Expr, stride: int, layout: str) -> None:
        """Stores fragment i; for the arguments see `load`."""
        T.evaluate(T.tvm_store_matrix_sync(self.buffer.data, *self.shape, i, T.address_of(place), stride, layout))

    def add_product(self, i: Expr, a: "Fragments", ai: Expr, b: "Fragments", bi: Expr) -> None:
        """self[i] += a[ai] @ b[bi]."""
        T.evaluate(T.tvm_mma_sync(self.buffer.data, i, a.buffer.data, ai, b.buffer.data, bi, self.buffer.data, i))

    def convert(self, i: Expr, other: "Fragments", oi: Expr) -> None:
        """self[i] = other[oi], converted to this type. self[i] must have been filled before."""
        T.evaluate(T.call_extern("void", "fragment_cast", self.buffer.data, i, other.buffer.data, oi))

    def elements(self, i: Expr) -> Frame:
        """`with f.elements(i) as e:` is a loop over the elements that the lane holds. Element e is the same element of
        the matrix in all fragments of one kind and shape."""
        return T.serial(T.call_extern("int32", "fragment_length", self.buffer.data, i))

    def get(self, i: Expr, e: Expr) -> Expr:
        """Element e of fragment i."""
        return T.Bind(T.call_extern(self.dtype, "fragment_get", self.buffer.data, i, e))

    def set(self, i: Expr, e: Expr, value: Expr) -> None:
        T.evaluate(T.call_extern("void", "fragment_set", self.buffer.data, i, e, value))


# ---- units whose lanes are known

SIDE = 16  # rows of an instruction's product
EIGHT = 8  # float16 elements in 16 bytes


@dataclass(frozen=True)
class MatrixUnit:
    """A unit for tiles of 16 rows x `side` columns. "Columns" without further words are those of operand A, along k."""

    columns: int  # columns that one load of a wave covers: 16 bytes a lane (32 bytes if `whole`)
    acc: int  # accumulators of a lane. Accumulator i of group g of 16 lanes is of row acc*g + i
    instruction: str = ""  # LLVM's name
    zeros: int = 0  # number of zero operands that follow A, B and the sums
    # Whether each lane holds all 16 columns; all groups of 16 lanes then hold the same operands, and accumulator i of
    # group g is of row 2*i + g.
    whole: bool = False
    # Columns of operand B. With 16: lane r of each group of 16 has row r of A, column r of B and column r of the sums.
    # With 8: neighbouring lanes have rows r and r + 8 of A and column r of B; the distribution of sums is unknown.
    side: int = SIDE

    units = property(lambda self: 2 if self.whole else 1)  # units of eight elements that a lane holds of `columns`
    steps = property(lambda self: self.columns // SIDE)  # instructions that multiply `columns` columns
    knows_sums = property(lambda self: self.side == SIDE)

    def place(self, lane: Expr, wave: int) -> tuple[Expr, Expr]:
        """(r, number of the lane among the lanes that share r) of a lane. wave: lanes of the wave."""
        if self.knows_sums:
            return lane % SIDE, lane // SIDE
        return lane // (wave // self.side), lane % (wave // self.side)

    def sharing(self, wave: int) -> list[int]:
        """The masks of the lane exchanges (`shuffle_xor`) that reduce a value over the lanes that share r."""
        first, count = (SIDE, wave // SIDE) if self.knows_sums else (1, wave // self.side)
        return [first << i for i in range(count.bit_length() - 1)]

    def unit(self, n: Expr, i: int, group: Expr) -> Expr:
        """The number of the lane's unit i among all units of eight columns of a row, for the columns from n*columns
        on."""
        return n * self.units + i if self.whole else n * (self.columns // EIGHT) + group

    def row(self, r: Expr) -> Expr:
        """The row of a tile that must be loaded as row r of A, so that a lane's accumulators are of consecutive
        rows."""
        return r // 2 + r % 2 * 8 if self.whole else r

    def rows(self, r: Expr, tile: int = 0) -> list[Expr]:
        """The rows of A that a lane holds of a tile, where tiles have consecutive rows."""
        return [tile * SIDE + self.row(r)] if self.knows_sums else [tile * SIDE + i + r for i in (0, self.side)]

    def eighth_rows(self, r: Expr, tile: int) -> list[Expr]:
        """Like `rows`, but for 8 / acc tiles with `columns` rows in total: the accumulators of group g in all of these
        tiles are of rows 8*g .. 8*g + 7. These are a lane's elements of the operand of a next product."""
        if self.knows_sums and self.acc < EIGHT:
            return [r // self.acc * EIGHT + tile * self.acc + r % self.acc]
        return self.rows(r, tile)

    def of_units(self, found: Sequence[Expr]) -> Sequence[Expr]:
        """The operands of a tile, one for each instruction. found: the lane's units of `columns` columns, float16x8
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

Run = Expr | list[Expr]  # eight float16: a vector, or a list of scalars
WORDS = RUN // 2  # words of a run


class Registers:
    """The operands and sums of a wave for rocm. sums: number of tiles of sums."""

    def __init__(self, unit: MatrixUnit, rows: int, tokens: int, sums: int):
        self.unit, self.count, self.sums = unit, sums, local(sums * unit.acc)
        self._words: dict[int, Buffer] = {}  # {number of an operand that `keep` keeps: its words}

    def clear(self) -> None:
        for i in range(self.count):
            put(self.sums, T.broadcast(T.float32(0), self.unit.acc), self._slice(i))

    clear_sums = clear

    def _slice(self, i: int) -> Expr:
        return at(i * self.unit.acc, self.unit.acc)

    def operands(self, kind: str, i: int, runs: Sequence[Run]) -> Sequence[Expr]:
        """The operands for one or more instructions from runs of eight float16. kind: "a" or "b". i: number of the
        operand (less than `rows` or `tokens`)."""
        return self.unit.of_units([vector(run) if isinstance(run, list) else run for run in runs])

    each = operands

    def keep(self, i: int, runs: Sequence[Expr]) -> None:
        """Keeps operand B number i in registers, for `kept`."""
        words = self._words[i] = local(len(runs) * WORDS, "uint32")
        for n, run in enumerate(runs):
            put(words, T.reinterpret(f"uint32x{WORDS}", run), at(n * WORDS, WORDS))

    def kept(self, i: int) -> Sequence[Expr]:
        runs = [self._words[i][at(n * WORDS, WORDS)] for n in range(self.unit.units)]
        return self.unit.of_units([T.Bind(T.reinterpret(f"float16x{RUN}", run)) for run in runs])

    def add_product(self, i: int, a: Expr, b: Expr) -> None:
        """sums[i] += a x b, where a and b are operands from `operands`, `each` or `kept`."""
        where = self._slice(i)
        put(self.sums, self.unit.multiply(a, b, self.sums[where]), where)

    def result(self, i: int) -> Expr:
        """The lane's accumulators of sums[i], a float32 vector."""
        return T.Bind(self.sums[self._slice(i)])

    def scale(self, i: int, factor: Expr) -> None:
        """Multiplies the lane's accumulators of sums[i] by a factor, which may differ between lanes."""
        where = self._slice(i)
        put(self.sums, self.sums[where] * T.broadcast(factor, self.unit.acc), where)

    @staticmethod
    def activations(X: Buffer, group: Expr) -> Callable[[Expr], Expr]:
        """Returns load(place), which loads a run of a group of columns of X, in the layout "lanes". place: offset in
        float16 elements from the group's elements of token 0. LLVM can add such a 32-bit offset to a scalar address."""
        base = T.Bind(T.address_of(X[0, group, 0]))
        view = T.decl_buffer((math.prod(int(size) for size in X.shape),), "float16", data=base)
        return lambda place: T.Bind(view[at(place, RUN)])


class Matrices:
    """`Registers` for Vulkan. Operands are fragments, which are set just before they are multiplied."""

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
        """`operands` as an iterator, which sets each operand when it is yielded. Operands of the kind "a" with the same
        number i share one fragment, so each must be multiplied before the next one is taken."""
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
    """The operands and sums of a wave, on an arch with a `known_unit`. rows, tokens: numbers of operands A and B that
    exist at the same time. sums: number of tiles of sums."""
    return (Matrices if arch.api == "vulkan" else Registers)(known_unit(arch), rows, tokens, sums)
