"""The weight formats as data: `FORMATS` has one `Format` for each GGUF tensor type that this project supports.

A weight matrix is stored as planes: arrays that each hold one part of all weights, such as the codes or the scales. All
code that packs, decodes or multiplies weights reads `FORMATS`. Where a plane has which weight is defined by the target
(schedules/cpu/linear/planes.py, schedules/gpu/base/planes.py), the blocks in a GGUF file by compiler/quant/unpack.py.

Every int8 format is one of two affine maps of a code, without the factors or terms whose planes the format lacks:

    weight = D * S * value - DM * Z        value = code - zero, or table[code]
    weight = D * value + M

`code` is an unsigned integer, whose bits are in the bit planes `codes`, the low bits in the first plane (q8_0: one
signed byte). All products are exact in float32: D has 11 significant bits, S and the value together at most 12, and
float32 has 24. So only the last addition rounds. Any order of evaluation, with or without fused multiply-add, produces
the same bits as the references of ggml and gguf-py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlc_amd.runtime.errors import UserError

# Tables: the value of each code. kvalues_iq4nl of ggml-common.h, for iq4_nl and iq4_xs
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# The magnitudes in the codebooks of ggml-common.h (iq2xxs_grid, iq3xxs_grid, iq3s_grid), then the same with a minus
# sign. Codes 3 and 7 of iq2 are unused.
IQ2_VALUES = (8, 25, 43, 0, -8, -25, -43, 0)
IQ3_XXS_VALUES = (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62)
IQ3_S_VALUES = (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)
# In units of 1/8: iq1s_grid's -1, 0 and 1 plus IQ1S_DELTA (1/8); then minus IQ1S_DELTA. Codes 3 and 7 are unused.
IQ1_VALUES = (-7, 1, 9, 0, -9, -1, 7, 0)
# kvalues_mxfp4 of ggml-common.h: twice the values of a 4-bit float (E2M1)
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

# Unsigned 8-bit floats in which S may be stored (decode.py: `minifloat`). e8m0 is only an exponent: its value is
# 2**(e - 128) for all e, half of OCP's E8M0. e5m3 is bits 14 to 7 of a float16, which hold every UE4M3 without
# denormals.
MINIFLOATS = ("e8m0", "e5m3")

HALF_MAX = 65504.0  # the largest float16
PLANE_BITS = {"Q1": 1, "Q2": 2, "Q4": 4, "Q8": 8}  # bits of each code that a plane holds


@dataclass(frozen=True)
class Format:
    """One weight format. See the module's docstring for the meaning of D, S, Z, M and DM."""

    name: str  # key in FORMATS: the GGUF type's name in lower case
    gguf_type: int  # value of gguf.GGMLQuantizationType
    block: int  # columns of a GGUF block: 1, 32, 64 or 256
    block_bytes: int  # bytes of a GGUF block
    kind: str  # "float": multiplied in float32; "int8": multiplied with int8 activations
    codes: tuple[str, ...]  # bit planes of the code, low bits first; keys of PLANE_BITS
    zero: int  # the code whose value is 0; without a table
    table: tuple[int, ...] | None  # the value of each code; None: code - zero
    group: int  # columns that share an element of S and Z (int8 formats: 16 or 32)
    scales: tuple[str, ...]  # names of the planes D, S, Z, M and DM that the format has, in the order of storage
    # int8 formats: dtype of S, or one of MINIFLOATS, "" without S. Float formats: dtype of the weights (bf16: uint16)
    dtype: str
    unit: float = 1.0  # factor of all values in `table`, a power of two

    @property
    def signed(self) -> bool:
        """Codes are signed bytes (q8_0)."""
        return self.codes == ("Q8",)

    @property
    def minimum(self) -> str | None:
        """The plane of float16 minimums: "M" (added), "DM" (multiplied by Z, or by the high nibble of S, and
        subtracted), or None."""
        return next((p for p in ("M", "DM") if p in self.scales), None)

    @property
    def nibble_scales(self) -> bool:
        """A byte of S holds the sub-scale in its low nibble and the sub-minimum in its high nibble (q2_k)."""
        return "DM" in self.scales and "Z" not in self.scales

    @property
    def minifloat(self) -> str | None:
        """The one of MINIFLOATS in which S is stored, or None."""
        return self.dtype if self.dtype in MINIFLOATS else None

    def scale_plane(self, plane: str) -> tuple[int, str]:
        """(number of columns that share an element of this scale plane, dtype of the plane)."""
        if plane not in ("S", "Z"):
            return self.block, "float16"
        return self.group, self.dtype if plane == "S" and not self.minifloat else "uint8"

    @property
    def code_bits(self) -> int:
        """Bits of a code (int8 formats)."""
        return sum(PLANE_BITS[plane] for plane in self.codes)

    @property
    def file_bits(self) -> float:
        """Bits of a weight in a GGUF file."""
        return self.block_bytes * 8 / self.block

    @property
    def memory_bits(self) -> float:
        """Bits of a weight in memory, in planes: codes and scales."""
        if self.kind == "float":
            return self.file_bits
        planes = (self.scale_plane(plane) for plane in self.scales)
        return self.code_bits + sum({"float16": 16}.get(dtype, 8) / columns for columns, dtype in planes)

    @property
    def expanded(self) -> bool:
        """Whether codes take more bits in memory than whole blocks in the file, which are compressed further."""
        return self.kind == "int8" and self.code_bits > self.file_bits


FORMATS = {
    f.name: f
    for f in (
        #      name     type block bytes kind     codes         zero table      group scales        dtype, unit
        Format("f32", 0, 1, 4, "float", (), 0, None, 1, (), "float32"),
        Format("f16", 1, 1, 2, "float", (), 0, None, 1, (), "float16"),
        Format("bf16", 30, 1, 2, "float", (), 0, None, 1, (), "uint16"),
        Format("q4_0", 2, 32, 18, "int8", ("Q4",), 8, None, 32, ("D",), ""),
        Format("q4_1", 3, 32, 20, "int8", ("Q4",), 0, None, 32, ("D", "M"), ""),
        Format("q5_0", 6, 32, 22, "int8", ("Q4", "Q1"), 16, None, 32, ("D",), ""),
        Format("q5_1", 7, 32, 24, "int8", ("Q4", "Q1"), 0, None, 32, ("D", "M"), ""),
        Format("q8_0", 8, 32, 34, "int8", ("Q8",), 0, None, 32, ("D",), ""),
        Format("q2_k", 10, 256, 84, "int8", ("Q2",), 0, None, 16, ("D", "S", "DM"), "uint8"),
        Format("q3_k", 11, 256, 110, "int8", ("Q2", "Q1"), 4, None, 16, ("D", "S"), "int8"),
        Format("q4_k", 12, 256, 144, "int8", ("Q4",), 0, None, 32, ("D", "S", "Z", "DM"), "uint8"),
        Format("q5_k", 13, 256, 176, "int8", ("Q4", "Q1"), 0, None, 32, ("D", "S", "Z", "DM"), "uint8"),
        Format("q6_k", 14, 256, 210, "int8", ("Q4", "Q2"), 32, None, 16, ("D", "S"), "int8"),
        Format("iq4_nl", 20, 32, 18, "int8", ("Q4",), 0, IQ4_VALUES, 32, ("D",), ""),
        Format("iq4_xs", 23, 256, 136, "int8", ("Q4",), 0, IQ4_VALUES, 32, ("D", "S"), "int8"),
        Format("mxfp4", 39, 32, 17, "int8", ("Q4",), 0, FP4_VALUES, 32, ("S",), "e8m0"),
        Format("nvfp4", 40, 64, 36, "int8", ("Q4",), 0, FP4_VALUES, 16, ("S",), "e5m3"),
        Format("tq1_0", 34, 256, 54, "int8", ("Q2",), 1, None, 32, ("D",), ""),
        Format("tq2_0", 35, 256, 66, "int8", ("Q2",), 1, None, 32, ("D",), ""),
        Format("iq1_s", 19, 256, 50, "int8", ("Q2", "Q1"), 0, IQ1_VALUES, 32, ("D", "S"), "uint8", 1 / 8),
        Format("iq1_m", 29, 256, 56, "int8", ("Q2", "Q1"), 0, IQ1_VALUES, 16, ("D", "S"), "uint8", 1 / 8),
        Format("iq2_xxs", 16, 256, 66, "int8", ("Q2", "Q1"), 0, IQ2_VALUES, 32, ("D", "S"), "uint8", 1 / 8),
        Format("iq2_xs", 17, 256, 74, "int8", ("Q2", "Q1"), 0, IQ2_VALUES, 16, ("D", "S"), "uint8", 1 / 8),
        Format("iq2_s", 22, 256, 82, "int8", ("Q2", "Q1"), 0, IQ2_VALUES, 16, ("D", "S"), "uint8", 1 / 8),
        Format("iq3_xxs", 18, 256, 98, "int8", ("Q4",), 0, IQ3_XXS_VALUES, 32, ("D", "S"), "uint8", 1 / 4),
        Format("iq3_s", 21, 256, 110, "int8", ("Q4",), 0, IQ3_S_VALUES, 32, ("D", "S"), "uint8"),
    )
}

_BY_GGUF_TYPE = {f.gguf_type: f for f in FORMATS.values()}


def by_gguf_type(gguf_type: int) -> Format | None:
    """The format with this number in GGUF (GGMLQuantizationType); None if it is not supported."""
    return _BY_GGUF_TYPE.get(int(gguf_type))


def lookup(fmt: "str | Format") -> Format:
    """The format of this name; a Format is returned unchanged. Raises UserError for an unknown name."""
    if isinstance(fmt, Format):
        return fmt
    if fmt not in FORMATS:
        raise UserError(f"unknown weight format {fmt!r}; use one of {', '.join(FORMATS)}")
    return FORMATS[fmt]


def parameters(totals: Mapping[str, Any]) -> int:
    """The number of weights of a model. totals: the manifest's `formats`, format name to an entry with "bytes"."""
    return sum(entry["bytes"] // lookup(name).block_bytes * lookup(name).block for name, entry in totals.items())
