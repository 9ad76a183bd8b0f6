"""Converts GGUF blocks to codes and scales in a form that all formats share. Only this module knows ggml's layouts.

In: a format's name and `Blocks`, the raw blocks of some rows. Out: (codes, scales):

    codes   uint32 [NT, KB, 8, 16]: word j of a block of 32 columns holds the codes of columns 4*j .. 4*j+3, one byte
            each, of row r
    scales  name -> [NT, blocks, 16], the planes D, S, Z, M and DM as `mlc_amd.schedules.formats` defines them

NT tiles of 16 rows, KB = K/32. Rows are transposed to the innermost axis first, four bytes at a time; everything after
that is bit arithmetic on long contiguous runs, four codes a word. Sources of the layouts: ggml-common.h (structs) and
ggml-quants.c (dequantize_row_*) of ggml, quants.py of gguf-py. A column in a comment counts within its block or
super-block; everything is little-endian.
"""

from collections.abc import Callable
from functools import cache

import gguf
import numpy as np

from mlc_amd.schedules.cpu.linear.planes import ROWS
from mlc_amd.schedules.formats import IQ1_VALUES, IQ2_VALUES, IQ3_S_VALUES, IQ3_XXS_VALUES


class Blocks:
    """The blocks of a whole number of row tiles: uint8 [NT * 16, NB * block_bytes]."""

    def __init__(self, raw: np.ndarray, block_bytes: int):
        self.raw = raw.reshape(raw.shape[0] // ROWS, ROWS, -1, block_bytes)

    def field(self, offset: int, count: int, dtype: str) -> np.ndarray:
        """`count` values at a byte offset of every block, as [NT, NB, count, 16]: rows innermost."""
        values = self.raw[..., offset : offset + count * np.dtype(dtype).itemsize].view(dtype)
        return np.ascontiguousarray(values.transpose(0, 2, 3, 1))

    def half(self, offset: int) -> np.ndarray:
        """The float16 at a byte offset of every block, as [NT, NB, 16]."""
        return self.field(offset, 1, "<f2")[:, :, 0]

    def words(self, offset: int, count: int, *shape: int) -> np.ndarray:
        """`count` uint32 at a byte offset of every block as [NT, NB, *shape, 16]; shape's product is `count`."""
        return self.field(offset, count, "<u4").reshape(self.raw.shape[0], self.raw.shape[2], *shape, ROWS)


def _split(words: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Fields of `bits` bits of every byte, lowest first, along a new axis: [..., 8 // bits, ...]."""
    shape = list(words.shape)
    shape.insert(axis, 8 // bits)
    out = np.empty(shape, np.uint32)
    mask = np.uint32(0x01010101 * ((1 << bits) - 1))
    parts = np.moveaxis(out, axis, 0)
    for i, part in enumerate(parts):
        np.right_shift(words, np.uint32(i * bits), out=part)
        np.bitwise_and(part, mask, out=part)
    return out


def _or_shifted(codes: np.ndarray, high: np.ndarray, bits: int) -> np.ndarray:
    """codes | high << bits, in place."""
    np.left_shift(high, np.uint32(bits), out=high)
    return np.bitwise_or(codes, high.reshape(codes.shape), out=codes)


def _flat(planes: np.ndarray) -> np.ndarray:
    """[NT, NB, ..., 16] to [NT, all, 16]."""
    return planes.reshape(planes.shape[0], -1, ROWS)


def _codes_of(words: np.ndarray) -> np.ndarray:
    """[NT, NB, ..., 16] to [NT, KB, 8, 16]."""
    return words.reshape(words.shape[0], -1, 8, ROWS)


def _bits_of_32(b: Blocks, offset: int) -> np.ndarray:
    """32 bits, bit c belonging to column c, as the lowest bit of 32 bytes: [NT, NB, 8, 16]."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)[:, None]
    nibbles = (b.words(offset, 1, 1) >> shifts) & np.uint32(15)
    # bit i of the nibble to bit 8*i: copies at 0, 7, 14 and 21 do not overlap
    nibbles *= np.uint32(0x00204081)
    nibbles &= np.uint32(0x01010101)
    return nibbles


def _nibbles_of_32(b: Blocks, offset: int, blocks: int = 1) -> np.ndarray:
    """Per 32 columns 16 bytes, low nibbles are columns 0..15, high nibbles 16..31: [NT, KB, 8, 16]."""
    return _codes_of(_split(b.words(offset, 4 * blocks, blocks, 4), 4, 3))


def q4_0(b: Blocks):
    """d f16 @0, qs[16] @2"""
    return _nibbles_of_32(b, 2), {"D": b.half(0)}


def q4_1(b: Blocks):
    """d f16 @0, m f16 @2, qs[16] @4"""
    return _nibbles_of_32(b, 4), {"D": b.half(0), "M": b.half(2)}


def q5_0(b: Blocks):
    """d f16 @0, qh u32 @2 (bit c: fifth bit of column c), qs[16] @6"""
    return _or_shifted(_nibbles_of_32(b, 6), _bits_of_32(b, 2), 4), {"D": b.half(0)}


def q5_1(b: Blocks):
    """d f16 @0, m f16 @2, qh u32 @4, qs[16] @8"""
    return _or_shifted(_nibbles_of_32(b, 8), _bits_of_32(b, 4), 4), {"D": b.half(0), "M": b.half(2)}


def q8_0(b: Blocks):
    """d f16 @0, qs int8[32] @2"""
    return b.words(2, 8, 8), {"D": b.half(0)}


def q2_k(b: Blocks):
    """scales[16] @0 (16 columns each: low nibble scale, high nibble minimum), qs[64] @16, d f16 @80, dmin f16 @82.

    qs: two halves of 128 columns; byte c of a half holds columns c, 32 + c, 64 + c, 96 + c, low bits first.
    """
    return _codes_of(_split(b.words(16, 16, 2, 8), 2, 3)), {
        "D": b.half(80),
        "S": _flat(b.field(0, 16, "u1")),
        "DM": b.half(82),
    }


def q3_k(b: Blocks):
    """hmask[32] @0, qs[64] @32, scales[12] @96, d f16 @108.

    qs as in q2_k; bit i of hmask[c] is the third bit of column 32*i + c. Sixteen 6-bit scales, 32 standing for 0: low
    four bits in the low nibbles of bytes 0..7, then the high nibbles; high two bits in bytes 8..11, lowest two bits of
    each first.
    """
    codes = _codes_of(_split(b.words(32, 16, 2, 8), 2, 3))
    _or_shifted(codes, _split(b.words(0, 8, 8), 1, 2), 2)
    packed = b.field(96, 12, "u1")
    low = np.concatenate([packed[:, :, :8] & 15, packed[:, :, :8] >> 4], axis=2)
    high = np.concatenate([packed[:, :, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=2)
    return codes, {"D": b.half(108), "S": _flat((low | high << 4).view(np.int8) - np.int8(32))}


def _scales_and_minimums(b: Blocks, offset: int) -> dict[str, np.ndarray]:
    """Eight 6-bit scales and minimums of q4_k and q5_k in 12 bytes (get_scale_min_k4).

    Bytes 0..3: scales 0..3, bytes 4..7: minimums 0..3, with the top two bits of the later four above them; bytes 8..11:
    low nibbles scales 4..7, high nibbles minimums 4..7.
    """
    scales, minimums, rest = np.split(b.field(offset, 12, "u1"), 3, axis=2)
    return {
        "S": _flat(np.concatenate([scales & 63, rest & 15 | scales >> 2 & 48], axis=2)),
        "Z": _flat(np.concatenate([minimums & 63, rest >> 4 | minimums >> 2 & 48], axis=2)),
    }


def q4_k(b: Blocks):
    """d f16 @0, dmin f16 @2, scales[12] @4, qs[128] @16.

    qs: four groups of 64 columns, 32 bytes each; low nibbles are a group's columns 0..31, high nibbles 32..63.
    """
    return _codes_of(_split(b.words(16, 32, 4, 8), 4, 3)), {
        "D": b.half(0),
        **_scales_and_minimums(b, 4),
        "DM": b.half(2),
    }


def q5_k(b: Blocks):
    """d f16 @0, dmin f16 @2, scales[12] @4, qh[32] @16 (bit i of byte c: fifth bit of column 32*i + c), qs[128] @48 as
    in q4_k"""
    codes = _codes_of(_split(b.words(48, 32, 4, 8), 4, 3))
    return _or_shifted(codes, _split(b.words(16, 8, 8), 1, 2), 4), {
        "D": b.half(0),
        **_scales_and_minimums(b, 4),
        "DM": b.half(2),
    }


def q6_k(b: Blocks):
    """ql[128] @0, qh[64] @128, scales int8[16] @192 (16 columns each), d f16 @208.

    Two halves of 128 columns. ql: 64 bytes a half, low nibbles columns 0..63, high nibbles 64..127; qh: 32 bytes a
    half, as qs in q2_k.
    """
    codes = _codes_of(_split(b.words(0, 32, 2, 16), 4, 3))
    return _or_shifted(codes, _split(b.words(128, 16, 2, 8), 2, 3), 4), {
        "D": b.half(208),
        "S": _flat(b.field(192, 16, "i1")),
    }


def iq4_xs(b: Blocks):
    """d f16 @0, scales_h u16 @2, scales_l[4] @4, qs[128] @8.

    qs: eight blocks as in q4_0. Eight 6-bit scales, 32 standing for 0: low nibble of byte i is scale 2*i, high nibble
    2*i + 1; the high two bits of scale i are bits 2*i of scales_h.
    """
    packed = b.field(4, 4, "u1")
    low = _flat(np.stack([packed & 15, packed >> 4], axis=3))
    high = _flat(b.field(2, 1, "<u2") >> np.arange(0, 16, 2, dtype=np.uint16)[:, None]).astype(np.uint8) & 3
    return _nibbles_of_32(b, 8, 8), {"D": b.half(0), "S": (low | high << 4).view(np.int8) - np.int8(32)}


def mxfp4(b: Blocks):
    """e E8M0 @0, qs[16] @1 as in q4_0"""
    return _nibbles_of_32(b, 1), {"S": _flat(b.field(0, 1, "u1"))}


def _e5m3_of_ue4m3() -> np.ndarray:
    """For each UE4M3 byte (ggml_ue4m3_to_fp32), the E5M3 byte of half its value. 0x7F: 0; the sign bit is ignored."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 11), mantissa * 2.0**-10)
    value[0x7F] = 0
    return (value.astype(np.float16).view(np.uint16) >> 7).astype(np.uint8)


_E5M3 = _e5m3_of_ue4m3()


def nvfp4(b: Blocks):
    """d UE4M3[4] @0 (16 columns each), qs[32] @4: per 16 columns 8 bytes, low nibbles columns 0..7, high 8..15"""
    return _codes_of(_split(b.words(4, 8, 4, 2), 4, 3)), {"S": _flat(_E5M3[b.field(0, 4, "u1")])}


def tq2_0(b: Blocks):
    """qs[64] @0 as in q2_k, d f16 @64"""
    return _codes_of(_split(b.words(0, 16, 2, 8), 2, 3)), {"D": b.half(64)}


# ---- types that are compressed further: vectors of a codebook (iq1, iq2, iq3) and digits to base 3 (tq1_0)
#
# An entry of a codebook is four or eight weights. Here it becomes one or two words of codes; the format's table
# (`mlc_amd.schedules.formats`) has the value of each code. The codebooks are gguf-py's, which are those of
# ggml-common.h (iq2xxs_grid and so on). Sub-scales are odd: d * (0.5 + s) is d/2 * (2*s + 1).


@cache
def _grid(name: str, values: tuple[int, ...]) -> np.ndarray:
    """A type's codebook as words of codes, uint32 [words of an entry, entries]. A code is the index of a weight's value
    in `values`."""
    kind = getattr(gguf.quants, name)
    kind.init_grid()
    codes = np.array([values.index(int(v)) for v in kind.grid.flat], np.uint8)
    return np.ascontiguousarray(codes.reshape(kind.grid_shape).view("<u4").T)


@cache
def _sign_words(bits: int) -> np.ndarray:
    """Words of signs, uint32 [2, 2**bits]: bit i of the index is in byte i % 4 of word i // 4. With bits = 7, the
    eighth sign makes the number of set bits even (ksigns_iq2xs)."""
    index = np.arange(1 << bits)[:, None] >> np.arange(8) & 1
    if bits == 7:
        index[:, 7] = index.sum(1) & 1
    return np.ascontiguousarray(index.astype(np.uint8).view("<u4").T)


def _looked_up(words: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The entries of a table. words: uint32 [w, entries]; index: [NT, NB, n, 16]. Returns uint32 [NT, NB, n, w, 16]."""
    out = np.empty((*index.shape[:3], len(words), index.shape[3]), np.uint32)
    for i, column in enumerate(words):
        out[..., i, :] = column[index]
    return out


def _signed(entries: np.ndarray, signs: np.ndarray, bit: int) -> np.ndarray:
    """Codes from words of magnitudes and words of signs, which have equal shapes. bit: the sign's place in a code."""
    return _codes_of(_or_shifted(entries, signs, bit))


def _fields(x: np.ndarray, shifts, mask: int) -> np.ndarray:
    """Bit fields of integers [NT, NB, n, 16] as [NT, NB, n * fields, 16]."""
    parts = x[:, :, :, None] >> np.array(shifts, x.dtype)[:, None] & x.dtype.type(mask)
    return parts.reshape(*x.shape[:2], -1, x.shape[3])


def _odd(s: np.ndarray) -> np.ndarray:
    """S of sub-scales: 2*s + 1."""
    return _flat(s.astype(np.uint8) * np.uint8(2) + np.uint8(1))


def _nibble_scales(b: Blocks, offset: int, count: int) -> np.ndarray:
    """S of 4-bit sub-scales in `count` bytes, low nibbles first."""
    return _odd(_fields(b.field(offset, count, "u1"), (0, 4), 15))


def iq2_xxs(b: Blocks):
    """d f16 @0, then for each 32 columns 4 indices of 8 bits and u32: 4 signs of 7 bits, scale in the top 4"""
    words = b.words(2, 16, 8, 2)
    index, rest = words[:, :, :, 0], words[:, :, :, 1]
    entries = _looked_up(_grid("IQ2_XXS", IQ2_VALUES), _fields(index, (0, 8, 16, 24), 255))
    signs = _looked_up(_sign_words(7), _fields(rest, (0, 7, 14, 21), 127))
    return _signed(entries, signs, 2), {"D": b.half(0), "S": _odd(rest >> np.uint32(28))}


def iq2_xs(b: Blocks):
    """d f16 @0, qs u16[32] @2 (index of 9 bits, signs of 7), scales[8] @66 (nibbles, 16 columns each)"""
    packed = b.field(2, 32, "<u2")
    entries = _looked_up(_grid("IQ2_XS", IQ2_VALUES), packed & np.uint16(511))
    signs = _looked_up(_sign_words(7), packed >> np.uint16(9))
    return _signed(entries, signs, 2), {"D": b.half(0), "S": _nibble_scales(b, 66, 8)}


def iq2_s(b: Blocks):
    """d f16 @0, qs[32] @2, signs[32] @34, qh[8] @66 (two high bits of an index each), scales[8] @74 as in iq2_xs"""
    index = b.field(2, 32, "u1") | _fields(b.field(66, 8, "u1"), (0, 2, 4, 6), 3).astype(np.uint16) << np.uint16(8)
    entries = _looked_up(_grid("IQ2_S", IQ2_VALUES), index)
    signs = _looked_up(_sign_words(8), b.field(34, 32, "u1"))
    return _signed(entries, signs, 2), {"D": b.half(0), "S": _nibble_scales(b, 74, 8)}


def iq3_xxs(b: Blocks):
    """d f16 @0, qs[64] @2 (indices of 4 columns), u32[8] @66 as in iq2_xxs"""
    entries = _looked_up(_grid("IQ3_XXS", IQ3_XXS_VALUES), b.field(2, 64, "u1"))
    rest = b.field(66, 8, "<u4")
    signs = _looked_up(_sign_words(7), _fields(rest, (0, 7, 14, 21), 127))
    return _signed(entries, signs, 3), {"D": b.half(0), "S": _odd(rest >> np.uint32(28))}


def iq3_s(b: Blocks):
    """d f16 @0, qs[64] @2, qh[8] @66 (high bit of an index each), signs[32] @74, scales[4] @106 (nibbles of 32)"""
    index = b.field(2, 64, "u1") | _fields(b.field(66, 8, "u1"), range(8), 1).astype(np.uint16) << np.uint16(8)
    entries = _looked_up(_grid("IQ3_S", IQ3_S_VALUES), index)
    signs = _looked_up(_sign_words(8), b.field(74, 32, "u1"))
    return _signed(entries, signs, 3), {"D": b.half(0), "S": _nibble_scales(b, 106, 4)}


def _iq1(b: Blocks, low: np.ndarray, high: np.ndarray, minus: np.ndarray) -> np.ndarray:
    """The codes of entries. low, high: the low 8 and the high 3 bits of their indices, [NT, NB, 32, 16]. minus: 1 where
    delta is subtracted."""
    # The codebook has values without delta; IQ1_VALUES[:3] are the same ones with delta added.
    entries = _looked_up(_grid("IQ1_S", tuple((v - 1) // 8 for v in IQ1_VALUES[:3])), low | high.astype(np.uint16) << 8)
    entries |= (minus.astype(np.uint32) * np.uint32(0x04040404))[:, :, :, None]
    return _codes_of(entries)


def iq1_s(b: Blocks):
    """d f16 @0, qs[32] @2, qh u16[8] @34: for each 32 columns 4 times 3 high bits of an index, scale of 3 bits, sign of
    delta"""
    rest = b.field(34, 8, "<u2")
    codes = _iq1(b, b.field(2, 32, "u1"), _fields(rest, (0, 3, 6, 9), 7), np.repeat(rest >> np.uint16(15), 4, axis=2))
    return codes, {"D": b.half(0), "S": _odd(rest >> np.uint16(12) & np.uint16(7))}


def iq1_m(b: Blocks):
    """qs[32] @0, qh[16] @32 (nibbles: 3 high bits of an index, sign of delta), scales u16[4] @48.

    scales: 4 times 3 bits each, of 16 columns; the top nibbles are d, a float16, lowest first.
    """
    rest, packed = b.field(32, 16, "u1"), b.field(48, 4, "<u2")
    codes = _iq1(b, b.field(0, 32, "u1"), _fields(rest, (0, 4), 7), _fields(rest, (3, 7), 1))
    d = np.bitwise_or.reduce(packed >> np.uint16(12) << np.arange(0, 16, 4, dtype=np.uint16)[:, None], axis=2)
    return codes, {"D": d.view(np.float16), "S": _odd(_fields(packed, (0, 3, 6, 9), 7))}


def tq1_0(b: Blocks):
    """qs[48] @0, qh[4] @48, d f16 @52.

    A byte is a fraction of 256 with five digits to base 3, of columns n apart: bytes 0..31 of columns 0..159 (n = 32),
    32..47 of 160..239 (n = 16), qh of 240..255 (n = 4, four digits).
    """
    runs = ((0, 8, 5), (32, 4, 5), (48, 1, 4))  # offset, words, digits
    parts = [_digits(b.words(offset, words, words), digits) for offset, words, digits in runs]
    return _codes_of(np.concatenate(parts, axis=2)), {"D": b.half(52)}


def _digits(words: np.ndarray, count: int) -> np.ndarray:
    """The digits to base 3 of every byte, most significant first: [NT, NB, n, 16] to [NT, NB, count * n, 16]."""
    pairs = np.uint32(0x00FF00FF)
    even, odd = words & pairs, words >> np.uint32(8) & pairs
    digits = np.empty((*words.shape[:2], count, *words.shape[2:]), np.uint32)
    for i in range(count):
        even, odd = even * np.uint32(3), odd * np.uint32(3)
        digits[:, :, i] = even >> np.uint32(8) & np.uint32(0x00030003) | odd & np.uint32(0x03000300)
        even, odd = even & pairs, odd & pairs
    return digits.reshape(*words.shape[:2], -1, words.shape[3])


UNPACK: dict[str, Callable[[Blocks], tuple[np.ndarray, dict[str, np.ndarray]]]] = {
    f.__name__: f
    for f in (
        q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_xs, mxfp4, nvfp4, tq2_0, tq1_0, iq1_s, iq1_m,
        iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s,
    )
} | {"iq4_nl": q4_0}  # fmt: skip
