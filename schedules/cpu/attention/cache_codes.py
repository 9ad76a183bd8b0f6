"""Quantization of the KV cache on the CPU (`Attention.quantized`): from elements to codes and scales, and back."""

from tvm.tirx.script import builder as T

from mlc_amd.runtime.cache.kv_types import Codes
from mlc_amd.schedules.cpu.base.vector import LANES, dtype, f32, i32, opaque, reduce, splat, tree, tree_add, widen
from mlc_amd.schedules.cpu.linear.quantize import magnitudes
from mlc_amd.schedules.formats import HALF_MAX
from mlc_amd.schedules.tir import Expr

BYTES = {"float16": 2, "int8": 1, "uint8": 1}  # bytes of each dtype that a cache may have


def stored(width: int, codes: Codes | None) -> tuple[int, str]:
    """(number of elements, dtype) in which the cache stores `width` columns. codes None: the cache is not quantized."""
    if codes is None:
        return width, "float16"
    return width * codes.bits // 8, "int8" if codes.bits == 8 else "uint8"


def quantized(x: list[Expr], codes: Codes) -> tuple[list[Expr], Expr]:
    """(codes int32, scale float16 in a register) of a block of KV_BLOCK columns. x: its two float32 vectors."""
    if codes.lowest == -codes.highest:
        top, step = T.reinterpret("float32", reduce("smax", magnitudes(x))), codes.highest
    else:
        high, low = (tree(join, T.Bind(join(*x))) for join in (T.max, T.min))
        top, step = opaque(T.Select(high > -low, high, low), "float32"), codes.lowest
    real = T.max(T.min(top * T.float32(1 / step), T.float32(HALF_MAX)), T.float32(-HALF_MAX))
    scale = T.Bind(T.cast(real, "float16"))
    real = T.Bind(T.cast(scale, "float32"))
    # Codes are clamped: if float16 rounds the scale coarsely, the largest ones would be out of range.
    inverse = T.Bind(T.Select(real != T.float32(0), T.float32(1) / real, T.float32(0)))
    steps = [T.min(T.max(v * splat(inverse), f32(codes.lowest)), f32(codes.highest)) for v in x]
    steps = [T.Bind(T.nearbyint(v)) for v in steps]
    if codes.refits:
        product, square = (
            tree_add(T.Bind(sum((v * q for v, q in zip(of[1:], steps[1:], strict=True)), of[0] * steps[0])))
            for of in (x, steps)
        )
        real = product / T.max(square, T.float32(1))  # square is a whole number; 0 if all codes are 0
        scale = T.Bind(T.cast(T.max(T.min(real, T.float32(HALF_MAX)), T.float32(-HALF_MAX)), "float16"))
    return [T.Bind(T.cast(v, dtype("int32", LANES))) for v in steps], scale


def halves_of_bytes(steps: list[Expr], codes: Codes) -> Expr:
    """The 4-bit codes of `quantized` as bytes, int32. The codes of the first vector are in the lower halves."""
    low, high = (v - i32(codes.lowest) for v in steps)
    return low | T.shift_left(high, i32(codes.bits))


def number(stored: Expr, codes: Codes, half: Expr, n: int) -> Expr:
    """The codes in a vector of n stored bytes, as float32. half: for 4-bit codes, whether to take the upper halves."""
    if codes.bits == 8:
        return widen(stored, n)
    shift = half * codes.bits
    word = T.shift_right(
        T.cast(stored, dtype("int32", n)), i32(shift, n) if isinstance(shift, int) else splat(shift, n)
    )
    return widen((word & i32(15, n)) + i32(codes.lowest, n), n)
