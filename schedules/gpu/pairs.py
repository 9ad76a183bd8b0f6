"""The activation layout "pairs": float16 in the order in which packed arithmetic finds the columns of quantized
weights.

A word of a code plane (layout "rows": `planes.py`) holds one byte of each of columns 4*j .. 4*j + 3, and a nibble
plane's byte those of columns 4*j + i and 16 + 4*j + i. Fields 16 bits apart become float16 two at a time, so what word
j gives by shifting alone is the run j:

    4*j, 4*j + 2,    16 + 4*j, 16 + 4*j + 2,    4*j + 1, 4*j + 3,    16 + 4*j + 1, 16 + 4*j + 3

of eight halves, 16 bytes. A product over columns may take them in any order, so activations are stored in this one: H
float16 [m, k], each block of 32 columns being the runs 0 to 3. `gemm_coop.py` multiplies them.
"""

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.planes import BLOCK

RUN = 8  # columns of a run
RUNS = BLOCK // RUN
# run j, element i: the column within the block
RUN_COLUMNS = tuple(tuple(4 * j + 16 * (i // 2 % 2) + 2 * (i % 2) + i // 4 for i in range(RUN)) for j in range(RUNS))


def in_pairs(x):
    """A numpy array [..., k] with the columns of each block in this order; k is a multiple of 32."""
    order = [column for run in RUN_COLUMNS for column in run]
    return x.reshape(*x.shape[:-1], -1, BLOCK)[..., order].reshape(x.shape)


def from_pairs(x):
    """The inverse of `in_pairs`."""
    place = sorted(range(BLOCK), key=[column for run in RUN_COLUMNS for column in run].__getitem__)
    return x.reshape(*x.shape[:-1], -1, BLOCK)[..., place].reshape(x.shape)


def store_pairs(out, token, column, x):
    """Writes columns `column`.. (a multiple of 4) of a token: x, four float16 registers each of them, into out [m,
    k]."""
    for first in range(0, len(x), 4):
        start = T.Bind(column + first)
        quad = T.Bind(start % BLOCK // 4)
        place = T.Bind(start // BLOCK * BLOCK + quad % RUNS * RUN + quad // RUNS * 2)
        for odd in (0, 1):
            pair = T.Shuffle([x[first + odd], x[first + odd + 2]], [T.int32(0), T.int32(1)])
            T.buffer_store(out, pair, [token, T.ramp(place + 4 * odd, 1, 2)])
