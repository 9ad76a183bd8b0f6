"""Attention of single rows, one to SLOTS tokens of any sequences, against the cache on a GPU: split-KV ("flash
decoding"), with RoPE and the cache write in the same launch.

In: the token's q, k, v rows as the projections left them, or tokens' queries that `rope_kv_write.py` rotated, and the
cache. Out: the heads' outputs in an activation layout of `quantize.py`. A workgroup has a token's KV head, or a part of
the query heads that share it, and a split of its visible keys; it rotates these queries into LDS itself. A wave
processes blocks of 32 or 64 keys and keeps its own softmax (`attention_rows.py`), so nothing waits in the loop; K and V
are loaded once for the whole group. The waves join through LDS at the end. Which split of which token
a workgroup has: `attention_splits.py`.

Splits join in device memory (`attention_join.py`): the last one to finish joins them all, without a second launch.
(On Vulkan a split that is alone stores the output itself.)

With RoPE the token's own key and value never come from the cache: the first wave's softmax starts with them, as float16
whatever the type of the cache is. So do those of rows before it that are of the same sequence, which other workgroups
write in the same launch: the wave rotates these keys itself. On matrices they come after the keys of the cache, the
row's own one in the last wave, which has the fewest blocks.
"""

from contextlib import nullcontext

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention.attention_join import Join, scratch_args
from mlc_amd.schedules.gpu.attention.attention_own import add_row, add_rows, earlier_rows, rounded, start_with_own
from mlc_amd.schedules.gpu.attention.attention_rows_matrix import MatrixRows
from mlc_amd.schedules.gpu.attention.attention_rows_vulkan import query_dtype, rows_of
from mlc_amd.schedules.gpu.attention.attention_splits import DecodePlan, split_of, splits_of
from mlc_amd.schedules.gpu.attention.attention_step import SCRATCH, Step, attention_step
from mlc_amd.schedules.gpu.attention.cache import (
    UNIT,
    Cache,
    Pages,
    clamped_position,
    is_at,
    pages_arg,
    row_slot,
    rows_arg,
    store_valid,
    visible,
)
from mlc_amd.schedules.gpu.attention.rope_kv_write import rope_args, rotated, value_scale
from mlc_amd.schedules.gpu.attention.softmax import output_args, sinks_arg
from mlc_amd.schedules.gpu.base.device import WAVE_SHARED, each, launch, uniform
from mlc_amd.schedules.gpu.base.registers import at
from mlc_amd.schedules.gpu.base.step import kept, kernel, opaque_zero, state_arg
from mlc_amd.schedules.operators.attention import SLOTS, Attention, Rope

# Rows of a step, at most, of which the waves of a row's first split share out the rows before it where these are not on
# matrices. With more, one wave takes all: for 64 sequences of Qwen 3 0.6B, whose rows have none before them, that takes
# 4 % less time on an H200.
SHARED_ROWS = 32


def attention_decode(
    attention: Attention, layout, arch, name, rope: Rope | None = None, plan: DecodePlan | None = None, m: int = 1
) -> tirx.PrimFunc:
    """Kernel of m rows (SLOTS at most), each at a position of some sequence: that of `attention_step` with
    `splits`, or with `rope` (state int32[4], rows int32[m, 2], pages, then Q, K, V, [QN, KN], [CS] as for
    `rope_kv_write`, then the cache (in place) and so on). Rows of the same sequence follow one another, with
    consecutive positions.

    With `rope.writes` the rows' own keys and values are written to the cache, else they must be there already. One
    launch. plan: instead of the arch's; ValueError as for `splits_of`. UserError for shapes that `cache_types`,
    `rope_args`, `group_of` or `output_args` refuses.
    """
    if m > SLOTS:
        raise ValueError(f"decode attention of {m} rows")
    if not rope:
        with attention_step(attention, m, layout, name, splits=True) as (ir, step):
            emit(attention, m, layout, arch, step, plan)
        return ir.get()
    with kernel(name, coherent=SCRATCH) as ir:
        state, places, pages = state_arg(), rows_arg(m), pages_arg(attention)
        sources = rope_args(attention, m, rope)
        cache, sinks = Cache(attention, pages), sinks_arg(attention)
        scratch = scratch_args(attention.heads, attention.d)
        out = output_args(attention, m, layout)
        emit(attention, m, layout, arch, Step(state, places, sources, cache, sinks, scratch, out), plan, rope=rope)
    return ir.get()


def emit(attention: Attention, m, layout, arch, step: Step, plan=None, live=1, rope: Rope | None = None) -> None:
    """The launch for rows 0 .. m-1 of a step, of which state[live] are computed. step.Q: with `rope` the `Sources`.
    Errors: of `attention_decode`."""
    state, places, scratch, sinks, out = step.state, step.rows, step.scratch, step.sinks, step.out
    kv_heads, d, ctx = attention.kv_heads, attention.d, attention.ctx
    splits = splits_of(attention, arch, plan, m)
    cache = step.cache.by_shifts()
    group, parts, size = splits.group, splits.parts, splits.step
    own_apart = rope is not None and rope.writes  # its own key and value do not come from the cache
    grid = kv_heads * parts, splits.workgroups(m)
    with launch(grid, (arch.wave, splits.waves)) as (part, split, lane, thread_wave):
        token, works, active = 0, None, None
        if m > 1:
            count = T.Bind(T.min(state[live], T.int32(m)))
            works, token, split, active = split_of(arch, attention, splits, places, m, count, split, lane)
        kv = part if parts == 1 else T.Bind(part // parts)
        wave = uniform(arch, thread_wave)
        position, slot = clamped_position(places, token, ctx), row_slot(places, token)
        seen, earlier = visible(attention, position, own=not own_apart), 0
        if own_apart and m > 1:
            earlier = earlier_rows(arch, places, token, slot, lane)
            seen = seen._replace(end=T.Bind(T.max(position - earlier, T.int32(0))))
        steps, first_step = seen.end_block(size), seen.first_block(size)
        if works is None:
            active = splits.active(steps - first_step)
            works = split < active
        with T.serial(T.cast(works, "int32")):
            dtype = "float16" if splits.matrix else query_dtype(arch)
            queries = T.alloc_buffer((group, d), dtype, scope="shared")
            if splits.matrix:
                rows = MatrixRows(arch, attention, group, lane, wave, splits.waves, size, ahead=m == 1)
            else:
                rows = rows_of(arch, attention, group, lane, wave, splits.waves, size, splits.loads)
            rows.start()
            stream, streams, mine = splits.share(steps - first_step, split, wave, active, m > 1)
            # on Vulkan, keys are loaded before the queries arrive, and those of a block with the values before it
            prefetches, last = arch.api == "vulkan" and rows.prefetches, T.Bind(T.max(steps - 1, T.int32(0)))

            def first_key(i):
                """Of this wave's block number i; of the last block where there is none."""
                return T.Bind(T.min(stream + i * streams + first_step, last) * size)

            pages = Pages(cache, slot, [first_key(i) for i in range(1 + prefetches)])
            if prefetches:
                rows.load_keys(cache.block(kv, first_key(0), pages.take()[0], size))
            if rope:
                own_key = T.alloc_buffer((d,), dtype, scope="shared") if own_apart and not splits.matrix else None
                place = part, kv, token
                _rotate(arch, attention, splits, step.Q, rope, (queries, own_key), place, position, wave, lane)
            else:
                _load_queries(splits, d, step.Q, queries, token, part, wave * arch.wave + lane)
            if splits.matrix:
                rows.load_queries(lambda row, c: queries[row, at(c * UNIT, UNIT)])
            others = 0  # rows before it in the step that it sees
            if own_apart and m > 1:
                others = earlier if seen.first is None else T.min(earlier, position - seen.first)
            place, first = (kv, token, position), None
            if own_apart and not splits.matrix:
                first = T.Bind((wave == 0) & (split == 0))
                _add_own(arch, rows, queries, own_key, step.Q, rope, place, first)
                if m > 1:
                    others = T.Bind(T.Select(split == 0, others, T.int32(0)))
                    _add_earlier(arch, rows, queries, step.Q, rope, place, others, m, wave, splits.waves)
            # On matrices a block is much code: NVIDIA's driver would unroll the loop eight times.
            with (kept if splits.matrix else T.serial)(mine) as i:
                number = T.Bind(stream + i * streams + first_step)
                page, *ahead = pages.take(first_key(i + (1 + prefetches)))
                following = {}
                if prefetches:  # the last block's successor is loaded without being used
                    following = {"following": cache.block(kv, first_key(i + 1), ahead[0], size)}
                block = cache.block(kv, T.Bind(number * size), page, size)
                rows.step(block, queries, lambda r, key: seen.sees(key), opaque_zero(state, i), **following)
            if own_apart and splits.matrix:
                # Behind the loop, in which the other waves are still busy: before it, all would wait for the one that
                # has the own key and as many blocks as any.
                keys = T.alloc_buffer((splits.waves * d,), dtype, scope=WAVE_SHARED)
                count = T.Bind(T.Select(split == 0, others + 1, T.int32(0)))
                takers = splits.waves - 1 - wave, splits.waves  # blocks go to the first waves first
                writes = (part % parts == 0) & is_at(places, token, position)
                add_rows(rows, keys, step.Q, rope, place, count, takers, (cache, slot, writes))
            elif own_apart:
                sources = step.Q
                writes = first if parts == 1 else first & (part % parts == 0)
                with T.If(writes & is_at(places, token, position)), T.Then():
                    if attention.quantized:
                        cache.store_key_codes(arch, kv, slot, position, lambda e: _real(own_key[e]), lane)
                    else:
                        key = rotated(arch, sources.K, token, kv * d, sources.CS, position, sources.KN, lane, d, rope)
                        cache.store_key(kv, slot, position, key)
                    scale = value_scale(arch, sources.V, token, kv, lane, d, rope)
                    cache.store_value(arch, kv, slot, position, sources.V, token, lane, scale)
            quad = rows.join_waves(wave, splits.waves)
            tid = T.Bind(wave * arch.wave + lane)
            join = Join(arch, splits, layout, out, scratch, sinks, token, part, kv_heads * parts, wave, lane, tid)
            if arch.api == "vulkan":
                with T.serial(T.cast(active == 1, "int32")):
                    join.store_alone(quad)
            with nullcontext() if arch.api == "rocm" else T.serial(T.cast(active > 1, "int32")):
                join.store_parts(quad, split)
                join.arrive_and_join(active)


def _rotate(arch, attention, splits, sources, rope, buffers, place, position, wave, lane):
    """Rotates the group's queries and the key, if there is one, into LDS; the waves take heads round robin."""
    (Q, K, _, QN, KN, CS), (queries, own_key), (part, kv, token) = sources, buffers, place
    group, d, scale = splits.group, splits.d, T.float32(attention.query_scale)
    for i in _each_head(arch, splits):
        row = T.Bind(i * splits.waves + wave)
        with T.If(row < group), T.Then():
            for valid, values in rotated(arch, Q, token, (part * group + row) * d, CS, position, QN, lane, d, rope):
                store_valid(valid, queries, [((row, e), rounded(y * scale, queries)) for e, y in values])
    if own_key is None:
        return
    with T.If(wave == splits.waves - 1), T.Then():
        for valid, values in rotated(arch, K, token, kv * d, CS, position, KN, lane, d, rope):
            store_valid(valid, own_key, [((e,), rounded(y, own_key)) for e, y in values])


def _each_head(arch, splits):
    """Numbers of the heads that a wave rotates; on matrices, where code is small otherwise, in a loop in any case."""
    count = -(-splits.group // splits.waves)
    if not splits.matrix:
        yield from each(arch, count)
        return
    with kept(count) as i:
        yield i


def _add_own(arch, rows, queries, own_key, sources, rope, place, first):
    """The first wave's state begins with the row's own key."""
    kv, token, _ = place
    with T.If(first), T.Then():
        scale = value_scale(arch, sources.V, token, kv, rows.lane, rows.d, rope)
        start_with_own(rows, queries, own_key, sources.V, scale, kv, token)


def _add_earlier(arch, rows, queries, sources, rope, place, others, m, wave, waves):
    """Adds the keys of the `others` rows before it, which are of its sequence."""
    (kv, token, position), d = place, rows.d
    takers = waves if m <= SHARED_ROWS else 1
    keys = T.alloc_buffer((takers * d,), query_dtype(arch), scope=WAVE_SHARED)
    count = T.truncdiv(T.max(others - wave, T.int32(0)) + (takers - 1), takers)
    with T.serial(T.Bind(count if takers > 1 else T.Select(wave == 0, others, T.int32(0)))) as i:
        back = T.Bind(1 + wave + i * takers)
        there = T.Bind(token - back), T.Bind(T.max(position - back, T.int32(0)))
        buffer = keys, T.Bind(wave * d) if takers > 1 else 0
        add_row(rows, queries, buffer, sources, rope, kv, there)


def _real(x):
    return T.cast(x, "float32")


def _load_queries(splits, d, Qo, queries, token, part, tid):
    """Copies a token's rotated queries of the group, d columns each, into LDS."""
    elements = splits.group * d
    for first in range(0, elements, splits.threads):
        e = T.Bind(first + tid)
        store_valid(
            None if first + splits.threads <= elements else e < elements,
            queries,
            [
                (
                    (e // d, e % d),
                    T.cast(Qo[token, part * splits.group + e // d, e % d], queries.dtype),
                )
            ],
        )
