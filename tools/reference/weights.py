"""Packed weights as numbers, from the planes of both layouts of dist/README.md (schedules/cpu/linear/planes.py,
schedules/gpu/base/planes.py).

In: a format's name and its planes by name, as arrays. Out: float32 rows, bit for bit equal to gguf-py's `dequantize`.
In both layouts, a block of 32 columns has the same words of four bytes; the CPU's layout interleaves the words of 16
rows.
"""

import numpy as np

from mlc_amd.schedules.formats import FORMATS, Format

TILE, BLOCK = 16, 32  # rows that the CPU's layout interleaves; columns of a block
BITS = {"Q1": 1, "Q2": 2, "Q4": 4}


def rows_of(layout: str, fmt: str, planes: dict[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Rows of a matrix, float32 [len(rows), k]. layout: "cpu" or "gpu"."""
    form = FORMATS[fmt]
    parts = {name: _rows(layout, name, plane, rows) for name, plane in planes.items()}
    if form.kind == "float":
        stored = parts["W"]
        return (stored.astype(np.uint32) << 16).view(np.float32) if fmt == "bf16" else stored.astype(np.float32)
    value = _codes(form, parts)
    value = np.array(form.table, np.float32)[value] if form.table else (value - form.zero).astype(np.float32)
    return _scaled(form, parts, value)


def _rows(layout: str, name: str, plane: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The rows of a plane. Code planes: bytes [rows, blocks, words, 4]. Other planes: [rows, groups]."""
    if layout == "gpu":
        picked = np.ascontiguousarray(plane[rows])
        return picked.view(np.uint8).reshape(len(rows), plane.shape[1], -1, 4) if name[0] == "Q" else picked
    tiles, of_tile = plane[rows // TILE], rows % TILE
    if name[0] == "Q":
        words = tiles.reshape(len(rows), plane.shape[1], -1, TILE, 4)
        return words[np.arange(len(rows)), :, :, of_tile]
    return tiles[np.arange(len(rows)), :, of_tile]


def _codes(form: Format, parts: dict[str, np.ndarray]) -> np.ndarray:
    """Codes int32 [rows, k]. In a block, column 4*j + i is byte i of word j."""
    if form.signed:
        return parts["Q8"].view(np.int8).astype(np.int32).reshape(len(parts["Q8"]), -1)
    code, filled = 0, 0
    for plane in form.codes:
        words, bits = parts[plane], BITS[plane]
        # Q4: the low nibbles of all words, then the high ones. Q2, Q1: all fields of a word, then those of the next
        # word
        shifts = range(0, 8, bits)
        fields = [(words >> shift) & ((1 << bits) - 1) for shift in shifts]
        ordered = np.stack(fields, 2 if plane == "Q4" else 3)
        code = code | ordered.reshape(len(words), -1).astype(np.int32) << filled
        filled += bits
    return np.asarray(code)


def _scaled(form: Format, parts: dict[str, np.ndarray], value: np.ndarray) -> np.ndarray:
    """Applies the formula of schedules/formats.py."""

    def each(numbers: np.ndarray, columns: int) -> np.ndarray:
        return np.repeat(numbers.astype(np.float32), columns, 1)

    scale = np.float32(form.unit)
    if "D" in form.scales:
        scale = each(parts["D"], form.block) * scale
    if "S" in form.scales:
        stored = parts["S"]
        numbers = _minifloat(form.dtype, stored) if form.minifloat else stored & 15 if form.nibble_scales else stored
        scale = scale * each(numbers, form.group)
    weight = scale * value
    if form.minimum == "M":
        return weight + each(parts["M"], form.block)
    if form.minimum == "DM":
        minimum = parts["S"] >> 4 if form.nibble_scales else parts["Z"]
        return weight - each(parts["DM"], form.block) * each(minimum, form.group)
    return weight


def _minifloat(kind: str, byte: np.ndarray) -> np.ndarray:
    """Decodes small floats. e8m0: half of OCP's value, a power of two. e5m3: bits 14 to 7 of a float16."""
    if kind == "e8m0":
        return np.ldexp(np.float32(1), byte.astype(np.int32) - 128)
    return (byte.astype(np.uint16) << 7).view(np.float16)
