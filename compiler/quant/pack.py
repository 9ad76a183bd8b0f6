"""Converts GGUF rows to the planes of a target's layout: lossless, vectorized, in pieces that fit the CPU's cache.

In: rows of a tensor as GGUF stores them. Out: planes, {name: array}, in the layout "tile16"
(`mlc_amd.schedules.cpu.linear.planes`) or "rows" (`mlc_amd.schedules.gpu.base.planes`).

Rows, or tiles of 16 rows, are the outermost axis of every plane. So a tensor can be repacked in chunks of rows
(multiples of 16, except for the last one) by several threads (numpy releases the GIL), and the chunks of a plane can be
written one after the other.

Both layouts hold the same 32-bit words of codes and the same scales: an array [NT, x, 16 rows] in "tile16" is [NT * 16,
x] in "rows". The work is done in the order of "tile16"; for "rows" the results are written through transposed views.
"""

import numpy as np

from mlc_amd.compiler.quant.blocks import UNPACK, Blocks
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.cpu.linear import planes as cpu
from mlc_amd.schedules.cpu.linear.planes import BLOCK, ROWS
from mlc_amd.schedules.formats import PLANE_BITS, Format, lookup
from mlc_amd.schedules.gpu.base import planes as gpu

LAYOUTS = {"tile16": cpu.planes, "rows": gpu.planes}  # name -> planes(fmt, n, k): shapes and dtypes
# bytes of GGUF blocks in a piece: its intermediate arrays (about six times as many bytes) stay in the L2 cache
PIECE = 256 << 10
# A block has 8 words of 4 columns (`blocks`). For each code plane, the words that share its bytes, lowest bits first
WORDS = {
    "Q8": (slice(0, 8),),
    "Q4": (slice(0, 4), slice(4, 8)),
    "Q2": tuple(slice(t, 8, 4) for t in range(4)),
    "Q1": tuple(slice(j, j + 1) for j in range(8)),
}


def _tiled_words(plane: np.ndarray, layout: str, blocks: int) -> np.ndarray:
    """A view of a code plane as uint32 [NT, KB, words, 16], in either layout. blocks: KB, the blocks of a row."""
    if layout == "tile16":
        return plane.view(np.uint32).reshape(plane.shape[0], blocks, -1, ROWS)
    return plane.reshape(-1, ROWS, blocks, plane.size // (plane.shape[0] * blocks)).transpose(0, 2, 3, 1)


def _tiled(plane: np.ndarray, layout: str) -> np.ndarray:
    """A view of a plane of scales or of float weights as [NT, values of a row, 16], in either layout."""
    return plane if layout == "tile16" else plane.reshape(-1, ROWS, plane.shape[1]).transpose(0, 2, 1)


def _pack_codes(fmt: Format, codes: np.ndarray, out: dict[str, np.ndarray]) -> None:
    """Fills the code planes, seen through `_tiled_words`, from codes uint32 [NT, KB, 8, 16], one byte a code."""
    shift = 0
    for plane in fmt.codes:
        bits = PLANE_BITS[plane]
        words = np.empty(out[plane].shape, np.uint32)
        for i, part in enumerate(WORDS[plane]):
            field = codes[:, :, part] >> np.uint32(shift)
            field &= np.uint32(0x01010101 * ((1 << bits) - 1))
            field <<= np.uint32(i * bits)
            if i:
                words |= field
            else:
                words[...] = field
        out[plane][...] = words
        shift += bits


def repack(fmt: str | Format, blocks: np.ndarray, k: int, layout: str = "tile16") -> dict[str, np.ndarray]:
    """The planes of some rows of a tensor.

    blocks: uint8 [rows, bytes of a row], as in the GGUF file. k: columns. layout: a key of LAYOUTS. The planes have the
    shapes and dtypes of the layout's `planes(fmt, rows, k)`: rows are padded to a multiple of 16 with zero codes and
    zero scales. Raises UserError if the bytes of a row do not hold k columns.
    """
    fmt = lookup(fmt)
    rows, row_bytes = blocks.shape
    shapes = LAYOUTS[layout](fmt, rows, k)
    if row_bytes != k // fmt.block * fmt.block_bytes:
        raise UserError(
            f"{row_bytes} bytes a row cannot be {k} columns of {fmt.name}; the GGUF file's tensor table is damaged"
        )
    out = {name: np.empty(shape, dtype) for name, (shape, dtype) in shapes.items()}
    tiled = {p: _tiled_words(a, layout, k // BLOCK) if p in fmt.codes else _tiled(a, layout) for p, a in out.items()}
    step = max(1, PIECE // (ROWS * row_bytes)) * ROWS
    for start in range(0, rows, step):
        piece = np.ascontiguousarray(blocks[start : start + step])
        live = piece.shape[0]
        if live % ROWS:
            piece = np.concatenate([piece, np.zeros((-live % ROWS, row_bytes), np.uint8)])
        tiles = slice(start // ROWS, start // ROWS + piece.shape[0] // ROWS)
        if fmt.kind == "float":
            tiled["W"][tiles] = piece.view(fmt.dtype).reshape(-1, ROWS, k).transpose(0, 2, 1)
            continue
        codes, scales = UNPACK[fmt.name](Blocks(piece, fmt.block_bytes))
        _pack_codes(fmt, codes, {p: tiled[p][tiles] for p in fmt.codes})
        for name, values in scales.items():
            tiled[name][tiles] = values
    if rows % ROWS and "S" in out:
        tiled["S"][-1, :, rows % ROWS :] = 0  # a zero byte is not a zero scale in q3_k, iq1 to iq4
    return out
