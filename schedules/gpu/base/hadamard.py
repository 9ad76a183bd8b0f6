"""Multiplication by Hadamard matrices H / sqrt(size), which are their own inverses, by the fast Walsh-Hadamard
transform: log2(size) steps, some within a lane's registers and some between lanes."""

from collections.abc import Sequence

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.device import fma, shuffle_xor
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.tir import Expr


def hadamard(arch: Device, lane: Expr, x: Sequence[Sequence[Expr]], size: int) -> list[list[Expr]]:
    """Multiplies each `size` consecutive elements by the matrix. size: a power of two. x: a lane's float32 registers;
    x[i][j] is element (i*wave + lane)*len(x[i]) + j. All lanes of the wave must call this."""
    width = len(x[0])
    found = [[T.Bind(v * T.float32(size**-0.5)) for v in part] for part in x]
    for step in (1 << i for i in range(size.bit_length() - 1)):
        if step < width:
            found = [_butterflies(part, step) for part in found]
        elif step < width * arch.wave:
            mask = step // width
            sign = T.Bind(T.Select((lane & mask) == 0, T.float32(1), T.float32(-1)))
            found = [[fma(v, sign, shuffle_xor(arch, v, mask)) for v in part] for part in found]
        else:
            columns = [_butterflies(column, step // (width * arch.wave)) for column in zip(*found, strict=True)]
            found = [list(part) for part in zip(*columns, strict=True)]
    return found


def _butterflies(x: Sequence[Expr], step: int) -> list[Expr]:
    """Replaces each pair (a, b) of elements that are `step` apart by (a + b, a - b)."""
    return [T.Bind(x[i ^ step] - v if i & step else v + x[i ^ step]) for i, v in enumerate(x)]
