"""The value of a weight as a TensorIR expression of its code and scales: the formula of formats.py.

It is independent of where codes and scales are stored (cpu/linear/planes.py, gpu/base/planes.py). The results are equal
to those of gguf-py's `dequantize`, bit for bit.
"""

from collections.abc import Callable

from tvm import tirx

from mlc_amd.schedules.formats import Format
from mlc_amd.schedules.tir import Expr


def float_weight(fmt: Format, stored: Expr) -> Expr:
    """The float32 value of a stored weight of the format f32, f16 or bf16 (stored as its bits, uint16)."""
    return (
        tirx.reinterpret("float32", stored.astype("uint32") << 16) if fmt.name == "bf16" else stored.astype("float32")
    )


def minifloat(kind: str, byte: Expr) -> Expr:
    """The float32 value of a byte in a format of MINIFLOATS. kind: the format; byte: int32, scalar or vector."""
    bits = f"float32{str(byte.ty).removeprefix('int32')}"
    if kind == "e8m0":  # 2**(byte - 128): a float32 exponent; bytes 0 and 1 are the denormals 2**-128 and 2**-127
        return tirx.reinterpret(bits, tirx.max((byte + 1) << 21, (byte - 1) << 23))
    small: Expr = tirx.reinterpret(bits, byte << 20)
    return small * 2.0**112  # the exponent bias of float32 is larger by 112 than that of float16


def int8_weight(fmt: Format, value: Expr, at: Callable[[str, int], Expr]) -> Expr:
    """The float32 weight of an int8 format. value: code - zero, or the table's entry, int32. at(plane, columns): the
    element of a scale plane for this weight; an element is for `columns` columns."""

    def real(x: Expr) -> Expr:
        return x.astype("float32")

    scale: Expr = real(at("D", fmt.block)) if "D" in fmt.scales else None
    if fmt.unit != 1:
        scale = scale * fmt.unit
    if "S" in fmt.scales:
        s = at("S", fmt.group)
        if fmt.minifloat:
            s = minifloat(fmt.minifloat, s.astype("int32"))
        else:
            s = real(s & tirx.const(15, "uint8") if fmt.nibble_scales else s)
        scale = s if scale is None else scale * s
    weight = scale * real(value)
    if fmt.minimum == "M":
        return weight + real(at("M", fmt.block))
    if fmt.minimum == "DM":
        z = at("S", fmt.group) >> tirx.const(4, "uint8") if fmt.nibble_scales else at("Z", fmt.group)
        return weight - real(at("DM", fmt.block)) * real(z)
    return weight
