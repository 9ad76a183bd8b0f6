"""Weights from their planes (layout "rows": `planes.py`) to the registers of a GEMM, for every format.

The unit of work is a piece: half a block of 32 columns of one row, columns 8*part .. 8*part + 7 and 16 + 8*part .. 16 +
8*part + 7 (part 0 or 1: what two words of nibbles hold). Fetching and unpacking are separate, so that the loads of one
step can be in flight while the step before is multiplied:

    fetch           the global loads of a piece
    byte_piece      a piece as 16 signed bytes with scales and offsets, for int8 dot products
    real8           eight weights of a float format as float32
"""

from tvm.tirx.script import builder as T

from mlc_amd.schedules.decode import minifloat
from mlc_amd.schedules.formats import PLANE_BITS, Format
from mlc_amd.schedules.gpu.base.planes import BLOCK, Planes
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import at, lane_of, vector
from mlc_amd.schedules.gpu.linear.load import bytes_of, values
from mlc_amd.schedules.tir import Expr

Raw = dict[str, list[Expr]]  # what `fetch` loads: by plane

PIECE = 16  # columns of a piece


def columns_of(part: Expr) -> tuple[Expr, Expr]:
    """First columns, within their block, of the two runs of eight that make a piece."""
    return 8 * part, 16 + 8 * part


# ---- loads


def fetch(fmt: Format, bufs: Planes, row: Expr, block: Expr, part: Expr) -> Raw:
    """The loads of a piece, in registers: name of a plane -> list of loaded values."""
    if fmt.kind == "float":
        return {"W": [T.Bind(bufs["W"][row, at(block * BLOCK + column, 8)]) for column in columns_of(part)]}
    starts = {"Q4": ((2 * part, 2),), "Q8": ((2 * part, 2), (4 + 2 * part, 2)), "Q2": ((0, 2),)}
    raw = {p: [T.Bind(bufs[p][row, block, at(first, n)]) for first, n in starts[p]] for p in fmt.codes if p != "Q1"}
    if "Q1" in fmt.codes:
        raw["Q1"] = [T.Bind(bufs["Q1"][row, block])]
    for plane in fmt.scales:
        columns, _ = fmt.scale_plane(plane)
        count = max(1, BLOCK // columns)
        first = block * count if columns <= BLOCK else block // (columns // BLOCK)
        raw[plane] = [T.Bind(bufs[plane][row, first + i]) for i in range(count)]
    return raw


# ---- codes


def _codes(fmt: Format, raw: Raw, part: Expr) -> list[Expr]:
    """Four words of unsigned codes, one byte each; two words for each of the two runs of eight columns."""
    words = {}
    for plane in fmt.codes:
        found = raw[plane] if plane == "Q1" else [lane_of(x, i) for x in raw[plane] for i in range(2)]
        if (bits := PLANE_BITS[plane]) <= 2:
            found = [T.Bind(T.shift_right(x, T.cast(2 * bits * part, "uint32"))) for x in found]
        words[plane] = found
    return bytes_of(words, 2)


def _signed(arch: Device, fmt: Format, raw: Raw, part: Expr) -> list[Expr]:
    """Four words of signed bytes: the weights in units of the scale."""
    nibbles = [lane_of(raw["Q4"][0], i) for i in range(2)] if "Q4" in raw else None
    words = values(arch, fmt, nibbles, lambda: _codes(fmt, raw, part))
    if fmt.table or fmt.signed or not fmt.zero:
        return words
    top, zero = T.uint32(0x80808080), T.uint32(0x01010101 * fmt.zero)  # the top bits keep borrows inside their byte
    return [((word | top) - zero) ^ top for word in words]


# ---- scales


def scales(fmt: Format, raw: Raw) -> tuple[list[Expr], list[Expr] | None]:
    """(scales, minimums), lists of float32, one per group of columns of the block (two groups of 16 or one of 32).

    weight = scale * (code - zero) + minimum; minimums are None for formats without."""

    def real(x: Expr) -> Expr:
        return T.cast(x, "float32")

    if fmt.minifloat:
        return [T.Bind(minifloat(fmt.minifloat, T.cast(s, "int32"))) for s in raw["S"]], None
    d = real(raw["D"][0])
    if fmt.unit != 1:
        d = T.Bind(d * T.float32(fmt.unit))
    if "S" not in fmt.scales:
        return [T.Bind(d)], [T.Bind(real(raw["M"][0]))] if fmt.minimum else None
    subs, mins = raw["S"], raw.get("Z", [])
    if fmt.nibble_scales:
        subs, mins = [s & T.uint8(15) for s in subs], [T.shift_right(s, T.uint8(4)) for s in subs]
    found = [T.Bind(d * real(s)) for s in subs]
    return found, [T.Bind(-(real(raw["DM"][0]) * real(z))) for z in mins] if fmt.minimum else None


# ---- pieces


def byte_piece(arch: Device, fmt: Format, raw: Raw, part: Expr) -> tuple[list[Expr], list[Expr], list[Expr] | None]:
    """(runs, scales, minimums): the two runs of eight columns as int32x2, words of signed bytes; `scales` as above."""
    words = [T.Bind(T.reinterpret("int32", word)) for word in _signed(arch, fmt, raw, part)]
    return [vector(words[:2]), vector(words[2:])], *scales(fmt, raw)


def real8(fmt: Format, w: Expr) -> Expr:
    """Eight weights of a float format as float32x8."""
    if fmt.name == "bf16":
        return T.reinterpret("float32x8", T.shift_left(T.cast(w, "uint32x8"), T.broadcast(T.uint32(16), 8)))
    return T.cast(w, "float32x8")
