"""Converts elements of a quantized KV cache (`Attention.quantized`) from codes and scales, and to them.

From codes: in are words of four 8-bit codes or eight 4-bit codes, and float16 scales: one scale for all codes of a word
of a key, one for each code of values. Out is float32, which is exact (a product of 8 bits and 11 bits), or float16,
rounded once, for packed products and matrix units. To codes: in are float32 elements of the lanes that hold a block.

8-bit codes are signed. 4-bit codes are unsigned; code 0 is the lowest value. A word with eight 4-bit codes of a key has
elements 2*i and 2*i + 1 in bits 4*i .. 4*i+3 and 16 + 4*i .. 16 + 4*i+3, so that a shift and a mask extract two
float16. For values, a byte has two neighbouring columns of one key, because other keys are written at other times; in a
word of values, each byte has the code of another key.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.runtime.cache.kv_types import Codes
from mlc_amd.schedules.formats import HALF_MAX
from mlc_amd.schedules.gpu.base.device import fma, intrin, maximum, minimum, rcp, rint, wave_max, wave_sum
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.gpu.base.registers import lane_of, opaque, vector
from mlc_amd.schedules.operators.attention import KV_BLOCK
from mlc_amd.schedules.tir import Expr

BYTES = 4  # bytes of a word
EXPONENT = 0x64646464  # the upper byte of 1024.0 as float16, in every byte
PAIR, PAIR_EXPONENT = 0x000F000F, 0x64006400  # a mask for two 4-bit codes, and 1024.0 as two float16
PAIRS = (0x04010400, 0x04030402)  # selectors of byte permutes: bytes 0 and 1 (2 and 3) of a word below exponent bytes
FLIP = 0x80808080  # converts signed bytes to unsigned ones, by xor
NIBBLES = 0x0F0F0F0F
LANES = KV_BLOCK // WIDTH  # lanes that hold a block


class Form(NamedTuple):
    """How keys or values are stored.

    side    elements of a key, or of a column of values, that stand side by side
    size    of these in numbers of the tensor's type
    words   uint32 of eight elements, as they are loaded
    zero    what means 0, of a code without sign; 0: there are no codes
    packed  whether a word has eight codes
    shared  columns of values that a number has
    """

    dtype: str
    side: int
    size: int
    words: int
    zero: int = 0
    packed: bool = False
    shared: int = 1


# of keys and of values, by the bits of an element
FORMS = {
    16: (Form("float16", 8, 8, 4),) * 2,
    8: (Form("int8", 16, 16, 2, 128),) * 2,
    4: (Form("uint8", 8, 4, 1, 8, packed=True), Form("uint8", 16, 16, 2, 8, shared=2)),
}


def _scale(scales: Expr, i: Expr) -> Expr:
    return lane_of(scales, i) if "x" in str(scales.ty) else scales


def _bytes(form: Form, word: Expr, shift: Expr) -> Expr:
    """The unsigned codes of a word. shift: the first bit of the column, if a byte has two columns."""
    nibbles = form.shared > 1
    return T.Bind(T.shift_right(word, shift) & T.uint32(NIBBLES) if nibbles else word ^ T.uint32(FLIP))


def reals(form: Form, words: Sequence[Expr], scales: Expr, shift: Expr = None) -> list[Expr]:
    """The elements of uint32 words as float32 registers. scales: a float16, or a vector with one for each element.
    shift: the first bit of the column, if a byte has two columns."""
    found, bits, mask = [], [8 * j for j in range(BYTES)], 255
    if form.packed:
        bits, mask = [4 * (e // 2) + 16 * (e % 2) for e in range(2 * BYTES)], 15
    for i, word in enumerate(words):
        codes = word if form.packed else _bytes(form, word, shift)
        for j, bit in enumerate(bits):
            code = T.cast(T.shift_right(codes, T.uint32(bit)) & T.uint32(mask), "float32")
            scale = T.Bind(T.cast(_scale(scales, i * BYTES + j), "float32"))
            found.append(fma(code, scale, scale * T.float32(-form.zero)))
    return found


def halves(form: Form, words: Sequence[Expr], scales: Expr, shift: Expr = None) -> list[Expr]:
    """`reals`, but as words of two float16 each, uint32 registers. A code in the mantissa of 1024.0 reads as 1024 +
    code."""
    found = []
    for i, word in enumerate(words):
        if form.packed:
            shifted = (T.shift_right(word, T.uint32(4 * j)) for j in range(BYTES))
            pairs = [bits & T.uint32(PAIR) | T.uint32(PAIR_EXPONENT) for bits in shifted]
        else:
            codes, name = _bytes(form, word, shift), "llvm.amdgcn.perm"
            pairs = [intrin("uint32", name, T.uint32(EXPONENT), codes, T.uint32(select)) for select in PAIRS]
        for j, bits in enumerate(pairs):
            code = T.Bind(T.reinterpret("float16x2", bits) - T.broadcast(T.float16(1024 + form.zero), 2))
            factors = vector([_scale(scales, i * BYTES + 2 * j + k) for k in range(2)])
            found.append(T.Bind(T.reinterpret("uint32", code * factors)))
    return found


def quantized(arch: Device, codes: Codes, x: Sequence[Expr]) -> tuple[list[Expr], Expr]:
    """Quantizes a block that LANES neighbouring lanes hold. x: a lane's WIDTH float32 registers. Returns (codes as
    int32 registers, scale as a float16 register, which is the same in all lanes of the block). All lanes of the wave
    must call this."""
    if codes.lowest == -codes.highest:
        top, step = wave_max(arch, functools.reduce(maximum, [T.fabs(v) for v in x]), LANES), codes.highest
    else:
        high = wave_max(arch, functools.reduce(maximum, x), LANES)
        low = wave_max(arch, T.Bind(-functools.reduce(minimum, x)), LANES)
        top, step = opaque(T.Select(high > low, high, -low)), codes.lowest
    real = maximum(minimum(top * T.float32(1 / step), T.float32(HALF_MAX)), T.float32(-HALF_MAX))
    scale = T.Bind(T.cast(real, "float16"))
    real = T.Bind(T.cast(scale, "float32"))
    inverse = T.Bind(T.Select(real != T.float32(0), rcp(real), T.float32(0)))
    # limited, because a scale that float16 rounds down could make the largest codes too large
    steps = [minimum(maximum(v * inverse, T.float32(codes.lowest)), T.float32(codes.highest)) for v in x]
    steps = [rint(v) for v in steps]
    if codes.refits:
        sums = (sum((v * q for v, q in zip(of[1:], steps[1:], strict=True)), of[0] * steps[0]) for of in (x, steps))
        product, square = (wave_sum(arch, T.Bind(total), LANES) for total in sums)
        real = product * rcp(maximum(square, T.float32(1)))  # a sum of squares of whole numbers
        scale = T.Bind(T.cast(maximum(minimum(real, T.float32(HALF_MAX)), T.float32(-HALF_MAX)), "float16"))
    return [T.Bind(T.cast(v, "int32")) for v in steps], scale


def stored(form: Form, codes: Sequence[Expr]) -> list[Expr]:
    """The bytes to store for the codes of four consecutive elements: four, or two with 4-bit codes."""
    if form.dtype == "int8":
        return [T.cast(code, form.dtype) for code in codes]
    a, b, c, d = (T.Bind(code + T.int32(form.zero)) for code in codes)
    pairs = ((a, c), (b, d)) if form.packed else ((a, b), (c, d))
    return [T.cast(low | T.shift_left(high, T.int32(4)), form.dtype) for low, high in pairs]
