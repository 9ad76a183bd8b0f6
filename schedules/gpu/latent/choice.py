"""The choice of keys of sparse attention on the GPU (schedules/operators/indexer.py), in three launches:

1. Rows' own keys go into the cache.
2. The scores, as int32 in the same order. A lane has some keys, a wave some of the heads of these keys, as registers
   hold; the waves of a workgroup add theirs up. Blocks of keys have a thread or a wave each.
3. A workgroup for each row finds the least score that is chosen digit by digit: how many scores have which digit says
   where it is. The first digit's counts are of the second launch, where keys are many. Then each wave writes, in order,
   the numbers of those of its part of the scores that are chosen.

Rows that see no more keys than they may choose need neither scores nor digits.
"""

from collections.abc import Callable, Iterator

from tvm.tirx.script import builder as T

from mlc_amd.schedules.choices import choices
from mlc_amd.schedules.gpu.attention.attention_step import LOWEST
from mlc_amd.schedules.gpu.attention.cache import UNIT, clamped_position, is_at, row_slot
from mlc_amd.schedules.gpu.attention.cache_units import WORDS
from mlc_amd.schedules.gpu.base.device import barrier, fma, launch, maximum, uniform, wave_max, wave_scan
from mlc_amd.schedules.gpu.base.group import Group
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.gpu.base.registers import at, each_owned, elements, filled, local, put
from mlc_amd.schedules.gpu.base.step import builds, if_live, is_live, kept, once, when
from mlc_amd.schedules.operators.attention import PAGE, SLOTS
from mlc_amd.schedules.operators.indexer import SelectKeys
from mlc_amd.schedules.tir import Buffer, Expr, declared

LEAST = -(1 << 31)  # in the place of the scores of keys that a row does not see
DIGITS = ((21, 11), (10, 11), (0, 10))  # of a score, the highest first: the lowest bit, bits
COUNTS = 1 << DIGITS[0][1]
GROUP, KEYS, HEADS = 128, 4, 8  # keys of a workgroup and of a lane, and heads of these keys at a time, at most
WAVES = 4  # that have the same keys, at most
ROOMY = 32 * 1024  # bytes of shared memory with which a workgroup counts its scores' digits itself
FILL = 32  # workgroups of the second launch for each compute unit, at most
BATCH = 8  # loads of scores in flight, at most
MOST_THREADS = 1024  # of the third launch


@builds(SelectKeys)
def select_keys(op: SelectKeys, arch: Device, state: Buffer, plan: None) -> None:
    """Kernel (state, rows, pages, Q, [W], K, Ik, Ids)."""
    m, blocks = op.m, op.ctx // PAGE
    rows, pages = declared("int32", rows=(m, 2), pages=(SLOTS, blocks))
    Q, W, K = declared(**op.shapes())
    (Ik,), (Ids,) = declared("float16", Ik=op.cache_shape()), declared("int32", Ids=(m, op.sets * op.used))
    Order = T.alloc_buffer((m, op.sets, -(-op.blocks // WIDTH) * WIDTH), "int32")
    Counts = T.alloc_buffer((m, COUNTS), "int32") if op.block == 1 else None
    with launch((m,), (arch.wave,)) as (row, lane), if_live(state, m, row):
        last = clamped_position(rows, row, op.ctx)
        with T.If(is_at(rows, row, last)), T.Then():
            store_key(arch, Ik, K, row, (T.Bind(pages[row_slot(rows, row), last // PAGE]), last % PAGE), lane)
        if Counts is not None:
            with T.If(last >= op.used), T.Then(), T.serial(COUNTS // (arch.wave * WIDTH)) as i:
                zero = T.broadcast(T.int32(0), WIDTH)
                put(Counts, zero, row, at((i * arch.wave + lane) * WIDTH, WIDTH))
    if Counts is not None:
        _score_keys(op, arch, state, (rows, pages), (Q, W, Ik, Order, Counts))
    else:
        _score_blocks(op, arch, state, (rows, pages), (Q, Ik, Order))
    waves = max(min(MOST_THREADS, arch.most_threads, op.blocks // 2) // arch.wave, 1)
    with launch((op.sets, m), (arch.wave, waves)) as (own, row, lane, wave), if_live(state, m, row):
        position = clamped_position(rows, row, op.ctx)
        last, wanted = T.Bind(position // op.block), choices(op, position)
        _choose(op, Group(arch, lane, wave, waves), (Order, Counts, Ids), (row, own), last, wanted)


def store_key(arch: Device, cache: Buffer, K: Buffer, row: Expr, place: tuple[Expr, Expr], lane: Expr) -> None:
    """A wave stores a row's key, float32 of K, at (page, place in the page) of a cache float16 [pages, places, d]."""
    for column, valid in each_owned(lane, arch.wave, int(cache.shape[2])):
        with when(valid):
            put(cache, T.cast(K[row, column], "float16"), *place, column)


def _order(score: Expr) -> Expr:
    """An int32 that is larger where the score is."""
    bits = T.Bind(T.reinterpret("int32", T.Bind(score)))
    return T.Select(bits < 0, bits ^ T.int32(0x7FFFFFFF), bits)


def _first_digit(order: Expr) -> Expr:
    return T.shift_right(order, T.int32(DIGITS[0][0])) + COUNTS // 2


class _Keys:
    """Keys of a group in shared memory, some columns at a time, `size` keys of which each lane has `per`."""

    def __init__(self, arch: Device, op: SelectKeys, Ik: Buffer, threads: int, tid: Expr):
        self.Ik, self.threads, self.tid, self.wave = Ik, threads, tid, arch.wave
        self.columns = max(n for n in range(UNIT, (64 if arch.lds >= ROOMY else 32) + 1, UNIT) if op.d % n == 0)
        self.per = max(min(KEYS, GROUP // arch.wave), 1)
        self.size, self.units = self.per * arch.wave, self.columns // UNIT
        self.loaded = local(-(-self.size * self.units // threads) * WORDS, "uint32")
        # a unit after each row: neighbouring rows start in different banks
        self.buffer = T.alloc_buffer((self.size, (self.units + 1) * UNIT), "float16", scope="shared")

    def load(self, place: Callable[[Expr], tuple[Expr, Expr]], column: Expr) -> None:
        """Starts the loads of the columns from that one on into registers. place(number): page of a key, and where it
        is there."""
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
        """products[h * per + i] += head h's query times the lane's key number i. query(h, column): WIDTH elements of it
        from that one of these columns on."""
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


def _score_keys(op: SelectKeys, arch: Device, state: Buffer, places, buffers) -> None:
    """A workgroup has every so many groups of keys of a row: fewer workgroups where the rows are many."""
    (rows, pages), (Q, W, Ik, Order, Counts), m = places, buffers, op.m
    waves = next(n for n in (WAVES, 2, 1) if op.heads % n == 0 and n * arch.wave <= arch.threads)
    threads, size = waves * arch.wave, max(min(KEYS, GROUP // arch.wave), 1) * arch.wave
    stride = min(-(-op.ctx // size), -(-FILL * arch.units // m))
    with launch((stride, m), (arch.wave, waves)) as (begin, row, lane, thread_wave):
        wave, last = uniform(arch, thread_wave), clamped_position(rows, row, op.ctx)
        works = (begin * size <= last) & (last >= op.used)
        with once(works if m == 1 else works & is_live(state, row)):
            tid, slot = T.Bind(wave * arch.wave + lane), row_slot(rows, row)
            keys, sums = _Keys(arch, op, Ik, threads, tid), T.alloc_buffer((waves, size), "float32", scope="shared")
            counts = T.alloc_buffer((COUNTS,), "int32", scope="shared") if arch.lds >= ROOMY else None
            if counts is not None:
                with T.serial(COUNTS // threads) as i:
                    put(counts, T.int32(0), i * threads + tid)
            with kept(T.Bind((last // size - begin) // stride + 1)) as step:
                first = T.Bind((begin + step * stride) * size)

                def place(number: Expr, first: Expr = first) -> tuple[Expr, Expr]:
                    key = T.Bind(T.min(first + number, last))
                    return T.Bind(pages[slot, key // PAGE]), T.Bind(key % PAGE)

                _score_group(op, (Q, W), keys, sums, place, (row, wave, lane))
                for number, valid in each_owned(tid, threads, size):
                    total = sums[0, number]
                    for i in range(1, waves):
                        total = total + sums[i, number]
                    order, seen = T.Bind(_order(total)), first + number <= last
                    with T.If(seen if valid is None else seen & valid), T.Then():
                        put(Order, order, row, 0, first + number)
                        digit = _first_digit(order)
                        _count(T.int32(1), *((Counts, row, digit) if counts is None else (counts, digit)))
            if counts is not None:
                barrier()
                with T.serial(COUNTS // threads) as i:
                    count = T.Bind(counts[i * threads + tid])
                    with T.If(count > 0), T.Then():
                        _count(count, Counts, row, i * threads + tid)


def _score_group(op: SelectKeys, buffers, keys: _Keys, sums: Buffer, place, of: tuple[Expr, Expr, Expr]) -> None:
    """Leaves in `sums` each wave's part of the scores of a group of keys, when all are here."""
    (Q, W), (row, wave, lane), waves, d = buffers, of, int(sums.shape[0]), op.d
    own = op.heads // waves
    together = max(n for n in range(1, HEADS + 1) if own % n == 0)
    totals = filled(T.float32(0), keys.per)
    with kept(own // together) as part:
        head, products = T.Bind(wave * own + part * together), filled(T.float32(0), together * keys.per)
        keys.load(place, T.int32(0))
        with kept(d // keys.columns) as chunk:
            barrier()
            keys.store()
            barrier()
            column = T.Bind(chunk * keys.columns)
            keys.load(place, T.Bind(T.min(column + keys.columns, T.int32(d - keys.columns))))
            keys.add_products(products, lambda h, c: Q[row, at((head + h) * d + column + c, WIDTH)], together, lane)
        for h in range(together):
            weight = T.Bind(W[row, head + h])
            for i in range(keys.per):
                positive = maximum(products[h * keys.per + i], T.float32(0))
                put(totals, fma(weight, positive, totals[i]), i)
    for i in range(keys.per):
        put(sums, totals[i], wave, i * keys.wave + lane)
    barrier()


def _score_blocks(op: SelectKeys, arch: Device, state: Buffer, places, buffers) -> None:
    """By head a workgroup of one wave for each block, of which each thread has every so many positions; else a thread
    for each block."""
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
            order = T.Bind(T.Select(forced, T.int32(0x7FFFFFFF), _order(score)))
            with T.If((lane == 0) if op.by_head else (number < op.blocks)), T.Then():
                put(Order, order, row, own, number)


def _key(Ik: Buffer, page: Expr, place: Expr, d: int) -> Buffer:
    """A key in registers."""
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


def _choose(op: SelectKeys, group: Group, buffers, row: tuple[Expr, Expr], last: Expr, most: Expr) -> None:
    """The `most` ids of a row's set among the blocks up to number `last`."""
    (Order, Counts, Ids), threads, arch = buffers, group.threads, group.arch
    with T.serial(-(-op.used // threads)) as step:
        place = T.Bind(step * threads + group.tid)
        with T.If(((last < most) | (place >= most)) & (place < op.used)), T.Then():
            put(Ids, T.Select((place <= last) & (place < most), place, T.int32(-1)), row[0], row[1] * op.used + place)
    with once(T.Bind(last >= most)):
        batch = min(BATCH, -(-op.blocks // (threads * WIDTH)))
        steps, end = T.Bind(last // (threads * WIDTH * batch) + 1), int(Order.shape[2]) - WIDTH

        def each() -> Iterator[tuple[Expr, list[Expr]]]:
            """(the number of the first, some scores) of those that a wave has, in order."""
            with T.serial(steps) as i:
                begin = (group.wave * steps + i) * (batch * arch.wave)
                firsts = [T.Bind((begin + n * arch.wave + group.lane) * WIDTH) for n in range(batch)]
                loaded = [T.Bind(Order[*row, at(T.min(first, T.int32(end)), WIDTH)]) for first in firsts]
                for first, scores in zip(firsts, loaded, strict=True):
                    seen = [T.Select(first + e <= last, x, T.int32(LEAST)) for e, x in enumerate(elements(scores))]
                    yield first, [T.Bind(x) for x in seen]

        least, wanted = _least(group, each, None if Counts is None else (Counts, row[0]), most)
        counts = filled(T.int32(0), 2)
        for _, scores in each():
            for score in scores:
                put(counts, counts[0] + T.Select(score > least, T.int32(1), T.int32(0)), 0)
                put(counts, counts[1] + T.Select(score == least, T.int32(1), T.int32(0)), 1)
        before = [group.before_wave(count) for count in (counts[0], counts[1])]
        above, equal = (filled(x) for x in before)
        for first, scores in each():
            # 16 bits hold the number of scores that a wave looks at together
            flags = [
                T.Select(x > least, T.int32(1 << 16), T.Select(x == least, T.int32(1), T.int32(0))) for x in scores
            ]
            flags = [T.Bind(flag) for flag in flags]
            lower, whole = wave_scan(arch, T.Bind(sum(flags[1:], flags[0])), group.lane)
            for e, flag in enumerate(flags):
                larger, same = above[0] + T.shift_right(lower, T.int32(16)), T.Bind(equal[0] + (lower & 0xFFFF))
                with T.If((first + e <= last) & ((flag > 1) | ((flag == 1) & (same < wanted)))), T.Then():
                    place = T.min(larger + T.min(same, wanted), T.int32(op.used - 1))
                    put(Ids, first + e, row[0], row[1] * op.used + place)
                lower = T.Bind(lower + flag)
            put(above, above[0] + T.shift_right(whole, T.int32(16)), 0)
            put(equal, equal[0] + (whole & 0xFFFF), 0)


def _least(group: Group, each, counted: tuple[Buffer, Expr] | None, most: Expr) -> tuple[Expr, Expr]:
    """(The least score that is chosen, how many with that score), of the `most` largest scores that `each` visits.
    counted: (buffer, row) of the counts of the first digit, None: they are not known."""
    counts = T.alloc_buffer((COUNTS,), "int32", scope="shared")
    found = T.alloc_buffer((2,), "int32", scope="shared")
    least, wanted = T.int32(LEAST), most
    for i, (shift, bits) in enumerate(DIGITS):
        size = 1 << bits
        if i or counted is None:
            for begin in range(0, size, group.threads):
                with when(None if begin + group.threads <= size else begin + group.tid < size):
                    put(counts, T.int32(0), begin + group.tid)
            barrier()
            for _, scores in each():
                for score in scores:
                    same, digit = score > LEAST, _first_digit(score)
                    if i:
                        rest = T.Bind(score ^ least)
                        same = (rest >= 0) & (rest < (1 << (shift + bits)))
                        digit = T.shift_right(score, T.int32(shift)) & (size - 1)
                    with when(same):
                        _count(T.int32(1), counts, digit)
            barrier()
        _find_digit(group, found, wanted, size, (counts,) if i or counted is None else counted)
        least, wanted = T.Bind(least ^ T.shift_left(found[0], T.int32(shift))), T.Bind(found[1])
        barrier()
    return least, wanted


def _count(amount: Expr, counts: Buffer, *index: Expr) -> None:
    T.evaluate(T.call_intrin("int32", "tirx.atomic_add", T.address_of(counts[index]), amount))


def _find_digit(group: Group, found: Buffer, wanted: Expr, size: int, counts: tuple) -> None:
    """Leaves in `found` the digit, of `size` ones, that the score number `wanted` from the largest on has, and the
    number that this score has of those with this digit. counts: a buffer and the index of the first digit's count."""
    share, own = -(-size // group.threads), filled(T.int32(0))
    buffer, *index = counts

    def count_of(n: Expr) -> tuple[Expr, Expr]:
        """(a digit of this thread's, the largest first, how many scores have it)."""
        digit = T.Bind(size - 1 - (group.tid * share + n))
        return digit, T.Bind(T.Select(digit >= 0, buffer[(*index, T.max(digit, T.int32(0)))], T.int32(0)))

    with T.serial(share) as n:
        put(own, own[0] + count_of(n)[1], 0)
    before = filled(group.scan(own[0])[0])
    with T.serial(share) as n:
        digit, count = count_of(n)
        with T.If((before[0] < wanted) & (before[0] + count >= wanted)), T.Then():
            put(found, digit, 0)
            put(found, T.Bind(wanted - before[0]), 1)
        put(before, before[0] + count, 0)
    barrier()
