"""A lane's share of a tile of weights on matrix units: from planes (layout "rows": `planes.py`) to words of bytes and
to scales, for every int8 format.

A lane has one row, and of each half of a block of 32 columns the words count*part .. count*part + count - 1 of four
columns (`matrix_int8.py`: count, part). A step is `blocks` blocks of a row, of which scales and the planes of one and
two bits are loaded in one go:

    views       the planes' buffers as `fetch` reads them
    fetch       the loads of a step
    words       of a block: the words of both halves, signed bytes
    scales      of a block: `load.Scales`
"""

from math import prod
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.schedules.formats import PLANE_BITS, Format
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.tables import values
from mlc_amd.schedules.gpu.linear import load
from mlc_amd.schedules.gpu.linear.load import Planes
from mlc_amd.schedules.tir import Expr

HALVES = 2  # of a block
WORD = 4  # bytes


class Share(NamedTuple):
    """The registers of a step. codes: plane -> words by block. scales: plane -> registers, of S and Z words of
    bytes."""

    codes: dict[str, list[list[Expr]]]
    scales: dict[str, list[Expr]]


def _bytes(fmt: Format, blocks: int) -> int:
    """Of S or Z in a step."""
    return blocks * BLOCK // fmt.group


def views(fmt: Format, bufs: Planes, blocks: int) -> Planes:
    """The planes as rows of words, S and Z of bytes in words of up to 32 bits. Declares views; call it after the last
    parameter."""
    out = {}
    for name, buf in bufs.items():
        rows, size = int(buf.shape[0]), prod(int(extent) for extent in buf.shape[1:])
        if name in ("S", "Z"):
            width = min(WORD, _bytes(fmt, blocks))
            out[name] = T.decl_buffer((rows, size // width), f"uint{8 * width}", data=buf.data)
        else:
            out[name] = buf if len(buf.shape) == 2 else T.decl_buffer((rows, size), buf.dtype, data=buf.data)
    return out


def fetch(fmt: Format, planes: Planes, row: Expr, first: Expr, blocks: int, part: Expr, count: int) -> Share:
    """Loads blocks first .. first + blocks - 1 of a row; `first` is a multiple of `blocks`."""
    codes, scales = {}, {}
    for plane in fmt.codes:
        bits, buf = PLANE_BITS[plane], planes[plane]
        if bits <= 2:  # bits of all columns are in the same word
            found = load.wide(buf, row, first * bits, blocks * bits)
            codes[plane] = [found[b * bits : (b + 1) * bits] for b in range(blocks)]
            continue
        starts = range(0, bits, 4)
        codes[plane] = [
            [word for start in starts for word in load.wide(buf, row, (first + b) * bits + start + part * count, count)]
            for b in range(blocks)
        ]
    for name in fmt.scales:
        if name in ("S", "Z"):
            total = _bytes(fmt, blocks)
            width = min(WORD, total)
            found = load.wide(planes[name], row, first * (BLOCK // fmt.group) // width, total // width)
            scales[name] = [T.Bind(T.cast(x, "uint32")) for x in found] if width < WORD else found
        elif fmt.block > BLOCK:
            scales[name] = [T.Bind(planes[name][row, first // (fmt.block // BLOCK)])]
        else:
            scales[name] = load.wide(planes[name], row, first, blocks)
    return Share(codes, scales)


def words(arch: Device, fmt: Format, share: Share, block: int, part: Expr, count: int) -> list[list[Expr]]:
    """The int32 words of signed bytes of a step's block number `block`: `count` of each half."""
    raw = {plane: share.codes[plane][block] for plane in fmt.codes}
    for plane, bits in (("Q2", 2), ("Q1", 1)):
        if plane in raw and count < WORD:
            raw[plane] = [T.Bind(T.shift_right(x, T.cast(part * (count * bits), "uint32"))) for x in raw[plane]]

    def codes() -> list[Expr]:
        found: list[Expr] = [None] * (HALVES * count)
        filled = 0
        for plane in fmt.codes:
            bits = PLANE_BITS[plane]
            for i in range(HALVES * count):
                half, j = divmod(i, count)
                word, first = {
                    "Q8": (raw[plane][i % len(raw[plane])], 0),
                    "Q4": (raw[plane][j % len(raw[plane])], 4 * half),
                    "Q2": (raw[plane][half % len(raw[plane])], 2 * j),
                    "Q1": (raw[plane][0], WORD * half + j),
                }[plane]
                field = word if bits == 8 else load.field(word, first, bits, filled)
                found[i] = field if found[i] is None else found[i] | field
            filled += bits
        return [T.Bind(x) for x in found]

    found = values(arch, fmt, None, codes) if fmt.table else codes()
    found = [T.Bind(T.reinterpret("int32", x)) for x in found]
    return [found[:count], found[count:]]


def scales(fmt: Format, share: Share, block: int) -> load.Scales:
    """The float32 factors of a step's block number `block`."""
    own, number = {}, 0
    for name, found in share.scales.items():
        if name in ("S", "Z"):
            first = block * (BLOCK // fmt.group)
            own[name], number = [found[first // WORD]], first % WORD // (BLOCK // fmt.group)
        else:
            own[name] = [found[block if fmt.block == BLOCK else 0]]
    return load.scales(fmt, load.Unit({}, own), number)
