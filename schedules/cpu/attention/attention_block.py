"""Shared code of the CPU's attention kernels: matrix products in register blocks, and online softmax. Keys are in
blocks of 64; a span is four blocks, 256 keys.

A softmax row is one query of one head. Queries are already multiplied by log2(e), so a weight is 2**score. For each row
a kernel keeps its output so far, and
    top[row]            the largest score so far
    total[row, lanes]   the sum of 2**(score - top) so far, as partial sums in the lanes of a vector
When top gets larger, output and total are multiplied by 2**(old top - new top).

Each span is reduced independently, and its results are then joined to those of the spans before it, in order. Decode
computes spans in parallel, prefill one after the other, but both round in the same way: a row's output has the same
bits in both. Keys that a row does not attend to have no effect on the bits, because 2**0 is exactly 1. So their blocks
and spans may be computed or skipped.
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

SPAN = 4  # blocks in a span
LOWEST = -1e30  # used as minus infinity; LOWEST - LOWEST is 0, not NaN


class Step(NamedTuple):
    """A kernel for m rows: its layer, and its parameters."""

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
    """A float32 scratch buffer of this thread, of any size."""
    return T.alloc_buffer(shape, "float32", scope="local")


def limits(isa: Isa) -> tuple[int, ...]:
    """The values to try for a plan's number of accumulator registers."""
    return tuple(isa.registers * n // 8 for n in (2, 3, 4, 5, 6, 7))


def product_blocks(limit: int, rows: int, columns: int, isa: Isa) -> list[tuple[range, int]]:
    """Divides a product of `rows` x `columns` results into blocks of at most `limit` accumulators: [(range of rows,
    number of vectors of columns), ...]."""
    chunks = -(-rows // limit)
    ranges = [range(chunk * rows // chunks, (chunk + 1) * rows // chunks) for chunk in range(chunks)]
    return [(mine, largest_divisor(limit // len(mine), columns // isa.lanes)) for mine in ranges]


def capped(x: Expr, softcap: float, isa: Isa) -> Expr:
    """softcap * tanh(s / softcap) * log2(e), where x = s * log2(e) is a vector of scores; x if softcap is 0. The last
    operation is a subtraction: LLVM could fuse a product with the next operation in one kernel but not in another, and
    their bits would differ."""
    if not softcap:
        return x
    n, limit = isa.lanes, softcap * LOG2E
    return f32(limit, n) - f32(2 * limit, n) / (isa.exp2(x * f32(2 / softcap, n), n) + f32(1.0, n))


def span_blocks(span: Expr, first_block: Expr, blocks: Expr) -> tuple[Expr, Expr]:
    """(first block, number of blocks) of a span's blocks among the blocks first_block .. blocks-1; the span must have
    one of them. first_block: the int 0 or an expression."""
    start = span * SPAN
    if isinstance(first_block, int):
        return start, T.min(blocks - start, T.int32(SPAN))
    first = T.Bind(T.max(start, first_block))
    return first, T.min(blocks, start + SPAN) - first


Number = Callable[[int, Expr], Expr]  # f(row, column): a scalar of a matrix
Vectors = Callable[[Expr, list[Expr]], list[Expr]]  # f(row, columns): for each of the columns, the vector from it on


@dataclass(frozen=True)
class Softmax:
    """The online softmax of rows over the keys of a span, and their outputs. It processes some rows at a time: the rows
    of a pass.

    limit              number of accumulators that are in registers at the same time
    top, total, out    for all rows: float32 [rows], [rows, lanes], [rows, value_width]
    scores             for the rows of a pass: their scores for a block of keys, which `emit_weights` replaces by
                       weights, float32 [rows of a pass, 64]
    shrink             for the rows of a pass: the factors by which outputs and totals so far are multiplied
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
        """Initializes top, total and out of rows 0 .. rows-1, before the first block."""
        lanes = self.isa.lanes
        with T.serial(rows) as row:
            store(self.top, T.float32(LOWEST), row)
            store(self.total, f32(0.0, lanes), row, at(0, lanes))
            with T.serial(self.spec.value_width // LANES) as i:
                store(self.out, f32(0.0), row, at(i * LANES))

    def emit_scores(self, rows: int, query: Number, keys: Vectors, here: Expr = 0, needed: Expr = None) -> None:
        """Computes the scores of `rows` rows of the pass, from its row `here` on. query(r, c): element c of the query
        of row r. keys(c, columns): for each of these columns of scores, the vector of element c of the keys from there
        on. needed: only the scores of the first so many keys are needed; None: of all."""
        spec, isa = self.spec, self.isa

        def keep(r: int, key: Expr, x: Expr) -> None:
            store(self.scores, capped(x, spec.softcap, isa), here + r, at(key, isa.lanes))

        self._emit_product(rows, BLOCK, spec.d, query, keys, lambda r, key: f32(0.0, isa.lanes), keep, needed)

    def emit_outputs(self, rows: int, keys: Expr, values: Vectors, here: Expr = 0, row0: Expr = 0) -> None:
        """Adds the products of weights and values to the outputs of rows row0 .. row0+rows-1, which are the rows from
        `here` on of the pass. keys: how many keys are multiplied. values(key, columns): for each of these columns, the
        vector of the key's value from there on."""
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
        """Emits a matrix product: calls finish(row, column, x) for all rows and columns, where x = start(row, column) +
        the sum over i < inner of left(row, i) * right(i, column).

        `column` is the first of the isa.lanes columns of a vector. left returns scalars. right is called with a list of
        columns, and returns the list of their vectors. Rows are unrolled, in blocks of at most `limit` accumulators.
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
        """Replaces the scores of the pass, for the keys key0 .. key0+63, by weights. Row r of the pass is row first + r
        of all rows, and attends to the KeyRange keys(r). unmasked: a condition under which every row attends to all of
        these keys, so that no masks are needed. The loops over rows have short bodies, so that the CPU executes several
        rows out of order."""

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
        """Updates top[state_row] by the row's scores of keys in the KeyRange. Stores its previous value to
        shrink[row]."""
        lanes = self.isa.lanes
        blocks = range(0, BLOCK, lanes)
        x = [T.Bind(keys.select(key0 + i, self.scores[row, at(i, lanes)], LOWEST, lanes)) for i in blocks]
        largest = functools.reduce(lambda a, b: T.Bind(T.max(a, b)), x)
        old = T.Bind(self.top[state_row])
        store(self.shrink, old, row)
        store(self.top, T.max(old, tree(T.max, largest, lanes)), state_row)

    def _emit_row_weights(self, row: Expr, state_row: Expr, key0: Expr, keys: KeyRange) -> None:
        """Replaces a row's scores by weights 2**(score - top), or 0 for keys outside the KeyRange. Multiplies
        total[state_row] by shrink[row], and adds the weights to it."""
        lanes = self.isa.lanes
        now = T.Bind(self.top[state_row])
        sums = self.total[state_row, at(0, lanes)] * splat(self.shrink[row], lanes)
        for i in range(0, BLOCK, lanes):
            # Without a key in range so far, now == LOWEST, and masked scores would get the weight 1.
            weight = self.isa.exp2(self.scores[row, at(i, lanes)] - splat(now, lanes), lanes)
            weight = T.Bind(keys.select(key0 + i, weight, 0.0, lanes))
            store(self.scores, weight, row, at(i, lanes))
            sums = T.Bind(sums + weight)
        store(self.total, sums, state_row, at(0, lanes))

    def sum(self, row: Expr) -> Expr:
        """The sum of the lanes of a row's total, a scalar in a register."""
        return tree(operator.add, T.Bind(self.total[row, at(0, self.isa.lanes)]), self.isa.lanes)


def _joined(before: Expr, top: Expr, n: int) -> tuple[Expr, Expr, Expr]:
    """(new top, factor of the results before, factor of the results that are joined to them) of `n` rows. before, top:
    the tops of both."""
    now = T.Bind(T.max(before, top))
    return now, exp2(before - now, n), exp2(top - now, n)


class Joined(NamedTuple):
    """The joined results of all spans so far: tops float32 [rows], totals [rows], outs [rows, value_width]."""

    tops: Buffer
    totals: Buffer
    outs: Buffer

    def emit_start(self, rows: int, sink: Callable[[Expr], Expr] | None = None) -> None:
        """Initializes rows 0 .. rows-1, before the first span. sink(row): the logit of the row's sink, which acts like
        a first key whose value is zeros."""
        with T.serial(rows) as row:
            # Because of the maximum, LLVM cannot fuse the product with the next subtraction. It would do so in one
            # kernel but not in the other, and their bits would differ.
            top = T.float32(LOWEST) if sink is None else T.max(sink(row) * T.float32(LOG2E), T.float32(LOWEST))
            store(self.tops, top, row)
            store(self.totals, T.float32(0 if sink is None else 1), row)
            with T.serial(int(self.outs.shape[1]) // LANES) as i:
                store(self.outs, f32(0.0), row, at(i * LANES))

    def emit_join(self, row: Expr, top: Expr, total: Expr, out: Callable[[Expr], Expr]) -> None:
        """Joins a span's results of a row to those so far. top, total: scalars. out(i): columns i .. i+15 of the span's
        output."""
        now, keep, gain = _joined(T.Bind(self.tops[row]), top, 1)
        store(self.tops, now, row)
        store(self.totals, self.totals[row] * keep + total * gain, row)
        self._emit_out(row, out, keep, gain)

    def emit_join_rows(self, rows: Expr, span: Softmax) -> None:
        """`emit_join` for rows 0 .. rows-1, with the same bits, but the factors of 16 rows are computed as vectors. All
        buffers must have a multiple of 16 rows."""
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
