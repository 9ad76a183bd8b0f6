"""Sparse attention by an indexer on the GPU (schedules/operators/indexer.py): the choice of keys, and attention to
them.

The choice has three launches: rows' own keys into the cache; the scores, a thread for each key; a workgroup for each
row, which finds the largest scores bit by bit (how many are at least a number says its next bit) and writes their
positions in order. In attention a workgroup has a head of a row: a thread scores some keys, then sums some columns.
"""

from tvm.tirx.script import builder as T

from mlc_amd.schedules.choices import choices, keys_of
from mlc_amd.schedules.gpu.attention.attention_step import LOWEST, with_sink
from mlc_amd.schedules.gpu.attention.cache import KEYS, UNIT, Cache, clamped_position, is_at, place_args, row_slot
from mlc_amd.schedules.gpu.base.device import barrier, exp2, fma, launch, maximum, rcp, wave_max
from mlc_amd.schedules.gpu.base.norm import workgroup_sum
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.gpu.base.registers import at, elements, filled, local, put
from mlc_amd.schedules.gpu.base.step import builds, if_live, is_live, once
from mlc_amd.schedules.operators.attention import PAGE, SLOTS
from mlc_amd.schedules.operators.indexer import SelectedAttention, SelectKeys
from mlc_amd.schedules.tir import Buffer, Expr, declared

LEAST = -(1 << 31)  # in the place of the scores of keys that a row does not see
THREADS, MOST_THREADS = 256, 1024  # of attention; of the choice
HELD = 64  # scores of a thread that stay in registers, where it has no more


def _waves(arch: Device) -> int:
    return max(min(THREADS, arch.threads) // arch.wave, 1)


@builds(SelectKeys)
def select_keys(op: SelectKeys, arch: Device, state: Buffer, plan: None) -> None:
    """Kernel (state, rows, pages, Q, [W], K, Ik, Ids)."""
    m, d, blocks = op.m, op.d, op.ctx // PAGE
    rows, pages = declared("int32", rows=(m, 2), pages=(SLOTS, blocks))
    Q, W, K = declared(**op.shapes())
    (Ik,), (Ids,) = declared("float16", Ik=op.cache_shape()), declared("int32", Ids=(m, op.sets * op.used))
    Order = T.alloc_buffer((m, op.sets, op.blocks), "int32")
    with launch((m,), (arch.wave,)) as (row, lane), if_live(state, m, row):
        last = clamped_position(rows, row, op.ctx)
        with T.If(is_at(rows, row, last)), T.Then():
            page = T.Bind(pages[row_slot(rows, row), last // PAGE])
            for first in range(0, d, arch.wave):
                column = T.Bind(first + lane)
                with T.If(column < d), T.Then():
                    put(Ik, T.cast(K[row, T.min(column, T.int32(d - 1))], "float16"), page, last % PAGE, column)
    waves = max(min(MOST_THREADS, arch.threads, op.blocks // 2) // arch.wave, 1)
    if op.block == 1:
        _score_keys(op, state, (rows, pages), (Q, W, Ik, Order))
    else:
        _score_blocks(op, arch, state, (rows, pages), (Q, Ik, Order))
    with launch((op.sets, m), (arch.wave, waves)) as (own, row, lane, wave), if_live(state, m, row):
        position = clamped_position(rows, row, op.ctx)
        last, wanted = T.Bind(position // op.block), choices(op, position)
        _choose(op, arch, waves, (Order, Ids), (row, own), last, wanted, lane, wave)


def _order(score: Expr) -> Expr:
    """An int32 that is larger where the score is."""
    bits = T.Bind(T.reinterpret("int32", T.Bind(score)))
    return T.Select(bits < 0, bits ^ T.int32(0x7FFFFFFF), bits)


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


def _score_keys(op: SelectKeys, state: Buffer, places, buffers) -> None:
    """A thread for each key."""
    (rows, pages), (Q, W, Ik, Order), m = places, buffers, op.m
    with launch((op.ctx // PAGE, m), (PAGE,)) as (block, row, thread):
        last = clamped_position(rows, row, op.ctx)
        with T.If((block * PAGE <= last) & ((m == 1) | is_live(state, row))), T.Then():
            page, total = T.Bind(pages[row_slot(rows, row), block]), filled(T.float32(0))
            key = _key(Ik, page, thread, op.d)
            with T.serial(op.heads) as head:
                product = _product(Q, row, head, key, op.d)
                put(total, fma(W[row, head], maximum(product, T.float32(0)), total[0]), 0)
            order, place = _order(total[0]), block * PAGE + thread
            put(Order, T.Select(place <= last, order, T.int32(LEAST)), row, 0, place)


def _score_blocks(op: SelectKeys, arch: Device, state: Buffer, places, buffers) -> None:
    """A workgroup of a wave for each block by head, whose threads have its positions in turn, else a thread for each
    block."""
    (rows, pages), (Q, Ik, Order), m = places, buffers, op.m
    of_group = 1 if op.by_head else arch.wave
    with launch((-(-op.blocks // of_group), op.sets, m), (arch.wave,)) as (group, own, row, lane):
        last, slot = clamped_position(rows, row, op.ctx), row_slot(rows, row)
        number = T.Bind(group if op.by_head else group * of_group + lane)
        begin, newest = T.Bind(number * op.block), T.Bind(T.min(number * op.block + (op.block - 1), last))

        def key_of(position: Expr) -> Buffer:
            return _key(Ik, T.Bind(pages[slot, position // PAGE]), position % PAGE, op.d)

        with T.If((begin <= last) & ((m == 1) | is_live(state, row))), T.Then():
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


def _choose(
    op: SelectKeys, arch: Device, waves: int, buffers, row: tuple[Expr, Expr], last: Expr, most: Expr, lane: Expr,
    wave: Expr,
) -> None:  # fmt: skip
    """The `most` ids of a row's set among the blocks up to number `last`."""
    (Order, Ids), threads = buffers, arch.wave * waves
    thread, several = T.Bind(wave * arch.wave + lane), T.Bind(last >= most)
    share = -(-op.blocks // threads)
    held = local(share, "int32") if share <= HELD else None
    own = T.int32(share) if held is not None else T.Bind((last + threads) // threads)
    part = T.alloc_buffer((waves,), "int32", scope="shared")
    above, level = (T.alloc_buffer((threads,), "int32", scope="shared") for _ in range(2))
    with T.serial(-(-op.used // threads)) as step:
        place = T.Bind(step * threads + thread)
        with T.If(((last < most) | (place >= most)) & (place < op.used)), T.Then():
            put(Ids, T.Select((place <= last) & (place < most), place, T.int32(-1)), row[0], row[1] * op.used + place)
    with once(several):
        least = filled(T.int32(LEAST))

        def each_own():
            """(number, score, or the least one after the last) of what the thread has."""
            if held is not None:
                for i in range(share):
                    yield T.Bind(thread * share + i), T.Bind(held[i])
                return
            with T.serial(own) as i:
                key = T.Bind(thread * own + i)
                yield key, T.Bind(T.Select(key <= last, Order[*row, T.min(key, last)], T.int32(LEAST)))

        for i in range(share) if held is not None else ():
            key = T.Bind(thread * share + i)
            put(held, T.Select(key <= last, Order[*row, T.min(key, last)], T.int32(LEAST)), i)
        with T.serial(32) as i:
            trial, count = T.Bind(least[0] ^ T.shift_left(T.int32(1), 31 - i)), filled(T.int32(0))
            for _, score in each_own():
                put(count, count[0] + T.Select(score >= trial, T.int32(1), T.int32(0)), 0)
            enough = workgroup_sum(arch, waves, count[0], part, wave, lane)
            put(least, T.Select(enough >= most, trial, least[0]), 0)
            barrier()
        counts = filled(T.int32(0), 2)
        for _, score in each_own():
            put(counts, counts[0] + T.Select(score > least[0], T.int32(1), T.int32(0)), 0)
            put(counts, counts[1] + T.Select(score == least[0], T.int32(1), T.int32(0)), 1)
        put(above, counts[0], thread)
        put(level, counts[1], thread)
        barrier()
        before, total = filled(T.int32(0), 2), filled(T.int32(0))
        with T.serial(threads) as other:
            put(before, before[0] + T.Select(other < thread, above[other], T.int32(0)), 0)
            put(before, before[1] + T.Select(other < thread, level[other], T.int32(0)), 1)
            put(total, total[0] + above[other], 0)
        wanted = T.Bind(most - total[0])  # of the equal ones
        equal, place = filled(T.Bind(before[1])), filled(T.Bind(before[0] + T.min(before[1], wanted)))
        for key, score in each_own():
            same = T.Bind(score == least[0])
            with T.If((key <= last) & ((score > least[0]) | (same & (equal[0] < wanted)))), T.Then():
                put(Ids, key, row[0], row[1] * op.used + T.min(place[0], T.int32(op.used - 1)))
                put(place, place[0] + 1, 0)
            put(equal, equal[0] + T.Select(same, T.int32(1), T.int32(0)), 0)


@builds(SelectedAttention)
def selected_attention(op: SelectedAttention, arch: Device, state: Buffer, plan: None) -> None:
    """Kernel (state, rows, pages, Qo, Ids, Kc, [Vc], [Sinks], Y). ValueError for more keys than shared memory holds the
    scores of."""
    spec, m, waves = op.layer, op.m, _waves(arch)
    threads = arch.wave * waves
    if 8 * op.most_keys + 4 * THREADS * UNIT + 1024 > arch.lds:
        raise ValueError(f"{op.most_keys} keys: shared memory holds fewer")
    rows, pages = place_args(m, spec)
    Q = T.arg("Qo", T.buffer((m, spec.heads, spec.width), "float16"))
    (Ids,) = declared("int32", Ids=(m, op.sets * op.used))
    cache, sinks = Cache(spec, pages), declared(Sinks=(spec.heads,) if spec.sinks else None)[0]
    (Y,) = declared(Y=(m, spec.heads * spec.value_d))
    with launch((spec.heads, m), (arch.wave, waves)) as (head, row, lane, wave), if_live(state, m, row):
        thread, last = T.Bind(wave * arch.wave + lane), clamped_position(rows, row, spec.ctx)
        slot, many, kv = row_slot(rows, row), choices(op, last), T.Bind(head // spec.group)
        own = T.Bind(kv // (spec.kv_heads // op.sets))
        count = keys_of(op, many, Ids[row, own * op.used + many - 1], last)
        scores = T.alloc_buffer((op.most_keys,), "float32", scope="shared")
        places = T.alloc_buffer((op.most_keys,), "int32", scope="shared")
        parts = [T.alloc_buffer((waves,), "float32", scope="shared") for _ in range(2)]

        def element(there: Expr, column: Expr, size: int) -> Expr:
            tile, within = T.Bind(there % PAGE // KEYS), T.Bind(there % KEYS)
            return cache.Kc[there // PAGE, kv, tile, column // UNIT, within, at(column % UNIT, size)]

        top = filled(T.float32(LOWEST))
        steps = T.Bind((count + (threads - 1)) // threads)
        with T.serial(steps) as step:
            number = T.Bind(step * threads + thread)
            with T.If(number < count), T.Then():
                position = Ids[row, own * op.used + number // op.block] * op.block + number % op.block
                position = T.Bind(T.max(T.min(position, last), T.int32(0)))
                there = T.Bind(pages[slot, position // PAGE] * PAGE + position % PAGE)
                product = filled(T.float32(0))
                with T.serial(spec.d // UNIT) as unit:
                    k, q = (T.Bind(x) for x in (element(there, unit * UNIT, UNIT), Q[row, head, at(unit * UNIT, UNIT)]))
                    for a, b in zip(elements(k), elements(q), strict=True):
                        put(product, fma(T.cast(a, "float32"), T.cast(b, "float32"), product[0]), 0)
                put(scores, product[0], number)
                put(places, there, number)
                put(top, maximum(top[0], product[0]), 0)
        best = wave_max(arch, T.Bind(top[0]))
        with T.If(lane == 0), T.Then():
            put(parts[0], best, wave)
        barrier()
        largest = filled(T.float32(LOWEST))
        with T.serial(waves) as i:
            put(largest, maximum(largest[0], parts[0][i]), 0)
        total = filled(T.float32(0))
        with T.serial(steps) as step:
            number = T.Bind(step * threads + thread)
            score = T.Bind(scores[T.min(number, count - 1)])
            with T.If(number < count), T.Then():
                weight = exp2(maximum(score - largest[0], T.float32(-120)))
                put(scores, weight, number)
                put(total, total[0] + weight, 0)
        total = workgroup_sum(arch, waves, total[0], parts[1], wave, lane)
        inverse = rcp(with_sink(sinks, head, total, largest[0], 0))
        if spec.values and spec.value_d // UNIT <= threads:
            _sum_units(op, arch, threads, element, (scores, places, Y), (row, head), (thread, count), inverse)
            return
        for first in range(0, spec.value_d, threads):
            column, result = T.Bind(T.min(first + thread, T.int32(spec.value_d - 1))), filled(T.float32(0))
            with T.serial(count) as number:
                there = T.Bind(places[number])
                if spec.values:
                    value = element(there, column, 1)
                else:
                    value = cache.Vc[there // PAGE, kv, there % PAGE // UNIT, column, there % UNIT]
                value = T.cast(value, "float32")
                put(result, fma(scores[number], value, result[0]), 0)
            with T.If(first + thread < spec.value_d), T.Then():
                put(Y, result[0] * inverse, row, head * spec.value_d + column)


def _sum_units(op: SelectedAttention, arch: Device, threads: int, element, buffers, place, of, inverse: Expr) -> None:
    """The result of a head of a row. A thread has a unit of the columns, and of the keys as many as there are threads
    for each unit; their sums meet in shared memory."""
    (scores, places, Y), (row, head), (thread, count), d = buffers, place, of, op.layer.value_d
    units = d // UNIT
    slices = threads // units
    unit, part = T.Bind(thread % units), T.Bind(thread // units)
    sums, own = T.alloc_buffer((slices, d), "float32", scope="shared"), filled(T.float32(0), UNIT)
    with T.serial(T.max((count - part + (slices - 1)) // slices, T.int32(0))) as step:
        number = T.Bind(T.min(step * slices + part, count - 1))
        weight = T.Bind(scores[number])
        for i, x in enumerate(elements(T.Bind(element(T.Bind(places[number]), unit * UNIT, UNIT)))):
            put(own, fma(weight, T.cast(x, "float32"), own[i]), i)
    with T.If(part < slices), T.Then():
        for i in range(UNIT):
            put(sums, own[i], part, unit * UNIT + i)
    barrier()
    for first in range(0, d, threads):
        column, total = T.Bind(T.min(first + thread, T.int32(d - 1))), T.float32(0)
        for i in range(slices):
            total = total + sums[i, column]
        with T.If(first + thread < d), T.Then():
            put(Y, total * inverse, row, head * d + column)
