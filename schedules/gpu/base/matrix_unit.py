"""Matrix units as kernels use them that know which lane of a wave has what: float16 operands A and B, float32 sums of
tiles of 16 rows. AMD's (WMMA of gfx11 and gfx12, MFMA of gfx9) with layouts as in AMD's ISA manuals, NVIDIA's with what
its Vulkan driver does; on Vulkan the runtime checks that (runtime/matrix_lanes.py).

Some lanes share a row of operand A (on NVIDIA's unit two rows) and a column of operand B. Along what is summed each
takes eight consecutive elements at a time, 16 bytes, or where both half-waves hold all of an operand twice as many.
Where an instruction sums over four elements of each lane, two of them do that: which elements a lane has does not
matter, as long as both operands agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.tir import Expr

SIDE = 16  # rows of an instruction's product
EIGHT = 8  # elements that a lane has of 16 bytes


@dataclass(frozen=True)
class MatrixUnit:
    """Instructions on tiles of 16 x `side`.

    columns   that one load of 16 bytes per lane, or of 32 where a lane holds them all, is of
    acc       accumulators of a lane. Accumulator i of group g of 16 lanes: row acc*g + i
    instruction   LLVM's name; zeros: that follow its operands
    whole     a lane holds all 16 columns, all groups alike, and accumulator i of group g is of row 2*i + g
    side      columns of operand B. 16: lane r of each group of 16 has row r of A, column r of B and of the sums.
              8: neighbours have the rows r and r + 8 of A and the column r of B, and nothing is known of the sums
    """

    columns: int
    acc: int
    instruction: str = ""
    zeros: int = 0
    whole: bool = False
    side: int = SIDE

    @property
    def units(self) -> int:
        """Of eight elements, that a lane holds of `columns`."""
        return 2 if self.whole else 1

    @property
    def steps(self) -> int:
        """Instructions that multiply `columns` of both operands."""
        return self.columns // SIDE

    @property
    def knows_sums(self) -> bool:
        return self.side == SIDE

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


def knows_lanes(arch: Device) -> bool:
    """Whether an arch has a matrix unit whose lanes are known."""
    return arch.lane_blocks > 0


def known_unit(arch: Device) -> MatrixUnit:
    """That unit."""
    return (UNITS | NVIDIA)[arch.lane_unit]
