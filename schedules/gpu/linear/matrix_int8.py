"""AMD's matrix instructions on signed bytes, as GEMVs of several tokens use them: tokens are the rows of the product,
16 rows of a weight its columns.

`unit_of(arch)` says for a wave of `groups` times 16 lanes

    parts       groups of lanes that hold different columns of an operand; lane l belongs to part l // 16 % parts
    words       4 // parts, of four bytes each: what a lane holds of either half of a block of 32 columns. Part g holds
                the words words*g .. of the half
    acc         sums of a lane in an instruction, all of weight row l % 16

The order of columns within an instruction is free, as both operands have the same one; so a lane's words of both
halves come from the same words of nibbles.

Tokens stand in the matrix so that m of them (as many as lanes have groups, or more) take m / groups sums of each lane:
with fewer than 16 the others are copies, which are left alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.arch import GpuArch
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import vector
from mlc_amd.schedules.tir import Expr

SIDE = 16  # rows and columns of a product


class Int8Unit(ABC):
    """Sum i of group g of lanes belongs to row acc*g + i, unless a unit says otherwise."""

    groups: int
    parts: int
    acc: int
    per_half = True  # an instruction multiplies one half of a block, or both

    @classmethod
    def token_of_row(cls, row: Expr, m: int) -> Expr:
        held = m // cls.groups
        return row // cls.acc * held + row % cls.acc % held

    @classmethod
    def token_of_sum(cls, group: Expr, i: int, m: int) -> Expr:
        return group * (m // cls.groups) + i

    @classmethod
    def place(cls, token: Expr, m: int) -> Expr:
        """The inverse: group * m / groups + i."""
        return token

    @staticmethod
    @abstractmethod
    def multiply(acts: Sequence[Expr], weights: Sequence[Expr], sums: Expr) -> Expr:
        """sums (int32 vector) plus the product of a half's words of tokens and of weights."""


class _Wmma12(Int8Unit):
    """Of gfx12: each half of the wave has eight columns."""

    groups, parts, acc = 2, 2, 8

    @staticmethod
    def multiply(acts: Sequence[Expr], weights: Sequence[Expr], sums: Expr) -> Expr:
        signed, exact = T.bool(True), T.bool(False)
        name = "llvm.amdgcn.wmma.i32.16x16x16.iu8"
        a, b = vector(acts), vector(weights)
        return T.Bind(T.call_llvm_pure_intrin("int32x8", name, signed, a, signed, b, sums, exact))


class _Wmma11(_Wmma12):
    """Of gfx11: a lane has all 16 columns, both halves of the wave alike. Sum i of group h belongs to row 2*i + h."""

    parts = 1

    @classmethod
    def token_of_row(cls, row: Expr, m: int) -> Expr:
        return row % m

    @classmethod
    def token_of_sum(cls, group: Expr, i: int, m: int) -> Expr:
        return 2 * i + group

    @classmethod
    def place(cls, token: Expr, m: int) -> Expr:
        return token % 2 * (m // 2) + token // 2


class _Mfma16(Int8Unit):
    """Of gfx908, gfx90a: each quarter of the wave has four columns."""

    groups, parts, acc = 4, 4, 4

    @staticmethod
    def multiply(acts: Sequence[Expr], weights: Sequence[Expr], sums: Expr) -> Expr:
        zero = T.int32(0)
        name = "llvm.amdgcn.mfma.i32.16x16x16i8"
        return T.Bind(T.call_llvm_pure_intrin("int32x4", name, *acts, *weights, sums, zero, zero, zero))


class _Mfma32(_Mfma16):
    """Of gfx94x and later: as before, of both halves in one instruction."""

    per_half = False

    @staticmethod
    def multiply(acts: Sequence[Expr], weights: Sequence[Expr], sums: Expr) -> Expr:
        zero = T.int32(0)
        a, b = (T.reinterpret("int64", vector(words)) for words in (acts, weights))
        name = "llvm.amdgcn.mfma.i32.16x16x32.i8"
        return T.Bind(T.call_llvm_pure_intrin("int32x4", name, a, b, sums, zero, zero, zero))


UNITS: dict[tuple[str, int], type[Int8Unit]] = {
    ("wmma11", 16): _Wmma11, ("wmma12", 16): _Wmma12, ("mfma", 16): _Mfma16, ("mfma", 32): _Mfma32
}  # fmt: skip


def unit_of(arch: Device) -> type[Int8Unit] | None:
    """The int8 matrix unit of an arch; None without one that kernels use."""
    return UNITS.get((arch.matrix, arch.code.int8_columns)) if isinstance(arch, GpuArch) else None


def products(
    unit: type[Int8Unit], acts: Sequence[Sequence[Expr]], weights: Sequence[Sequence[Expr]], groups: int
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
