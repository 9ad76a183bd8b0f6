"""Codes that stand for the entries of a table: four signed bytes of four codes, without memory.

In: a Format with a table, codes in registers as words. Out: words of signed bytes. AMD's own API has byte permutes for
it. On Vulkan each bit of the codes selects between constants, which takes two to three instructions for every entry; so
the sign of tables that are symmetric, and FP4's magnitudes, come from arithmetic on packed bytes and nibbles.
"""

from collections.abc import Callable, Sequence

from tvm.tirx.script import builder as T

from mlc_amd.schedules.formats import FP4_VALUES, Format
from mlc_amd.schedules.gpu.base.device import intrin
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.tir import Expr

Table = tuple[int, ...]  # signed bytes, 8 or 16

BYTE_SELECT = 0x03020100  # of a byte permute: the bytes where they are


def values(
    arch: Device, fmt: Format, nibbles: list[Expr] | None, codes: Callable[[], Sequence[Expr]], flip: int = 0
) -> list[Expr]:
    """The words of signed bytes ^ flip that words of four codes stand for.

    codes(): these words, a byte each; nibbles: for formats with one plane of nibbles its words, whose low nibbles are
    the codes of the first half of the words. flip: 0, or 0x80 for bytes that count from -128.
    """
    if arch.api == "vulkan" and fmt.table == FP4_VALUES and nibbles:
        return _fp4(nibbles, flip)
    return [_lookup(arch, fmt.table or (), x, flip) for x in codes()]


def _bits(x: Expr, mask: int) -> Expr:
    """Those bits of each byte."""
    return x & T.uint32(0x01010101 * mask)


def _words(table: Table, flip: int = 0) -> list[Expr]:
    packed = bytes((v ^ flip) & 255 for v in table)
    return [T.uint32(int.from_bytes(packed[i : i + 4], "little")) for i in range(0, len(packed), 4)]


def _lookup(arch: Device, table: Table, x: Expr, flip: int) -> Expr:
    """table[code] ^ flip of a word of four codes. The table has 8 or 16 entries."""
    words = _words(table, flip)
    if arch.api == "vulkan":
        return _selected(table, x, flip)
    if len(table) == 8:  # a byte permute picks from eight bytes
        return intrin("uint32", "llvm.amdgcn.perm", words[1], words[0], x)
    # two of them; then byte i of `low`, or of `high` where bit 3 is set
    low3 = T.Bind(_bits(x, 7))
    low, high = (intrin("uint32", "llvm.amdgcn.perm", words[i + 1], words[i], low3) for i in (0, 2))
    pick = T.shift_right(_bits(x, 8), T.uint32(1)) | T.uint32(BYTE_SELECT)
    return intrin("uint32", "llvm.amdgcn.perm", high, low, pick)


def _selected(table: Table, x: Expr, flip: int) -> Expr:
    half = len(table) // 2
    if table[half:] != tuple(-v for v in table[:half]) or min(table[:half]) < 0:
        return T.Bind(T.call_extern("uint32", "vk.lookup", x, *_words(table, flip)))
    magnitude = T.Bind(T.call_extern("uint32", "vk.lookup", x, *_words(table[:half])))
    sign_bit = half.bit_length() - 1
    return _negated(magnitude, _bits(T.shift_left(x, T.uint32(7 - sign_bit)), 0x80), flip)


def _negated(magnitude: Expr, top: Expr, flip: int) -> Expr:
    """Bytes 0..127, negated where the byte in `top` is 0x80 and not 0, ^ flip."""
    top = T.Bind(top)
    sign = T.Bind(T.shift_right(top, T.uint32(7)))
    # 127 - magnitude, plus 1: never a carry into the next byte, also for 0
    return T.Bind(((magnitude ^ (top - sign)) + sign) ^ (top ^ T.uint32(0x01010101 * flip)))


def fp4_magnitudes(w: Expr) -> Expr:
    """The words of eight codes of FP4_VALUES, in nibbles, as nibbles too: of a code's bits s, c, b, a the magnitude is
    4c + 2b + a, for c = 1 plus 2b + a, plus 2 if both."""
    # c at the places of a and of b
    c_of_a = T.shift_right(w, T.uint32(2)) & T.uint32(0x11111111)
    c_of_b = T.shift_right(w, T.uint32(1)) & T.uint32(0x22222222)
    more = T.Bind(w & (c_of_a | c_of_b))
    both = T.shift_left(more, T.uint32(1)) & more
    return T.Bind((w & T.uint32(0x77777777)) + more + both)


def _fp4(nibbles: Sequence[Expr], flip: int) -> list[Expr]:
    """FP4_VALUES."""
    low, high = [], []
    for w in nibbles:
        magnitudes = fp4_magnitudes(w)
        low.append(_negated(_bits(magnitudes, 15), _bits(T.shift_left(w, T.uint32(4)), 0x80), flip))
        high.append(_negated(_bits(T.shift_right(magnitudes, T.uint32(4)), 15), _bits(w, 0x80), flip))
    return low + high
