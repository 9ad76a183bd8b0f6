"""The matrix units of AMD's GPUs (WMMA of gfx11 and gfx12, MFMA of gfx9) as kernels use them: float16 operands, float32
sums of tiles of 16 x 16, and which lane has what. Layouts as in AMD's ISA manuals.

Lanes are in groups of 16, and lane r of each supplies row r of operand A or column r of B; a lane's sums are of column
r. Along what is summed a lane takes eight consecutive elements at a time, 16 bytes, or where both half-waves hold all
of an operand twice as many. Where an instruction sums over four elements of each lane, two of them do that: which
elements a lane has does not matter, as long as both operands agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.registers import at
from mlc_amd.schedules.tir import Buffer, Expr

SIDE = 16  # rows and columns of an instruction's product
EIGHT = 8  # elements that a lane has of 16 bytes


@dataclass(frozen=True)
class MatrixUnit:
    """Instructions on tiles of 16 x 16.

    columns   that one load of 16 bytes per lane, or of 32 where a lane holds them all, is of
    acc       accumulators of a lane. Accumulator i of group g of 16 lanes: row acc*g + i
    instruction   LLVM's name; zeros: that follow its operands
    whole     a lane holds all 16 columns, all groups alike, and accumulator i of group g is of row 2*i + g
    """

    columns: int
    acc: int
    instruction: str
    zeros: int = 0
    whole: bool = False

    @property
    def units(self) -> int:
        """Of eight elements, that a lane holds of `columns`."""
        return 2 if self.whole else 1

    @property
    def steps(self) -> int:
        """Instructions that multiply `columns` of both operands."""
        return self.columns // SIDE

    def unit(self, n: Expr, i: int, group: Expr) -> Expr:
        """The number of the lane's unit i of the columns n*columns .."""
        return n * self.units + i if self.whole else n * (self.columns // EIGHT) + group

    def row(self, r: Expr) -> Expr:
        """The row of a tile that row r of A takes, so that accumulators are of consecutive rows."""
        return r // 2 + r % 2 * 8 if self.whole else r

    def eighth_row(self, r: Expr, tile: int) -> Expr:
        """As `row`, among 8 * columns / 8 rows in 8 / acc tiles: so that the accumulators of group g in all of these
        tiles are of rows 8*g .. 8*g + 7, a lane's part of the next product's operand."""
        return self.row(r) if self.acc == EIGHT else r // self.acc * EIGHT + tile * self.acc + r % self.acc

    def operands(self, words: Buffer, first: Expr) -> Sequence[Expr]:
        """A tile's operands, one for each instruction, of the lane's units of `columns` columns, which are in words of
        two elements from `first` on."""
        count = self.units * EIGHT // 2 // self.steps
        return [T.reinterpret(f"float16x{2 * count}", words[at(first + i * count, count)]) for i in range(self.steps)]

    def of_units(self, found: Sequence[Expr]) -> Sequence[Expr]:
        """The same of these units, float16x8 registers."""
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
