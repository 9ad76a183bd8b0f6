"""Causal attention of a chunk of tokens on cooperative matrices (KHR_cooperative_matrix), with online softmax.

A wave has some fragments of rows; a fragment has consecutive tokens of one head. The waves of a workgroup share a KV
head. Its keys and values go through shared memory, a block at a time, in the layout of operands. The next block is
loaded while this one is multiplied: keys during the second product (weights x values), values during the first (queries
x keys).

Which lane holds which element of a fragment is implementation-defined. So the code applies the same operation to all
elements, or combines two fragments of the same type element by element. Operations on rows are built from these:
    broadcast of a column       a load from memory with a stride of 0. The numbers of columns, and of the keys that rows
                                attend to, are also loaded like this, for masks
    sum of a row's weights      the product with a matrix of ones, so that weights are rounded as in the other product
    maximum of a row            the maximum over the fragment's columns, each broadcast. This is slow, but rarely
                                needed: weights are 2**(score - top), for any `top` with which they fit into
                                float16. Only when a weight would exceed 2**LIMIT, `top` is renewed such that the
                                largest weight becomes 2**START, and the outputs are rescaled.
"""

from collections.abc import Iterator, Sequence

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.attention.attention_coop_tiles import Shared, SharedBlock, Tile, shared_units, tile_of
from mlc_amd.schedules.gpu.attention.attention_step import LIMIT, LOWEST, START, Step, group_of, soft_cap, with_sink
from mlc_amd.schedules.gpu.attention.cache import UNIT, Chunk, Pages, Visible
from mlc_amd.schedules.gpu.base.device import (
    WAVE_SHARED,
    barrier,
    exp2,
    launch,
    maximum,
    rcp,
    rint,
    uniform,
    wave_barrier,
)
from mlc_amd.schedules.gpu.base.matrices import Fragments
from mlc_amd.schedules.gpu.base.profiles import Profile
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.gpu.base.registers import filled, put
from mlc_amd.schedules.gpu.base.step import SUMS, WAVES, checked_threads
from mlc_amd.schedules.operators.attention import PAGE, CausalAttention
from mlc_amd.schedules.space import Kernel, planned
from mlc_amd.schedules.tir import Expr


class Wave:
    """The rows of one wave. Fragment i has the tokens from tokens[i] on of head heads[i]; they are the rows from
    step_rows[i] on of the step. After single rows, the last fragment may overlap the one before; it stores only the
    rows from fresh[i] on."""

    def __init__(
        self, arch: Profile, step: Step, tile: Tile, shared: Shared, chunk: Chunk, kv: Expr, number: Expr, first: Expr
    ):
        """number: of the wave. first: number of the workgroup's first fragment among those of the KV head."""
        attention, Q = step.layer, step.Q
        group, width = attention.group, attention.width
        count = step.op.m // arch.fragment[0] * group  # fragments of the KV head
        self.arch, self.step, self.attention, self.tile, self.Q = arch, step, attention, tile, Q
        self.chunk, (self.keys, self.values, self.weights, self.numbers, self.bounds) = chunk, shared
        self.part, self.rows = T.Bind(number % tile.parts), T.Bind(number // tile.parts)
        self.base, self.row_units = T.Bind(number * tile.wave_units(arch.fragment)), tile.own_keys // UNIT + 1
        first, self.place = T.Bind(first + self.rows * tile.fragments), T.Bind(number * tile.fragments)
        self.m, self.n, self.k = arch.fragment
        # fragments beyond the chunk repeat the last one, and are not stored
        places = [T.Bind(T.min(first + i, T.int32(count - 1))) for i in range(tile.fragments)]
        self.fresh = [T.Bind(place // group * self.m) for place in places]
        self.tokens = self.step_rows = self.fresh
        if not isinstance(chunk.row0, int):
            most = T.int32(int(Q.shape[0]) - self.m)
            self.step_rows = [T.Bind(T.min(chunk.row(token), most)) for token in self.fresh]
            self.tokens = [T.Bind(row - chunk.row0) for row in self.step_rows]
        self.heads = [T.Bind(kv * group + place % group) for place in places]
        self.valid = [first + i < count for i in range(tile.fragments)]
        self.score_columns, self.columns = tile.own_keys // self.n, width // self.n
        self.query_steps = width // self.k
        self.held = tile.held_steps(width, arch)
        self.queries = self._new("a", tile.fragments * max(self.held, 1))
        self.operand, self.weight, self.ones = self._new("b", 1), self._new("a", tile.fragments), self._new("b", 1)
        self.scores, self.halves = self._new("sum", tile.fragments * self.score_columns), self._new("half", 1)
        self.out, self.total, self.top = (self._new("sum", tile.fragments * c) for c in (self.columns, 1, 1))
        self.other, self.now = self._new("sum", 2), self._new("sum", 1)

    def _new(self, kind: str, count: int) -> Fragments:
        return Fragments(kind, count, self.arch.fragment)

    def start(self, lane: Expr) -> None:
        """Initializes the state, and loads the queries that stay in registers. Lanes write the first key and the end of
        the keys that each row attends to, as float32, to shared memory."""
        last = T.Bind(T.min(self.tokens[-1] + self.m, self.chunk.count) - 1)
        first, end = self.chunk.visible(self.tokens[0]), self.chunk.visible(last)
        self.all_see = Visible(end.first, first.end)
        for place in range(0, self.tile.fragments * self.m, self.arch.wave):
            row = T.Bind(T.min(place + lane, T.int32(self.tile.fragments * self.m - 1)))
            token = self._of(self.tokens, row // self.m) + row % self.m
            seen = self.chunk.visible(T.Bind(T.min(token, self.chunk.count - 1)))
            where = T.Bind((self.place + row // self.m) * 2 * self.m + row % self.m)
            put(self.bounds, T.cast(seen.end, "float32"), where + self.m)
            if seen.first is not None:
                put(self.bounds, T.cast(seen.first, "float32"), where)
        wave_barrier()
        for i in range(self.tile.fragments):
            for c in range(self.held):
                self._load_query(self.queries, i * self.held + c, i, c)
        self.ones.fill(0, 1)
        self.halves.clear()
        self.now.clear()
        for i in range(self.tile.fragments):
            self.top.fill(i, LOWEST / 2)  # greater than the scores of masked keys, so that their weights are 0
        self.total.clear()
        self.out.clear()

    def _of(self, values: Sequence[Expr], i: Expr) -> Expr:
        """values[i]"""
        found = values[-1]
        for number, value in reversed(list(enumerate(values[:-1]))):
            found = T.Select(i == number, value, found)
        return found

    def _load_query(self, fragments: Fragments, place: Expr, i: Expr, c: Expr) -> None:
        """fragments[place] = columns c * k.. of the queries of fragment i."""
        stride = int(self.Q.shape[1]) * self.attention.width
        fragments.load(place, self.Q[self.step_rows[i], self.heads[i], c * self.k], stride, "row_major")

    def score(self) -> None:
        """scores = queries @ keys, for the block in shared memory."""
        keys = self.keys
        self.scores.clear()
        first = T.Bind(self.part * (self.tile.own_keys * keys.row_units))
        for c in range(self.query_steps):
            for i in range(self.tile.fragments if c >= self.held else 0):
                self._load_query(self.weight, i, i, c)
            for j in range(self.score_columns):
                place = keys.buffer[first + j * self.n * keys.row_units + c * (self.k // UNIT)]
                self.operand.load(0, place, keys.row_units * UNIT, "col_major")
                for i in range(self.tile.fragments):
                    queries, query = (self.queries, i * self.held + c) if c < self.held else (self.weight, i)
                    self.scores.add_product(i * self.score_columns + j, queries, query, self.operand, 0)

    def cap(self) -> None:
        """Applies the layer's softcap, if it has one."""
        if self.attention.softcap:
            with self.scores.elements(0) as e:
                for i in range(self.tile.fragments * self.score_columns):
                    self.scores.set(i, e, soft_cap(self.attention, self.scores.get(i, e)))

    def mask(self, key0: Expr) -> None:
        """Sets the scores of masked keys to LOWEST."""
        key0 = T.Bind(key0 + self.part * self.tile.own_keys)
        with T.If(tirx.Not(self.all_see.covers(key0, self.tile.own_keys))), T.Then():
            self.other.load(0, self.numbers[0], 0, "row_major")  # the number of the column
            for i in range(self.tile.fragments):
                first, end = (self.bounds[(self.place + i) * 2 * self.m + which * self.m] for which in range(2))
                self.other.load(1, end, 0, "col_major")
                if self.all_see.first is not None:
                    self.now.load(0, first, 0, "col_major")
                with self.scores.elements(0) as e:
                    for j in range(self.score_columns):
                        key = T.Bind(self.other.get(0, e) + T.cast(key0 + j * self.n, "float32"))
                        seen = key < self.other.get(1, e)
                        if self.all_see.first is not None:
                            seen = seen & (key >= self.now.get(0, e))
                        score = self.scores.get(i * self.score_columns + j, e)
                        self.scores.set(i * self.score_columns + j, e, T.Select(seen, score, T.float32(LOWEST)))

    def renew_tops(self) -> None:
        """If a weight would be too large, renews `top` and rescales outputs and sums."""
        worst = filled(T.float32(LOWEST))
        with self.scores.elements(0) as e:
            for i in range(self.tile.fragments):
                top = self.top.get(i, e)
                for j in range(self.score_columns):
                    put(worst, maximum(worst[0], self.scores.get(i * self.score_columns + j, e) - top), 0)
        with T.If(T.Bind(T.call_extern("bool", "vk.any", worst[0] > T.float32(LIMIT)))), T.Then():
            for i in range(self.tile.fragments):
                self._row_maximum(i)
                with self.top.elements(0) as e:
                    old = self.top.get(i, e)
                    new = maximum(old, rint(self.now.get(0, e) - T.float32(START)))
                    self.top.set(i, e, new)
                    self._shrink(i, e, exp2(old - new))

    def _row_maximum(self, i: Expr) -> None:
        """now = the maximum score of each row of fragment i, in all columns."""
        units = self.m * 2 // UNIT  # of a column of float32
        with self.now.elements(0) as e:
            largest = self.scores.get(i * self.score_columns, e)
            for j in range(1, self.score_columns):
                largest = maximum(largest, self.scores.get(i * self.score_columns + j, e))
            self.now.set(0, e, largest)
        self.now.store(0, self.weights[self.base], self.m * 2, "col_major")
        wave_barrier()
        with T.serial(self.n) as column:
            self.other.load(0, self.weights[self.base + column * units], 0, "col_major")
            with self.now.elements(0) as e:
                self.now.set(0, e, maximum(self.now.get(0, e), self.other.get(0, e)))
        wave_barrier()

    def weigh(self) -> None:
        """Computes weights from scores, and stores them to shared memory as operands."""
        with self.scores.elements(0) as e:
            for i in range(self.tile.fragments):
                top = self.top.get(i, e)
                for j in range(self.score_columns):
                    self.scores.set(
                        i * self.score_columns + j, e, exp2(self.scores.get(i * self.score_columns + j, e) - top)
                    )
        for i in range(self.tile.fragments):
            for j in range(self.score_columns):
                self.halves.convert(0, self.scores, i * self.score_columns + j)
                place = self.weights[self.base + i * self.m * self.row_units + j * (self.n // UNIT)]
                self.halves.store(0, place, self.row_units * UNIT, "row_major")
        wave_barrier()

    def add_values(self) -> None:
        """out += weights @ values, for the block in shared memory."""
        values = self.values
        first = T.Bind(self.part * (self.tile.own_keys // UNIT))
        for c in range(self.tile.own_keys // self.k):
            for i in range(self.tile.fragments):
                place = self.weights[self.base + i * self.m * self.row_units + c * (self.k // UNIT)]
                self.weight.load(i, place, self.row_units * UNIT, "row_major")
                self.total.add_product(i, self.weight, i, self.ones, 0)
            for x in range(self.columns):
                place = values.buffer[first + x * self.n * values.row_units + c * (self.k // UNIT)]
                self.operand.load(0, place, values.row_units * UNIT, "col_major")
                for i in range(self.tile.fragments):
                    self.out.add_product(i * self.columns + x, self.weight, i, self.operand, 0)
        wave_barrier()

    def join_parts(self) -> None:
        """Adds the results of all parts to those of the first part's waves."""
        if self.tile.parts == 1:
            return
        for i in range(self.tile.fragments):
            with self.top.elements(i) as e:
                self.now.set(0, e, self.top.get(i, e))
            for _ in self._others(self.top, i):
                with self.top.elements(i) as e:
                    self.top.set(i, e, maximum(self.top.get(i, e), self.other.get(0, e)))
            with self.top.elements(i) as e:
                self._shrink(i, e, exp2(self.now.get(0, e) - self.top.get(i, e)))
        sums = [(self.total, i) for i in range(self.tile.fragments)]
        for fragments, i in sums + [(self.out, i) for i in range(self.tile.fragments * self.columns)]:
            for part in self._others(fragments, i):
                with T.If(self.part != part), T.Then(), fragments.elements(i) as e:
                    fragments.set(i, e, fragments.get(i, e) + self.other.get(0, e))
        barrier()  # other waves must have read this memory before `finish` overwrites it

    def _others(self, fragments: Fragments, i: Expr) -> Iterator[int]:
        """Yields the number of each part, after loading to other[0] that fragment of the wave with the same rows in the
        part."""
        barrier()
        fragments.store(i, self.weights[self.base], self.m * 2, "col_major")
        barrier()
        for part in range(self.tile.parts):
            there = T.Bind((self.rows * self.tile.parts + part) * self.tile.wave_units(self.arch.fragment))
            self.other.load(0, self.weights[there], self.m * 2, "col_major")
            yield part

    def _shrink(self, i: Expr, e: Expr, factor: Expr) -> None:
        """Multiplies element e of the outputs and sums of fragment i by a factor."""
        for fragments, count in ((self.total, 1), (self.out, self.columns)):
            for place in range(i * count, (i + 1) * count):
                fragments.set(place, e, fragments.get(place, e) * factor)

    def finish(self, lane: Expr) -> None:
        """Stores the outputs of the live rows, a fragment at a time through shared memory."""
        sinks = self.step.sinks
        quads, d = self.n // WIDTH, self.attention.d  # quads: of a row
        for i in range(self.tile.fragments):
            with self.out.elements(0) as e:
                total = self.total.get(i, e)
                if sinks is not None:
                    total = with_sink(sinks, self.heads[i], total, self.top.get(i, e), shift=0)
                inverse = rcp(total)
                for x in range(self.columns):
                    self.out.set(i * self.columns + x, e, self.out.get(i * self.columns + x, e) * inverse)
            for x in range(self.columns):
                self.out.store(i * self.columns + x, self.weights[self.base], self.n * 2, "row_major")
                wave_barrier()
                for first in range(0, self.m * quads, self.arch.wave):
                    place = T.Bind(first + lane)
                    within, column = T.Bind(place // quads), place % quads * WIDTH
                    token = T.Bind(self.tokens[i] + within)
                    y = T.Bind(T.reinterpret(f"float32x{WIDTH}", self.weights[self.base + place]))
                    live = tirx.all(self.valid[i], token < self.chunk.count, self.part == 0)
                    if self.tokens is not self.fresh:
                        live = tirx.all(live, token >= self.fresh[i])
                    if (x + 1) * self.n > d:
                        live = tirx.all(live, x * self.n + column < d)
                    y = [T.Bind(T.Shuffle([y], [c])) for c in range(WIDTH)]
                    place = T.Bind(self.heads[i] * d + x * self.n + column)
                    row = token if self.step_rows is self.tokens else T.Bind(self.step_rows[i] + within)
                    self.step.store(self.arch, y, row, place, live)
                wave_barrier()


def emit(step: Step, arch: Profile, plan: Tile | None = None) -> None:
    """Emits the launch for the chunk of a step. Raises UserError for shapes that `group_of` or `tile_of` refuses, for
    the layout "rows", and if the number of rows is not a multiple of a fragment's; ValueError for a tile whose keys do
    not divide a page."""
    step.refuse_blocks()
    attention, m, rows = step.layer, step.op.m, arch.fragment[0]
    if m % rows:
        raise UserError(f"attention on matrix units of {arch.name} takes chunks in multiples of {rows} tokens, not {m}")
    kv_heads, group = attention.kv_heads, group_of(attention)
    tile, cache = plan or tile_of(attention, m, arch), step.cache
    if PAGE % tile.keys:
        raise ValueError(f"{tile} does not divide a page of {PAGE} keys")
    fragments, per_tile = m // rows * group, tile.row_fragments
    tiles = tile.workgroups(attention, m, arch) // kv_heads
    with launch((kv_heads, tiles), (arch.wave, tile.waves)) as (kv, reverse, lane, thread_wave):
        number = uniform(arch, thread_wave)
        tid, threads = T.Bind(number * arch.wave + lane), tile.waves * arch.wave
        chunk = step.chunk()
        first = T.Bind((tiles - 1 - reverse) * per_tile)  # workgroups with the most keys start first
        shared = Shared(
            SharedBlock("key", attention, tile.keys, threads, tid),
            SharedBlock("value", attention, tile.keys, threads, tid),
            shared_units(tile.waves * tile.wave_units(arch.fragment)),
            T.alloc_buffer((max(arch.fragment) // WIDTH,), f"float32x{WIDTH}", scope=WAVE_SHARED),
            T.alloc_buffer((tile.waves * tile.fragments * 2 * rows,), "float32", scope=WAVE_SHARED),
        )
        keys, values = shared.keys, shared.values
        # a loop of 0 or 1 iterations, because TVM does not allow barriers in an `if`
        with T.serial(T.cast(first // group * rows < chunk.count, "int32")):
            place = T.Bind(tid % (max(arch.fragment) // WIDTH))
            put(shared.numbers, T.cast(T.ramp(place * WIDTH, 1, WIDTH), f"float32x{WIDTH}"), place)
            wave = Wave(arch, step, tile, shared, chunk, kv, number, first)
            wave.start(lane)
            last = T.min(T.min(first + per_tile, T.int32(fragments)) - 1, T.int32(fragments - 1)) // group * rows + rows
            begin = T.int32(0)
            if attention.span:
                begin = chunk.visible(first // group * rows).first_block(tile.keys)
            end = chunk.visible(T.min(last, chunk.count) - 1).end_block(tile.keys)

            def first_key(number: Expr) -> Expr:
                """The first key of the block with that number; that of the last block if the number is beyond it."""
                return T.Bind(T.min(number, end - 1) * tile.keys)

            pages = Pages(cache, chunk.slot, [first_key(begin), first_key(begin + 1)])
            page, _ = pages.take()
            keys.load(cache.block(kv, T.Bind(begin * tile.keys), page, tile.keys))
            keys.store()
            barrier()
            with T.serial(end - begin) as i:
                number = T.Bind(i + begin)
                page, next_page = pages.take(first_key(number + 2))
                block = cache.block(kv, T.Bind(number * tile.keys), page, tile.keys)
                values.load(block)
                wave.score()
                wave.cap()
                wave.mask(block.key0)
                wave.renew_tops()
                wave.weigh()
                values.store()
                barrier()
                keys.load(cache.block(kv, first_key(number + 1), next_page, tile.keys))
                wave.add_values()
                keys.store()
                barrier()
            wave.join_parts()
            wave.finish(lane)


CHOICES = {"waves": WAVES, "fragments": (1, 2), "keys": (16, 32, 64), "parts": (1, 2, 4)}


@planned(CHOICES, lambda op, arch: tile_of(op.layer, op.m, arch))
def space(op: CausalAttention, arch: Profile, tile: Tile) -> Kernel:
    (rows, columns, step), own, width = arch.fragment, tile.own_keys, op.layer.width
    whole = tile.waves % tile.parts == 0 and tile.keys % tile.parts == 0 and own % columns == 0 and own % step == 0
    threads = checked_threads(arch, tile.waves * arch.wave)
    if not whole or PAGE % tile.keys or tile.lds_bytes(width, arch.fragment) > arch.lds:
        raise ValueError(f"{tile} does not fit {arch.name}")
    if tile.fragments * (own + width) * rows // arch.wave > SUMS:
        raise ValueError(f"{tile} takes more registers than {arch.name} has")
    return Kernel(tile, tile.workgroups(op.layer, op.m, arch), threads, tile.keys * width * 4 / threads)
