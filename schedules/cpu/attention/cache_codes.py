"""Elements of a quantized KV cache (`Attention.quantized`) as codes and scales, and back."""

from tvm.tirx.script import builder as T

from mlc_amd.runtime.cache.kv_types import Codes
from mlc_amd.schedules.cpu.base.vector import LANES, dtype, f32, i32, opaque, reduce, splat, tree, tree_add, widen
from mlc_amd.schedules.cpu.linear.quantize import magnitudes
from mlc_amd.schedules.formats import HALF_MAX
from mlc_amd.schedules.tir import Expr

BYTES = {"float16": 2, "int8": 1, "uint8": 1}  # of what is stored


def stored(width: int, codes: Codes | None) -> tuple[int, str]:
    """(number, type) of what is stored of so many columns. None: float16."""
    if codes is None:
        return width, "float16"
    return width * codes.bits // 8, "int8" if codes.bits == 8 else "uint8"


def quantized(x: list[Expr], codes: Codes) -> tuple[list[Expr], Expr]:
    """(codes, int32, and their scale, float16, in a register) of a block's two vectors."""
    if codes.lowest == -codes.highest:
        top, step = T.reinterpret("float32", reduce("smax", magnitudes(x))), codes.highest
    else:
        high, low = (tree(join, T.Bind(join(*x))) for join in (T.max, T.min))
        top, step = opaque(T.Select(high > -low, high, low), "float32"), codes.lowest
    real = T.max(T.min(top * T.float32(1 / step), T.float32(HALF_MAX)), T.float32(-HALF_MAX))
    scale = T.Bind(T.cast(real, "float16"))
    real = T.Bind(T.cast(scale, "float32"))
    # the largest codes of a block with a scale that float16 rounds coarsely would be out of range
    inverse = T.Bind(T.Select(real != T.float32(0), T.float32(1) / real, T.float32(0)))
    steps = [T.min(T.max(v * splat(inverse), f32(codes.lowest)), f32(codes.highest)) for v in x]
    steps = [T.Bind(T.nearbyint(v)) for v in steps]
    if codes.refits:
        product, square = (
            tree_add(T.Bind(sum((v * q for v, q in zip(of[1:], steps[1:], strict=True)), of[0] * steps[0])))
            for of in (x, steps)
        )
        real = product / T.max(square, T.float32(1))  # a sum of squares of whole numbers
        scale = T.Bind(T.cast(T.max(T.min(real, T.float32(HALF_MAX)), T.float32(-HALF_MAX)), "float16"))
    return [T.Bind(T.cast(v, dtype("int32", LANES))) for v in steps], scale


def halves_of_bytes(steps: list[Expr], codes: Codes) -> Expr:
    """The codes of 4 bits of `quantized` as bytes, int32: those of the first vector are the lower ones."""
    low, high = (v - i32(codes.lowest) for v in steps)
    return low | T.shift_left(high, i32(codes.bits))


def number(stored: Expr, codes: Codes, half: Expr, n: int) -> Expr:
    """Codes as float32. half: which of two of 4 bits."""
    if codes.bits == 8:
        return widen(stored, n)
    shift = half * codes.bits
    word = T.shift_right(
        T.cast(stored, dtype("int32", n)), i32(shift, n) if isinstance(shift, int) else splat(shift, n)
    )
    return widen((word & i32(15, n)) + i32(codes.lowest, n), n)
