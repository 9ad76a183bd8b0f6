"""One weight from its code and scales, as a TensorIR expression: the formula of `formats.py`, whatever the layout of
the planes.

Layouts (`cpu/planes.py`, `gpu/planes.py`) say where a code and a scale lie; this says what they mean, bit for bit as
gguf-py's `dequantize`.
"""

from collections.abc import Callable

from tvm import tirx

from mlc_amd.schedules.formats import Format
from mlc_amd.schedules.tir import Expr


def float_weight(fmt: Format, stored: Expr) -> Expr:
    """A stored f32, f16 or bf16 (its bits as uint16) as float32."""
    return (
        tirx.reinterpret("float32", stored.astype("uint32") << 16) if fmt.name == "bf16" else stored.astype("float32")
    )


def minifloat(kind: str, byte: Expr) -> Expr:
    """A byte of one of MINIFLOATS as float32. byte: int32 of any number of lanes."""
    bits = f"float32{str(byte.ty).removeprefix('int32')}"
    if kind == "e8m0":  # 2**(byte - 128): an exponent, or below 2 the denormals 2**-128 and 2**-127
        return tirx.reinterpret(bits, tirx.max((byte + 1) << 21, (byte - 1) << 23))
    small: Expr = tirx.reinterpret(bits, byte << 20)
    return small * 2.0**112  # float32 has a bias larger by 112


def int8_weight(fmt: Format, value: Expr, at: Callable[[str, int], Expr]) -> Expr:
    """float32 weight of an int8 format. value: code - zero or the table's entry, int32; at(plane, columns): the element
    of a scale plane that serves this weight, where one stands for `columns` columns."""

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
