"""One weight from its code and scales, as a TensorIR expression: the formula of `formats.py`, whatever the layout of
the planes.

Layouts (`cpu/planes.py`, `gpu/planes.py`) say where a code and a scale lie; this says what they mean, bit for bit as
gguf-py's `dequantize`.
"""

from tvm import tirx

from mlc_amd.schedules.formats import Format


def float_weight(fmt: Format, stored):
    """A stored f32, f16 or bf16 (its bits as uint16) as float32."""
    return (
        tirx.reinterpret("float32", stored.astype("uint32") << 16) if fmt.name == "bf16" else stored.astype("float32")
    )


def int8_weight(fmt: Format, value, at):
    """float32 weight of an int8 format. value: code - zero or the table's entry, int32; at(plane, columns): the element
    of a scale plane that serves this weight, where one stands for `columns` columns."""

    def real(x):
        return x.astype("float32")

    scale = real(at("D", fmt.block))
    if "S" in fmt.scales:
        s = at("S", fmt.group)
        scale = scale * real(s & tirx.const(15, "uint8") if fmt.nibble_scales else s)
    weight = scale * real(value)
    if fmt.minimum == "M":
        return weight + real(at("M", fmt.block))
    if fmt.minimum == "DM":
        z = at("S", fmt.group) >> tirx.const(4, "uint8") if fmt.nibble_scales else at("Z", fmt.group)
        return weight - real(at("DM", fmt.block)) * real(z)
    return weight
