"""The kernels of `SelectKeys` and `SelectedAttention` on the CPU (schedules/operators/indexer.py).

Scores are computed for blocks of 64 keys, which are transposed first, so that a vector holds one column of several
keys. The smallest score that is still chosen is found bit by bit: a bit is set if enough scores are at least the number
with this bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.choices import choices, keys_of
from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.attention.cache import BLOCK, Cache, RowTable
from mlc_amd.schedules.cpu.base.arch import Arch
from mlc_amd.schedules.cpu.base.kernel import kernel, live_rows
from mlc_amd.schedules.cpu.base.vector import (
    LANES,
    at,
    dtype,
    exp2,
    f32,
    i32,
    largest_divisor,
    opaque,
    reduce,
    registers,
    splat,
    store,
    tree_add,
)
from mlc_amd.schedules.operators.attention import LOG2E, SLOTS, Attention
from mlc_amd.schedules.operators.indexer import SelectedAttention, SelectKeys
from mlc_amd.schedules.tir import Buffer, Expr, declared

LOWEST = -(1 << 31)  # replaces the scores of keys that a row does not attend to
MOST = (1 << 31) - 1  # replaces the scores of blocks that are always chosen
FAR = -1e30  # in attention, replaces the scores of keys that a row does not attend to
MAX_HEADS = 16  # largest number of heads in a task


@registry.builds(SelectKeys)
def select_keys(op: SelectKeys, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], rows, pages, Q, [W], K, Ik, Ids), with the shapes of `SelectKeys`."""
    blocks, columns = op.ctx // BLOCK, -(-op.blocks // LANES) * LANES
    with kernel(name) as (builder, state):
        rows, pages = RowTable(op.m), T.arg("pages", T.buffer((SLOTS, blocks), "int32"))
        Q, W, K = declared(**op.shapes())
        (Ik,), (Ids,) = declared("float16", Ik=op.cache_shape()), declared("int32", Ids=(op.m, op.sets * op.used))
        live = live_rows(state, op.m)
        with each_new_key(rows, pages, live, op.ctx) as (row, page, last):
            store_key(Ik, K, row, page, last % BLOCK)
        Order = T.alloc_buffer((op.m, op.sets, columns), "int32")  # `_order` of the scores
        if op.block == 1:
            with T.parallel(live * blocks) as task:
                row, block = opaque(task // blocks), opaque(task % blocks)
                last = opaque(rows.clamped(row, op.ctx))
                _score_keys(op, arch, (Q, W, Ik, Order), (pages, rows.slot(row)), last, (row, block))
        else:
            with T.parallel(live * op.sets * columns) as task:
                row, one = opaque(task // (op.sets * columns)), opaque(task % (op.sets * columns))
                place = row, opaque(one // columns), opaque(one % columns)
                last = opaque(rows.clamped(row, op.ctx))
                _score_block(op, arch, (Q, Ik, Order), (pages, rows.slot(row)), last, place)
        with T.parallel(live * op.sets) as task:
            row = opaque(task // op.sets)
            position = opaque(rows.clamped(row, op.ctx))
            _choose(op, Order, Ids, (row, opaque(task % op.sets)), position // op.block, choices(op, position))
    return builder.get()


@contextmanager
def each_new_key(rows: RowTable, pages: Buffer, live: Expr, ctx: int) -> Iterator[tuple[Expr, Expr, Expr]]:
    """A loop over the live rows whose position is in the cache: (row, page of its key, position)."""
    with T.serial(live) as row:
        last = opaque(rows.clamped(row, ctx))
        with T.If(last == rows.position(row)), T.Then():
            yield row, opaque(pages[rows.slot(row), last // BLOCK]), last


def store_key(cache: Buffer, K: Buffer, row: Expr, page: Expr, place: Expr) -> None:
    """Stores the row's key, float32 in K, at [page, place] of a cache float16 [pages, places, d]."""
    with T.serial(int(cache.shape[2]) // LANES) as c:
        store(cache, T.cast(K[row, at(c * LANES)], "float16x16"), page, place, at(c * LANES))


def _order(scores: Expr, n: int) -> Expr:
    """n int32 numbers in the same order as the n float32 scores."""
    bits = T.Bind(T.reinterpret(dtype("int32", n), scores))
    return T.Select(bits < i32(0, n), bits ^ i32(MOST, n), bits)


def _score_keys(op: SelectKeys, arch: Arch, buffers, pages, last: Expr, place: tuple[Expr, Expr]) -> None:
    """Stores the scores of the positions in a block of 64 (block = 1). place: (row, number of the block of 64)."""
    (Q, W, Ik, Order), (table, slot), (row, block) = buffers, pages, place
    with T.If(block * BLOCK <= last), T.Then():
        page, turned = opaque(table[slot, block]), T.alloc_buffer((op.d, BLOCK), "float32")
        with T.serial(BLOCK) as key, T.serial(op.d // LANES) as c:
            x = arch.isa.half(Ik[page, key, at(c * LANES)], LANES)
            for lane in range(LANES):
                store(turned, T.Shuffle([x], [T.int32(lane)]), c * LANES + lane, key)
        totals = [registers(LANES) for _ in range(BLOCK // LANES)]
        products = [registers(LANES) for _ in range(BLOCK // LANES)]
        for total in totals:
            store(total, f32(0.0), at(0))
        with T.serial(op.heads) as head:
            for product in products:
                store(product, f32(0.0), at(0))
            with T.serial(op.d) as c:
                q = splat(Q[row, head * op.d + c])
                for i, product in enumerate(products):
                    store(product, product[at(0)] + q * turned[c, at(i * LANES)], at(0))
            for total, product in zip(totals, products, strict=True):
                positive = T.Bind(T.max(product[at(0)], f32(0.0)))
                store(total, total[at(0)] + splat(W[row, head]) * positive, at(0))
        for i, total in enumerate(totals):
            order = _order(total[at(0)], LANES)
            key = block * BLOCK + i * LANES
            store(Order, T.Select(at(key) <= splat(last), order, i32(LOWEST)), row, 0, at(key))


def _score_block(op: SelectKeys, arch: Arch, buffers, pages, last: Expr, place: tuple[Expr, Expr, Expr]) -> None:
    """Stores the score of a block of several positions (block > 1). place: (row, set, number of the block)."""
    (Q, Ik, Order), (table, slot), (row, own, number) = buffers, pages, place
    newest = opaque(T.min((number + 1) * op.block - 1, last))

    def product(head: Expr, position: Expr) -> Expr:
        page, total = opaque(table[slot, position // BLOCK]), registers(LANES)
        store(total, f32(0.0), at(0))
        with T.serial(op.d // LANES) as c:
            key = arch.isa.half(Ik[page, position % BLOCK, at(c * LANES)], LANES)
            store(total, total[at(0)] + Q[row, at(head * op.d + c * LANES)] * key, at(0))
        return T.Bind(tree_add(T.Bind(total[at(0)])))

    store(Order, T.int32(LOWEST), row, own, number)
    with T.If(number * op.block <= last), T.Then():
        score = registers(1)
        if op.by_head:
            store(score, T.float32(FAR), 0)
            with T.serial(newest - number * op.block + 1) as i:
                store(score, T.max(score[0], product(own, opaque(number * op.block + i))), 0)
            forced = number > last // op.block - op.local
        else:
            store(score, T.float32(0), 0)
            with T.serial(op.heads) as head:
                store(score, score[0] + T.max(product(head, newest), T.float32(0)), 0)
            forced = (number + 1) * op.block - 1 > last
        store(Order, T.Select(forced, i32(MOST, 1), _order(score[0], 1)), row, own, number)


def _choose(op: SelectKeys, Order: Buffer, Ids: Buffer, row: tuple[Expr, Expr], last: Expr, wanted: Expr) -> None:
    """Stores the ids of a row and set: the `wanted` blocks with the largest scores among the blocks 0 .. last. row:
    (row, set)."""
    first = opaque(row[1] * op.used)
    with T.If(last < wanted):
        with T.Then(), T.serial(op.used) as i:
            store(Ids, T.Select(i <= last, i, T.int32(-1)), row[0], first + i)
        with T.Else():
            vectors, least = opaque(last // LANES + 1), registers(1, kind="int32")

            def count_from(number: Expr) -> Expr:
                """How many scores are at least `number`."""
                found = registers(LANES, kind="int32")
                store(found, i32(0), at(0))
                with T.serial(vectors) as i:
                    more = T.Select(Order[*row, at(i * LANES)] >= splat(number), i32(1), i32(0))
                    store(found, found[at(0)] + more, at(0))
                return reduce("add", T.Bind(found[at(0)]))

            store(least, T.int32(LOWEST), 0)
            with T.serial(32) as i:
                trial = opaque(least[0] ^ T.shift_left(T.int32(1), 31 - i))
                enough = count_from(trial)
                store(least, T.Select(enough >= wanted, trial, least[0]), 0)
            smallest, equal, place = opaque(least[0]), registers(1, kind="int32"), registers(1, kind="int32")
            store(equal, wanted - count_from(smallest + 1), 0)
            store(place, T.int32(0), 0)
            with T.serial(op.used - wanted) as i:
                store(Ids, T.int32(-1), row[0], first + wanted + i)
            with T.serial(last + 1) as key:
                score = T.Bind(Order[*row, key])
                with T.If(tirx.any(score > smallest, tirx.all(score == smallest, equal[0] > 0))), T.Then():
                    store(equal, equal[0] - T.Select(score == smallest, T.int32(1), T.int32(0)), 0)
                    store(Ids, key, row[0], first + T.min(place[0], T.int32(op.used - 1)))
                    store(place, place[0] + 1, 0)


@registry.builds(SelectedAttention)
def selected_attention(op: SelectedAttention, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], rows, pages, Qo, Ids, Kc, [Vc], [Sinks], Y). A task computes some heads of a row. It
    copies the chosen keys to a buffer, for all its heads."""
    spec, isa, width, values = op.layer, arch.isa, op.layer.width, op.layer.value_width
    heads = largest_divisor(MAX_HEADS, spec.group)
    parts = spec.heads // heads
    with kernel(name) as (builder, state):
        rows, cache = RowTable(op.m), Cache(spec, isa).declare_pages()
        Q = T.arg("Qo", T.buffer((op.m, spec.heads, width), "float32"))
        (Ids,) = declared("int32", Ids=(op.m, op.sets * op.used))
        cache.declare()
        sinks, Y = declared(Sinks=(spec.heads,) if spec.sinks else None, Y=(op.m, spec.heads * spec.value_d))
        live = live_rows(state, op.m)
        with T.parallel(live * parts) as task:
            row, first = opaque(task // parts), opaque(task % parts * heads)
            last = opaque(rows.clamped(row, spec.ctx))
            kv, slot, many = opaque(first // spec.group), opaque(rows.slot(row)), choices(op, last)
            own = opaque(kv // (spec.kv_heads // op.sets))
            count = keys_of(op, many, Ids[row, own * op.used + many - 1], last)
            keys, scores = T.alloc_buffer((BLOCK, width), "float32"), registers(BLOCK)
            gathered = keys if spec.values else T.alloc_buffer((BLOCK, values), "float32")
            out, tops, totals = T.alloc_buffer((heads, values), "float32"), registers(heads), registers(heads)
            with T.serial(heads) as r:
                store(tops, T.float32(FAR) if sinks is None else sinks[first + r] * T.float32(LOG2E), r)
                store(totals, T.float32(0) if sinks is None else T.float32(1), r)
                with T.serial(values // LANES) as c:
                    store(out, f32(0.0), r, at(c * LANES))
            with T.serial((count + BLOCK - 1) // BLOCK) as block:
                near = opaque(T.min(count - block * BLOCK, T.int32(BLOCK)))
                with T.serial(near) as key:
                    number = opaque(block * BLOCK + key)
                    there = Ids[row, own * op.used + number // op.block] * op.block + number % op.block
                    page, place = cache.place(slot, opaque(T.max(T.min(there, last), T.int32(0))))
                    if not spec.values:
                        with T.serial(width) as c:  # the cache's padding was never written, so it must not be read
                            x = cache.K[page, kv, place // LANES, T.min(c, T.int32(spec.d - 1)), place % LANES]
                            store(keys, T.Select(c < spec.d, T.cast(x, "float32"), T.float32(0)), key, c)
                    with T.serial(gathered.shape[1] // LANES) as c:
                        x = isa.half(cache.V[page, kv, place, at(c * LANES)], LANES)
                        store(gathered, x, key, at(c * LANES))
                with T.serial(heads) as r:
                    emit_head(
                        op.layer, isa, (Q, row, first + r), (keys, gathered, scores, near), (out, tops, totals), r
                    )
            with T.serial(heads) as r:
                inverse = T.Bind(T.float32(1) / totals[r])
                with T.serial(spec.value_d) as c:
                    store(Y, out[r, c] * inverse, row, (first + r) * spec.value_d + c)
    return builder.get()


def emit_head(layer: Attention, isa, query, block, sums, r: Expr) -> None:
    """Emits online softmax for a block of keys and one head: computes the scores, and updates the head's sums."""
    (Q, row, head), (keys, gathered, scores, near), (out, tops, totals) = query, block, sums
    for i in range(0, BLOCK, LANES):
        store(scores, f32(FAR), at(i))
    top = registers(1)
    store(top, tops[r], 0)
    with T.serial(near) as key:
        product = registers(LANES)
        store(product, f32(0.0), at(0))
        with T.serial(layer.width // LANES) as c:
            store(product, product[at(0)] + Q[row, head, at(c * LANES)] * keys[key, at(c * LANES)], at(0))
        score = T.Bind(tree_add(T.Bind(product[at(0)])))
        store(scores, score, key)
        store(top, T.max(top[0], score), 0)
    now = T.Bind(top[0])
    shrink = T.Bind(exp2(tops[r] - now, 1))
    store(tops, now, r)
    total = T.float32(0)
    for i in range(0, BLOCK, LANES):
        weights = T.Bind(isa.exp2(T.Bind(scores[at(i)] - splat(now)), LANES))
        store(scores, weights, at(i))
        total = total + T.Bind(tree_add(weights))
    store(totals, totals[r] * shrink + total, r)
    with T.serial(layer.value_width // LANES) as c:
        result = registers(LANES)
        store(result, out[r, at(c * LANES)] * splat(shrink), at(0))
        with T.serial(near) as key:
            store(result, result[at(0)] + splat(scores[key]) * gathered[key, at(c * LANES)], at(0))
        store(out, result[at(0)], r, at(c * LANES))
