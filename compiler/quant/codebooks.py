"""GGUF blocks of types that are compressed further than codes and scales to the form of `blocks.py`: vectors of a
codebook (iq1, iq2, iq3) and digits to base 3 (tq1_0).

In and out as in `blocks.py`. A codebook's entry is four or eight weights; here it becomes one or two words of codes,
whose values are the format's table (`mlc_amd.schedules.formats`). The codebooks are gguf-py's, which has them from
ggml-common.h (iq2xxs_grid and so on). Sub-scales are odd: d * (0.5 + s) is d/2 * (2*s + 1).
"""

from collections.abc import Callable
from functools import cache

import gguf
import numpy as np

from mlc_amd.compiler.quant.blocks import Blocks, codes_of, flat, or_shifted
from mlc_amd.schedules.formats import IQ1_VALUES, IQ2_VALUES, IQ3_S_VALUES, IQ3_XXS_VALUES


@cache
def _grid(name: str, values: tuple[int, ...]) -> np.ndarray:
    """A type's codebook as words of codes, uint32 [words of an entry, entries]: the places of its numbers in
    `values`."""
    kind = getattr(gguf.quants, name)
    kind.init_grid()
    codes = np.array([values.index(int(v)) for v in kind.grid.flat], np.uint8)
    return np.ascontiguousarray(codes.reshape(kind.grid_shape).view("<u4").T)


@cache
def _sign_words(bits: int) -> np.ndarray:
    """uint32 [2, 2**bits]: bit i of the index in byte i % 4 of word i // 4. With 7 bits the eighth makes their number
    even (ksigns_iq2xs)."""
    index = np.arange(1 << bits)[:, None] >> np.arange(8) & 1
    if bits == 7:
        index[:, 7] = index.sum(1) & 1
    return np.ascontiguousarray(index.astype(np.uint8).view("<u4").T)


def _looked_up(words: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The entries [NT, NB, n, 16] of a table of words [w, entries] as [NT, NB, n, w, 16]."""
    out = np.empty((*index.shape[:3], len(words), index.shape[3]), np.uint32)
    for i, column in enumerate(words):
        out[..., i, :] = column[index]
    return out


def _signed(entries: np.ndarray, signs: np.ndarray, bit: int) -> np.ndarray:
    """Codes: words of magnitudes with words of signs (of equal size) at that bit."""
    return codes_of(or_shifted(entries, signs, bit))


def _fields(x: np.ndarray, shifts, mask: int) -> np.ndarray:
    """Bit fields of integers [NT, NB, n, 16] as [NT, NB, n * fields, 16]."""
    parts = x[:, :, :, None] >> np.array(shifts, x.dtype)[:, None] & x.dtype.type(mask)
    return parts.reshape(*x.shape[:2], -1, x.shape[3])


def _odd(s: np.ndarray) -> np.ndarray:
    """S of sub-scales: 2*s + 1."""
    return flat(s.astype(np.uint8) * np.uint8(2) + np.uint8(1))


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
    """Codes of entries with these low 8 and high 3 bits of their indices [NT, NB, 32, 16]; minus: 1 where delta is
    subtracted."""
    # the values with delta added, as the codebook has them without
    entries = _looked_up(_grid("IQ1_S", tuple((v - 1) // 8 for v in IQ1_VALUES[:3])), low | high.astype(np.uint16) << 8)
    entries |= (minus.astype(np.uint32) * np.uint32(0x04040404))[:, :, :, None]
    return codes_of(entries)


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
    return codes_of(np.concatenate(parts, axis=2)), {"D": b.half(52)}


def _digits(words: np.ndarray, count: int) -> np.ndarray:
    """Digits to base 3 of every byte, first ones first: [NT, NB, n, 16] to [NT, NB, count * n, 16]."""
    pairs = np.uint32(0x00FF00FF)
    even, odd = words & pairs, words >> np.uint32(8) & pairs
    digits = np.empty((*words.shape[:2], count, *words.shape[2:]), np.uint32)
    for i in range(count):
        even, odd = even * np.uint32(3), odd * np.uint32(3)
        digits[:, :, i] = even >> np.uint32(8) & np.uint32(0x00030003) | odd & np.uint32(0x03000300)
        even, odd = even & pairs, odd & pairs
    return digits.reshape(*words.shape[:2], -1, words.shape[3])


UNPACK: dict[str, Callable[[Blocks], tuple[np.ndarray, dict[str, np.ndarray]]]] = {
    f.__name__: f for f in (tq1_0, iq1_s, iq1_m, iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s)
}
