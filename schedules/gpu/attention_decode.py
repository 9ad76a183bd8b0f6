"""Attention of single rows, one to SLOTS tokens of any sequences, against the cache on a GPU: split-KV ("flash
decoding"), with RoPE and the cache write in the same launch.

In: the token's q, k, v rows as the projections left them, or tokens' queries that `rope_kv_write.py` rotated, and the
cache. Out: the heads' outputs in an activation layout of `quantize.py`. A workgroup has a token's KV head, or a part of
the query heads that share it, and a split of its visible keys; it rotates these queries into LDS itself. A wave
processes blocks of 32 or 64 keys and keeps its own softmax (`attention_rows.py`), so nothing waits in the loop; K and V
are loaded once for the whole group. The waves join through LDS at the end. Several tokens share the GPU: one that sees
many keys has more splits than others, none has more than it would have alone; which split of which token a workgroup
has is computed in the kernel, so that there are no more workgroups than splits with something to do.

Splits join in device memory (`attention_join.py`): the last one to finish joins them all, without a second launch.
(On Vulkan a split that is alone stores the output itself.)

With RoPE the token's own key and value never come from the cache: the first wave's softmax starts with them, as float16
whatever the type of the cache is. So do those of rows before it that are of the same sequence, which other workgroups
write in the same launch: the wave rotates these keys itself.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.attention import SLOTS, Attention, Rope
from mlc_amd.schedules.gpu.attention_join import Join, max_splits, scratch_args
from mlc_amd.schedules.gpu.attention_own import add_row, earlier_rows, rounded, start_with_own
from mlc_amd.schedules.gpu.attention_rows import STEP
from mlc_amd.schedules.gpu.attention_rows_vulkan import query_dtype, rows_of, waves_of
from mlc_amd.schedules.gpu.attention_step import SCRATCH, Step, attention_step
from mlc_amd.schedules.gpu.cache import (
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
from mlc_amd.schedules.gpu.device import (
    WAVE_SHARED,
    each,
    launch,
    uniform,
    wave_max,
    wave_scan,
    wave_sum,
)
from mlc_amd.schedules.gpu.registers import opaque
from mlc_amd.schedules.gpu.rope_kv_write import rope_args, rotated, value_scale
from mlc_amd.schedules.gpu.softmax import MAX_GROUP, group_of, output_args, sinks_arg
from mlc_amd.schedules.gpu.step import kernel, opaque_zero, state_arg


@dataclass(frozen=True)
class Plan:
    """threads  of a workgroup, at most
    fill     workgroups per compute unit that a long context is split into
    step     keys between two looks at the maximum; on "rocm" STEP
    batch    splits whose results are loaded at once
    rows     query heads that a workgroup has, at least; where more share a KV head, several workgroups read its keys
    """

    threads: int
    fill: int
    step: int
    batch: int
    rows: int


# By family and `_kind` of the layer: what takes least time on an H200 with 0 to 16384 tokens in the cache. Several
# workgroups that read the same keys are faster than one with more rows, until reading counts.
PLANS = {
    ("nvidia", "wide"): Plan(threads=128, fill=2, step=32, batch=32, rows=4),
    ("nvidia", "narrow"): Plan(threads=128, fill=8, step=32, batch=32, rows=2),
    ("nvidia", "window"): Plan(threads=128, fill=4, step=32, batch=32, rows=1),
}
# Of latent attention, whose rows have the most columns: as many rows as registers hold. On an H200, GLM 4.7 Flash
# decodes a tenth slower with 4 rows than with one, but with 16384 tokens in the cache one and a half times as fast.
LATENT_PLAN = Plan(threads=128, fill=2, step=STEP, batch=8, rows=4)
DEFAULT_PLAN = Plan(threads=128, fill=2, step=STEP, batch=8, rows=MAX_GROUP)
NARROW = 64  # columns of a head, at most
FIELD = 7  # bits of a word for a row, or for a number of splits
# Rows of a step, at most, of which the waves of a row's first split share out the rows before it. With more, one wave
# takes all: 64 sequences, whose rows have none before them, decode 9098 instead of 8388 tokens a second on an H200.
SHARED_ROWS = 32
# family: blocks of keys that each wave of a workgroup processes before there are splits, since joining them in device
# memory takes as long. Others: one.
ALONE = {"nvidia": 4}


def default_plan(arch, d, span, m=1, values=0) -> Plan:
    """For m rows with heads of d columns, which see `span` keys at most (0: all). values: of latent attention."""
    plan = LATENT_PLAN if values else PLANS.get((arch.family, _kind(d, span)), DEFAULT_PLAN)
    return plan if m == 1 else replace(plan, batch=DEFAULT_PLAN.batch)  # a step of several rows gains by little code


def _kind(d, span) -> str:
    return "window" if span else "narrow" if d <= NARROW else "wide"


class Splits(NamedTuple):
    """How a KV head's keys are distributed: up to `count` workgroups of `waves` waves, which take blocks of `step` keys
    round robin, for each `group` of the query heads; `parts` such groups share a KV head. d: columns of an output.
    batch: splits whose results are loaded at once. maximum: splits for which there is memory. alone: of `ALONE`. fill:
    splits that all rows together should have."""

    count: int
    waves: int
    threads: int
    group: int
    d: int
    step: int
    batch: int
    parts: int
    maximum: int
    alone: int
    fill: int

    def workgroups(self, m) -> int:
        """Of m rows, for each group of query heads: as many as there may be splits with something to do."""
        return min(m * self.count, self.fill + m) if m > 1 else self.count

    def least(self, total):
        """The blocks that a split of several rows has at least. total: of all rows."""
        return T.Bind(T.max((total + (self.fill - 1)) // self.fill, T.int32(self.waves)))

    def active(self, steps, least=None):
        """The number of splits that have a block to process, at least one. steps: blocks in all; least: of `least`,
        None for one row."""
        one = least is None
        splits = (steps + self.waves - 1) // self.waves if one else T.truncdiv(steps + least - 1, least)
        count = T.max(T.min(splits, T.int32(self.count)), T.int32(1))
        return T.Bind(count if self.alone == 1 else T.Select(steps <= self.waves * self.alone, T.int32(1), count))

    def share(self, steps, split, wave, active, several):
        """(the first block of a wave, the distance to its next one, how many it has) of `steps` blocks. With `several`
        rows blocks are dealt out to the active splits; with one to all splits, unless one is active alone."""

        def rest(streams):
            return T.max((steps - stream + streams - 1) // streams, T.int32(0))

        stream, streams = T.Bind(split * self.waves + wave), self.count * self.waves
        if several:
            distance = T.Bind(active * self.waves)
            return stream, distance, T.truncdiv(T.max(steps - stream, T.int32(0)) + distance - 1, distance)
        if self.alone == 1:
            return stream, streams, rest(streams)
        one = active == 1
        distance = T.Bind(T.Select(one, T.int32(self.waves), T.int32(streams)))
        return stream, distance, T.Select(one, rest(self.waves), rest(streams))


def splits_of(heads, kv_heads, d, ctx, arch, plan=None, span=0, m=1, values=0) -> Splits:
    """The splits of a shape for m tokens: no more than the visible keys have blocks for, than fill the GPU, than a wave
    has lanes to join them. values: of latent attention. ValueError for a plan that the arch cannot run."""
    plan = plan or default_plan(arch, d, span, m, values)
    shared = heads if values else group_of(heads, kv_heads)
    group = next(n for n in range(min(plan.rows, shared), shared + 1) if shared % n == 0)
    parts = shared // group
    if plan.step != STEP and (arch.api == "rocm" or plan.step % arch.wave or plan.step > STEP):
        raise ValueError(f"{arch.name} takes steps of up to {STEP} keys, not of {plan.step}")
    if plan.threads < arch.wave:
        raise ValueError(f"{plan.threads} threads are less than a wave of {arch.name}")
    waves = waves_of(arch, group, d, plan.threads)
    keys = min(ctx, span + plan.step) if span else ctx  # what a row sees may begin within a block
    fill, maximum = -(-plan.fill * arch.units // (kv_heads * parts)), max_splits(m)
    count = min(-(-keys // (plan.step * waves)), fill, maximum, arch.wave)
    batch = min(plan.batch, arch.wave)
    alone = ALONE.get(arch.family, 1)
    return Splits(count, waves, waves * arch.wave, group, values or d, plan.step, batch, parts, maximum, alone, fill)


def attention_decode(
    attention: Attention, layout, arch, name, rope: Rope | None = None, plan: Plan | None = None, m: int = 1
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
    heads, kv_heads, d, ctx = attention.heads, attention.kv_heads, attention.d, attention.ctx
    splits = splits_of(heads, kv_heads, d, ctx, arch, plan, attention.span, m, attention.values)
    cache = step.cache.by_shifts()
    group, parts, size = splits.group, splits.parts, splits.step
    own_apart = rope is not None and rope.writes  # its own key and value do not come from the cache
    grid = kv_heads * parts, splits.workgroups(m)
    with launch(grid, (arch.wave, splits.waves)) as (part, split, lane, thread_wave):
        token, works, active = 0, None, None
        if m > 1:
            count = T.Bind(T.min(state[live], T.int32(m)))
            works, token, split, active = dealt(arch, attention, splits, places, m, count, split, lane)
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
            queries = T.alloc_buffer((group, d), query_dtype(arch), scope="shared")
            rows = rows_of(arch, attention, group, lane, wave, splits.waves, size, shared=m > 1)
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
                own_key = T.alloc_buffer((d,), query_dtype(arch), scope="shared") if own_apart else None
                place = part, kv, token
                _rotate(arch, attention, splits, step.Q, rope, (queries, own_key), place, position, wave, lane)
                if own_apart:
                    first = T.Bind((wave == 0) & (split == 0))
                    with T.If(first), T.Then():
                        scale = value_scale(arch, step.Q.V, token, kv, lane, d, rope)
                        start_with_own(rows, queries, own_key, step.Q.V, scale, kv, token)
                    if m > 1:
                        others = earlier if seen.first is None else T.min(earlier, position - seen.first)
                        others = T.Bind(T.Select(split == 0, others, T.int32(0)))
                        takers = splits.waves if m <= SHARED_ROWS else 1
                        keys = T.alloc_buffer((takers * d,), query_dtype(arch), scope=WAVE_SHARED)
                        count = T.truncdiv(T.max(others - wave, T.int32(0)) + (takers - 1), takers)
                        with T.serial(T.Bind(count if takers > 1 else T.Select(wave == 0, others, T.int32(0)))) as i:
                            back = T.Bind(1 + wave + i * takers)
                            place = T.Bind(token - back), T.Bind(T.max(position - back, T.int32(0)))
                            buffer = keys, T.Bind(wave * d) if takers > 1 else 0
                            add_row(rows, queries, buffer, step.Q, rope, kv, place)
            else:
                _load_queries(splits, d, step.Q, queries, token, part, wave * arch.wave + lane)
            with T.serial(mine) as i:
                place = T.Bind(stream + i * streams + first_step)
                page, *ahead = pages.take(first_key(i + (1 + prefetches)))
                following = {}
                if prefetches:  # the last block's successor is loaded without being used
                    following = {"following": cache.block(kv, first_key(i + 1), ahead[0], size)}
                block = cache.block(kv, T.Bind(place * size), page, size)
                rows.step(block, queries, lambda r, key: seen.sees(key), opaque_zero(state, i), **following)
            if own_apart:
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


def dealt(arch, attention, splits, places, m, count, workgroup, lane):
    """Deals the splits of the first `count` of m rows out to workgroups, those of row 0 first. (Whether this workgroup
    has one, its row, the number of its split, the splits of that row), the same in all lanes. Each wave computes it: a
    lane has a row or several."""
    found = T.int32(0)
    for row, active, before in splits_of_rows(arch, attention, splits, places, m, count, lane):
        split = opaque(workgroup - before)
        mine = (split >= 0) & (split < active)
        word = T.shift_left(T.shift_left(row, T.int32(FIELD)) + split, T.int32(FIELD)) + active
        found = opaque(T.max(found, T.Select(mine, word, T.int32(0))))
    word = opaque(uniform(arch, wave_max(arch, found)))
    fields = [T.Bind(T.shift_right(word, T.int32(n * FIELD)) & ((1 << FIELD) - 1)) for n in range(3)]
    return word > 0, fields[2], fields[1], fields[0]


def splits_of_rows(arch, attention, splits, places, m, count, lane):
    """Yields, for each row that a lane has: (row, its splits, those of all rows before it)."""
    steps = []
    for first in range(0, m, arch.wave):
        row = T.Bind(T.min(first + lane, T.int32(m - 1)))
        seen = visible(attention, clamped_position(places, row, attention.ctx))
        blocks = seen.end_block(splits.step) - seen.first_block(splits.step)
        steps.append(T.Bind(T.Select(first + lane < count, blocks, T.int32(0))))
    least = splits.least(wave_sum(arch, T.Bind(sum(steps[1:], steps[0]))))
    before = T.int32(0)
    for i, own in enumerate(steps):
        row = T.Bind(i * arch.wave + lane)
        active = opaque(T.Select(row < count, splits.active(own, least), T.int32(0)))
        lower, whole = wave_scan(arch, active, lane)
        yield row, active, T.Bind(before + lower)
        before = opaque(before + whole)


def _rotate(arch, attention, splits, sources, rope, buffers, place, position, wave, lane):
    """Rotates the group's queries and the key, if there is one, into LDS; the waves take heads round robin."""
    (Q, K, _, QN, KN, CS), (queries, own_key), (part, kv, token) = sources, buffers, place
    group, d, scale = splits.group, splits.d, T.float32(attention.query_scale)
    for i in each(arch, -(-group // splits.waves)):
        row = T.Bind(i * splits.waves + wave)
        with T.If(row < group), T.Then():
            for valid, values in rotated(arch, Q, token, (part * group + row) * d, CS, position, QN, lane, d, rope):
                store_valid(valid, queries, [((row, e), rounded(y * scale, queries)) for e, y in values])
    if own_key is None:
        return
    with T.If(wave == splits.waves - 1), T.Then():
        for valid, values in rotated(arch, K, token, kv * d, CS, position, KN, lane, d, rope):
            store_valid(valid, own_key, [((e,), rounded(y, own_key)) for e, y in values])


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
