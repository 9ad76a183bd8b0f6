"""Elements of a quantized KV cache (`Attention.quantized`) as codes and scales, and back.

In: words of four signed bytes, and their float16 scales, one for all (a key's) or one for each (values'). Out: float32,
which is exact (8 bits by 11), or float16 for packed products and matrix units, rounded once. Codes come from float32 of
the lanes that hold a block.
"""

import functools
from collections.abc import Sequence

from tvm.tirx.script import builder as T

from mlc_amd.schedules.formats import HALF_MAX
from mlc_amd.schedules.gpu.base.device import fma, intrin, maximum, minimum, rcp, rint, wave_max
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.gpu.base.registers import lane_of, vector
from mlc_amd.schedules.operators.attention import KV_BLOCK, KV_STEPS
from mlc_amd.schedules.tir import Expr

BYTES = 4  # of a word
EXPONENT = 0x64646464  # of 1024.0 as float16, in every byte
PAIRS = (0x04010400, 0x04030402)  # byte selectors: bytes 0 and 1, 2 and 3 of a word below exponent bytes
FLIP, ZERO = 0x80808080, 128  # signed bytes become unsigned ones, of which 128 means 0
LANES = KV_BLOCK // WIDTH  # that hold a block


def _scale(scales: Expr, i: Expr) -> Expr:
    return lane_of(scales, i) if "x" in str(scales.ty) else scales


def reals(words: Sequence[Expr], scales: Expr) -> list[Expr]:
    """Float32 in registers, four of each uint32 of `words`. scales: a float16, or a vector with one for each."""
    found = []
    for i, word in enumerate(words):
        flipped = T.Bind(word ^ T.uint32(FLIP))
        for j in range(BYTES):
            byte = T.cast(T.shift_right(flipped, T.uint32(8 * j)) & T.uint32(255), "float32")
            scale = T.Bind(T.cast(_scale(scales, i * BYTES + j), "float32"))
            found.append(fma(byte, scale, scale * T.float32(-ZERO)))
    return found


def halves(words: Sequence[Expr], scales: Expr) -> list[Expr]:
    """Words of two float16 each, uint32 in registers, two of each of `words`. A byte below the exponent of 1024 reads
    as 1024 + byte."""
    found = []
    for i, word in enumerate(words):
        flipped = T.Bind(word ^ T.uint32(FLIP))
        for j, select in enumerate(PAIRS):
            bits = intrin("uint32", "llvm.amdgcn.perm", T.uint32(EXPONENT), flipped, T.uint32(select))
            code = T.Bind(T.reinterpret("float16x2", bits) - T.broadcast(T.float16(1024 + ZERO), 2))
            factors = vector([_scale(scales, i * BYTES + 2 * j + k) for k in range(2)])
            found.append(T.Bind(T.reinterpret("uint32", code * factors)))
    return found


def quantized(arch: Device, x: Sequence[Expr]) -> tuple[list[Expr], Expr]:
    """(codes, scale) of a lane's WIDTH float32 registers, where LANES neighbouring lanes hold a block: int32 registers,
    and a float16 register that is the same in all of them. All lanes of the wave must call this."""
    top = wave_max(arch, functools.reduce(maximum, [T.fabs(v) for v in x]), LANES)
    scale = T.Bind(T.cast(minimum(top * T.float32(1 / KV_STEPS), T.float32(HALF_MAX)), "float16"))
    real = T.Bind(T.cast(scale, "float32"))
    inverse = T.Bind(T.Select(real > T.float32(0), rcp(real), T.float32(0)))
    # the largest codes of a block with a scale that float16 rounds coarsely would be above KV_STEPS
    steps = [minimum(maximum(v * inverse, T.float32(-KV_STEPS)), T.float32(KV_STEPS)) for v in x]
    return [T.Bind(T.cast(rint(v), "int32")) for v in steps], scale
