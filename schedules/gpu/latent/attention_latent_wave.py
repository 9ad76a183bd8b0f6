"""Latent attention of a tile of rows on cooperative matrices (KHR_cooperative_matrix), with online softmax: the code of
a wave.

All heads share the keys, and the first columns of a key are its value. So a row is a head of a token, and a workgroup
has a tile of consecutive rows. Each block of keys is stored to LDS once, as rows of keys, and used for both products:
    scores   a wave multiplies a fragment of rows of queries by the keys, over some of their columns; the waves with the
             same rows store their partial scores to LDS
    weights  the lanes that share a row add the partial scores, mask them, and store weights, an operand of the next
             product
    values   a wave multiplies the weights of all rows by some of the columns of values, which no other wave has
Weights are 2**(score - top), as in attention_prefill_coop.py: if a weight would exceed 2**LIMIT, `top` is renewed
such that the largest weight becomes 2**START, and the outputs are rescaled.

Splits of keys are joined by another launch (`join`), because the results of many splits are too much for one workgroup
to load. A part is the result of a workgroup for its tile, float32: the outputs of its rows [rows, value_d], then (top,
total) of each row. Outputs and totals are sums of weights relative to `top`.
"""

import functools
import operator
from collections.abc import Callable
from math import gcd

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention.attention_coop_tiles import SharedBlock
from mlc_amd.schedules.gpu.attention.attention_step import LIMIT, LOWEST, START, Step, soft_cap, with_sink
from mlc_amd.schedules.gpu.attention.cache import UNIT, Cache, Pages, Visible
from mlc_amd.schedules.gpu.base.device import WAVE_SHARED, barrier, exp2, maximum, rcp, wave_barrier, wave_max, wave_sum
from mlc_amd.schedules.gpu.base.matrices import Fragments
from mlc_amd.schedules.gpu.base.profiles import Profile
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.gpu.base.registers import at, elements, local, put, vector
from mlc_amd.schedules.gpu.latent.attention_latent_tiles import PAD, Tile, key_units, scores, shape_of, weight_units
from mlc_amd.schedules.operators.attention import Attention
from mlc_amd.schedules.tir import Buffer, Expr


class Wave:
    """A wave's work for a tile: its fragments of queries, keys and outputs, and for each lane a row whose weights it
    computes. first: the tile's first row within the step. number: of the wave. seen(row): the keys that a row attends
    to. Fragments must not exceed the step's last row, so the last ones begin earlier and overlap with those before:
    starts[i] is the row at which fragment i begins, fresh[i] its first row that is in no fragment before it."""

    def __init__(
        self,
        arch: Profile,
        step: Step,
        tile: Tile,
        first: Expr,
        number: Expr,
        lane: Expr,
        seen: Callable[[Expr], Visible],
    ):
        attention, Q = step.layer, step.Q
        self.step, self.arch, self.attention, self.tile, self.Q = step, arch, attention, tile, Q
        self.number, self.lane, (self.m, self.n, self.k) = number, lane, arch.fragment
        shape = shape_of(tile, attention, arch)
        assert shape is not None
        self.shape, self.last = shape, int(Q.shape[0]) * attention.heads - self.m
        self.row_fragment, self.part = T.Bind(number // shape.parts), T.Bind(number % shape.parts)
        self.row_units, self.weight_units = attention.width // UNIT + PAD, weight_units(tile)
        self.fresh = [T.Bind(first + i * self.m) for i in range(shape.row_fragments)]
        self.starts = [self._start(row) for row in self.fresh]
        self.row = T.Bind(number * (arch.wave // shape.lanes) + lane // shape.lanes)  # the lane's row in the tile
        self.sub = T.Bind(lane % shape.lanes)
        self.step_row = T.Bind(self._start(first + self.row // self.m * self.m) + self.row % self.m)
        self.seen = seen(self.step_row)
        self.vectors = gcd(shape.own, WIDTH)  # scores in a load of a lane
        dtype = f"float32x{self.vectors}" if self.vectors > 1 else "float32"
        self.scores = T.alloc_buffer((scores(tile, arch) // self.vectors,), dtype, scope=WAVE_SHARED)
        self.pack = min(shape.own, UNIT)  # weights in a store of a lane
        self.weights = T.alloc_buffer(
            (tile.rows * self.weight_units * UNIT // self.pack,), f"float16x{self.pack}", scope=WAVE_SHARED
        )
        self.factors = T.alloc_buffer((tile.rows,), "float32", scope=WAVE_SHARED)
        self.flags = T.alloc_buffer((tile.waves,), "float32", scope=WAVE_SHARED)
        self.held = min(tile.held, shape.steps)
        self.queries, self.query = self._new("a", max(self.held, 1)), self._new("a", 1)
        self.key, self.value, self.weight = self._new("b", 1), self._new("b", 1), self._new("a", shape.row_fragments)
        self.partial = self._new("sum", tile.keys // self.n)
        self.out, self.factor = self._new("sum", shape.row_fragments * shape.columns), self._new("sum", 1)
        self.top, self.total = local(1), local(1)

    def _new(self, kind: str, count: int) -> Fragments:
        return Fragments(kind, count, self.arch.fragment)

    def _start(self, row: Expr) -> Expr:
        return T.Bind(T.min(row, T.int32(self.last)))

    def _load_query(self, target: Fragments, i: Expr, step: Expr) -> None:
        """Loads fragment number `step` of the wave's queries to fragment i of `target`."""
        start, heads = self.query_row, self.attention.heads
        column = T.Bind((self.part * self.shape.steps + step) * self.k)
        place = self.Q[T.truncdiv(start, T.int32(heads)), T.truncmod(start, T.int32(heads)), column]
        target.load(i, place, self.attention.width, "row_major")

    def start(self) -> None:
        """Loads the queries, and initializes the softmax before the first block of keys."""
        self.query_row = self._start(self.fresh[0] + self.row_fragment * self.m)
        for step in range(self.held):
            self._load_query(self.queries, step, step)
        put(self.top, T.float32(LOWEST / 2), 0)  # above masked scores, so that their weights are 0
        put(self.total, T.float32(0), 0)
        self.out.clear()

    def score(self, keys: Buffer, first: Expr) -> None:
        """Stores this wave's partial scores of a block of keys to LDS. first: the block's first unit in `keys`."""
        count = self.tile.keys // self.n
        self.partial.clear()
        first = T.Bind(first + self.part * (self.shape.steps * self.k // UNIT))
        for step in range(self.shape.steps):
            queries, i = self.queries, step
            if step >= self.held:
                queries, i = self.query, 0
                self._load_query(self.query, 0, step)
            for j in range(count):
                place = keys[first + j * self.n * self.row_units + step * (self.k // UNIT)]
                self.key.load(0, place, self.row_units * UNIT, "col_major")
                self.partial.add_product(j, queries, i, self.key, 0)
        place = T.Bind((self.part * self.tile.rows + self.row_fragment * self.m) * (self.tile.keys // self.vectors))
        for j in range(count):
            self.partial.store(j, self.scores[place + j * self.n // self.vectors], self.tile.keys, "row_major")

    def weigh(self, key0: Expr) -> None:
        """Computes the weights of the lane's row for the block of keys that begins at position key0."""
        own, vectors, tile = self.shape.own, self.vectors, self.tile
        sums = [T.float32(0)] * own
        for part in range(self.shape.parts):
            for v in range(own // vectors):
                unit = T.Bind(self.scores[((part * tile.rows + self.row) * tile.keys + self.sub * own) // vectors + v])
                for e, x in enumerate(elements(unit)):
                    sums[v * vectors + e] = x if part == 0 else sums[v * vectors + e] + x
        key0 = T.Bind(key0 + self.sub * own)
        found, largest = [], T.float32(LOWEST)
        for i, score in enumerate(sums):
            score = T.Select(self.seen.sees(key0 + i), soft_cap(self.attention, T.Bind(score)), T.float32(LOWEST))
            found.append(T.Bind(score))
            largest = maximum(largest, found[-1])
        largest = wave_max(self.arch, T.Bind(largest), self.shape.lanes)
        old = T.Bind(self.top[0])
        grows = T.Bind(largest > old + T.float32(LIMIT))
        new = T.Bind(T.Select(grows, largest - T.float32(START), old))
        shrink = T.Bind(exp2(old - new))
        put(self.top, new, 0)
        halves = [T.Bind(T.cast(exp2(score - new), "float16")) for score in found]
        total = self.total[0] * shrink
        for weight in halves:
            total = total + T.cast(weight, "float32")
        put(self.total, total, 0)
        place = T.Bind((self.row * (self.weight_units * UNIT) + self.sub * own) // self.pack)
        for i in range(own // self.pack):
            put(self.weights, vector(halves[i * self.pack : (i + 1) * self.pack]), place + i)
        any_grows = T.Bind(T.call_extern("bool", "vk.any", grows))
        put(self.factors, shrink, self.row)
        put(self.flags, T.Select(any_grows, T.float32(1), T.float32(0)), self.number)

    def rescale(self) -> None:
        """Multiplies the outputs by the factors of their rows, if any of them is not 1."""
        changed = functools.reduce(operator.add, [self.flags[i] for i in range(self.tile.waves)])
        with T.If(T.Bind(changed > T.float32(0))), T.Then():
            self._multiply()

    def _multiply(self) -> None:
        for i in range(self.shape.row_fragments):
            self.factor.load(0, self.factors[i * self.m], 0, "col_major")
            with self.out.elements(0) as e:
                factor = self.factor.get(0, e)
                for x in range(i * self.shape.columns, (i + 1) * self.shape.columns):
                    self.out.set(x, e, self.out.get(x, e) * factor)

    def add_values(self, keys: Buffer, first: Expr) -> None:
        """out += weights @ values for a block of keys. first: the block's first unit in `keys`."""
        columns = self.shape.columns
        first = T.Bind(first + self.number * (columns * self.n // UNIT))
        for c in range(self.tile.keys // self.k):
            for i in range(self.shape.row_fragments):
                place = self.weights[(i * self.m * self.weight_units * UNIT + c * self.k) // self.pack]
                self.weight.load(i, place, self.weight_units * UNIT, "row_major")
            for x in range(columns):
                place = keys[first + c * self.k * self.row_units + x * (self.n // UNIT)]
                self.value.load(0, place, self.row_units * UNIT, "row_major")
                for i in range(self.shape.row_fragments):
                    self.out.add_product(i * columns + x, self.weight, i, self.value, 0)

    def row_total(self) -> Expr:
        """The sum of all weights of the lane's row."""
        return wave_sum(self.arch, T.Bind(self.total[0]), self.shape.lanes)

    def finish(self, live: Callable[[Expr], Expr]) -> None:
        """Divides the outputs by the totals of their rows, and stores those of the tokens for which live(token) is
        true, one fragment at a time, through LDS."""
        total = with_sink(self.step.sinks, self.step.token_and_head(self.step_row)[1], self.row_total(), self.top[0], 0)
        barrier()  # other waves may still read `factors` in `rescale`
        put(self.factors, rcp(total), self.row)
        barrier()
        self._multiply()
        columns, quads, d = self.shape.columns, self.n // WIDTH, self.attention.value_d
        base, units = T.Bind(self.number * (self.m * self.n // self.vectors)), WIDTH // self.vectors
        for i, fresh in enumerate(self.fresh):
            for x in range(columns):
                self.out.store(i * columns + x, self.scores[base], self.n, "row_major")
                wave_barrier()
                for first in range(0, self.m * quads, self.arch.wave):
                    place = T.Bind(first + self.lane)
                    found = [T.Bind(self.scores[base + place * units + v]) for v in range(units)]
                    y = [T.Bind(x) for unit in found for x in elements(unit)]
                    row = T.Bind(self.starts[i] + place // quads)
                    token, head = self.step.token_and_head(row)
                    column = T.Bind(head * d + (self.number * columns + x) * self.n + place % quads * WIDTH)
                    self.step.store(self.arch, y, token, column, (row >= fresh) & live(token))
                wave_barrier()

    def store_parts(self, Parts: Buffer, first: Expr) -> None:
        """Stores the workgroup's part (see the module's docstring) to Parts, from element `first` on."""
        columns, d = self.shape.columns, self.attention.value_d
        for i in range(self.shape.row_fragments):
            for x in range(columns):
                place = T.Bind(first + i * self.m * d + (self.number * columns + x) * self.n)
                self.out.store(i * columns + x, Parts[place], d, "row_major")
        total = self.row_total()
        with T.If(self.sub == 0), T.Then():
            place = T.Bind(first + self.tile.rows * d + self.row * 2)
            put(Parts, self.top[0], place)
            put(Parts, total, place + 1)


def attend(wave: Wave, cache: Cache, slot: Expr, begin: Expr, end: Expr, tid: Expr, threads: int) -> None:
    """Emits the loop of a workgroup's waves over the blocks of keys begin .. end-1 of a slot. There must be at least
    one block."""
    attention, tile = wave.attention, wave.tile
    keys, size = SharedBlock("key", attention, tile.keys, threads, tid, tile.buffers), key_units(tile, attention)

    def first_key(number: Expr) -> Expr:
        """The first key of block `number`, clamped to the last block."""
        return T.Bind(T.min(number, end - 1) * tile.keys)

    pages = Pages(cache, slot, [first_key(begin), first_key(begin + 1)])
    page, _ = pages.take()
    keys.load(cache.block(0, T.Bind(begin * tile.keys), page, tile.keys))
    keys.store()
    barrier()
    with T.serial(end - begin) as i:
        number = T.Bind(i + begin)
        _, page = pages.take(first_key(number + 2))
        following = cache.block(0, first_key(number + 1), page, tile.keys)
        place = T.int32(0)
        if tile.buffers > 1:
            place = T.Bind((i & 1) * size)
            keys.load(following)
        wave.score(keys.buffer, place)
        barrier()
        if tile.buffers > 1:
            keys.store(T.Bind(size - place))
        else:
            keys.load(following)
        wave.weigh(T.Bind(number * tile.keys))
        barrier()
        wave.rescale()
        wave.add_values(keys.buffer, place)
        if tile.buffers == 1:
            barrier()
            keys.store()
            barrier()


# ---- the join of splits

Part = Callable[[Expr], Expr]
WAVES, BATCH = 4, 8  # waves of a workgroup of the join; splits whose loads a wave issues together


def chunks_of(attention: Attention, arch: Profile) -> int:
    """The number of workgroups of the join for each row. A lane has WIDTH columns."""
    return -(-attention.value_d // (arch.wave * WIDTH))


def place_in_tile(row: Expr, first: Expr, rows: int, fragment: int) -> Expr:
    """The number within its tile of a row of the step. first: the tile's first row. rows: rows of the step, near whose
    end fragments begin earlier (`Wave`). fragment: rows of a fragment."""
    begin = T.Bind((row - first) // fragment * fragment)
    return T.Bind(begin + row - T.min(first + begin, T.int32(rows - fragment)))


def join(
    step: Step, arch: Profile, tile: Tile, splits: tuple[Buffer, int, Expr, Part], row: Expr,
    thread: tuple[Expr, Expr, Expr], place: Callable[[], tuple[Expr, Expr]],
) -> None:  # fmt: skip
    """Joins and stores some columns of a row of a tile, WIDTH columns for each lane. All threads of a workgroup of
    WAVES waves must execute it. splits: (Parts, largest number of splits, number of active splits, part(split): the
    first element of its part in Parts). row: number within the tile. thread: (number of the chunk of columns, lane,
    wave). place(): returns the row's token and head."""
    (Parts, most, active, part), (chunk, lane, wave), d = splits, thread, step.layer.value_d
    firsts, count = range(0, -(-most // arch.wave) * arch.wave, arch.wave), arch.wave * WIDTH
    weights = T.alloc_buffer((firsts.stop,), "float32", scope="shared")
    sums = T.alloc_buffer((WAVES, count), "float32", scope="shared")
    column = T.Bind(chunk * count + lane * WIDTH)
    inside = None if d % count == 0 else column < d
    token, head = place()
    # the weights of the splits, which add up to 1; each lane has one or more splits
    tops, totals = [], []
    for first in firsts:
        split, has = T.Bind(T.min(first + lane, active - 1)), first + lane < active
        there = T.Bind(part(split) + tile.rows * d + row * 2)
        tops.append(T.Bind(T.Select(has, Parts[there], T.float32(LOWEST))))
        totals.append(T.Bind(T.Select(has, Parts[there + 1], T.float32(0))))
    largest = wave_max(arch, T.Bind(functools.reduce(maximum, tops)))
    powers = [T.Bind(exp2(top - largest)) for top in tops]
    total = sum((power * own for power, own in zip(powers, totals, strict=True)), T.float32(0))
    inverse = T.Bind(rcp(with_sink(step.sinks, head, wave_sum(arch, T.Bind(total)), largest, 0)))
    with T.If(wave == 0), T.Then():
        for first, power in zip(firsts, powers, strict=True):
            put(weights, power * inverse, first + lane)
    barrier()
    y, safe = local(WIDTH), column if inside is None else T.Bind(T.min(column, T.int32(d - WIDTH)))
    put(y, T.broadcast(T.float32(0), WIDTH), at(0, WIDTH))
    with T.serial((active + (WAVES * BATCH - 1)) // (WAVES * BATCH)) as batch:
        for i in range(BATCH):
            split = T.Bind((batch * BATCH + i) * WAVES + wave)
            there = T.Bind(T.min(split, active - 1))
            weight = T.Bind(T.Select(split < active, weights[there], T.float32(0)))
            found = Parts[at(T.Bind(part(there) + row * d + safe), WIDTH)]
            put(y, y[at(0, WIDTH)] + found * T.broadcast(weight, WIDTH), at(0, WIDTH))
    put(sums, y[at(0, WIDTH)], wave, at(lane * WIDTH, WIDTH))
    barrier()
    with T.If(wave == 0), T.Then():
        for n in range(1, WAVES):
            put(y, y[at(0, WIDTH)] + sums[n, at(lane * WIDTH, WIDTH)], at(0, WIDTH))
        step.store(arch, [T.Bind(y[i]) for i in range(WIDTH)], token, T.Bind(head * d + column), inside)
