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

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu.attention.cache import BLOCK, Cache, KeyRange, RowTable
from mlc_amd.schedules.cpu.base.arch import Isa
from mlc_amd.schedules.cpu.base.vector import LANES, at, exp2, f32, largest_divisor, registers, splat, store, tree
from mlc_amd.schedules.cpu.linear.quantize import Output
from mlc_amd.schedules.operators.attention import LOG2E, Attention
from mlc_amd.schedules.tir import Buffer, Expr

SPAN = 4  # blocks of a span
# "Minus infinity" that may be subtracted from itself.
LOWEST = -1e30


class Step(NamedTuple):
    """A kernel of m rows: its layer and its parameters as buffers."""

    spec: Attention
    isa: Isa
    m: int
    state: Buffer  # int32 [4]
    rows: RowTable
    Q: Buffer  # float32 [m, heads, width]: rotated, scaled by Attention.query_scale
    cache: Cache
    sinks: Buffer | None  # float32 [heads]
    output: Output  # [m, heads*value_d]


def scratch(*shape: int) -> Buffer:
    """A float32 buffer of this thread, of any size."""
    return T.alloc_buffer(shape, "float32", scope="local")


def limits(isa: Isa) -> tuple[int, ...]:
    """Numbers of accumulator registers of a product to try."""
    return tuple(isa.registers * n // 8 for n in (2, 3, 4, 5, 6, 7))


def product_blocks(limit: int, rows: int, columns: int, isa: Isa) -> list[tuple[range, int]]:
    """How a product of that many rows and columns is cut into blocks of at most `limit` accumulators: [(range of rows,
    vectors of columns), ...]."""
    chunks = -(-rows // limit)
    ranges = [range(chunk * rows // chunks, (chunk + 1) * rows // chunks) for chunk in range(chunks)]
    return [(mine, largest_divisor(limit // len(mine), columns // isa.lanes)) for mine in ranges]


def capped(x: Expr, softcap: float, isa: Isa) -> Expr:
    """A vector of scores after softcap (0: none): softcap * tanh(s / softcap) of s = x / log2(e), again as an exponent
    of two. A difference comes last: a product could become one operation with the next, in one kernel and not in
    another."""
    if not softcap:
        return x
    n, limit = isa.lanes, softcap * LOG2E
    return f32(limit, n) - f32(2 * limit, n) / (isa.exp2(x * f32(2 / softcap, n), n) + f32(1.0, n))


def span_blocks(span: Expr, first_block: Expr, blocks: Expr) -> tuple[Expr, Expr]:
    """(first, number) of a span's blocks among first_block .. blocks-1, where it has one. first_block: the int 0 or an
    expression."""
    start = span * SPAN
    if isinstance(first_block, int):
        return start, T.min(blocks - start, T.int32(SPAN))
    first = T.Bind(T.max(start, first_block))
    return first, T.min(blocks, start + SPAN) - first


Number = Callable[[int, Expr], Expr]  # by row and number
Vectors = Callable[[Expr, list[Expr]], list[Expr]]  # by row, from each of these columns on


@dataclass(frozen=True)
class Softmax:
    """The online softmax of rows over the keys of a span, and their outputs.

    limit              accumulators that are in registers at once
    top, total, out    of all rows: float32 [rows], [rows, lanes], [rows, value_width]
    scores, shrink     of the rows at hand: their scores of a block of keys, then its weights, float32 [rows at hand,
                       64]; the factors on what came before, [rows at hand]
    """

    spec: Attention
    isa: Isa
    limit: int
    top: Buffer
    total: Buffer
    out: Buffer
    scores: Buffer
    shrink: Buffer

    def emit_start(self, rows: int) -> None:
        """The state of rows 0 .. rows-1 before the first block."""
        lanes = self.isa.lanes
        with T.serial(rows) as row:
            store(self.top, T.float32(LOWEST), row)
            store(self.total, f32(0.0, lanes), row, at(0, lanes))
            with T.serial(self.spec.value_width // LANES) as i:
                store(self.out, f32(0.0), row, at(i * LANES))

    def emit_scores(self, rows: int, query: Number, keys: Vectors, here: Expr = 0, needed: Expr = None) -> None:
        """The scores of `rows` rows at hand, from number `here` on. query(r, c): element c of a row's query; keys(c,
        columns): vectors of element c of the keys from each of these columns of scores on. needed: of how many keys the
        scores are needed; None: of all."""
        spec, isa = self.spec, self.isa

        def keep(r: int, key: Expr, x: Expr) -> None:
            store(self.scores, capped(x, spec.softcap, isa), here + r, at(key, isa.lanes))

        self._emit_product(rows, BLOCK, spec.d, query, keys, lambda r, key: f32(0.0, isa.lanes), keep, needed)

    def emit_outputs(self, rows: int, keys: Expr, values: Vectors, here: Expr = 0, row0: Expr = 0) -> None:
        """Adds the products of weights and values to the outputs of rows row0 .. row0+rows-1, of which the first is
        number `here` at hand. keys: how many are multiplied; values(key, columns): vectors of a value."""
        lanes = self.isa.lanes
        self._emit_product(
            rows,
            self.spec.value_width,
            keys,
            lambda r, key: self.scores[here + r, key],
            values,
            lambda r, c: self.out[row0 + r, at(c, lanes)] * splat(self.shrink[here + r], lanes),
            lambda r, c, x: store(self.out, x, row0 + r, at(c, lanes)),
            None,
        )

    def _emit_product(
        self,
        rows: int,
        columns: int,
        inner: Expr,
        left: Number,
        right: Vectors,
        start: Number,
        finish: Callable,
        needed: Expr,
    ) -> None:
        """A matrix product: finish(row, column, x) for all rows and columns, x = start(row, column) + sum of left(row,
        i) * right(i, column).

        Here `column` is the first of isa.lanes columns that a vector holds, i counts to `inner`, and left returns
        scalars. right is called with a list of columns and returns the list of their vectors. Rows are unrolled, in
        chunks that fit `limit` accumulators.
        """
        lanes = self.isa.lanes
        for mine, vectors in product_blocks(self.limit, rows, columns, self.isa):
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

    def emit_weights(
        self, rows: Expr, first: Expr, key0: Expr, keys: Callable[[Expr], KeyRange], unmasked: Expr = None
    ) -> None:
        """Turns the scores of the rows at hand, of the keys key0 .. key0+63, into weights. The r-th of them is row
        first + r, and sees the KeyRange keys(r). unmasked: a condition under which every row sees all of these keys, so
        that masks can be left out. Loops over rows in short steps, of which the processor overlaps several."""

        def emit(keys: Callable[[Expr], KeyRange]) -> None:
            with T.serial(rows) as r:
                self._emit_top(r, first + r, key0, keys(r))
            with T.serial(rows) as r:
                store(self.shrink, exp2(self.shrink[r] - self.top[first + r], 1), r)
            with T.serial(rows) as r:
                self._emit_row_weights(r, first + r, key0, keys(r))

        if unmasked is None:
            emit(keys)
            return
        with T.If(unmasked):
            with T.Then():
                emit(lambda r: KeyRange())
            with T.Else():
                emit(keys)

    def _emit_top(self, row: Expr, state_row: Expr, key0: Expr, keys: KeyRange) -> None:
        """Updates top[state_row] by a row's scores, those of keys outside the KeyRange left out; shrink[row]: what it
        was."""
        lanes = self.isa.lanes
        blocks = range(0, BLOCK, lanes)
        x = [T.Bind(keys.select(key0 + i, self.scores[row, at(i, lanes)], LOWEST, lanes)) for i in blocks]
        largest = functools.reduce(lambda a, b: T.Bind(T.max(a, b)), x)
        old = T.Bind(self.top[state_row])
        store(self.shrink, old, row)
        store(self.top, T.max(old, tree(T.max, largest, lanes)), state_row)

    def _emit_row_weights(self, row: Expr, state_row: Expr, key0: Expr, keys: KeyRange) -> None:
        """Turns a row's scores into weights 2**(score - top), those of keys outside the KeyRange into zeros, and
        updates total[state_row], which is scaled by shrink[row]."""
        lanes = self.isa.lanes
        now = T.Bind(self.top[state_row])
        sums = self.total[state_row, at(0, lanes)] * splat(self.shrink[row], lanes)
        for i in range(0, BLOCK, lanes):
            # A row that has seen no key yet has now == LOWEST: its masked scores would weigh 1.
            weight = self.isa.exp2(self.scores[row, at(i, lanes)] - splat(now, lanes), lanes)
            weight = T.Bind(keys.select(key0 + i, weight, 0.0, lanes))
            store(self.scores, weight, row, at(i, lanes))
            sums = T.Bind(sums + weight)
        store(self.total, sums, state_row, at(0, lanes))

    def sum(self, row: Expr) -> Expr:
        """The sum of a row's weights, a scalar in a register."""
        return tree(operator.add, T.Bind(self.total[row, at(0, self.isa.lanes)]), self.isa.lanes)


def _joined(before: Expr, top: Expr, n: int) -> tuple[Expr, Expr, Expr]:
    """(new top, factor on what came before, factor on what is joined to it) of `n` rows from both tops."""
    now = T.Bind(T.max(before, top))
    return now, exp2(before - now, n), exp2(top - now, n)


class Joined(NamedTuple):
    """The results of all spans so far: float32 [rows], [rows], [rows, value_width]."""

    tops: Buffer
    totals: Buffer
    outs: Buffer

    def emit_start(self, rows: int, sink: Callable[[Expr], Expr] | None = None) -> None:
        """The state of rows 0 .. rows-1 before the first span. sink(row): the logit of the row's sink, which counts
        like a key with a value of zeros that comes before all others."""
        with T.serial(rows) as row:
            # The maximum keeps the product from being fused with the subtraction that follows, in one kernel and not in
            # the other: they would round differently.
            top = T.float32(LOWEST) if sink is None else T.max(sink(row) * T.float32(LOG2E), T.float32(LOWEST))
            store(self.tops, top, row)
            store(self.totals, T.float32(0 if sink is None else 1), row)
            with T.serial(int(self.outs.shape[1]) // LANES) as i:
                store(self.outs, f32(0.0), row, at(i * LANES))

    def emit_join(self, row: Expr, top: Expr, total: Expr, out: Callable[[Expr], Expr]) -> None:
        """Joins a span's results of a row. top and total: scalars; out(i): its output, columns i .. i+15."""
        now, keep, gain = _joined(T.Bind(self.tops[row]), top, 1)
        store(self.tops, now, row)
        store(self.totals, self.totals[row] * keep + total * gain, row)
        self._emit_out(row, out, keep, gain)

    def emit_join_rows(self, rows: Expr, span: Softmax) -> None:
        """`emit_join` of rows 0 .. rows-1, to the same bits: the factors of 16 rows at a time. All buffers have a
        multiple of 16 rows."""
        padded = int(self.tops.shape[0])
        keeps, gains, sums = (scratch(padded) for _ in range(3))
        with T.serial(rows) as row:
            store(sums, span.sum(row), row)
        with T.serial((rows + LANES - 1) // LANES) as i:
            some = at(i * LANES)
            now, keep, gain = _joined(T.Bind(self.tops[some]), T.Bind(span.top[some]), LANES)
            store(self.tops, now, some)
            store(self.totals, self.totals[some] * keep + sums[some] * gain, some)
            store(keeps, keep, some)
            store(gains, gain, some)
        with T.serial(rows) as row:
            self._emit_out(row, lambda c: span.out[row, at(c)], keeps[row], gains[row])

    def _emit_out(self, row: Expr, out: Callable[[Expr], Expr], keep: Expr, gain: Expr) -> None:
        with T.serial(int(self.outs.shape[1]) // LANES) as i:
            column = at(i * LANES)
            store(self.outs, self.outs[row, column] * splat(keep) + out(i * LANES) * splat(gain), row, column)
