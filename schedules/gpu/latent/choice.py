"""The kernel of `SelectKeys` on GPUs (schedules/operators/indexer.py), in three or four launches:

1. It writes the rows' keys to the cache, and converts queries to operands of matrix units.
2. It computes scores as int32 keys in the order of the scores, and counts how often each value of the first digit
   occurs (scores.py). A digit is some bits of such an int32, see DIGITS.
3. It finds the smallest score that is chosen, digit by digit: the counts of a digit's values determine this score's
   digit. If there are few rows, several workgroups have a part of each row. They count the second digit together, in a
   launch of their own. Each workgroup counts the last digit for all scores, and separately for those before its part.
4. In the same launch, each wave writes the numbers of the chosen keys of its part, in order.

Rows with no more keys than they may choose need no scores and no digits.
"""

from collections.abc import Iterator

from tvm.tirx.script import builder as T

from mlc_amd.schedules.choices import choices
from mlc_amd.schedules.gpu.attention.cache import clamped_position, is_at, row_slot
from mlc_amd.schedules.gpu.base.device import barrier, launch, wave_meets, wave_scan
from mlc_amd.schedules.gpu.base.group import Group
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.gpu.base.registers import at, each_owned, elements, filled, put
from mlc_amd.schedules.gpu.base.step import builds, if_live, when
from mlc_amd.schedules.gpu.latent.scores import (
    COUNTS,
    DIGITS,
    add_counts,
    add_to,
    clear,
    first_digit,
    score_blocks,
    score_keys,
)
from mlc_amd.schedules.gpu.latent.scores_matrix import Queries
from mlc_amd.schedules.operators.attention import PAGE, SLOTS
from mlc_amd.schedules.operators.indexer import SelectKeys
from mlc_amd.schedules.tir import Buffer, Expr, declared

LEAST = -(1 << 31)  # replaces the scores of keys that a row does not attend to
BATCH = 8  # largest number of loads of scores that a thread issues together
MOST_THREADS = 1024  # largest number of threads of a workgroup that finds the smallest score


@builds(SelectKeys)
def select_keys(op: SelectKeys, arch: Device, state: Buffer, plan: None) -> None:
    """Kernel (state, rows, pages, Q, [W], K, Ik, Ids), with the shapes of `SelectKeys`."""
    m, blocks = op.m, op.ctx // PAGE
    rows, pages = declared("int32", rows=(m, 2), pages=(SLOTS, blocks))
    Q, W, K = declared(**op.shapes())
    (Ik,), (Ids,) = declared("float16", Ik=op.cache_shape()), declared("int32", Ids=(m, op.sets * op.used))
    Order = T.alloc_buffer((m, op.sets, -(-op.blocks // WIDTH) * WIDTH), "int32")
    waves = max(min(MOST_THREADS, arch.most_threads, op.blocks // 2) // arch.wave, 1)
    parts = max(min(arch.units // (m * op.sets), op.blocks // (waves * arch.wave * WIDTH)), 1)
    counted = (2 if parts > 1 else 1) if op.block == 1 else 0  # digits that are counted before the last launch
    Counts = T.alloc_buffer((m, counted, COUNTS), "int32") if counted else None
    queries = Queries(op, arch) if Counts is not None and Queries.fit(op, arch) else None
    many = op.heads if queries else 1
    with launch((many, m), (arch.wave,)) as (head, row, lane), if_live(state, m, row):
        last = clamped_position(rows, row, op.ctx)
        with T.If((head == 0) & is_at(rows, row, last)), T.Then():
            store_key(arch, Ik, K, row, (T.Bind(pages[row_slot(rows, row), last // PAGE]), last % PAGE), lane)
        if Counts is not None:
            with T.If(last >= op.used), T.Then():
                for i in range(counted):
                    clear(Counts, (row, i), T.Bind(head * arch.wave + lane), many * arch.wave)
                if queries:
                    queries.store(Q, W, row, head, lane)
    if Counts is not None:
        score_keys(op, arch, state, (rows, pages), queries or (Q, W), (Ik, Order, Counts))
    else:
        score_blocks(op, arch, state, (rows, pages), (Q, Ik, Order))
    for chooses in (False, True) if counted > 1 else (True,):
        with launch((parts, op.sets, m), (arch.wave, waves)) as (part, own, row, lane, wave), if_live(state, m, row):
            position = clamped_position(rows, row, op.ctx)
            last, wanted = T.Bind(position // op.block), choices(op, position)
            group = Group(arch, lane, wave, waves)
            if chooses:
                _pad(op, group, Ids, (row, own), last, wanted, (part, parts))
            share = (T.truncdiv(last, T.int32(parts * WIDTH)) + 1) * WIDTH if parts > 1 else last + 1
            begin = T.Bind(part * share)
            stop = T.Bind(T.min(begin + share, last + 1))
            # false for rows with no more blocks than they may choose, and for parts after the last score
            works = T.Bind((last >= wanted) & (begin <= last))
            end = T.Bind(T.Select(works, last + 1, T.int32(0)))
            search = _Search(op, group, Order, (row, own), end, (begin, T.Select(works, stop, begin), parts))
            known = [(Counts, row, i) for i in range(counted if chooses else 1)]
            if chooses:
                search.write(Ids, *search.least(known, wanted))
            else:
                search.count_second(known, wanted)


def store_key(arch: Device, cache: Buffer, K: Buffer, row: Expr, place: tuple[Expr, Expr], lane: Expr) -> None:
    """A wave stores a row's key, float32 in K, at place = (page, place in the page) of a cache float16 [pages, places,
    d]."""
    for column, valid in each_owned(lane, arch.wave, int(cache.shape[2])):
        with when(valid):
            put(cache, T.cast(K[row, column], "float16"), *place, column)


def _pad(op: SelectKeys, group: Group, Ids: Buffer, row, last: Expr, most: Expr, part: tuple[Expr, int]) -> None:
    """Writes a part of the ids that do not depend on scores: -1, and all ids of rows that have no more blocks than they
    may choose."""
    (part, parts), threads = part, group.threads
    with T.serial(-(-op.used // (threads * parts))) as step:
        place = T.Bind((step * parts + part) * threads + group.tid)
        with T.If(((last < most) | (place >= most)) & (place < op.used)), T.Then():
            put(Ids, T.Select((place <= last) & (place < most), place, T.int32(-1)), row[0], row[1] * op.used + place)


class _Search:
    """A workgroup's search among the scores of a row and set. row: (row, set), indices of Order. end: number of scores.
    part: (first score of the workgroup's part, end of the part, number of parts). Its barriers are outside of loops and
    branches."""

    def __init__(self, op: SelectKeys, group: Group, Order: Buffer, row: tuple[Expr, Expr], end: Expr, part):
        self.op, self.group, self.Order, self.row, self.parts = op, group, Order, row, part[2]
        # in buffers: TVM would replace each use by the expression, and take minutes to simplify it
        self.begin, self.stop, self.end = (T.Bind(filled(T.Bind(x))[0]) for x in (*part[:2], end))
        self.counts = T.alloc_buffer((COUNTS,), "int32", scope="shared")
        self.found = T.alloc_buffer((2,), "int32", scope="shared")
        with T.If(group.tid < 2), T.Then():
            put(self.found, T.int32(0), group.tid)  # the result for parts without scores
        barrier()

    def _each(self, whole: bool) -> Iterator[tuple[Expr, list[Expr]]]:
        """A loop over the scores of a wave, in order: (number of the first score, WIDTH scores). whole: the waves share
        all scores; otherwise those of the workgroup's part."""
        group, arch, begin = self.group, self.group.arch, T.int32(0) if whole else self.begin
        stop, most = (self.end, 1) if whole else (self.stop, self.parts)
        size, end = group.threads * WIDTH, int(self.Order.shape[2]) - WIDTH
        batch = min(BATCH, -(-self.op.blocks // (most * size)))
        steps = T.Bind(filled(T.truncdiv(stop - begin + (size * batch - 1), T.int32(size * batch)))[0])
        with T.serial(steps) as i:
            own = (group.wave * steps + i) * (batch * arch.wave)
            firsts = [T.Bind(begin + (own + n * arch.wave + group.lane) * WIDTH) for n in range(batch)]
            loaded = [T.Bind(self.Order[*self.row, at(T.min(first, T.int32(end)), WIDTH)]) for first in firsts]
            for first, scores in zip(firsts, loaded, strict=True):
                seen = [T.Select(first + e < stop, x, T.int32(LEAST)) for e, x in enumerate(elements(scores))]
                yield first, [T.Bind(x) for x in seen]

    def count_second(self, known: list, wanted: Expr) -> None:
        """Counts the second digit in this part, and adds the counts to the buffer of `known`, where they follow those
        of the first digit."""
        group, ((buffer, row, _),) = self.group, known
        least, _ = self._find(known[0], wanted, 0, T.int32(LEAST))
        self._count(1, least, whole=False)
        add_counts(self.counts, (buffer, row, 1), group.tid, group.threads)

    def least(self, known: list, wanted: Expr) -> tuple:
        """(the smallest of the `wanted` largest scores, how many scores that equal it are chosen, before). before: for
        several parts, [number of larger scores before this part, number of equal ones before it]. known: the counts of
        the first digits."""
        least, last = T.int32(LEAST), len(DIGITS) - 1
        for i in range(last):
            if i >= len(known):
                self._count(i, least, whole=True)
            least, wanted = self._find(known[i] if i < len(known) else (self.counts,), wanted, i, least)
        above = self._count(last, least, whole=True)
        size = 1 << DIGITS[last][1]
        least, wanted = self._find((self.counts,), wanted, last, least)
        if self.parts == 1:
            return least, wanted, []
        digit = T.Bind(self.found[0] & (size - 1))  # in parts without scores any digit
        for own, valid in each_owned(self.group.tid, self.group.threads, size):
            with when(own > digit if valid is None else valid & (own > digit)):
                put(above, above[0] + self.counts[size + own], 0)
        wave_meets(self.group.arch)
        return least, wanted, [*self.group.reduce((above[0], "sum")), T.Bind(self.counts[size + digit])]

    def _count(self, i: int, least: Expr, whole: bool) -> Buffer:
        """Counts in `counts` how often each value of digit number i occurs in scores whose earlier digits are those of
        `least`. For the last digit and several parts: scores before this part are counted separately, after the other
        counts. Returns how many of a thread's scores are before this part and have larger digits before the last."""
        clear(self.counts, (), self.group.tid, self.group.threads)
        barrier()
        (shift, bits), above = DIGITS[i], filled(T.int32(0))
        top, apart = T.int32(shift + bits), self.parts > 1 and i == len(DIGITS) - 1
        for first, scores in self._each(whole):
            for score in scores:
                same, digit = score > LEAST, first_digit(score)
                if i:
                    rest = T.Bind(score ^ least)
                    same, digit = T.shift_right(rest, top) == 0, T.shift_right(rest, T.int32(shift))
                if apart:
                    before = first < self.begin
                    digit = digit + T.Select(before, T.int32(1 << bits), T.int32(0))
                    higher = before & (T.shift_right(score, top) > T.shift_right(least, top))
                    put(above, above[0] + T.Select(higher, T.int32(1), T.int32(0)), 0)
                with when(same):
                    add_to(T.int32(1), self.counts, digit)
        wave_meets(self.group.arch)
        barrier()
        return above

    def _find(self, counts: tuple, wanted: Expr, i: int, least: Expr) -> tuple[Expr, Expr]:
        """(`least` with digit number i, the remaining `wanted` among the scores with this digit)."""
        shift, bits = DIGITS[i]
        _find_digit(self.group, self.found, wanted, 1 << bits, counts, self.parts > 1 and i == len(DIGITS) - 1)
        digit, wanted = T.Bind(self.found[0]), T.Bind(self.found[1])
        barrier()
        return T.Bind(least ^ T.shift_left(digit, T.int32(shift))), wanted

    def write(self, Ids: Buffer, least: Expr, wanted: Expr, before: list[Expr]) -> None:
        """Writes the numbers of the chosen scores of this part. least, wanted, before: the result of `least`."""
        op, group, row, counts = self.op, self.group, self.row, filled(T.int32(0), 2)
        for _, scores in self._each(whole=False):
            for score in scores:
                put(counts, counts[0] + T.Select(score > least, T.int32(1), T.int32(0)), 0)
                put(counts, counts[1] + T.Select(score == least, T.int32(1), T.int32(0)), 1)
        above, equal = (filled(group.before_wave(counts[i])) for i in range(2))
        for of, x in zip((above, equal), before, strict=False):
            put(of, of[0] + x, 0)
        for first, scores in self._each(whole=False):
            # a flag in each half of 32 bits; 16 bits are enough for the number of scores of a wave in a step
            flags = [
                T.Select(x > least, T.int32(1 << 16), T.Select(x == least, T.int32(1), T.int32(0))) for x in scores
            ]
            flags = [T.Bind(flag) for flag in flags]
            lower, whole = wave_scan(group.arch, T.Bind(sum(flags[1:], flags[0])), group.lane)
            for e, flag in enumerate(flags):
                larger, same = above[0] + T.shift_right(lower, T.int32(16)), T.Bind(equal[0] + (lower & 0xFFFF))
                chosen = (flag > 1) | ((flag == 1) & (same < wanted))
                with T.If((first + e < self.stop) & chosen), T.Then():
                    place = T.min(larger + T.min(same, wanted), T.int32(op.used - 1))
                    put(Ids, first + e, row[0], row[1] * op.used + place)
                lower = T.Bind(lower + flag)
            wave_meets(group.arch)
            put(above, above[0] + T.shift_right(whole, T.int32(16)), 0)
            put(equal, equal[0] + (whole & 0xFFFF), 0)


def _find_digit(group: Group, found: Buffer, wanted: Expr, size: int, counts: tuple, two: bool) -> None:
    """Stores to `found`: the digit of the `wanted`-th largest score, and its number among the scores with this digit,
    counted from the largest. size: number of values of the digit. counts: (buffer, index..) of the counts. two: each
    value has two counts, which are added."""
    share = 1 << (-(-size // group.threads) - 1).bit_length()
    width, own, (buffer, *index) = min(share, WIDTH), filled(T.int32(0)), counts

    def counted(n: Expr) -> list[tuple[Expr, Expr]]:
        """(digit, count) of the values in this thread's vector number n, the largest digit first."""
        first = T.Bind(size - group.tid * share - (n + 1) * width)
        place = T.max(first, T.int32(0))
        found = elements(T.Bind(buffer[(*index, at(place, width))]))
        if two:
            found = [a + b for a, b in zip(found, elements(T.Bind(buffer[at(size + place, width)])), strict=True)]
        return [(first + e, T.Bind(T.Select(first >= 0, found[e], T.int32(0)))) for e in reversed(range(width))]

    with T.serial(share // width) as n:
        put(own, sum((count for _, count in counted(n)), own[0]), 0)
    before = filled(group.scan(own[0])[0])
    with T.serial(share // width) as n:
        for digit, count in counted(n):
            with T.If((before[0] < wanted) & (before[0] + count >= wanted)), T.Then():
                put(found, digit, 0)
                put(found, T.Bind(wanted - before[0]), 1)
            put(before, before[0] + count, 0)
    wave_meets(group.arch)
    barrier()
