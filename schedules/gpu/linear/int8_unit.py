"""Int8 matrix units of AMD's GPUs (WMMA of gfx12, MFMA of gfx942 and gfx950), and weights as their operands.

Instructions are on signed bytes: tokens are the rows of the product, 16 rows of a weight its columns. All sums of a
lane l are of weight row l % 16, so a block's scales are scalars of the lane. Of each half of a block of 32 columns a
lane has the words count*part .. count*part + count - 1 of four columns (`Int8Unit`). The order of columns within an
instruction is free, as both operands have the same one; so a lane's words of both halves of a block come from the same
words of nibbles.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from mlc_amd.schedules.formats import PLANE_BITS, Format
from mlc_amd.schedules.gpu.base.arch import GpuArch
from mlc_amd.schedules.gpu.base.planes import BLOCK, Planes
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import vector
from mlc_amd.schedules.gpu.linear import load
from mlc_amd.schedules.tir import Expr

SIDE = 16  # rows and columns of a product
Halves = tuple[list[Expr], list[Expr]]  # int32 words of a lane of both halves of a block


@dataclass(frozen=True)
class Int8Unit:
    """The instructions of waves of `groups` times 16 lanes."""

    groups: int
    # Groups of lanes that hold different columns of an operand; lane l belongs to part l // 16 % parts. Of the four
    # words of either half of a block of 32 columns, part g holds 4 // parts from word (4 // parts) * g on.
    parts: int
    acc: int  # sums of a lane in an instruction
    per_half: bool = True  # whether an instruction multiplies one half of a block, or both

    @property
    def words(self) -> int:
        """Of either half of a block, that a lane has."""
        return load.QUADS // 2 // self.parts

    def multiply(self, acts: Sequence[Expr], weights: Sequence[Expr], sums: Expr) -> Expr:
        """sums (int32 vector) plus the product of words of tokens and of weights."""
        zero, signed, exact = T.int32(0), T.bool(True), T.bool(False)
        if self.groups == 2:
            operands = [signed, vector(acts), signed, vector(weights), sums, exact]
            name = "llvm.amdgcn.wmma.i32.16x16x16.iu8"
        else:
            a, b = (T.reinterpret("int64", vector(words)) for words in (acts, weights))
            name, operands = "llvm.amdgcn.mfma.i32.16x16x32.i8", [a, b, sums, zero, zero, zero]
        return T.Bind(T.call_llvm_pure_intrin(f"int32x{self.acc}", name, *operands))


# kind of matrix unit, columns of its int8 instructions; those of other GPUs are no faster than float16
UNITS = {("wmma12", 16): Int8Unit(2, 2, 8), ("mfma", 32): Int8Unit(4, 4, 4, per_half=False)}


def unit_of(arch: Device) -> Int8Unit | None:
    """The int8 matrix unit of an arch; None for one without, or that kernels do not use."""
    return UNITS.get((arch.matrix, arch.code.int8_columns)) if isinstance(arch, GpuArch) else None


def products(
    unit: Int8Unit, acts: Sequence[Sequence[Expr]], weights: Sequence[Sequence[Expr]], groups: int, start: int
) -> list[Expr]:
    """`start` plus the products of a block of tokens and weights, int32 vectors of `unit.acc` sums: one, or one for
    each half of its columns (groups: 2). acts, weights: for each half a lane's words, int32."""
    zero = T.broadcast(T.int32(start), unit.acc)
    if not unit.per_half:
        whole = [*acts[0], *acts[1]]
        if groups == 1:
            return [unit.multiply(whole, [*weights[0], *weights[1]], zero)]
        nothing = [T.int32(0)] * len(weights[0])
        return [unit.multiply(whole, of, zero) for of in ([*weights[0], *nothing], [*nothing, *weights[1]])]
    low = unit.multiply(acts[0], weights[0], zero)
    if groups == 1:
        return [unit.multiply(acts[1], weights[1], low)]
    return [low, unit.multiply(acts[1], weights[1], zero)]


class RowBlocks:
    """The blocks of 32 columns, so many at a time, of a lane's row of a weight. planes: of `load.views`, of as many
    blocks; part: of the lane, as of `Int8Unit`."""

    def __init__(self, fmt: Format, planes: Planes, row: Expr, unit: Int8Unit, part: Expr, blocks: int):
        self.fmt, self.planes, self.row, self.part, self.blocks = fmt, planes, row, part, blocks
        self.count = unit.words

    def fetched(self, first: Expr) -> load.Unit:
        """Loads block `first` and the next ones. Of codes the words of all blocks by plane, of S and Z words of
        bytes."""
        fmt, row, blocks, count = self.fmt, self.row, self.blocks, self.count
        codes: dict[str, list[Expr]] = {}
        scales: dict[str, list[Expr]] = {}
        for plane in fmt.codes:
            bits, buf = PLANE_BITS[plane], self.planes[plane]
            if bits <= 2:  # bits of all columns are in the same word
                codes[plane] = load.wide(buf, row, first * bits, blocks * bits)
                continue
            starts = [(b, start) for b in range(blocks) for start in range(0, bits, 4)]
            codes[plane] = [
                x for b, start in starts
                for x in load.wide(buf, row, (first + b) * bits + start + self.part * count, count)
            ]  # fmt: skip
        for name in fmt.scales:
            if name in ("S", "Z"):
                total = blocks * BLOCK // fmt.group
                width = min(load.WORD, total)
                found = load.wide(self.planes[name], row, first * (BLOCK // fmt.group) // width, total // width)
                scales[name] = [T.Bind(T.cast(x, "uint32")) for x in found] if width < load.WORD else found
            elif fmt.block > BLOCK:
                scales[name] = [T.Bind(self.planes[name][row, first // (fmt.block // BLOCK)])]
            else:
                scales[name] = load.wide(self.planes[name], row, first, blocks)
        return load.Unit(codes, scales)

    def codes(self, arch: Device, loaded: load.Unit, block: int) -> Halves:
        """Codes of one of the loaded blocks, or what they stand for in the format's table."""
        raw, count = {}, self.count
        for plane, words in loaded.codes.items():
            each = len(words) // self.blocks
            raw[plane] = words[block * each : (block + 1) * each]
            if (bits := PLANE_BITS[plane]) <= 2 and count < load.WORD:
                raw[plane] = [
                    T.Bind(T.shift_right(x, T.cast(self.part * (count * bits), "uint32"))) for x in raw[plane]
                ]
        found = load.values(arch, self.fmt, None, lambda: load.bytes_of(raw, count))
        found = [T.Bind(T.reinterpret("int32", x)) for x in found]
        return found[:count], found[count:]

    def scales(self, loaded: load.Unit, block: int) -> load.Scales:
        """Of one of the loaded blocks."""
        own, number = {}, 0
        for name, found in loaded.scales.items():
            if name in ("S", "Z"):
                first = block * (BLOCK // self.fmt.group)
                own[name], number = [found[first // load.WORD]], first % load.WORD // (BLOCK // self.fmt.group)
            else:
                own[name] = [found[block if self.fmt.block == BLOCK else 0]]
        return load.scales(self.fmt, load.Unit({}, own), number)
