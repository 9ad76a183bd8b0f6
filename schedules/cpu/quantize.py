"""Quantizes activations: float32 in, int8 blocks of 32 columns out, in the one layout that every int8 format's linear kernel reads.

    A int8    [MT, KB, P, 32]   q = rint(x * (127 / amax)), amax = largest |x| of the 32 columns of one token
    S float32 [MT, KB, 8, P]    rows ("int32": the row holds an int32's bits, so that integer dot products can start from it):
        0  d = amax / 127                   1  d * sum(q)               2  int32: -sum(q)
        3  d * sum(q[:16])                  4  d * sum(q[16:])
        5  int32: -sum(q[:16])              6  int32: -sum(q[16:])      7  never written, never read

Token m of a chunk lives at [m // P, :, m % P]; KB = columns / 32, MT = ceil(M / P). Row 1 serves formats with a minimum per 32 columns,
row 2 those with a zero point, rows 3 to 6 the same for formats with scales per 16 columns: one quantization serves weights of all formats.
"""
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.cpu.vector import LANES, at, dtype, i32, reduce, splat, store

BLOCK = 32                      # columns that share a scale
FIELDS = 8                      # rows of S
# Below this the quotient 127 / amax could overflow: such a block becomes zeros.
TINY = 1e-30


def act_shapes(m, k, p):
    """Shapes of A (int8) and S (float32) for `m` tokens of `k` columns in tiles of `p` tokens. UserError unless 32 divides k."""
    if k % BLOCK:
        raise UserError(f"int8 activations need a multiple of {BLOCK} columns, not {k}; use a float weight format for this layer")
    tiles, blocks = -(-m // p), k // BLOCK
    return (tiles, blocks, p, BLOCK), (tiles, blocks, FIELDS, p)


def act_args(m, k, p):
    """Declares the kernel parameters A and S of that shape and returns the two buffers."""
    a, s = act_shapes(m, k, p)
    return T.arg("A", T.buffer(a, "int8")), T.arg("S", T.buffer(s, "float32"))


def emit_quantize_block(x0, x1, A, S, tile, block, row):
    """Stores one block of one token. x0, x1: float32x16, columns 0..15 and 16..31 of the block; tile = m // P, row = m % P of token m."""
    x = [T.Bind(x0), T.Bind(x1)]
    # Magnitudes compare like the integers that their bits are; LLVM's fmax would mind NaNs at each step.
    bits = [T.reinterpret(dtype("int32", LANES), v) & i32(0x7FFFFFFF) for v in x]
    top = T.Bind(T.reinterpret("float32", reduce("smax", T.max(*bits))))
    inverse = T.Bind(T.Select(top > T.float32(TINY), T.float32(127) / top, T.float32(0)))
    q = [T.Bind(T.cast(T.nearbyint(v * splat(inverse)), dtype("int32", LANES))) for v in x]
    for half in range(2):
        store(A, T.cast(q[half], dtype("int8", LANES)), tile, block, row, at(half * LANES))
    d = T.Bind(top / T.float32(127))
    low, high = reduce("add", q[0]), reduce("add", q[1])
    sums = (T.Bind(low + high), low, high)
    scaled = [d * T.cast(s, "float32") for s in sums]
    negative = [T.reinterpret("float32", T.int32(0) - s) for s in sums]
    for field, value in enumerate((d, scaled[0], negative[0], scaled[1], scaled[2], negative[1], negative[2])):
        store(S, value, tile, block, field, row)
