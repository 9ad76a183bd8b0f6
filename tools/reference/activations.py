"""Reads and writes rows of numbers in the layouts in which kernels pass them to one another (compiler/ops.py: LAYOUTS):

""       float32 [m, k]
"pairs"  float16 [m, k], with another order of columns within a block: schedules/gpu/base/quantize.py
"lanes:g"  float16 [tiles of 8 rows, groups of g blocks, 4 runs, 8 rows, g blocks, 8 columns], the last four in one
         dimension: schedules/gpu/base/quantize.py. Padding rows and columns of a tile or group are read, too
"rows"   A int8 [m, blocks, 32], S float32 [m, blocks, 4]: schedules/gpu/base/quantize.py
"tiles"  A int8 [tiles, blocks, p, 32], S float32 [tiles, blocks, 8, p]: schedules/cpu/linear/quantize.py
"""

import numpy as np

BLOCK = 32
# The order in which "pairs" stores the columns of a block: runs of eight; run j has columns 4*j .. 4*j + 3 and the
# columns 16 after these.
PAIRS = np.array([4 * j + 16 * (i // 2 % 2) + 2 * (i % 2) + i // 4 for j in range(4) for i in range(8)])
HALF_MAX = 65504.0


def quantized(a: np.ndarray, s: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(q int32 [m, blocks, 32], d float32 [m, blocks], [m, blocks, 3]: d times the sums of q, of its first half and of
    its last half), from either int8 layout."""
    if a.ndim == 4:
        tiles, blocks, p, _ = a.shape
        a = a.transpose(0, 2, 1, 3).reshape(tiles * p, blocks, BLOCK)
        s = s.transpose(0, 3, 1, 2).reshape(tiles * p, blocks, 8)[..., [0, 1, 3, 4]]
    return a.astype(np.int32), s[..., 0], s[..., 1:4]


def read(layout: str, arrays: dict[str, np.ndarray], suffix: str = "", rows: np.ndarray | None = None) -> np.ndarray:
    """Rows (None: all) as float32 [rows, k], from the parameters A and S, or H, or X, Y or O, whichever exist."""
    if layout.partition(":")[0] in ("rows", "tiles"):
        a, s = arrays["A" + suffix], arrays["S" + suffix]
        if rows is not None and a.ndim == 3:
            a, s, rows = a[rows], s[rows], None
        q, d, _ = quantized(a, s)
        x = (q * d[..., None]).reshape(len(q), -1)
        return x if rows is None else x[rows]
    x = next(arrays[name + suffix] for name in ("H", "X", "Y", "O") if name + suffix in arrays)
    name, _, number = layout.partition(":")
    if name == "lanes":
        rows = np.arange(8 * len(x)) if rows is None else rows
        tiles = x.reshape(len(x), -1, 4, 8, int(number), 8)[rows // 8]
        x = tiles[np.arange(len(rows)), :, :, rows % 8].transpose(0, 1, 3, 2, 4).reshape(len(rows), -1)
    elif rows is not None:
        x = x[rows]
    if name not in ("pairs", "lanes"):
        return x.astype(np.float32)
    blocks = x.reshape(len(x), -1, BLOCK)
    found = np.empty(blocks.shape, np.float32)
    found[..., PAIRS] = blocks
    return found.reshape(x.shape)


def _blocks(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x [m, k] as int8 blocks: (q int8 [m, blocks, 32], d float32 [m, blocks])."""
    blocks = x.reshape(len(x), -1, BLOCK).astype(np.float32)
    d = np.abs(blocks).max(-1) / np.float32(127)
    q = np.rint(np.divide(blocks, d[..., None], out=np.zeros_like(blocks), where=d[..., None] > 1e-32))
    return q.astype(np.int8), d


def rounded(x: np.ndarray) -> np.ndarray:
    """x [m, k] after rounding to int8 blocks, float32."""
    q, d = _blocks(x)
    return (q * d[..., None]).reshape(x.shape)


def write(layout: str, x: np.ndarray, arrays: dict[str, np.ndarray], suffix: str, rows: np.ndarray) -> None:
    """Writes x [len(rows), k] to these rows of the parameters A and S. Of S only the scales are written; `read` needs
    no more."""
    name, _, number = layout.partition(":")
    q, d = _blocks(x)
    if name == "rows":
        arrays["A" + suffix][rows], arrays["S" + suffix][rows, :, 0] = q, d
    else:
        p = int(number)
        arrays["A" + suffix][rows // p, :, rows % p] = q
        arrays["S" + suffix][rows // p, :, 0, rows % p] = d


def in_layout(layout: str, x: np.ndarray) -> np.ndarray:
    """x [m, k] in the layouts that have one array: "", "pairs" and "lanes"."""
    if layout == "":
        return x.astype(np.float32)
    x = np.clip(x, -HALF_MAX, HALF_MAX).astype(np.float16)
    x = x.reshape(len(x), -1, BLOCK)[..., PAIRS].reshape(x.shape)
    if layout == "pairs":
        return x
    g = int(layout.partition(":")[2])
    x = np.pad(x, ((0, -len(x) % 8), (0, -x.shape[1] % (g * BLOCK))))
    tiles, groups = len(x) // 8, x.shape[1] // (g * BLOCK)
    return x.reshape(tiles, 8, groups, g, 4, 8).transpose(0, 2, 4, 1, 3, 5).reshape(tiles, groups, -1)
