"""What both attention kernels are made of: matrix products in register blocks, and online softmax over blocks of 64
keys in spans of 256.

A softmax row is one query of one head. Its scores are exponents of two: log2(e) is in the query already. Besides its
output so far a kernel keeps per row
    top[row]            the largest score so far
    total[row, lanes]   the sum of 2**(score - top) so far, as partial sums in a vector's lanes
A larger score rescales what came before by 2**(old top - new top).

Each span of keys is reduced on its own and then joined to the ones before it, in order. Decode runs spans in parallel
and prefill one after the other, yet both round alike: a row's output has the same bits whichever kernel made it. Keys
that a row does not see change nothing, to the bit, because 2**0 is exactly 1; so blocks and spans that it does not see
may be skipped or not.
"""

from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu.attention.cache import BLOCK, KeyRange
from mlc_amd.schedules.cpu.base.vector import LANES, at, exp2, f32, largest_divisor, registers, splat, store, tree_add
from mlc_amd.schedules.operators.attention import LOG2E

SPAN = 4  # blocks of a span
# "Minus infinity" that may be subtracted from itself.
LOWEST = -1e30


def scratch(*shape):
    """A float32 buffer of this thread, of any size."""
    return T.alloc_buffer(shape, "float32", scope="local")


def accumulators(isa):
    """Accumulator registers of a product: by default three quarters of the machine's, which leaves room for the
    operands."""
    return isa.registers * 3 // 4


def accumulator_choices(isa):
    """Other numbers of accumulator registers to try."""
    return tuple(isa.registers * n // 8 for n in (2, 3, 4, 5, 6, 7))


def product_blocks(limit, rows, columns, isa):
    """How a product of that many rows and columns is cut into blocks of at most `limit` accumulators: [(range of rows,
    vectors of columns), ...]."""
    chunks = -(-rows // limit)
    ranges = [range(chunk * rows // chunks, (chunk + 1) * rows // chunks) for chunk in range(chunks)]
    return [(mine, largest_divisor(limit // len(mine), columns // isa.lanes)) for mine in ranges]


def emit_product(isa, limit, rows, columns, inner, left, right, start, finish, needed=None):
    """A matrix product: finish(row, column, x) for all rows and columns, x = start(row, column) + sum of left(row, i) *
    right(i, column).

    Here `column` is the first of isa.lanes columns that a vector holds, i counts to `inner`, which may be an
    expression, and left gives scalars. right is called with a list of columns and gives the list of their vectors. Rows
    are unrolled, in chunks that fit `limit` accumulators. needed: an expression, of how many columns the results are
    needed; None: of all.
    """
    lanes = isa.lanes
    for mine, vectors in product_blocks(limit, rows, columns, isa):
        width = vectors * lanes
        with T.serial(columns // width if needed is None else (needed + width - 1) // width) as slab:
            sums = {row: registers(vectors * lanes) for row in mine}
            places = [(at(v * lanes, lanes), slab * width + v * lanes) for v in range(vectors)]
            for row in mine:
                for lane, column in places:
                    store(sums[row], start(row, column), lane)
            with T.serial(inner) as i:
                operands = right(i, [column for _, column in places])
                for row in mine:
                    factor = splat(left(row, i), lanes)
                    for (lane, _), operand in zip(places, operands, strict=True):
                        store(sums[row], sums[row][lane] + factor * operand, lane)
            for row in mine:
                for lane, column in places:
                    finish(row, column, sums[row][lane])


def capped(x, softcap, isa):
    """A vector of scores after softcap (0: none): softcap * tanh(s / softcap) of s = x / log2(e), again as an exponent
    of two. A difference comes last: a product could become one operation with the next, in one kernel and not in
    another."""
    if not softcap:
        return x
    n, limit = isa.lanes, softcap * LOG2E
    return f32(limit, n) - f32(2 * limit, n) / (isa.exp2(x * f32(2 / softcap, n), n) + f32(1.0, n))


def sink_score(sink):
    """A sink's logit as an exponent of two. The maximum keeps the product from being fused with the subtraction that
    follows, in one kernel and not in the other: they would round differently."""
    return T.max(sink * T.float32(LOG2E), T.float32(LOWEST))


def tree_max(x, n):
    """The largest lane of a float32 vector by comparing halves, as fast as `tree_add` (llvm.vector.reduce.fmax handles
    NaNs, which costs instructions)."""
    while n > 1:
        n //= 2
        low, high = (T.Shuffle([x], [T.int32(i + h * n) for i in range(n)]) for h in (0, 1))
        x = T.Bind(T.max(low, high))
    return x


def span_blocks(span, first_block, blocks):
    """(first, number) of a span's blocks among first_block .. blocks-1, where it has one. first_block: the int 0 or an
    expression."""
    start = span * SPAN
    if isinstance(first_block, int):
        return start, T.min(blocks - start, T.int32(SPAN))
    first = T.Bind(T.max(start, first_block))
    return first, T.min(blocks, start + SPAN) - first


def emit_start(top, total, out, rows, d, lanes):
    """The state of rows 0 .. rows-1 before the first block: out is float32 [rows, d]."""
    with T.serial(rows) as row:
        store(top, T.float32(LOWEST), row)
        store(total, f32(0.0, lanes), row, at(0, lanes))
        with T.serial(d // LANES) as i:
            store(out, f32(0.0), row, at(i * LANES))


def _emit_top(scores, row, top, state_row, before, key0, keys, lanes):
    """Updates top[state_row] by scores[row, 0:64], of the keys key0 .. key0+63, those outside the KeyRange left out;
    before[row]: what it was."""
    x = [T.Bind(keys.select(key0 + i, scores[row, at(i, lanes)], LOWEST, lanes)) for i in range(0, BLOCK, lanes)]
    largest = x[0]
    for v in x[1:]:
        largest = T.Bind(T.max(largest, v))
    old = T.Bind(top[state_row])
    store(before, old, row)
    store(top, T.max(old, tree_max(largest, lanes)), state_row)


def _emit_weights(isa, scores, row, top, total, shrink, state_row, key0, keys):
    """Turns scores[row, 0:64] into weights 2**(score - top), those of keys outside the KeyRange into zeros, and updates
    total at state_row, which is scaled by the scalar `shrink`."""
    lanes = isa.lanes
    now = T.Bind(top[state_row])
    sums = total[state_row, at(0, lanes)] * splat(shrink, lanes)
    for i in range(0, BLOCK, lanes):
        # A row that has seen no key yet has now == LOWEST: its masked scores would weigh 1.
        weight = isa.exp2(scores[row, at(i, lanes)] - splat(now, lanes), lanes)
        weight = T.Bind(keys.select(key0 + i, weight, 0.0, lanes))
        store(scores, weight, row, at(i, lanes))
        sums = T.Bind(sums + weight)
    store(total, sums, state_row, at(0, lanes))


def emit_softmax(isa, scores, rows, top, total, shrink, state_row, key0, keys, unmasked=None):
    """Turns scores[0:rows, 0:64], of the keys key0 .. key0+63, into weights; row r's top and total are at state_row +
    r, and it sees the KeyRange keys(r). shrink[r]: the factor on what came before. unmasked: a condition under which
    every row sees all of these keys, so that masks can be left out. Loops over rows in short steps, of which the
    processor overlaps several."""
    lanes = isa.lanes

    def emit(keys):
        with T.serial(rows) as r:
            _emit_top(scores, r, top, state_row + r, shrink, key0, keys(r), lanes)
        with T.serial(rows) as r:
            store(shrink, exp2(shrink[r] - top[state_row + r], 1), r)
        with T.serial(rows) as r:
            _emit_weights(isa, scores, r, top, total, shrink[r], state_row + r, key0, keys(r))

    if unmasked is None:
        emit(keys)
        return
    with T.If(unmasked):
        with T.Then():
            emit(lambda r: KeyRange())
        with T.Else():
            emit(keys)


def emit_total(total, row, lanes):
    """The sum of a row's weights, a scalar in a register."""
    return tree_add(T.Bind(total[row, at(0, lanes)]), lanes)


def _joined(before, top, n):
    """(new top, factor on what came before, factor on what is joined to it) of `n` rows from both tops."""
    now = T.Bind(T.max(before, top))
    return now, exp2(before - now, n), exp2(top - now, n)


def _emit_join_out(outs, row, out, keep, gain, d):
    with T.serial(d // LANES) as i:
        column = at(i * LANES)
        store(outs, outs[row, column] * splat(keep) + out(i * LANES) * splat(gain), row, column)


def emit_join(joined, row, top, total, out, d):
    """Joins a span's results to those of the spans before it: joined = (top [rows], total [rows], out [rows, d]),
    float32, at `row`.

    top and total: the span's, scalars; out(i): its output, columns i .. i+15.
    """
    tops, totals, outs = joined
    now, keep, gain = _joined(T.Bind(tops[row]), top, 1)
    store(tops, now, row)
    store(totals, totals[row] * keep + total * gain, row)
    _emit_join_out(outs, row, out, keep, gain, d)


def emit_join_rows(joined, rows, padded, top, total, out, d, lanes):
    """`emit_join` of many rows, to the same bits: rows 0 .. rows-1, the factors of 16 rows at a time. joined, top
    [padded] and total [padded, lanes] have `padded` rows, a multiple of 16."""
    tops, totals, outs = joined
    keeps, gains, sums = (scratch(padded) for _ in range(3))
    with T.serial(rows) as row:
        store(sums, emit_total(total, row, lanes), row)
    with T.serial((rows + LANES - 1) // LANES) as i:
        some = at(i * LANES)
        now, keep, gain = _joined(T.Bind(tops[some]), T.Bind(top[some]), LANES)
        store(tops, now, some)
        store(totals, totals[some] * keep + sums[some] * gain, some)
        store(keeps, keep, some)
        store(gains, gain, some)
    with T.serial(rows) as row:
        _emit_join_out(outs, row, lambda c: out[row, at(c)], keeps[row], gains[row], d)


def emit_join_start(joined, rows, d, sink=None):
    """The state of rows 0 .. rows-1 before the first span. sink(row): the logit of the row's sink, which counts like a
    key with a value of zeros that comes before all others; None: there are no sinks."""
    tops, totals, outs = joined
    with T.serial(rows) as row:
        store(tops, T.float32(LOWEST) if sink is None else sink_score(sink(row)), row)
        store(totals, T.float32(0 if sink is None else 1), row)
        with T.serial(d // LANES) as i:
            store(outs, f32(0.0), row, at(i * LANES))
