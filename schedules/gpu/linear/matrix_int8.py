"""AMD's matrix instructions on signed bytes, as GEMVs of several tokens use them: tokens are the rows of the product,
16 rows of a weight its columns. All sums of a lane l are of weight row l % 16.

The order of columns within an instruction is free, as both operands have the same one; so a lane's words of both
halves of a block come from the same words of nibbles.

Tokens stand in the matrix so that m of them (as many as lanes have groups, or more) take m / groups sums of each lane:
with fewer than 16 the others are copies, which are left alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.arch import GpuArch
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import vector
from mlc_amd.schedules.tir import Expr

SIDE = 16  # rows and columns of a product


@dataclass(frozen=True)
class Int8Unit:
    """The instructions of waves of `groups` times 16 lanes.

    parts       groups of lanes that hold different columns of an operand; lane l belongs to part l // 16 % parts. Of
                the four words of either half of a block of 32 columns, part g holds 4 // parts from word
                (4 // parts) * g on
    acc         sums of a lane in an instruction
    alternates  whether sum i of group g belongs to row groups*i + g, else to row acc*g + i
    per_half    whether an instruction multiplies one half of a block, or both
    """

    groups: int
    parts: int
    acc: int
    alternates: bool = False
    per_half: bool = True

    def token_of_row(self, row: Expr, m: int) -> Expr:
        held = m // self.groups
        return row % m if self.alternates else row // self.acc * held + row % self.acc % held

    def token_of_sum(self, group: Expr, i: int, m: int) -> Expr:
        return self.groups * i + group if self.alternates else group * (m // self.groups) + i

    def place(self, token: Expr, m: int) -> Expr:
        """The inverse: group * m / groups + i."""
        return token % self.groups * (m // self.groups) + token // self.groups if self.alternates else token

    def multiply(self, acts: Sequence[Expr], weights: Sequence[Expr], sums: Expr) -> Expr:
        """sums (int32 vector) plus the product of words of tokens and of weights."""
        zero, signed, exact = T.int32(0), T.bool(True), T.bool(False)
        if self.groups == 2:
            operands = [signed, vector(acts), signed, vector(weights), sums, exact]
            name = "llvm.amdgcn.wmma.i32.16x16x16.iu8"
        elif self.per_half:
            name, operands = "llvm.amdgcn.mfma.i32.16x16x16i8", [*acts, *weights, sums, zero, zero, zero]
        else:
            a, b = (T.reinterpret("int64", vector(words)) for words in (acts, weights))
            name, operands = "llvm.amdgcn.mfma.i32.16x16x32.i8", [a, b, sums, zero, zero, zero]
        return T.Bind(T.call_llvm_pure_intrin(f"int32x{self.acc}", name, *operands))


# kind of matrix unit, columns of its int8 instructions
UNITS = {
    ("wmma11", 16): Int8Unit(2, 1, 8, alternates=True),
    ("wmma12", 16): Int8Unit(2, 2, 8),
    ("mfma", 16): Int8Unit(4, 4, 4),
    ("mfma", 32): Int8Unit(4, 4, 4, per_half=False),
}


def has_unit(arch: Device) -> bool:
    """Whether an arch has an int8 matrix unit that kernels use."""
    return isinstance(arch, GpuArch) and (arch.matrix, arch.code.int8_columns) in UNITS


def unit_of(arch: Device) -> Int8Unit:
    """The int8 matrix unit of an arch; ValueError for one without."""
    if not isinstance(arch, GpuArch) or not has_unit(arch):
        raise ValueError(f"{arch.name} has no int8 matrix unit that kernels use")
    return UNITS[arch.matrix, arch.code.int8_columns]


def products(
    unit: Int8Unit, acts: Sequence[Sequence[Expr]], weights: Sequence[Sequence[Expr]], groups: int
) -> list[Expr]:
    """The products of a block of tokens and weights, int32 vectors of `unit.acc` sums: one, or one for each half of its
    columns (groups: 2). acts, weights: for each half a lane's words, int32."""
    zero = T.broadcast(T.int32(0), unit.acc)
    if not unit.per_half:
        whole = [*acts[0], *acts[1]]
        if groups == 1:
            return [unit.multiply(whole, [*weights[0], *weights[1]], zero)]
        nothing = [T.int32(0)] * len(weights[0])
        return [
            unit.multiply(whole, [*weights[0], *nothing], zero),
            unit.multiply(whole, [*nothing, *weights[1]], zero),
        ]
    low = unit.multiply(acts[0], weights[0], zero)
    if groups == 1:
        return [unit.multiply(acts[1], weights[1], low)]
    return [low, unit.multiply(acts[1], weights[1], zero)]
