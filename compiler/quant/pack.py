"""GGUF rows to the planes of a weight in the CPU's layout: lossless, vectorized, in pieces that stay in the cache.

In: rows of a tensor as GGUF stores them. Out: the planes of `mlc_amd.schedules.cpu.planes`, name -> array. The row tile is the outermost
axis of every plane: a tensor can be repacked in chunks of rows (multiples of 16, but for the last), by several threads (numpy releases
the GIL), and each plane's chunks written one after the other.
"""
import numpy as np

from mlc_amd.compiler.quant.unpack import UNPACK, Blocks
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.cpu.planes import ROWS, planes
from mlc_amd.schedules.formats import PLANE_BITS, Format, lookup

PIECE = 256 << 10       # bytes of GGUF blocks worked on at once: the intermediate arrays (about six times that) stay in the L2 cache


# The words (4 columns, `unpack`) of a block that share a code plane's bytes, lowest bits first
WORDS = {
    "Q8": (slice(0, 8),),
    "Q4": (slice(0, 4), slice(4, 8)),
    "Q2": tuple(slice(t, 8, 4) for t in range(4)),
    "Q1": tuple(slice(j, j + 1) for j in range(8)),
}


def _pack_codes(fmt: Format, codes: np.ndarray, out: dict[str, np.ndarray]) -> None:
    """Fills the code planes from codes uint32 [NT, KB, 8, 16], one byte a code."""
    shift = 0
    for plane in fmt.codes:
        bits = PLANE_BITS[plane]
        words = out[plane].view(np.uint32).reshape(*codes.shape[:2], -1, ROWS)
        for i, part in enumerate(WORDS[plane]):
            field = codes[:, :, part] >> np.uint32(shift)
            field &= np.uint32(0x01010101 * ((1 << bits) - 1))
            field <<= np.uint32(i * bits)
            if i:
                words |= field
            else:
                words[...] = field
        shift += bits


def repack(fmt: str | Format, blocks: np.ndarray, k: int) -> dict[str, np.ndarray]:
    """The planes of some rows of a tensor.

    blocks: uint8 [rows, bytes of a row] as in the GGUF file; k: columns. Planes as `planes(fmt, rows, k)` says: rows are padded up to a
    multiple of 16 with zero codes and zero scales. UserError when a row's bytes do not hold k columns.
    """
    fmt = lookup(fmt)
    rows, row_bytes = blocks.shape
    shapes = planes(fmt, rows, k)
    if row_bytes != k // fmt.block * fmt.block_bytes:
        raise UserError(f"{row_bytes} bytes a row cannot be {k} columns of {fmt.name}; the GGUF file's tensor table is damaged")
    out = {name: np.empty(shape, dtype) for name, (shape, dtype) in shapes.items()}
    step = max(1, PIECE // (ROWS * row_bytes)) * ROWS
    for start in range(0, rows, step):
        piece = np.ascontiguousarray(blocks[start:start + step])
        live = piece.shape[0]
        if live % ROWS:
            piece = np.concatenate([piece, np.zeros((-live % ROWS, row_bytes), np.uint8)])
        tiles = slice(start // ROWS, start // ROWS + piece.shape[0] // ROWS)
        if fmt.kind == "float":
            out["W"][tiles] = piece.view(fmt.dtype).reshape(-1, ROWS, k).transpose(0, 2, 1)
            continue
        codes, scales = UNPACK[fmt.name](Blocks(piece, fmt.block_bytes))
        _pack_codes(fmt, codes, {p: out[p][tiles] for p in fmt.codes})
        for name, values in scales.items():
            out[name][tiles] = values
    if rows % ROWS and "S" in out:
        out["S"][-1, :, rows % ROWS:] = 0        # a zero byte is not a zero scale in q3_k and iq4_xs
    return out
