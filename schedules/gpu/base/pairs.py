"""The activation layout "pairs": float16 in the order in which packed arithmetic finds the columns of quantized
weights.

A word of a code plane (layout "rows": `planes.py`) holds one byte of each of columns 4*j .. 4*j + 3, and a nibble
plane's byte those of columns 4*j + i and 16 + 4*j + i. Fields 16 bits apart become float16 two at a time, so what word
j contains, but for shifts, is the run j:

    4*j, 4*j + 2,    16 + 4*j, 16 + 4*j + 2,    4*j + 1, 4*j + 3,    16 + 4*j + 1, 16 + 4*j + 3

of eight halves, 16 bytes. A product over columns may take them in any order, so activations are stored in this one: H
float16 [m, k], each block of 32 columns being the runs 0 to 3. `gemm_coop.py` multiplies them.

The layout "lanes" has the same runs in the order in which the lanes of `gemm_lanes.py` load them, so that a subgroup
reads 512 bytes side by side:

    H float16 [ceil(m / 8), ceil(k / 128), 1024]    eight tokens and a group of four blocks each: 1024 are
              [run, token, block, column of the run]    4 x 8 x 4 x 8; tokens and blocks that do not exist are undefined
"""

from collections.abc import Sequence

import numpy as np
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.registers import vector
from mlc_amd.schedules.tir import Buffer, Expr

RUN = 8  # columns of a run
RUNS = BLOCK // RUN
TOKENS = 8  # of a unit of the layout "lanes"
GROUP = 4  # blocks of such a unit
LANES = RUNS * TOKENS * GROUP * RUN  # halves of such a unit
# run j, element i: the column within the block
RUN_COLUMNS = tuple(tuple(4 * j + 16 * (i // 2 % 2) + 2 * (i % 2) + i // 4 for i in range(RUN)) for j in range(RUNS))


def in_pairs(x: np.ndarray) -> np.ndarray:
    """A numpy array [..., k] with the columns of each block in this order; k is a multiple of 32."""
    order = [column for run in RUN_COLUMNS for column in run]
    return x.reshape(*x.shape[:-1], -1, BLOCK)[..., order].reshape(x.shape)


def from_pairs(x: np.ndarray) -> np.ndarray:
    """The inverse of `in_pairs`."""
    place = sorted(range(BLOCK), key=[column for run in RUN_COLUMNS for column in run].__getitem__)
    return x.reshape(*x.shape[:-1], -1, BLOCK)[..., place].reshape(x.shape)


def lanes_shape(m: int, k: int) -> tuple[int, int, int]:
    """Of H for m tokens of k columns in the layout "lanes"."""
    return -(-m // TOKENS), -(-k // (GROUP * BLOCK)), LANES


def in_lanes(x: np.ndarray) -> np.ndarray:
    """A numpy array [m, k], k a multiple of 32, in the layout "lanes"; what does not exist is 0."""
    tiles, groups, _ = lanes_shape(*x.shape)
    whole = np.zeros((tiles * TOKENS, groups * GROUP * BLOCK), x.dtype)
    whole[: x.shape[0], : x.shape[1]] = in_pairs(x)
    return whole.reshape(tiles, TOKENS, groups, GROUP, RUNS, RUN).transpose(0, 2, 4, 1, 3, 5).reshape(tiles, groups, -1)


def store_pairs(out: Buffer, token: Expr, column: Expr, x: Sequence[Expr]) -> None:
    """Writes columns `column`.. (a multiple of 4) of a token: x, four float16 registers each of them, into out [m,
    k]."""
    for start, values in _quads(column, x):
        quad = T.Bind(start % BLOCK // 4)
        place = T.Bind(start // BLOCK * BLOCK + quad % RUNS * RUN + quad // RUNS * 2)
        for odd, pair in enumerate(_pairs(values)):
            T.buffer_store(out, pair, [token, T.ramp(place + 4 * odd, 1, 2)])


def store_lanes(out: Buffer, token: Expr, column: Expr, x: Sequence[Expr]) -> None:
    """As `store_pairs`, into `out` in the layout "lanes"."""
    for start, values in _quads(column, x):
        quad, block = T.Bind(start % BLOCK // 4), T.Bind(start // BLOCK)
        lane = T.Bind(token % TOKENS * GROUP + block % GROUP)
        place = T.Bind((quad % RUNS * (TOKENS * GROUP) + lane) * RUN + quad // RUNS * 2)
        for odd, pair in enumerate(_pairs(values)):
            T.buffer_store(out, pair, [token // TOKENS, block // GROUP, T.ramp(place + 4 * odd, 1, 2)])


def store_run(out: Buffer, token: Expr, column: Expr, x: Sequence[Expr]) -> None:
    """As `store_lanes`, columns `column`.. and column + 16.., four each: a run. column: a multiple of 4 in the first
    half of a block."""
    block, run = T.Bind(column // BLOCK), T.Bind(column % BLOCK // 4)
    lane = T.Bind(token % TOKENS * GROUP + block % GROUP)
    place = T.ramp((run * (TOKENS * GROUP) + lane) * RUN, 1, RUN)
    order = [x[i // 2 % 2 * 4 + 2 * (i % 2) + i // 4] for i in range(RUN)]
    T.buffer_store(out, vector(order), [token // TOKENS, block // GROUP, place])


def _quads(column: Expr, x: Sequence[Expr]) -> list[tuple[Expr, Sequence[Expr]]]:
    """(first column, its values) of every four."""
    return [(T.Bind(column + first), x[first : first + 4]) for first in range(0, len(x), 4)]


def _pairs(x: Sequence[Expr]) -> list[Expr]:
    """The even and the odd columns of four as float16x2."""
    return [T.Shuffle([x[odd], x[odd + 2]], [T.int32(0), T.int32(1)]) for odd in (0, 1)]
