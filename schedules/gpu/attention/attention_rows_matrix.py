"""Rows of queries as in `attention_rows.py`, on cooperative matrices whose distribution over the lanes is known.

Keys and values are operand A and go from the cache to registers to matrices, each once for all rows; queries and
weights are operand B. Which lane has which components of the operands is what `gemm_lanes.py` relies on, too, and the
runtime checks (runtime/devices/vulkan/fragments.py): for matrices of m x n sums, lane 4*r + q has the rows r and r + n
of A and the column r of B, and of both the same four places along what is summed, in whatever order. So a unit of the
cache, eight elements of a key or eight keys of a column, is a lane's part of two products:
    scores   keys x queries: of each CHUNK of columns lane 4*r + q has unit q of its keys and of query r
    outputs  columns of values x weights: of each CHUNK of keys lane 4*r + q has unit q of its columns of the values,
             and the weights of these eight keys in row r
Sums have a distribution of their own, which nothing depends on: scores reach the lanes that make weights of them
through shared memory, as the outputs do in the end. A lane's state is that of row r of each tile of n rows:
    top     weights are 2**(score - top). As in `attention_prefill_coop.py`, it is renewed when a weight would exceed
            2**LIMIT; looking whether one would takes one vote
    total   the sum of the weights of this lane's keys
"""

import functools
from collections.abc import Callable, Sequence

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention.cache import UNIT, KeyBlock
from mlc_amd.schedules.gpu.attention.cache_units import WORDS, Units
from mlc_amd.schedules.gpu.attention.softmax import (
    LIMIT,
    LOWEST,
    OTHER_BYTES,
    P_SHIFT,
    START,
    Joined,
    Sees,
    join,
    soft_cap,
)
from mlc_amd.schedules.gpu.base.coop_fragments import Fragments
from mlc_amd.schedules.gpu.base.device import WAVE_SHARED, barrier, exp2, maximum, wave_barrier, wave_max, wave_sum
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.gpu.base.registers import at, lane_of, local, put
from mlc_amd.schedules.operators.attention import Attention
from mlc_amd.schedules.tir import Buffer, Expr

QUADS = 4  # lanes that share a row
CHUNK = QUADS * UNIT  # columns, or keys, that two products sum over
PRODUCTS = 2  # of a chunk
HALF = UNIT // PRODUCTS  # elements that a lane has of a row in one product
PAD = 1  # units of WIDTH float32 after a row in shared memory
# Units of keys, at most, that stay in registers while values are multiplied. Heads of 128 have 16, and take 3 to 5 %
# longer with them on an H100, behind 512 tokens as behind 16384.
MOST_AHEAD = 8


def suits(arch: Device, attention: Attention) -> bool:
    """Whether the arch's matrices and the layer are such as `MatrixRows` takes."""
    lanes = arch.wave // QUADS
    known = arch.lane_matrix == (2 * lanes, lanes, QUADS * HALF)
    return known and attention.d % CHUNK == 0 and not attention.values


def row_tiles(arch: Device, count: int) -> int:
    """Tiles of n rows for `count` rows."""
    return -(-count // arch.lane_matrix[1])


def _wave_units(arch: Device, d: int, count: int, step: int) -> int:
    """Units of WIDTH float32 of shared memory that a wave has: scores, in the end outputs."""
    return row_tiles(arch, count) * arch.lane_matrix[1] * (max(d, step) // WIDTH + PAD)


def waves_of(arch: Device, count: int, d: int, threads: int, step: int) -> int:
    """Waves of a workgroup for `count` rows of `d` elements: those of `threads`, fewer where there is too little shared
    memory. ValueError if it does not suffice for one."""
    waves = min(threads, arch.threads) // arch.wave
    # of a wave: scores or outputs, factors, a key; besides, queries, and weights of splits
    units = _wave_units(arch, d, count, step) + row_tiles(arch, count) * arch.wave
    wave = units * WIDTH * 4 + d * 2
    while waves and waves * wave + count * (d * 2 + arch.wave * 4) + OTHER_BYTES > arch.lds:
        waves //= 2
    if not waves:
        raise ValueError(f"{arch.name} has too little shared memory for {count} rows of {d} elements on matrices")
    return waves


class MatrixRows:
    """The state of `count` rows of an `Attention` layer in a wave, number `wave` of `waves` in its workgroup; used as
    `attention_rows.Rows`. step: keys of a block; ahead: whether the keys of the next block are loaded while this one is
    multiplied, if registers hold them."""

    def __init__(
        self, arch: Device, attention: Attention, count: int, lane: Expr, wave: Expr, waves: int, step: int, ahead: bool
    ):
        self.arch, self.attention, self.count, self.d, self.lane = arch, attention, count, attention.d, lane
        self.m, self.n, _ = arch.lane_matrix
        self.row, self.quad = T.Bind(lane // QUADS), T.Bind(lane % QUADS)
        self.tiles, self.chunks, self.groups = row_tiles(arch, count), self.d // CHUNK, step // CHUNK
        self.key_tiles, self.columns = step // self.m, self.d // self.m
        self.query, self.weights = self._new("b", self.tiles * self.chunks * PRODUCTS), self._new("b", self.tiles * 2)
        self.a, self.sums = self._new("a", 1), self._new("sum", self.key_tiles * self.tiles)
        self.out, self.factor = self._new("sum", self.columns * self.tiles), self._new("sum", 1)
        self.top, self.total = local(self.tiles), local(self.tiles)
        self.key = Units(attention, self.chunks * self.key_tiles * 2, "key")
        self.value = Units(attention, self.columns * 2, "value")
        self.prefetches = ahead and self.chunks * self.key_tiles * 2 <= MOST_AHEAD
        self.row_units, self.out_units = step // WIDTH + PAD, self.d // WIDTH + PAD
        self.wave_units = _wave_units(arch, self.d, count, step)
        self.shared = T.alloc_buffer((waves * self.wave_units,), f"float32x{WIDTH}", scope=WAVE_SHARED)
        self.factors = T.alloc_buffer((waves * self.tiles * arch.wave,), f"float32x{WIDTH}", scope=WAVE_SHARED)
        self.base, self.factor_base = T.Bind(wave * self.wave_units), T.Bind(wave * (self.tiles * arch.wave))

    def _new(self, kind: str, count: int) -> Fragments:
        m, n, k = self.arch.lane_matrix
        return Fragments(kind, count, (m, n, k))

    def start(self) -> None:
        """Initializes the state: no key seen yet."""
        for t in range(self.tiles):
            put(self.top, T.float32(LOWEST / 2), t)  # above the scores of keys that are not seen: their weights are 0
            put(self.total, T.float32(0), t)
        self._clear(self.out)
        for fragments in (self.a, self.weights, self.query):
            self._clear(fragments)
        self.factor.fill(0, 0)

    @staticmethod
    def _clear(fragments: Fragments) -> None:
        for i in range(fragments.count):
            fragments.fill(i, 0)

    # ---- operands

    def load_queries(self, unit: Callable[[Expr, Expr], Expr]) -> None:
        """unit(row, c): float16x8, unit c of a row's query, scaled and rotated. Rows after the last one have its
        query."""
        for t in range(self.tiles):
            row = T.Bind(T.min(self.row + t * self.n, T.int32(self.count - 1)))
            for c in range(self.chunks):
                found = T.Bind(unit(row, c * QUADS + self.quad))
                for p in range(PRODUCTS):
                    for e in range(HALF):
                        place = (t * self.chunks + c) * PRODUCTS + p
                        self.query.set(place, e, lane_of(found, p * HALF + e))

    def load_keys(self, block: KeyBlock) -> None:
        """Loads the lane's units of the block's keys."""
        for c in range(self.chunks):
            for i in range(self.key_tiles * 2):
                place = block.place0 + (i * self.n + self.row)
                self.key.load_key(c * self.key_tiles * 2 + i, block, place, T.Bind(c * QUADS + self.quad))

    def _load_values(self, block: KeyBlock, group: int) -> None:
        """Loads the lane's units of the values of CHUNK keys, number `group` of the block."""
        for x in range(self.columns * 2):
            self.value.load_value(x, block, T.Bind(group * QUADS + self.quad), T.Bind(x * self.n + self.row))

    @staticmethod
    def _vector(units: Units, number: Expr) -> Expr:
        """Unit `number` of loaded units as float16x8."""
        words, first = units.pairs(number)
        return T.Bind(T.reinterpret(f"float16x{UNIT}", words[at(first, WORDS)]))

    def _set_a(self, units: Sequence[Expr], p: Expr) -> None:
        """Operand A of product p becomes the lane's parts of two units, float16x8."""
        for i, unit in enumerate(units):
            for e in range(HALF):
                self.a.set(0, i * HALF + e, lane_of(unit, p * HALF + e))

    # ---- blocks of keys

    def step(self, block: KeyBlock, queries: Buffer, sees: Sees, zero: Expr, following: KeyBlock | None = None) -> None:
        """As `attention_rows_vulkan.VulkanRows.step`; queries and zero: unused. All rows see the same keys."""
        if following is None:
            self.load_keys(block)
        self._score()
        self._load_values(block, 0)
        if following is not None:
            self.load_keys(following)
        scores = self._own_scores(block, sees)
        self._renew([self._largest(of) for of in scores])
        weights = [self._weigh(t, of) for t, of in enumerate(scores)]
        for group in range(self.groups):
            if group:
                self._load_values(block, group)
            self._add_values([of[group * UNIT : (group + 1) * UNIT] for of in weights])
        wave_barrier()

    def _score(self) -> None:
        """Leaves the scores of the loaded keys in shared memory: rows of keys."""
        self._clear(self.sums)
        for c in range(self.chunks):
            for i in range(self.key_tiles):
                units = [self._vector(self.key, (c * self.key_tiles + i) * 2 + half) for half in range(2)]
                for p in range(PRODUCTS):
                    self._set_a(units, p)
                    for t in range(self.tiles):
                        query = (t * self.chunks + c) * PRODUCTS + p
                        self.sums.add_product(i * self.tiles + t, self.a, 0, self.query, query)
        for i in range(self.key_tiles):
            for t in range(self.tiles):
                place = self.shared[self.base + (t * self.n * self.row_units + i * (self.m // WIDTH))]
                self.sums.store(i * self.tiles + t, place, self.row_units * WIDTH, "col_major")
        wave_barrier()

    def _own_scores(self, block: KeyBlock, sees: Sees) -> list[list[Expr]]:
        """[tile][key of the lane], in registers: LOWEST for keys that are not seen."""
        keys = [block.key0 + (g * CHUNK + i) + self.quad * UNIT for g in range(self.groups) for i in range(UNIT)]
        seen, found = [T.Bind(sees(0, key)) for key in keys], []
        for t in range(self.tiles):
            place = T.Bind(self.base + (t * self.n + self.row) * self.row_units + self.quad * (UNIT // WIDTH))
            scores = []
            for v in range(len(keys) // WIDTH):
                group, unit = divmod(v, UNIT // WIDTH)
                four = T.Bind(self.shared[place + (group * (CHUNK // WIDTH) + unit)])
                scores += [soft_cap(self.attention, T.Bind(lane_of(four, e))) for e in range(WIDTH)]
            found.append([T.Bind(T.Select(own, x, T.float32(LOWEST))) for own, x in zip(seen, scores, strict=True)])
        return found

    @staticmethod
    def _largest(scores: Sequence[Expr]) -> Expr:
        return T.Bind(functools.reduce(maximum, scores))

    def _renew(self, largest: Sequence[Expr]) -> None:
        """Rescales what came before if a weight would be too large. largest: the largest of the lane's scores, of each
        tile."""
        worst = self._largest([T.Bind(x - self.top[t]) for t, x in enumerate(largest)])
        with T.If(T.Bind(T.call_extern("bool", "vk.any", worst > T.float32(LIMIT)))), T.Then():
            for t, x in enumerate(largest):
                old = T.Bind(self.top[t])
                new = T.Bind(maximum(old, wave_max(self.arch, x, QUADS) - T.float32(START)))
                shrink = T.Bind(exp2(old - new))
                put(self.top, new, t)
                put(self.total, self.total[t] * shrink, t)
                put(self.factors, T.broadcast(shrink, WIDTH), self.factor_base + (t * self.arch.wave + self.lane))
            wave_barrier()
            for t in range(self.tiles):
                # Column by column, m times the same factor. Row by row, also with a stride of 0, NVIDIA's driver 580
                # reads other memory in this kernel, though not in small ones.
                self.factor.load(0, self.factors[self.factor_base + t * self.arch.wave], self.m, "col_major")
                with self.out.elements(0) as e:
                    factor = self.factor.get(0, e)
                    for x in range(t, self.out.count, self.tiles):
                        self.out.set(x, e, self.out.get(x, e) * factor)
            wave_barrier()

    def _weigh(self, t: int, scores: Sequence[Expr]) -> list[Expr]:
        """The weights of a tile's scores, float16, which are added to its total."""
        top, found, total = T.Bind(self.top[t]), [], self.total[t]
        for score in scores:
            found.append(T.Bind(T.cast(exp2(score - top), "float16")))
            total = total + T.cast(found[-1], "float32")
        put(self.total, total, t)
        return found

    def _add_values(self, weights: Sequence[Sequence[Expr]]) -> None:
        """Adds the loaded values of CHUNK keys, weighted. weights: of each tile, of the lane's keys."""
        for t, of in enumerate(weights):
            for e, weight in enumerate(of):
                self.weights.set(t * PRODUCTS + e // HALF, e % HALF, weight)
        for x in range(self.columns):
            units = [self._vector(self.value, x * 2 + half) for half in range(2)]
            for p in range(PRODUCTS):
                self._set_a(units, p)
                for t in range(self.tiles):
                    self.out.add_product(x * self.tiles + t, self.a, 0, self.weights, t * PRODUCTS + p)

    # ---- a key that is not in the cache

    def add_key(self, keys: Buffer, begin: Expr, value: Callable[[Expr], Expr]) -> None:
        """Adds one key, which all rows see: that in shared memory from `begin` on. value(column): its value, float16.
        Of the lanes that share a row the first one has its weight, the others 0."""
        first = T.Bind(self.quad == 0)
        values = [T.Bind(value(x * self.n + self.row)) for x in range(self.columns * 2)]
        scores = []
        for t in range(self.tiles):
            total = T.float32(0)
            for c in range(self.chunks):
                first_element = begin + (c * QUADS + self.quad) * UNIT
                for i in range(UNIT):
                    x = T.Bind(T.cast(keys[first_element + i], "float32"))
                    place = (t * self.chunks + c) * PRODUCTS + i // HALF
                    total = total + x * T.cast(self.query.get(place, i % HALF), "float32")
            scores.append(T.Bind(soft_cap(self.attention, wave_sum(self.arch, T.Bind(total), QUADS))))
        self._renew(scores)
        zero = T.float16(0)
        for t, score in enumerate(scores):
            weight = T.Bind(T.Select(first, T.cast(exp2(score - self.top[t]), "float16"), zero))
            put(self.total, self.total[t] + T.cast(weight, "float32"), t)
            for e in range(HALF):
                self.weights.set(t * PRODUCTS, e, weight if e == 0 else zero)
        for x in range(self.columns):
            for e in range(2 * HALF):
                self.a.set(0, e, zero if e % HALF else values[x * 2 + e // HALF])
            for t in range(self.tiles):
                self.out.add_product(x * self.tiles + t, self.a, 0, self.weights, t * PRODUCTS)

    # ---- the end

    def join_waves(self, wave: Expr, waves: int) -> Callable[[Expr, Expr], Joined]:
        """As `attention_rows.Rows.join_waves`."""
        tops, totals = (T.alloc_buffer((self.count, waves), "float32", scope="shared") for _ in range(2))
        for t in range(self.tiles):
            total, row = wave_sum(self.arch, T.Bind(self.total[t]), QUADS), T.Bind(self.row + t * self.n)
            with T.If((self.quad == 0) & (row < self.count)), T.Then():
                put(tops, self.top[t] + T.float32(P_SHIFT), row, wave)  # the weights that others have are larger
                put(totals, total, row, wave)
            for x in range(self.columns):
                place = self.shared[self.base + (t * self.n * self.out_units + x * (self.m // WIDTH))]
                self.out.store(x * self.tiles + t, place, self.out_units * WIDTH, "col_major")
        barrier()

        def out(w: Expr, r: Expr, column: Expr) -> list[Expr]:
            unit = T.Bind(self.shared[w * self.wave_units + r * self.out_units + column // WIDTH])
            return [lane_of(unit, i) for i in range(WIDTH)]

        return join(tops, totals, waves, out)
