"""Loads weights from their planes and decodes them to signed bytes and scales, for every format.

A unit is the part of a row that a lane loads at a time: `blocks(fmt)` blocks of 32 columns for int8 formats (so that
codes are read in 16 bytes), `columns(fmt, k)` columns for float formats. Loading and decoding are separate functions,
so that a kernel can have many loads in flight:

    views      the planes' buffers as rows of words; to be called first
    fetch      loads a unit (layout "rows": `planes.py`)
    codes      decodes a block of a loaded unit to eight words of four signed bytes, one for each column; or a
               part of it
    scales     decodes the float32 factors of a block of a loaded unit

For formats with a table, `values` converts codes to the entries of the table, without memory. For rocm it uses byte
permutes. On Vulkan each bit of a code selects between constants, which takes two to three instructions for every entry.
Therefore the signs of symmetric tables, and FP4's magnitudes, are computed by arithmetic on packed bytes and nibbles.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from tvm import DataType
from tvm.tirx.script import builder as T

from mlc_amd.schedules.decode import minifloat
from mlc_amd.schedules.formats import FP4_VALUES, MINIFLOATS, PLANE_BITS, Format
from mlc_amd.schedules.gpu.base.device import intrin
from mlc_amd.schedules.gpu.base.planes import BLOCK, Planes
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import at, elements, lane_of
from mlc_amd.schedules.tir import Buffer, Expr

QUADS = 8  # words of four codes in a block
LOAD_WORDS = 4  # words of the widest load, 128 bits
WORD = 4  # bytes of a word
SIGN = 0x80808080  # the sign bit of each byte


class Unit(NamedTuple):
    """The registers of a unit."""

    codes: dict[str, list[Expr]]  # plane -> words
    scales: dict[str, list[Expr]]  # plane -> one register per scale (D, DM, M) or one word of bytes (S, Z)


class Part(NamedTuple):
    """A lane's part of a block that several lanes share: `words` neighbouring quads of each half of the block, from
    quad number * words on."""

    number: Expr
    words: int


HALF = QUADS // 2
WHOLE = Part(0, HALF)


class Scales(NamedTuple):
    """The factors of one block: weight = d * sub * value + minimum (plane M), or - minimum * sub_minimum (plane DM)."""

    d: Expr | None  # scale of the block, or None
    sub: list[Expr | None]  # sub-scale of each group of columns, or [None]
    minimum: Expr | None  # minimum, float32, or None
    sub_minimum: list[Expr | None]  # sub-minimum of each group of columns, or [None]

    def factors(self) -> list[Expr]:
        """d * sub of each group of columns."""
        return [T.Bind(s if self.d is None else self.d if s is None else self.d * s) for s in self.sub]

    def lows(self) -> list[Expr]:
        """The term that is added in each group of columns, for a format with minimums."""
        return [self.minimum if sub is None else T.float32(0) - self.minimum * sub for sub in self.sub_minimum]


def blocks(*fmts: Format) -> int:
    """The number of blocks of a unit that all these int8 formats share: two if all of them have GGUF blocks
    of 64 or more columns, otherwise one."""
    return 2 if all(fmt.block % (2 * BLOCK) == 0 for fmt in fmts) else 1


def columns(fmt: Format, k: int) -> int:
    """The columns of a unit of a float format: 16 bytes, or fewer if these do not divide k."""
    return next(n for n in (8, 4, 2, 1) if k % n == 0 and n * DataType(fmt.dtype).bits <= 128)


def block_bytes(fmt: Format) -> float:
    """The bytes of a block of 32 columns, with scales."""
    return fmt.block_bytes * BLOCK / fmt.block


def groups(fmt: Format) -> int:
    """The number of groups of columns with a scale of their own in a block: 1 or 2."""
    return BLOCK // fmt.group


def wide(buf: Buffer, row: Expr, first: Expr, count: int) -> list[Expr]:
    """`count` consecutive elements of buf from [row, first] on in registers, by loads of up to 128 bits. first: a
    multiple of `count`."""
    step = min(count, LOAD_WORDS)
    if step == 1:
        return [T.Bind(buf[row, first])]
    loads = [T.Bind(buf[row, at(first + i, step)]) for i in range(0, count, step)]
    return [T.Bind(lane_of(x, i)) for x in loads for i in range(step)]


def views(fmt: Format, bufs: Planes, span: int) -> Planes:
    """The planes as `fetch` reads them: codes as words, S and Z as words of up to four bytes of a unit. To be called
    after the last parameter is declared, because it declares views."""
    out = {}
    for name, buf in bufs.items():
        rows, dtype, size = int(buf.shape[0]), buf.dtype, prod(int(extent) for extent in buf.shape[1:])
        if name in ("S", "Z"):
            count = min(WORD, span * BLOCK // fmt.group)
            size, dtype = size // count, f"uint{8 * count}"
        same = str(dtype) == str(buf.dtype) and len(buf.shape) == 2
        out[name] = buf if same else T.decl_buffer((rows, size), dtype, data=buf.data)
    return out


def fetch(fmt: Format, planes: Planes, row: Expr, unit: Expr, span: int, part: Part = WHOLE) -> Unit:
    """Loads unit number `unit` of a row: `span` blocks of an int8 format. part: which of their codes; but words of
    planes with fewer than four bits have the codes of all parts."""
    words, scales = {}, {}
    for plane in fmt.codes:
        count = span * PLANE_BITS[plane]
        starts = [(0, count)]
        if part.words < HALF <= PLANE_BITS[plane]:
            starts = [(start + part.number * part.words, part.words) for start in range(0, count, HALF)]
        words[plane] = [x for start, n in starts for x in wide(planes[plane], row, unit * count + start, n)]
    for name in fmt.scales:
        if name in ("S", "Z"):
            count = max(1, span * BLOCK // fmt.group // WORD)
            found = wide(planes[name], row, unit * count, count) if count > 1 else [planes[name][row, unit]]
            scales[name] = [T.Bind(T.cast(x, "uint32")) for x in found]
        elif fmt.block > BLOCK:
            scales[name] = [T.Bind(planes[name][row, unit // (fmt.block // BLOCK // span)])]
        else:
            scales[name] = wide(planes[name], row, unit * span, span)
    return Unit(words, scales)


def fetch_float(fmt: Format, planes: Planes, row: Expr, unit: Expr, width: int) -> list[Expr]:
    """Loads unit number `unit` of a row of a float format, as `width` float32 registers."""
    return [real(fmt, x) for x in elements(T.Bind(planes["W"][row, at(unit * width, width)]))]


def real(fmt: Format, x: Expr) -> Expr:
    """Weights of a float format, a scalar or a vector, as float32."""
    count = x.ty.dtype.lanes
    lanes = f"x{count}" if count > 1 else ""
    if fmt.name != "bf16":
        return T.cast(x, f"float32{lanes}")
    shift = T.broadcast(T.uint32(16), count) if lanes else T.uint32(16)
    return T.reinterpret(f"float32{lanes}", T.shift_left(T.cast(x, f"uint32{lanes}"), shift))


def block_words(unit: Unit, block: int, part: Part = WHOLE) -> dict[str, list[Expr]]:
    """{plane: words} of block number `block` of a unit, for `bytes_of`. part: that of `fetch`."""
    found = {}
    for plane, words in unit.codes.items():
        bits = PLANE_BITS[plane]
        count = bits if bits < HALF else bits * part.words // HALF
        found[plane] = words[block * count : (block + 1) * count]
        if bits < HALF and part.words < HALF:
            shift = T.cast(part.number * (part.words * bits), "uint32")
            found[plane] = [T.Bind(T.shift_right(x, shift)) for x in found[plane]]
    return found


def codes(arch: Device, fmt: Format, unit: Unit, block: int, part: Part = WHOLE) -> list[Expr]:
    """The codes of block number `block` of a unit as words of signed bytes: word j has columns 4*j .. 4*j+3. With a
    part: the words of the first half of the block, then those of the second half."""
    words = block_words(unit, block, part)
    return values(arch, fmt, words.get("Q4"), lambda: bytes_of(words, part.words))


def bytes_of(codes: Mapping[str, Sequence[Expr]], count: int = HALF) -> list[Expr]:
    """Codes as words of bytes: `count` neighbouring words of each half of a block. codes: {plane: words}; words of Q1
    and Q2 must be shifted so that the first of these codes is in their lowest bits."""
    parts: list[Expr] = [None] * (2 * count)
    filled = 0
    for plane, words in codes.items():
        bits = PLANE_BITS[plane]
        for i in range(2 * count):
            half, j = divmod(i, count)
            index, first = {"Q8": (i, 0), "Q4": (j, 4 * half), "Q2": (half, 2 * j), "Q1": (0, 4 * half + j)}[plane]
            part = words[index] if bits == 8 else field(words[index], first, bits, filled)
            parts[i] = part if parts[i] is None else parts[i] | part
        filled += bits
    return [T.Bind(part) for part in parts]


def field(x: Expr, first: Expr, bits: int, to: int, ones: int = 0x01010101) -> Expr:
    """Bits first .. first + bits - 1 of each byte of a word, moved to bit `to`. first: an int or a register. ones: a
    word with the lowest bit of each field set; by default fields are bytes."""
    if not isinstance(first, int):
        x = T.shift_left(T.shift_right(x, T.cast(first, "uint32")), T.uint32(to))
    elif first != to:
        x = T.shift_right(x, T.uint32(first - to)) if first > to else T.shift_left(x, T.uint32(to - first))
    return x & T.uint32(ones * ((1 << bits) - 1 << to))


def minus(word: Expr, zero: int) -> Expr:
    """Bytes below 128 minus `zero`, as signed bytes."""
    top = T.uint32(SIGN)  # keeps borrows within a byte
    return ((word | top) - T.uint32(0x01010101 * zero)) ^ top


def _byte(word: Expr, i: int, kind: str = "uint8") -> Expr:
    """Byte i of a word as float32. kind: "uint8", "int8" or one of MINIFLOATS."""
    if kind == "int8":
        word = T.shift_right(T.shift_left(T.reinterpret("int32", word), T.int32(24 - 8 * i)), T.int32(24))
    else:
        word = T.shift_right(word, T.uint32(8 * i)) & T.uint32(255)
    return T.Bind(minifloat(kind, T.reinterpret("int32", word)) if kind in MINIFLOATS else T.cast(word, "float32"))


def scales(fmt: Format, unit: Unit, block: int) -> Scales:
    """The float32 factors of block number `block` of a unit."""

    def half(name: str) -> Expr:
        found = unit.scales[name]
        return T.Bind(T.cast(found[block if len(found) > 1 else 0], "float32"))

    count = groups(fmt)
    word, first = divmod(block * count, WORD)  # place of the block's bytes of S and Z
    indices = range(first, first + count)
    if fmt.minifloat:
        sub = [_byte(unit.scales["S"][word], i, fmt.minifloat) for i in indices]
        return Scales(sub[0], [None], None, [None]) if fmt.block == BLOCK else Scales(None, sub, None, [None] * count)
    minimum = half(fmt.minimum) if fmt.minimum else None
    if "S" not in fmt.scales:
        return Scales(half("D"), [None] * count, minimum, [None] * count)
    sub, zub = unit.scales["S"][word], unit.scales["Z"][word] if "Z" in fmt.scales else None
    if fmt.nibble_scales:
        sub, zub = (T.Bind(T.shift_right(sub, T.uint32(shift)) & T.uint32(0x0F0F0F0F)) for shift in (0, 4))
    mins: list[Expr | None] = [None] * count if zub is None else [_byte(zub, i) for i in indices]
    d = half("D") if fmt.unit == 1 else T.Bind(half("D") * T.float32(fmt.unit))
    return Scales(d, [_byte(sub, i, fmt.dtype) for i in indices], minimum, mins)


# ---- tables

Table = tuple[int, ...]  # signed bytes, 8 or 16

BYTE_SELECT = 0x03020100  # the selector of a byte permute that changes nothing


def values(
    arch: Device, fmt: Format, nibbles: list[Expr] | None, codes: Callable[[], Sequence[Expr]], flip: int = 0
) -> list[Expr]:
    """The values of codes as words of four bytes: codes() itself; or for a format with a table, the entries of the
    table, signed bytes ^ flip. codes(): words of four codes. nibbles: for formats with one plane of nibbles its words,
    whose low nibbles are the first half of the codes; otherwise None. flip: 0, or 0x80 for unsigned bytes that are 128
    higher."""
    if not fmt.table:
        return list(codes())
    if arch.api == "vulkan" and fmt.table == FP4_VALUES and nibbles:
        return _fp4(nibbles, flip)
    return [_lookup(arch, fmt.table, x, flip) for x in codes()]


def _bits(x: Expr, mask: int) -> Expr:
    """The bits of `mask` in each byte."""
    return x & T.uint32(0x01010101 * mask)


def _words(table: Table, flip: int = 0) -> list[Expr]:
    packed = bytes((v ^ flip) & 255 for v in table)
    return [T.uint32(int.from_bytes(packed[i : i + 4], "little")) for i in range(0, len(packed), 4)]


def _lookup(arch: Device, table: Table, x: Expr, flip: int) -> Expr:
    """table[code] ^ flip for a word of four codes. The table has 8 or 16 entries."""
    words = _words(table, flip)
    if arch.api == "vulkan":
        return _selected(table, x, flip)
    if len(table) == 8:  # a byte permute selects among eight bytes
        return intrin("uint32", "llvm.amdgcn.perm", words[1], words[0], x)
    # two byte permutes for the halves of the table, then a third one that selects by bit 3 of the code
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
    """Bytes 0 .. 127, negated if the byte in `top` is 0x80 (otherwise it must be 0), ^ flip."""
    top = T.Bind(top)
    sign = T.Bind(T.shift_right(top, T.uint32(7)))
    # computed as 127 - magnitude, plus 1, without a carry into the next byte, even for 0
    return T.Bind(((magnitude ^ (top - sign)) + sign) ^ (top ^ T.uint32(0x01010101 * flip)))


def fp4_magnitudes(w: Expr) -> Expr:
    """The magnitudes of FP4_VALUES for a word of eight codes, as nibbles. For the bits s, c, b, a of a code, the
    magnitude is 4c + 2b + a; if c is 1, plus 2b + a; and plus 2 if all three are 1."""
    # bit c, moved to the places of a and of b
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
