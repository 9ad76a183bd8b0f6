"""The scores of an indexer (schedules/operators/indexer.py) on GPUs: a launch that stores them as int32 keys in the
same order, and counts the values of their first digit (choice.py).

A workgroup has some groups of keys of a row. With matrix units whose lane layout is known (base/matrices.py), a wave
has some keys of a group and all heads: scores_matrix.py. Otherwise a lane has some keys, and a wave some of the heads;
the waves add their sums in LDS. For block > 1 each block has a thread or a wave of its own.
"""

from collections.abc import Callable, Iterator

from tvm.tirx.script import builder as T

from mlc_amd.schedules.choices import choices
from mlc_amd.schedules.gpu.attention.attention_step import LOWEST
from mlc_amd.schedules.gpu.attention.cache import UNIT, clamped_position, row_slot
from mlc_amd.schedules.gpu.attention.cache_units import WORDS
from mlc_amd.schedules.gpu.base.device import barrier, fma, launch, maximum, uniform, wave_max, wave_meets
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.gpu.base.registers import at, each_owned, elements, filled, local, put
from mlc_amd.schedules.gpu.base.step import is_live, kept, once, when
from mlc_amd.schedules.gpu.latent.scores_matrix import MatrixScores, Queries
from mlc_amd.schedules.operators.attention import PAGE
from mlc_amd.schedules.operators.indexer import SelectKeys
from mlc_amd.schedules.tir import Buffer, Expr

DIGITS = ((21, 11), (10, 11), (0, 10))  # the digits of a score, the highest first: (lowest bit, number of bits)
COUNTS = 1 << DIGITS[0][1]  # counts of a digit
UNROLLED = 8  # largest number of vectors of counts of a thread that are unrolled; loops are faster to compile
MOST = (1 << 31) - 1  # replaces the scores of blocks that are always chosen
# Upper limits: keys of a group; keys of a lane; heads that a lane processes together
GROUP, KEYS, HEADS = 128, 4, 8
WAVES = 4  # largest number of waves with the same keys
ROOMY = 32 * 1024  # with so many bytes of LDS a workgroup counts digits in LDS, otherwise in memory
FILL = 32  # largest number of workgroups for each compute unit


def order_of(score: Expr) -> Expr:
    """An int32 key; keys have the order of the scores."""
    bits = T.Bind(T.reinterpret("int32", T.Bind(score)))
    return T.Select(bits < 0, bits ^ T.int32(MOST), bits)


def first_digit(order: Expr) -> Expr:
    return T.shift_right(order, T.int32(DIGITS[0][0])) + COUNTS // 2


def _keys_of_lane(arch: Device) -> int:
    """The number of keys of a lane."""
    return max(min(KEYS, GROUP // arch.wave), 1)


class _Keys:
    """Some columns of the keys of a group, in LDS. size: number of keys; per: keys of a lane."""

    def __init__(self, arch: Device, op: SelectKeys, Ik: Buffer, threads: int, tid: Expr):
        self.Ik, self.threads, self.tid, self.wave = Ik, threads, tid, arch.wave
        self.columns = max(n for n in range(UNIT, (64 if arch.lds >= ROOMY else 32) + 1, UNIT) if op.d % n == 0)
        self.per = _keys_of_lane(arch)
        self.size, self.units = self.per * arch.wave, self.columns // UNIT
        self.loaded = local(-(-self.size * self.units // threads) * WORDS, "uint32")
        # a unit of padding after each row, so that consecutive rows start in different banks
        self.buffer = T.alloc_buffer((self.size, (self.units + 1) * UNIT), "float16", scope="shared")

    def load(self, place: Callable[[Expr], tuple[Expr, Expr]], column: Expr) -> None:
        """Issues the loads of the columns from `column` on to registers. place(number): (page, place in the page) of a
        key of the group."""
        for i, (own, _) in enumerate(each_owned(self.tid, self.threads, self.size * self.units)):
            page, there = place(own // self.units)
            unit = T.Bind(self.Ik[page, there, at(column + own % self.units * UNIT, UNIT)])
            put(self.loaded, T.reinterpret(f"uint32x{WORDS}", unit), at(i * WORDS, WORDS))

    def store(self) -> None:
        for i, (own, valid) in enumerate(each_owned(self.tid, self.threads, self.size * self.units)):
            unit = T.reinterpret(f"float16x{UNIT}", self.loaded[at(i * WORDS, WORDS)])
            with when(valid):
                put(self.buffer, unit, own // self.units, at(own % self.units * UNIT, UNIT))

    def add_products(self, products: Buffer, query: Callable[[int, Expr], Expr], heads: int, lane: Expr) -> None:
        """products[h * per + i] += the product of the query of head h and the lane's key number i, for the columns in
        LDS. query(h, column): WIDTH elements of the query; column counts from the first of these columns."""
        with kept(self.units) as unit:
            keys = [T.Bind(self.buffer[i * self.wave + lane, at(unit * UNIT, UNIT)]) for i in range(self.per)]
            keys = [[T.Bind(T.cast(x, "float32")) for x in elements(key)] for key in keys]
            for h in range(heads):
                for first in range(0, UNIT, WIDTH):
                    q = elements(T.Bind(query(h, unit * UNIT + first)))
                    for i, key in enumerate(keys):
                        product = products[h * self.per + i]
                        for a, b in zip(q, key[first:], strict=False):
                            product = fma(a, b, product)
                        put(products, product, h * self.per + i)


def score_keys(op: SelectKeys, arch: Device, state: Buffer, places, queries, buffers) -> None:
    """Emits the launch for block = 1. The workgroups of a row take its groups of keys in turn; with more rows, each row
    has fewer workgroups. places: (rows, pages). queries: (Q, W) or `Queries`. buffers: (Ik, Order, Counts)."""
    (rows, pages), (Ik, Order, Counts), m = places, buffers, op.m
    kind = MatrixScores if isinstance(queries, Queries) else LaneScores
    waves, size = kind.shape(op, arch)
    threads, stride = waves * arch.wave, min(-(-op.ctx // size), -(-FILL * arch.units // m))
    with launch((stride, m), (arch.wave, waves)) as (begin, row, lane, thread_wave):
        wave, last = uniform(arch, thread_wave), clamped_position(rows, row, op.ctx)
        works = (begin * size <= last) & (last >= op.used)
        with once(works if m == 1 else works & is_live(state, row)):
            tid = T.Bind(wave * arch.wave + lane)
            scores = kind(op, arch, queries, Ik, (pages, row_slot(rows, row)), (row, wave, lane))
            counts = T.alloc_buffer((COUNTS,), "int32", scope="shared") if arch.lds >= ROOMY else None
            if counts is not None:
                clear(counts, (), tid, threads)
            with kept(T.Bind((last // size - begin) // stride + 1)) as step:
                first = T.Bind((begin + step * stride) * size)
                scores.compute(first, last)
                for number, valid in each_owned(tid, threads, size):
                    order, seen = T.Bind(order_of(scores.total(number))), first + number <= last
                    with T.If(seen if valid is None else seen & valid), T.Then():
                        put(Order, order, row, 0, first + number)
                        digit = first_digit(order)
                        add_to(T.int32(1), *((Counts, row, 0, digit) if counts is None else (counts, digit)))
                wave_meets(arch)  # reconverges the wave, as the next step uses matrix units
            if counts is not None:
                barrier()
                add_counts(counts, (Counts, row, 0), tid, threads)


class LaneScores:
    """The scores that a workgroup computes without matrix units, with float32 multiply-adds. queries: (Q, W). The
    interface is that of `MatrixScores`."""

    @staticmethod
    def shape(op: SelectKeys, arch: Device) -> tuple[int, int]:
        waves = next(n for n in (WAVES, 2, 1) if op.heads % n == 0 and n * arch.wave <= arch.threads)
        return waves, _keys_of_lane(arch) * arch.wave

    def __init__(self, op: SelectKeys, arch: Device, queries, Ik: Buffer, pages, place):
        (self.Q, self.W), (self.pages, self.slot), (self.row, self.wave, self.lane) = queries, pages, place
        (self.waves, size), self.op = self.shape(op, arch), op
        self.keys = _Keys(arch, op, Ik, self.waves * arch.wave, T.Bind(self.wave * arch.wave + self.lane))
        self.sums = T.alloc_buffer((self.waves, size), "float32", scope="shared")

    def compute(self, first: Expr, last: Expr) -> None:
        keys, d = self.keys, self.op.d
        own = self.op.heads // self.waves
        together = max(n for n in range(1, HEADS + 1) if own % n == 0)
        totals = filled(T.float32(0), keys.per)

        def place(number: Expr) -> tuple[Expr, Expr]:
            key = T.Bind(T.min(first + number, last))
            return T.Bind(self.pages[self.slot, key // PAGE]), T.Bind(key % PAGE)

        with kept(own // together) as part:
            head, products = T.Bind(self.wave * own + part * together), filled(T.float32(0), together * keys.per)
            keys.load(place, T.int32(0))
            with kept(d // keys.columns) as chunk:
                barrier()
                keys.store()
                barrier()
                column = T.Bind(chunk * keys.columns)
                keys.load(place, T.Bind(T.min(column + keys.columns, T.int32(d - keys.columns))))

                def query(h: int, c: Expr) -> Expr:
                    return self.Q[self.row, at((head + h) * d + column + c, WIDTH)]

                keys.add_products(products, query, together, self.lane)
            for h in range(together):
                weight = T.Bind(self.W[self.row, head + h])
                for i in range(keys.per):
                    positive = maximum(products[h * keys.per + i], T.float32(0))
                    put(totals, fma(weight, positive, totals[i]), i)
        for i in range(keys.per):
            put(self.sums, totals[i], self.wave, i * keys.wave + self.lane)
        barrier()

    def total(self, number: Expr) -> Expr:
        return sum((self.sums[i, number] for i in range(1, self.waves)), self.sums[0, number])


def score_blocks(op: SelectKeys, arch: Device, state: Buffer, places, buffers) -> None:
    """Emits the launch for block > 1. With by_head a workgroup of one wave computes a block, and its lanes take the
    block's positions in turn; otherwise each thread computes a block. places: (rows, pages). buffers: (Q, Ik,
    Order)."""
    (rows, pages), (Q, Ik, Order), m = places, buffers, op.m
    of_group = 1 if op.by_head else arch.wave
    with launch((-(-op.blocks // of_group), op.sets, m), (arch.wave,)) as (group, own, row, lane):
        last, slot = clamped_position(rows, row, op.ctx), row_slot(rows, row)
        number = T.Bind(group if op.by_head else group * of_group + lane)
        begin, newest = T.Bind(number * op.block), T.Bind(T.min(number * op.block + (op.block - 1), last))

        def key_of(position: Expr) -> Buffer:
            return _key(Ik, T.Bind(pages[slot, position // PAGE]), position % PAGE, op.d)

        works = (begin <= last) & (last // op.block >= choices(op, last))
        with T.If(works if m == 1 else works & is_live(state, row)), T.Then():
            if op.by_head:
                top = filled(T.float32(LOWEST))
                with T.serial(-(-op.block // arch.wave)) as step:
                    position = T.Bind(begin + step * arch.wave + lane)
                    key = key_of(T.Bind(T.min(position, newest)))
                    product = T.Bind(_product(Q, row, own, key, op.d))
                    put(top, maximum(top[0], T.Select(position <= newest, product, T.float32(LOWEST))), 0)
                score, forced = wave_max(arch, T.Bind(top[0])), number > last // op.block - op.local
            else:
                total, key = filled(T.float32(0)), key_of(newest)
                with T.serial(op.heads) as head:
                    put(total, total[0] + maximum(_product(Q, row, head, key, op.d), T.float32(0)), 0)
                score, forced = total[0], (number + 1) * op.block - 1 > last
            order = T.Bind(T.Select(forced, T.int32(MOST), order_of(score)))
            with T.If((lane == 0) if op.by_head else (number < op.blocks)), T.Then():
                put(Order, order, row, own, number)


def _key(Ik: Buffer, page: Expr, place: Expr, d: int) -> Buffer:
    """Loads a key, as float32 in registers."""
    key = local(d)
    for first in range(0, d, UNIT):
        for i, x in enumerate(elements(T.Bind(Ik[page, place, at(first, UNIT)]))):
            put(key, T.cast(x, "float32"), first + i)
    return key


def _product(Q: Buffer, row: Expr, head: Expr, key: Buffer, d: int) -> Expr:
    product = T.float32(0)
    for first in range(0, d, WIDTH):
        for i, q in enumerate(elements(T.Bind(Q[row, at(head * d + first, WIDTH)]))):
            product = fma(q, key[first + i], product)
    return product


def _vectors(thread: Expr, threads: int) -> Iterator[Expr]:
    """The numbers of the vectors of WIDTH counts of one of `threads` threads, in a loop if there are many."""
    vectors = COUNTS // WIDTH
    if vectors <= threads * UNROLLED:
        for own, valid in each_owned(thread, threads, vectors):
            with when(valid):
                yield own
        return
    with kept(-(-vectors // threads)) as step:
        own = T.Bind(step * threads + thread)
        with when(None if vectors % threads == 0 else own < vectors):
            yield own


def clear(counts: Buffer, index: tuple, thread: Expr, threads: int) -> None:
    """Sets the COUNTS elements of counts[index] to 0, by `threads` threads."""
    for own in _vectors(thread, threads):
        put(counts, T.broadcast(T.int32(0), WIDTH), *index, at(own * WIDTH, WIDTH))


def add_counts(counts: Buffer, to: tuple, thread: Expr, threads: int) -> None:
    """Adds a workgroup's counts to the COUNTS elements of `to`, (buffer, index..), atomically."""
    for own in _vectors(thread, threads):
        for i, count in enumerate(elements(T.Bind(counts[at(own * WIDTH, WIDTH)]))):
            with when(count > 0):
                add_to(count, *to, own * WIDTH + i)


def add_to(amount: Expr, counts: Buffer, *index: Expr) -> None:
    T.evaluate(T.call_intrin("int32", "tirx.atomic_add", T.address_of(counts[index]), amount))
