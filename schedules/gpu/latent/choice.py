"""The choice of keys of sparse attention on the GPU (schedules/operators/indexer.py), in three launches:

1. Rows' own keys go into the cache, and queries become operands of matrix units.
2. The scores as int32 in the same order; those of single keys with the counts of their first digit (`scores.py`).
3. A workgroup for each row finds the least score that is chosen digit by digit: how many scores have which digit says
   where it is. Then each wave writes, in order, the numbers of those of its part of the scores that are chosen.

Rows that see no more keys than they may choose need neither scores nor digits.
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
from mlc_amd.schedules.gpu.base.step import builds, if_live, kept, once, when
from mlc_amd.schedules.gpu.latent.scores import COUNTS, DIGITS, add_to, clear, first_digit, score_blocks, score_keys
from mlc_amd.schedules.gpu.latent.scores_matrix import Queries
from mlc_amd.schedules.operators.attention import PAGE, SLOTS
from mlc_amd.schedules.operators.indexer import SelectKeys
from mlc_amd.schedules.tir import Buffer, Expr, declared

LEAST = -(1 << 31)  # in the place of the scores of keys that a row does not see
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
    queries = Queries(op, arch) if Counts is not None and Queries.fit(op, arch) else None
    many = op.heads if queries else 1
    with launch((many, m), (arch.wave,)) as (head, row, lane), if_live(state, m, row):
        last = clamped_position(rows, row, op.ctx)
        with T.If((head == 0) & is_at(rows, row, last)), T.Then():
            store_key(arch, Ik, K, row, (T.Bind(pages[row_slot(rows, row), last // PAGE]), last % PAGE), lane)
        if Counts is not None:
            with T.If(last >= op.used), T.Then():
                clear(Counts, (row,), T.Bind(head * arch.wave + lane), many * arch.wave)
                if queries:
                    queries.store(Q, W, row, head, lane)
    if Counts is not None:
        score_keys(op, arch, state, (rows, pages), queries or (Q, W), (Ik, Order, Counts))
    else:
        score_blocks(op, arch, state, (rows, pages), (Q, Ik, Order))
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
            scanned, whole = wave_scan(arch, T.Bind(sum(flags[1:], flags[0])), group.lane)
            lower = filled(scanned)  # a chain of sums would take TVM seconds
            for e, flag in enumerate(flags):
                larger, same = above[0] + T.shift_right(lower[0], T.int32(16)), T.Bind(equal[0] + (lower[0] & 0xFFFF))
                with T.If((first + e <= last) & ((flag > 1) | ((flag == 1) & (same < wanted)))), T.Then():
                    place = T.min(larger + T.min(same, wanted), T.int32(op.used - 1))
                    put(Ids, first + e, row[0], row[1] * op.used + place)
                put(lower, lower[0] + flag, 0)
            wave_meets(arch)  # the next step exchanges values
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
            with kept(-(-size // group.threads)) as step:
                digit = T.Bind(step * group.threads + group.tid)
                with when(None if size % group.threads == 0 else digit < size):
                    put(counts, T.int32(0), digit)
            barrier()
            for _, scores in each():
                for score in scores:
                    same, digit = score > LEAST, first_digit(score)
                    if i:
                        rest = T.Bind(score ^ least)
                        same = (rest >= 0) & (rest < (1 << (shift + bits)))
                        digit = T.shift_right(score, T.int32(shift)) & (size - 1)
                    with when(same):
                        add_to(T.int32(1), counts, digit)
            wave_meets(group.arch)
            barrier()
        _find_digit(group, found, wanted, size, (counts,) if i or counted is None else counted)
        least, wanted = T.Bind(least ^ T.shift_left(found[0], T.int32(shift))), T.Bind(found[1])
        barrier()
    return least, wanted


def _find_digit(group: Group, found: Buffer, wanted: Expr, size: int, counts: tuple) -> None:
    """Leaves in `found` the digit, of `size` ones, that the score number `wanted` from the largest on has, and the
    number that this score has of those with this digit. counts: a buffer and the index of the first digit's count."""
    share, own = -(-size // group.threads), filled(T.int32(0))
    buffer, *index = counts

    def count_of(n: Expr) -> tuple[Expr, Expr]:
        """(a digit of this thread's, the largest first, how many scores have it)."""
        digit = T.Bind(size - 1 - (group.tid * share + n))
        return digit, T.Bind(T.Select(digit >= 0, buffer[(*index, T.max(digit, T.int32(0)))], T.int32(0)))

    with kept(share) as n:
        put(own, own[0] + count_of(n)[1], 0)
    before = filled(group.scan(own[0])[0])
    with kept(share) as n:
        digit, count = count_of(n)
        with T.If((before[0] < wanted) & (before[0] + count >= wanted)), T.Then():
            put(found, digit, 0)
            put(found, T.Bind(wanted - before[0]), 1)
        put(before, before[0] + count, 0)
    wave_meets(group.arch)
    barrier()
