"""The online softmax of some rows in a wave, for single rows and chunks, on matrix units whose lanes are known
(base/matrices.py), for both APIs. It has the interface of `attention_rows.py`.

A wave has tiles of as many rows as operand B has columns. Products are computed transposed:
    scores   S^T = K Q^T: keys are operand A; queries are operand B, which stays in registers
    outputs  O^T = V^T P^T: values are operand A, weights are operand B
A unit of the cache is exactly a lane's part of an operand. So keys and values go from the cache to registers to matrix
instructions, each once for all tiles, without shared memory. A lane's part of the operand P^T is the weights of eight
consecutive keys of each group of keys (the keys that an instruction sums over). On units where each lane holds the
whole operand, the half-waves exchange their weights.

Keys are assigned to rows of A in such an order that a lane's sums are the scores of just these keys; so scores need not
be exchanged. (`attention_rows_shared.py` is for units whose distribution of sums is unknown.) The state of a lane, for
its row of each tile:
    top     weights are 2**(score - top). Only when a weight would exceed 2**LIMIT, `top` is renewed and the outputs are
            rescaled; the test takes one vote of the wave
    total   the sum of the weights of this lane's keys
"""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, product
from typing import NamedTuple

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention.attention_rows_size import SCORES, holds, out_units, room, row_tiles
from mlc_amd.schedules.gpu.attention.attention_step import LIMIT, LOWEST, P_SHIFT, START, Joined, Sees, join, soft_cap
from mlc_amd.schedules.gpu.attention.cache import UNIT, KeyBlock
from mlc_amd.schedules.gpu.attention.cache_units import WORDS, Units
from mlc_amd.schedules.gpu.base.device import any_lane, dot2, exp2, intrin, maximum, rint, schedule_fence, shuffle_xor
from mlc_amd.schedules.gpu.base.matrices import SIDE, known_unit, wave_matrices
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.gpu.base.registers import at, elements, local, opaque, put, vector
from mlc_amd.schedules.gpu.base.step import kept, when
from mlc_amd.schedules.operators.attention import Attention
from mlc_amd.schedules.tir import Buffer, Expr

MOVING = ("key0", "page", "place0")  # fields of a `KeyBlock` that differ from block to block
ONES = 0x3C003C00  # two float16 ones
BATCH = 8  # upper limit of the operands that are loaded while others are multiplied
# For `schedule_fence`: all but products on matrices and accesses to device memory may cross; everything may.
MATRICES, NOTHING = 0x86, 0x7FF


class Operand(NamedTuple):
    """An operand of keys or values. load(n) starts its loads into registers number n; multiply(n) multiplies these
    registers."""

    load: Callable[[int], None]
    multiply: Callable[[int], None]


Query = Callable[[int, Expr], Expr]  # of a tile, number of a unit of the lane's row -> float16x8, scaled and rotated


class MatrixRows:
    """The state of `count` rows of an `Attention` layer in a wave. lane: number of the lane in the wave. wave: number
    of the wave among the `waves` waves of the workgroup. keys: of a block, a multiple of CHUNK."""

    prefetches = False  # see `attention_rows.Rows`

    def __init__(self, arch: Device, attention: Attention, count: int, lane: Expr, wave: Expr, waves: int, keys: int):
        self.arch, self.attention, self.count, self.d = arch, attention, count, attention.d
        self.unit, self.tiles = known_unit(arch), row_tiles(arch, count)
        self.lane, self.wave, self.waves = lane, wave, waves
        self.row, self.part = (self._hidden(x) for x in self.unit.place(lane, arch.wave))
        self.keys, self.own = keys, self._at_once(keys)  # of a block; of a step
        self.groups = self.own // self.unit.columns  # of keys
        self.blocks = self.unit.columns // SIDE  # tiles of scores of a group
        self.chunks, self.columns = -(-attention.width // self.unit.columns), attention.width // SIDE
        self.holds, self.zero = holds(arch, attention.width, self.tiles), 0
        queries = self.chunks if self.holds else 1
        self.scores = wave_matrices(arch, 1, self.tiles * queries, self.groups * self.blocks * self.tiles)
        self.out = wave_matrices(arch, 1, self.tiles, self.columns * self.tiles)
        self.top, self.total = local(self.tiles), local(self.tiles)
        self.pieces = len(self.unit.rows(0)) * self.unit.units  # units of an operand A
        self.batch = self._batch()
        self.key, self.value = (Units(attention, n * self.pieces, kind) for kind, n in self._loaded.items())

    # ---- what depends on the unit

    def _at_once(self, keys: int) -> int:
        """How many of the `keys` keys of a block are processed at the same time."""
        return min(keys, SCORES * self.arch.wave // SIDE)

    def _batch(self) -> int:
        """The number of operands that are loaded at the same time."""
        words = self.unit.units * (WORDS + 2 * self.attention.quantized)  # codes have scales
        return max(1, min(BATCH, room(self.arch, self.attention.width, self.tiles) // (2 * words)))

    @property
    def _loaded(self) -> dict[str, int]:
        """{kind: number of operands for which there are registers}."""
        return {"key": 2 * self.batch, "value": 2 * self.batch}

    def _hidden(self, x: Expr) -> Expr:
        """A scalar in a register. For rocm its value is hidden from TVM, which would otherwise substitute its
        computation into each address, and simplify that."""
        return opaque(x) if self.arch.api == "rocm" else T.Bind(x)

    # ---- operands

    def start(self) -> None:
        """Initializes the state: no key seen yet."""
        for t in range(self.tiles):
            put(self.top, T.float32(LOWEST / 2), t)  # above the scores of keys that are not seen: their weights are 0
            put(self.total, T.float32(0), t)
        self.out.clear()
        self.scores.clear()

    def across(self, x: Expr, op: Callable[[Expr, Expr], Expr]) -> Expr:
        """The reduction of x by `op` over the lanes that have the same row."""
        for distance in self.unit.sharing(self.arch.wave):
            x = self._hidden(op(x, shuffle_xor(self.arch, x, distance)))
        return x

    def _unit(self, chunk: Expr, i: int) -> tuple[Expr, Expr | None]:
        """(number of this lane's unit i of a chunk of columns, whether it exists; None if it does for all lanes)."""
        unit, units = self.unit.unit(chunk, i, self.part), self.attention.width // UNIT
        if (chunk + 1) * self.unit.columns <= self.attention.width:
            return T.Bind(unit), None
        return T.Bind(T.min(unit, T.int32(units - 1))), unit < units

    def load_queries(self, query: Query) -> None:
        """Loads the queries into registers. For wide heads there are too few registers; `query` is then called for each
        product."""
        self.query = query
        for t, c in product(range(self.tiles), range(self.chunks if self.holds else 0)):
            self.scores.keep(t * self.chunks + c, self._query_runs(t, c))

    def _query_runs(self, tile: int, c: int) -> list[Expr]:
        found = []
        for i in range(self.unit.units):
            place, valid = self._unit(c, i)
            run = T.Bind(self.query(tile, place + self.zero))
            zero = T.broadcast(T.float16(0), UNIT)
            found.append(run if valid is None else T.Bind(T.Select(T.broadcast(valid, UNIT), run, zero)))
        return found

    def _query(self, tile: int, c: int) -> Sequence[Expr]:
        if self.holds:
            return self.scores.kept(tile * self.chunks + c)
        return self.scores.operands("b", tile, self._query_runs(tile, c))

    def _runs(self, units: Units, n: int) -> list[Expr]:
        """The loaded units of operand number n as float16x8."""
        found = [units.pairs(n * self.pieces + i) for i in range(self.pieces)]
        return [T.Bind(T.reinterpret(f"float16x{UNIT}", words[at(first, WORDS)])) for words, first in found]

    # ---- blocks of keys

    def step(self, block: KeyBlock, sees: Sees, whole: Expr, zero: Expr, following: KeyBlock | None = None) -> None:
        """Processes a `KeyBlock`. sees(tile, key): whether the lane's row of a tile attends to a key. whole: whether
        all rows of the wave attend to all keys of the block. zero: from `step.opaque_zero`; without it LLVM would
        unroll the loop over parts of the block and start with all loads, for which there are not enough registers.
        following: the next block, whose keys are loaded here, if those of this block were loaded before
        (`prefetches`)."""
        self.zero = zero
        if self.keys == self.own:
            self._step(block, sees, whole)
            return
        with kept(T.Bind(zero + self.keys // self.own)) as part:
            first = self._hidden(part * self.own)
            self._step(block._replace(key0=block.key0 + first, place0=block.place0 + first), sees, whole)

    def _step(self, block: KeyBlock, sees: Sees, whole: Expr) -> None:
        """Processes a part of a block."""
        fields = {name: x for name, x in block._asdict().items() if name in MOVING and not isinstance(x, int)}
        block = block._replace(**{name: self._hidden(x) for name, x in fields.items()})
        self.scores.clear_sums()
        keys, weights = list(self._keys(block)), []
        parts, size = (keys, list(self._values(block, weights))), self.batch
        batches = [part[i : i + size] for part in parts for i in range(0, len(part), size)]

        def pending(i: int) -> Iterator[tuple[Operand, int]]:
            for n, operand in enumerate(batches[i] if i < len(batches) else []):
                yield operand, i % 2 * size + n

        for operand, n in pending(0):
            operand.load(n)
        for i in range(len(batches)):
            if i == -(-len(keys) // size):
                weights += self._weigh_block(block, sees, whole)
            for operand, n in pending(i + 1):
                operand.load(n)
            if self.arch.api == "rocm":
                schedule_fence(MATRICES)
            for operand, n in pending(i):
                operand.multiply(n)

    def _keys(self, block: KeyBlock) -> Iterator[Operand]:
        """The operands of the product of keys and queries. Afterwards a lane's sums are the scores of eight consecutive
        keys of each group."""
        unit, queries = self.unit, {}
        rows = [[T.Bind(block.place0 + r) for r in unit.eighth_rows(self.row, b)] for b in range(self.blocks)]
        for c, g, b in product(range(self.chunks), range(self.groups), range(self.blocks)):

            def load(n: int, c: int = c, g: int = g, b: int = b) -> None:
                for i, (row, u) in enumerate(product(rows[b], range(unit.units))):
                    place = T.Bind(row + g * unit.columns)
                    self.key.load_key(n * self.pieces + i, block, place, self._unit(c, u)[0])

            def multiply(n: int, c: int = c, g: int = g, b: int = b) -> None:
                if c not in queries:
                    queries[c] = [self._query(t, c) for t in range(self.tiles)]
                for step, key in enumerate(self.scores.each("a", 0, self._runs(self.key, n))):
                    for t, query in enumerate(queries[c]):
                        self.scores.add_product((g * self.blocks + b) * self.tiles + t, key, query[step])

            yield Operand(load, multiply)

    def _values(self, block: KeyBlock, weights: list[list[Expr]]) -> Iterator[Operand]:
        """The operands of the product of values and weights. weights: a list that `_weigh_block` fills before the first
        operand is multiplied."""
        rows, operands = [T.Bind(r) for r in self.unit.rows(self.row)], {}
        for g, x in product(range(self.groups), range(self.columns)):

            def load(n: int, g: int = g, x: int = x) -> None:
                for i, (row, u) in enumerate(product(rows, range(self.unit.units))):
                    unit = T.Bind(self.unit.unit(g, u, self.part))
                    self.value.load_value(n * self.pieces + i, block, unit, T.Bind(x * SIDE + row))

            def multiply(n: int, g: int = g, x: int = x) -> None:
                if g not in operands:
                    own = [self._weigh(t, of[g * UNIT : (g + 1) * UNIT]) for t, of in enumerate(weights)]
                    operands[g] = [list(self._weights(t, of)) for t, of in enumerate(own)]
                self._add_values(x, self._runs(self.value, n), operands[g])

            yield Operand(load, multiply)

    def _add_values(self, x: int, runs: list, weights: list[list]) -> None:
        """Adds the products of weights and the values of tile x of the columns, one product for each operand of
        weights."""
        for step, value in enumerate(islice(self.out.each("a", 0, runs), len(weights[0]))):
            for t, weight in enumerate(weights):
                self.out.add_product(x * self.tiles + t, value, weight[step])

    def _weigh_block(self, block: KeyBlock, sees: Sees, whole: Expr) -> list[list[Expr]]:
        """[tile][key of the lane]: the scores, after `top` was renewed if a weight would be too large."""
        scores = self._own_scores(block, sees, whole)
        self._renew([functools.reduce(maximum, of) for of in scores])
        return scores

    def _own_scores(self, block: KeyBlock, sees: Sees, whole: Expr) -> list[list[Expr]]:
        """[tile][key of the lane]: the scores, LOWEST for masked keys."""
        count, acc = self.groups * UNIT, self.unit.acc
        scores = [local(count) for _ in range(self.tiles)]
        for t, of in enumerate(scores):
            for n in range(count // acc):
                put(of, self.scores.result(n * self.tiles + t), at(n * acc, acc))
            for i in range(count if self.attention.softcap else 0):
                put(of, soft_cap(self.attention, of[i]), i)
        with T.If(tirx.Not(whole)), T.Then():
            if self.arch.api == "rocm":
                schedule_fence(NOTHING)  # without it LLVM would mask all blocks, and remove the branch
            for t, of in enumerate(scores):
                for i in range(count):
                    key = block.key0 + (i // UNIT * self.unit.columns + i % UNIT) + self.part * UNIT
                    put(of, T.Select(sees(t, key), of[i], T.float32(LOWEST)), i)
        return [[of[i] for i in range(count)] for of in scores]

    def _renew(self, largest: Sequence[Expr]) -> None:
        """If a weight would be too large, renews `top` and rescales the state. largest: the largest of the lane's
        scores of each tile."""
        differences = [self._hidden(x - self.top[t]) for t, x in enumerate(largest)]
        worst = self._hidden(functools.reduce(maximum, differences))
        with T.If(any_lane(self.arch, worst > T.float32(LIMIT))), T.Then():
            factors = []
            for t, x in enumerate(largest):
                old = self._hidden(self.top[t])
                new = self._hidden(maximum(old, rint(self.across(x, maximum) - T.float32(START))))
                factors.append(self._hidden(exp2(old - new)))
                put(self.top, new, t)
                put(self.total, self.total[t] * factors[t], t)
            self._rescale(factors)

    def _rescale(self, factors: Sequence[Expr]) -> None:
        """Multiplies the outputs of the lane's row of each tile by a factor."""
        for x, (t, factor) in product(range(self.columns), enumerate(factors)):
            self.out.scale(x * self.tiles + t, factor)

    def _weigh(self, t: int, scores: Sequence[Expr]) -> list[Expr]:
        """The weights of a tile's scores, float16. Adds them to the row's total."""
        top, halves, total = T.Bind(self.top[t]), [], self.total[t]
        if self.arch.api == "rocm":
            for i in range(0, len(scores), 2):
                own = [exp2(score - top) for score in scores[i : i + 2]]
                pair = intrin("float16x2", "llvm.amdgcn.cvt.pkrtz", *own)  # rounded toward zero
                total = dot2(self.arch, T.reinterpret("uint32", pair), T.uint32(ONES), total)
                halves += elements(pair)
        else:
            for score in scores:
                halves.append(T.Bind(T.cast(exp2(score - top), "float16")))
                total = total + T.cast(halves[-1], "float32")
        put(self.total, total, t)
        return halves

    def _weights(self, t: int, halves: list[Expr]) -> Iterable:
        """The lane's weights of a group of keys as operands."""
        if not self.unit.whole:
            return self.out.each("b", t, [halves])
        own = [self._hidden(T.reinterpret("uint32", vector(halves[i : i + 2]))) for i in range(0, UNIT, 2)]
        other, low = [self._hidden(shuffle_xor(self.arch, word, SIDE)) for word in own], self.part == 0
        runs = [[T.Select(low, a, b) for a, b in zip(*of, strict=True)] for of in ((own, other), (other, own))]
        return self.out.each("b", t, [T.Bind(T.reinterpret(f"float16x{UNIT}", vector(words))) for words in runs])

    # ---- a key that is not in the cache

    def add_key(self, keys: Buffer, begin: Expr, value: Callable[[Expr], Expr]) -> None:
        """Adds a key that all rows attend to. keys: shared memory with the key from `begin` on. value(column): an
        element of its value, float16. Among the lanes that share a row, the first has its weight in the place of its
        first key; all other weights are 0."""
        rows, zero = self.unit.rows(self.row), T.float16(0)
        values = [[self._hidden(value(T.Bind(x * SIDE + row))) for row in rows] for x in range(self.columns)]
        scores = [soft_cap(self.attention, self._product(t, keys, begin)) for t in range(self.tiles)]
        scores = [self._hidden(score) for score in scores]
        self._renew(scores)
        weights, rest = [], [zero] * (UNIT - 1)
        for t, score in enumerate(scores):
            weight = T.cast(exp2(score - self.top[t]), "float16")
            weight = self._hidden(T.Select(self.part == 0, weight, zero))
            put(self.total, self.total[t] + T.cast(weight, "float32"), t)
            weights.append(list(islice(self._weights(t, [weight, *rest]), 1)))
        for x, found in enumerate(values):
            runs = [[first, *rest] for x in found for first in (x, *[zero] * (self.unit.units - 1))]
            self._add_values(x, runs, weights)

    def _product(self, t: int, keys: Buffer, begin: Expr) -> Expr:
        """The score of the lane's row of tile t and a key in shared memory."""
        total = T.float32(0)
        for c, i in product(range(self.chunks), range(self.unit.units)):
            place, valid = self._unit(c, i)
            query, key = (T.Bind(x) for x in (self.query(t, place), keys[at(begin + place * UNIT, UNIT)]))
            score = total
            for w in range(WORDS):
                a, b = (T.reinterpret("uint32", T.Shuffle([x], [2 * w, 2 * w + 1])) for x in (query, key))
                score = dot2(self.arch, a, b, score)
            total = score if valid is None else T.Bind(T.Select(valid, score, total))
        return total if self.unit.whole else self.across(total, operator.add)  # each lane has all of the row, or a part

    # ---- the end

    def row_total(self, tile: int) -> Expr:
        """The sum of all weights of the lane's row."""
        return self.across(T.Bind(self.total[tile]), operator.add)

    def own_columns(self, tile: int) -> Iterator[tuple[list[Expr], Expr, Expr | None]]:
        """Yields the outputs of the lane's row, WIDTH columns at a time: (sums, first column, whether these columns
        exist; None if they always do)."""
        for x in range(self.columns):
            sums, whole = elements(self.out.result(x * self.tiles + tile)), (x + 1) * SIDE <= self.d
            for i in range(0, self.unit.acc, WIDTH):
                column = T.Bind(x * SIDE + self.part * self.unit.acc + i)
                yield sums[i : i + WIDTH], column, None if whole else column < self.d

    def join_waves(self) -> Callable[[Expr, Expr], Joined]:
        """See `attention_rows.Rows.join_waves`."""
        tops, totals = (T.alloc_buffer((self.count, self.waves), "float32", scope="shared") for _ in range(2))
        for t in range(self.tiles):
            total, row = self.row_total(t), T.Bind(self.row + t * self.unit.side)
            with T.If((self.part == 0) & (row < self.count)), T.Then():
                # other modules scale weights by 2**P_SHIFT
                put(tops, self.top[t] + T.float32(P_SHIFT), row, self.wave)
                put(totals, total, row, self.wave)
        outs, rows, units = self._store_outputs()

        def out(w: Expr, r: Expr, column: Expr) -> list[Expr]:
            return elements(T.Bind(outs[w * rows + r * units + column // WIDTH]))

        return join(tops, totals, self.waves, out)

    def _store_outputs(self) -> tuple[Buffer, int, int]:
        """(shared memory with the outputs of all waves, in units of WIDTH; units of a wave; units of a row)."""
        units, count = out_units(self.d), self.count
        outs = T.alloc_buffer((self.waves * count * units,), f"float32x{WIDTH}", scope="shared")
        for t in range(self.tiles):
            row = T.Bind(self.row + t * self.unit.side)
            with T.If(row < count), T.Then():
                for sums, column, live in self.own_columns(t):
                    with when(live):
                        put(outs, vector(sums), (self.wave * count + row) * units + column // WIDTH)
        return outs, count * units, units
