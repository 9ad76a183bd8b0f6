"""Attention of single rows (1 to SLOTS tokens, of any sequences) on a GPU: split-KV ("flash decoding"), with RoPE and
the write of the new keys and values to the cache in the same launch.

In: the q, k, v rows of the tokens as the projections wrote them, or queries that `kv_write.py` has rotated; the cache.
Out: the outputs of the heads in an activation layout of `quantize.py`.

A workgroup has one token, one KV head (or a part of the query heads that share it), and a split of the visible keys
(`attention_splits.py`). It rotates its queries into LDS. Each wave processes blocks of 32 or 64 keys and has a softmax
of its own (`attention_rows.py`), so the loop has no barriers. K and V are loaded once for all query heads of the
workgroup. At the end the waves join their results through LDS, and splits join through device memory (`join_splits`).
On Vulkan, a split that is alone stores the output itself.

With RoPE, a token's own key and value are not read from the cache: other workgroups write it in the same launch. The
first wave adds them to its softmax at the start, as float16 whatever the type of the cache is. The same holds for
earlier rows of the step that are of the same sequence: the wave rotates their keys itself. On matrix units
(`attention_rows_matrix.py`) these keys come after those of the cache, and the row's own key is in the last wave, which
has the fewest blocks.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention.attention_rows import Rows
from mlc_amd.schedules.gpu.attention.attention_rows_matrix import MatrixRows
from mlc_amd.schedules.gpu.attention.attention_rows_shared import SharedRows, rows_on_matrices
from mlc_amd.schedules.gpu.attention.attention_rows_size import query_dtype
from mlc_amd.schedules.gpu.attention.attention_splits import (
    DecodePlan,
    Splits,
    default_plan,
    join_splits,
    split_of,
    splits_of,
)
from mlc_amd.schedules.gpu.attention.attention_step import Step
from mlc_amd.schedules.gpu.attention.cache import (
    UNIT,
    Cache,
    Pages,
    clamped_position,
    is_at,
    row_slot,
    store_valid,
    visible,
)
from mlc_amd.schedules.gpu.attention.kv_write import Elements, Heads
from mlc_amd.schedules.gpu.base.device import WAVE_SHARED, each, launch, uniform, wave_meets, wave_min
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import at
from mlc_amd.schedules.gpu.base.step import kept, opaque_zero
from mlc_amd.schedules.operators.attention import Attending, RopeAttention
from mlc_amd.schedules.space import Kernel, planned
from mlc_amd.schedules.tir import Buffer, Expr

# ---- keys and values that are not in the cache yet, and that rows add to their softmax: their own, and those of
# earlier rows of the step that are of the same sequence


class Place(NamedTuple):
    """A row of the step in a workgroup: the KV head, the number of the row (the int 0 in a step of one row), its
    position, and the slot of its sequence."""

    kv: Expr
    token: Expr
    position: Expr
    slot: Expr


def store_rounded(
    pairs: Iterable[Elements], buffer: Buffer, *index: Expr, begin: Expr = None, scale: Expr = None
) -> None:
    """Stores a head's elements to buffer[*index, begin + element], times `scale`, rounded to float16 and converted to
    the buffer's type."""
    for valid, values in pairs:
        stores = []
        for e, y in values:
            half = T.cast(y if scale is None else y * scale, "float16")
            place = (*index, e if begin is None else begin + e)
            stores.append((place, half if str(buffer.dtype) == "float16" else T.cast(half, "float32")))
        store_valid(valid, buffer, stores)


def earlier_rows(arch: Device, places: Buffer, token: Expr, slot: Expr, lane: Expr) -> Expr:
    """The number of rows directly before row `token` that are of the same sequence."""
    m, first = int(places.shape[0]), token
    for start in range(0, m, arch.wave):
        row = T.Bind(T.min(start + lane, T.int32(m - 1)))
        same = (row < token) & (row_slot(places, row) == slot)
        first = T.Bind(T.min(first, wave_min(arch, T.Bind(T.Select(same, row, token)))))
    return T.Bind(token - first)


def write_own(
    cache: Cache, heads: Heads, place: Place, pairs: Iterable[Elements], key: Callable[[Expr], Expr], scale: Expr
) -> None:
    """Writes the row's own key and value to the cache. pairs: the lane's elements of the rotated key. key(e): element e
    of it, for any lane. scale: from `Heads.value_scale`."""
    kv, token, position, slot = place
    if heads.layer.quantized:
        cache.store_codes(heads.arch, kv, slot, position, lambda e: T.cast(key(e), "float32"), heads.lane)
    else:
        cache.store_key(kv, slot, position, pairs)
    heads.store_value(cache, token, kv, slot, position, scale)


def value_of(heads: Heads, row: Expr, kv: Expr, scale: Expr) -> Callable[[Expr], Expr]:
    """Returns value(column), an element of a row's value, rounded to float16."""
    return lambda column: T.cast(heads.value(row, kv, column, scale), "float16")


def add_rows(
    rows: Rows | MatrixRows, heads: Heads, place: Place, count: Expr, takers: tuple[Expr, int], dtype: str,
    written: tuple[Cache, Expr] | None = None,
) -> None:  # fmt: skip
    """Adds the keys and values of `count` rows of the step, at and before a row, to the softmax of a row's heads. These
    rows must be of the same sequence. takers: (number of this wave among the waves that share them, number of these
    waves). written: (cache, whether the row's own key is written to it) if the first of the rows is the row itself,
    otherwise None; in a step of one row, count is then at most 1."""
    arch, d, (kv, token, position, _), (wave, waves) = rows.arch, heads.d, place, takers
    keys = T.alloc_buffer((waves * d,), dtype, scope=WAVE_SHARED)
    begin = T.Bind(wave * d)
    with kept(T.Bind(T.truncdiv(T.max(count - wave, T.int32(0)) + (waves - 1), T.int32(waves)))) as i:
        back = T.Bind(wave + i * waves + (0 if written else 1))
        row, there = token, position
        if not isinstance(token, int):
            row, there = (T.Bind(T.max(x - back, T.int32(0))) for x in (token, position))
        pairs = list(heads.key(row, kv, there))
        store_rounded(pairs, keys, begin=begin)
        scale = heads.value_scale(row, kv)
        wave_meets(arch)
        rows.add_key(keys, begin, value_of(heads, row, kv, scale))
        if written:
            cache, writes = written
            with T.If((back == 0) & writes), T.Then():
                write_own(cache, heads, place._replace(token=row), pairs, lambda e: keys[begin + e], scale)
        wave_meets(arch)


# ---- the launch

# In steps of up to SHARED_ROWS rows without matrix units, the waves of a row's first split share the earlier rows of
# its sequence. In larger steps one wave takes all of them: for 64 sequences of Qwen 3 0.6B, whose rows have no earlier
# rows, this takes 4 % less time on an H200.
SHARED_ROWS = 32


def emit(step: Step, arch: Device, plan: DecodePlan | None = None) -> None:
    """Emits the launch for the single rows of a step. With RoPE and `rope.writes` it writes their own keys and values
    to the cache; otherwise these must be there already. Raises the errors of `splits_of`."""
    op, attention, m = step.op, step.layer, step.op.single
    state, places, cache = step.state, step.rows, step.cache.by_shifts()
    splits = splits_of(attention, arch, plan, m)
    group, parts, size, d = splits.group, splits.parts, splits.step, attention.d
    # whether the row's own key and value are not read from the cache
    own_apart = isinstance(op, RopeAttention) and op.rope.writes
    grid = attention.kv_heads * parts, splits.workgroups(m)
    with launch(grid, (arch.wave, splits.waves)) as (part, split, lane, thread_wave):
        token, works, active = 0, None, 0
        if m > 1:
            works, token, split, active = split_of(arch, attention, splits, places, m, step.singles(), split, lane)
        kv = part if parts == 1 else T.Bind(part // parts)
        wave = uniform(arch, thread_wave)
        place = Place(kv, token, clamped_position(places, token, attention.ctx), row_slot(places, token))
        position = place.position
        seen, earlier = visible(attention, position, own=not own_apart), 0
        if own_apart and m > 1:
            earlier = earlier_rows(arch, places, token, place.slot, lane)
            seen = seen._replace(end=T.Bind(T.max(position - earlier, T.int32(0))))
        steps, first_step = seen.end_block(size), seen.first_block(size)
        if works is None:
            active = splits.active(steps - first_step)
            works = split < active
        with T.serial(T.cast(works, "int32")):
            dtype = "float16" if splits.matrix else query_dtype(arch)
            queries = T.alloc_buffer((group, d), dtype, scope="shared")
            if not splits.matrix:
                rows = Rows(arch, attention, queries, lane, wave, splits.waves, splits.loads)
            else:
                rows = rows_on_matrices(arch, attention, group, lane, wave, splits.waves, size, ahead=m == 1)
            rows.start()
            stream, streams, mine = splits.share(steps - first_step, split, wave, active, m > 1)
            # on Vulkan, keys are loaded before the queries arrive, and those of a block with the values before it
            prefetches = rows.prefetches
            last = T.Bind(T.max(steps - 1, T.int32(0)))

            def first_key(i: Expr) -> Expr:
                """The first key of this wave's block number i; that of the last block if i is beyond it."""
                return T.Bind(T.min(stream + i * streams + first_step, last) * size)

            pages = Pages(cache, place.slot, [first_key(i) for i in range(1 + prefetches)])
            if prefetches and isinstance(rows, SharedRows | Rows):
                rows.load_keys(cache.block(kv, first_key(0), pages.take()[0], size))
            heads = own_key = None
            if isinstance(op, RopeAttention):
                own_key = T.alloc_buffer((d,), dtype, scope="shared") if own_apart and not splits.matrix else None
                assert step.sources
                heads = Heads(arch, attention, op.rope, step.sources, lane, d)
                _rotate(heads, splits, (queries, own_key), place, part, wave)
            else:
                _load_queries(step.Q, splits, queries, token, part, wave * arch.wave + lane)
            if isinstance(rows, MatrixRows):
                side = rows.unit.side
                own_rows = [T.Bind(T.min(rows.row + t * side, T.int32(group - 1))) for t in range(rows.tiles)]
                rows.load_queries(lambda t, c: queries[own_rows[t], at(c * UNIT, UNIT)])
            others = 0  # number of earlier rows of the step that the row attends to
            if own_apart and m > 1:
                others = earlier if seen.first is None else T.min(earlier, position - seen.first)
            first = T.Bind((wave == 0) & (split == 0)) if own_key is not None else None
            if heads and own_key is not None:
                with T.If(first), T.Then():
                    rows.add_key(own_key, 0, value_of(heads, token, kv, heads.value_scale(token, kv)))
                if m > 1:
                    alone = m > SHARED_ROWS
                    others = T.Bind(T.Select(first if alone else split == 0, others, T.int32(0)))
                    takers = (T.int32(0), 1) if alone else (wave, splits.waves)
                    add_rows(rows, heads, place, others, takers, dtype)
            # On matrices a block is much code, and NVIDIA's driver would unroll the loop eight times.
            with (kept if splits.matrix else T.serial)(mine) as i:
                number = T.Bind(stream + i * streams + first_step)
                page, *ahead = pages.take(first_key(i + (1 + prefetches)))
                # after the last block, a block is loaded that is not used
                following = cache.block(kv, first_key(i + 1), ahead[0], size) if prefetches else None
                block = cache.block(kv, T.Bind(number * size), page, size)
                zero = opaque_zero(state, i)
                whole = seen.covers(block.key0, size) if splits.matrix else None
                rows.step(block, lambda r, key: seen.sees(key), whole, zero, following)
            if own_apart and heads and splits.matrix:
                # After the loop, while other waves may still be in theirs. Before the loop, all waves would wait for
                # the one that has the own key in addition to its blocks.
                count = T.Bind(T.Select(split == 0, others + 1, T.int32(0)))
                takers = splits.waves - 1 - wave, splits.waves  # blocks go to the first waves first
                writes = (part % parts == 0) & is_at(places, token, position)
                add_rows(rows, heads, place, count, takers, dtype, (cache, writes))
            elif own_key is not None and heads:
                writes = first if parts == 1 else first & (part % parts == 0)
                with T.If(writes & is_at(places, token, position)), T.Then():
                    pairs, scale = heads.key(token, kv, position), heads.value_scale(token, kv)
                    write_own(cache, heads, place, pairs, lambda e: own_key[e], scale)
            quad = rows.join_waves()
            join_splits(arch, step, splits, (token, part), (wave, lane), quad, split, active)


def _rotate(heads: Heads, splits: Splits, buffers: tuple[Buffer, Buffer], place: Place, part: Expr, wave: Expr) -> None:
    """Rotates the queries of a part, and the key if there is one, into LDS. The waves take heads round robin."""
    (queries, own_key), (kv, token, position, _) = buffers, place
    scale = T.float32(heads.layer.query_scale)
    for i in _each_head(heads.arch, splits):
        row = T.Bind(i * splits.waves + wave)
        with T.If(row < splits.group), T.Then():
            store_rounded(heads.query(token, part * splits.group + row, position), queries, row, scale=scale)
    if own_key is not None:
        with T.If(wave == splits.waves - 1), T.Then():
            store_rounded(heads.key(token, kv, position), own_key)


def _each_head(arch: Device, splits: Splits) -> Iterator[Expr]:
    """The numbers of the heads that a wave rotates. With matrix units it is always a loop, as the rest of the code is
    small."""
    count = -(-splits.group // splits.waves)
    if not splits.matrix:
        yield from each(arch, count)
        return
    with kept(count) as i:
        yield i


def _load_queries(Q: Buffer, splits: Splits, queries: Buffer, token: Expr, part: Expr, tid: Expr) -> None:
    """Copies a token's rotated queries of the group into LDS."""
    d = int(queries.shape[1])
    elements = splits.group * d
    for first in range(0, elements, splits.threads):
        e = T.Bind(first + tid)
        query = T.cast(Q[token, part * splits.group + e // d, e % d], queries.dtype)
        valid = None if first + splits.threads <= elements else e < elements
        store_valid(valid, queries, [((e // d, e % d), query)])


CHOICES = {
    "threads": (32, 64, 96, 128, 256), "fill": (1, 2, 4, 8), "step": (32, 64), "batch": (4, 8, 16, 32),
    "rows": (1, 2, 4, 8, 16), "loads": (4, 8, 16), "ahead": (0, 1),
}  # fmt: skip


@planned(CHOICES, lambda op, arch: default_plan(op.layer, arch, op.m))
def space(op: Attending, arch: Device, plan: DecodePlan) -> Kernel:
    splits = splits_of(op.layer, arch, plan, op.m)
    groups = op.layer.kv_heads * splits.parts * splits.workgroups(op.m)
    return Kernel(splits, groups, splits.threads, splits.step * op.layer.d * 2 / arch.wave)
