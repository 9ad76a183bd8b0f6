"""Online softmax over blocks of keys, shared by the attention kernels.

A row is one query. Its scores are powers of two (log2(e) is in the query already). For a row the kernels keep, in buffers given here,
    top[row]            the largest score so far
    total[row, lanes]   the sum of 2**(score - top) so far, still spread over a vector's lanes
and its output so far, all of which shrink by 2**(old top - new top) when a larger score turns up.
"""
from mlc_amd.schedules.cpu.vector import at, exp2, f32, splat, store, tree_add
from tvm.tirx.script import builder as T

BLOCK = 64                      # keys between two looks at the maximum
# "Minus infinity" that may be subtracted from itself.
LOWEST = -1e30


def tree_max(x, n):
    """The largest lane of a float32 vector, halves compared with halves. As fast as `tree_add` (llvm.vector.reduce.fmax minds NaNs)."""
    while n > 1:
        n //= 2
        low, high = (T.Shuffle([x], [T.int32(i + h * n) for i in range(n)]) for h in (0, 1))
        x = T.Bind(T.max(low, high))
    return x


def emit_clear(top, total, rows, lanes):
    """Before the first block, for rows 0 .. rows-1."""
    with T.serial(rows) as row:
        store(top, T.float32(LOWEST), row)
        store(total, f32(0.0, lanes), row, at(0, lanes))


def emit_block(scores, row, top, total, state_row, key0, last, lanes):
    """Turns scores[row, 0:64], of the keys key0 .. key0+63, into weights 2**(score - top), those of keys beyond `last` into zeros.

    scores: float32 [rows, 64]; top, total: at state_row. Returns the factor that the row's earlier weights shrink by, a scalar.
    """
    vectors = [at(i, lanes) for i in range(0, BLOCK, lanes)]
    # Not bound: TVM 0.27 cannot bind a vector of booleans.
    seen = [at(key0 + i, lanes) <= splat(last, lanes) for i in range(0, BLOCK, lanes)]
    x = [T.Bind(T.Select(s, scores[row, v], f32(LOWEST, lanes))) for s, v in zip(seen, vectors, strict=True)]
    largest = x[0]
    for v in x[1:]:
        largest = T.Bind(T.max(largest, v))
    before = T.Bind(top[state_row])
    now = T.Bind(T.max(before, tree_max(largest, lanes)))
    shrink = exp2(before - now, 1)
    sums = total[state_row, at(0, lanes)] * splat(shrink, lanes)
    for s, v, value in zip(seen, vectors, x, strict=True):
        # A row that has seen no key yet has now == LOWEST: its masked scores would become 1.
        weight = T.Bind(T.Select(s, exp2(value - splat(now, lanes), lanes), f32(0.0, lanes)))
        store(scores, weight, row, v)
        sums = T.Bind(sums + weight)
    store(top, now, state_row)
    store(total, sums, state_row, at(0, lanes))
    return shrink


def emit_sum(total, row, lanes):
    """The sum of a row's weights, a scalar in a register."""
    return tree_add(T.Bind(total[row, at(0, lanes)]), lanes)
