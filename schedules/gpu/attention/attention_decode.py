"""Attention of single rows, one to SLOTS tokens of any sequences, against the cache on a GPU: split-KV ("flash
decoding"), with RoPE and the cache write in the same launch.

In: the token's q, k, v rows as the projections left them, or tokens' queries that `kv_write.py` rotated, and the
cache. Out: the heads' outputs in an activation layout of `quantize.py`. A workgroup has a token's KV head, or a part of
the query heads that share it, and a split of its visible keys; it rotates these queries into LDS itself. A wave
processes blocks of 32 or 64 keys and keeps its own softmax (`attention_rows.py`), so nothing waits in the loop; K and V
are loaded once for the whole group. The waves join through LDS at the end. Which split of which token
a workgroup has: `attention_splits.py`.

Splits join in device memory (`join_splits`). (On Vulkan a split that is alone stores the output itself.)

With RoPE the token's own key and value never come from the cache: the first wave's softmax starts with them, as float16
whatever the type of the cache is. So do those of rows before it that are of the same sequence, which other workgroups
write in the same launch: the wave rotates these keys itself. On matrices (`attention_rows_matrix.py`) they come after
the keys of the cache, the row's own one in the last wave, which has the fewest blocks.
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

# ---- what rows add to their softmax that is not in the cache yet: their own key and value, and those of rows before
# them in the same step that are of the same sequence


class Place(NamedTuple):
    """A row of the step: its KV head here, its number, which is the int 0 in a step of one row, its position, and the
    slot of its sequence."""

    kv: Expr
    token: Expr
    position: Expr
    slot: Expr


def store_rounded(
    pairs: Iterable[Elements], buffer: Buffer, *index: Expr, begin: Expr = None, scale: Expr = None
) -> None:
    """Stores a head's elements, times `scale`, as float16 in the type of the buffer, at (*index, begin + element)."""
    for valid, values in pairs:
        stores = []
        for e, y in values:
            half = T.cast(y if scale is None else y * scale, "float16")
            place = (*index, e if begin is None else begin + e)
            stores.append((place, half if str(buffer.dtype) == "float16" else T.cast(half, "float32")))
        store_valid(valid, buffer, stores)


def earlier_rows(arch: Device, places: Buffer, token: Expr, slot: Expr, lane: Expr) -> Expr:
    """How many rows right before row `token` are of its sequence."""
    m, first = int(places.shape[0]), token
    for start in range(0, m, arch.wave):
        row = T.Bind(T.min(start + lane, T.int32(m - 1)))
        same = (row < token) & (row_slot(places, row) == slot)
        first = T.Bind(T.min(first, wave_min(arch, T.Bind(T.Select(same, row, token)))))
    return T.Bind(token - first)


def write_own(
    cache: Cache, heads: Heads, place: Place, pairs: Iterable[Elements], key: Callable[[Expr], Expr], scale: Expr
) -> None:
    """Writes the row's own key and value to the cache. pairs: the lane's elements of the rotated key, of which key(e)
    is element e, for any lane; scale: of `Heads.value_scale`."""
    kv, token, position, slot = place
    if heads.layer.quantized:
        cache.store_codes(heads.arch, kv, slot, position, lambda e: T.cast(key(e), "float32"), heads.lane)
    else:
        cache.store_key(kv, slot, position, pairs)
    heads.store_value(cache, token, kv, slot, position, scale)


def value_of(heads: Heads, row: Expr, kv: Expr, scale: Expr) -> Callable[[Expr], Expr]:
    """value(column) of a row, rounded to float16."""
    return lambda column: T.cast(heads.value(row, kv, column, scale), "float16")


def add_rows(
    rows: Rows | MatrixRows, heads: Heads, place: Place, count: Expr, takers: tuple[Expr, int], dtype: str,
    written: tuple[Cache, Expr] | None = None,
) -> None:  # fmt: skip
    """Adds the keys and values of `count` rows before a row, which are of its sequence, to the rows' state. The waves
    of the workgroup share them out, takers: the number of this one among those that do, and how many these are.
    written: (cache, whether the row is written), where the first of them is the row itself; in a step of one row count
    is 1 at most then."""
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

# Rows of a step, at most, of which the waves of a row's first split share out the rows before it where these are not on
# matrices. With more, one wave takes all: for 64 sequences of Qwen 3 0.6B, whose rows have none before them, that takes
# 4 % less time on an H200.
SHARED_ROWS = 32


def emit(step: Step, arch: Device, plan: DecodePlan | None = None) -> None:
    """The launch for the single rows of a step. With RoPE and `rope.writes` their own keys and values are written to
    the cache, else they must be there already. Errors: of `splits_of`."""
    op, attention, m = step.op, step.layer, step.op.single
    state, places, cache = step.state, step.rows, step.cache.by_shifts()
    splits = splits_of(attention, arch, plan, m)
    group, parts, size, d = splits.group, splits.parts, splits.step, attention.d
    # its own key and value do not come from the cache
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
                """Of this wave's block number i; of the last block where there is none."""
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
            others = 0  # rows before it in the step that it sees
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
            # On matrices a block is much code: NVIDIA's driver would unroll the loop eight times.
            with (kept if splits.matrix else T.serial)(mine) as i:
                number = T.Bind(stream + i * streams + first_step)
                page, *ahead = pages.take(first_key(i + (1 + prefetches)))
                # the last block's successor is loaded without being used
                following = cache.block(kv, first_key(i + 1), ahead[0], size) if prefetches else None
                block = cache.block(kv, T.Bind(number * size), page, size)
                zero = opaque_zero(state, i)
                whole = seen.covers(block.key0, size) if splits.matrix else None
                rows.step(block, lambda r, key: seen.sees(key), whole, zero, following)
            if own_apart and heads and splits.matrix:
                # After the loop, in which the other waves are still busy: before it, all would wait for the one that
                # has the own key and as many blocks as any.
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
    """Rotates the queries of a part and the key, if there is one, into LDS; the waves take heads round robin."""
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
    """Numbers of the heads that a wave rotates; on matrices, where code is small otherwise, in a loop in any case."""
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
