"""Causal attention of a chunk of tokens against the cache: blocked, with online softmax ("flash attention"), for x86
CPUs.

In: the rotated queries (times log2(e)/sqrt(d)) and the caches of `rope_kv_write.py`, which already hold the chunk's own
keys and values. Out: the heads' outputs, float32 or int8 blocks, of the live tokens.

A task is one KV head and a tile of tokens; its rows are the tile's tokens times the heads of the group. For each block
of 64 keys it works through its rows in register blocks of a few rows by as many vectors as fit: scores, softmax,
outputs. Meanwhile it asks for the next block. Blocks of keys that no row of a register block may see are skipped. Tasks
of later tiles see more keys, so threads take them in turns, the longest first.
"""

import math
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu.attention_block import (
    BLOCK,
    LINE,
    SPAN,
    accumulator_choices,
    emit_join_rows,
    emit_join_start,
    emit_product,
    emit_softmax,
    emit_start,
    scratch,
)
from mlc_amd.schedules.cpu.norm import live_tokens
from mlc_amd.schedules.cpu.quantize import BLOCK as QUANT
from mlc_amd.schedules.cpu.quantize import act_args, emit_quantize_block, emit_quantize_tile
from mlc_amd.schedules.cpu.rope_kv_write import KEYS, cache_shapes
from mlc_amd.schedules.cpu.vector import LANES, at, f32, opaque, prefetch, registers, splat, store


@dataclass(frozen=True)
class Plan:
    """How a chunk's attention is shared out. No plan changes the order in which numbers are summed up.

    rows       rows of a register block
    together   register blocks that work on keys, then on softmax, then on values: each of these stays in the nearest
               cache meanwhile
    registers  sums that are in registers at once
    convert    1: keys and values become float32 once for all rows; 0: in the products, where a processor does that
               beside multiplying
    most       rows of a task: many share the conversion of keys and values, and what is fetched of them
    fewest     rows of a task below which a short chunk is not split up further
    tasks      tasks that a short chunk should make, for all threads to have work
    """

    rows: int
    together: int
    registers: int
    convert: int
    most: int
    fewest: int
    tasks: int


def default_plan(isa):
    return Plan(rows=isa.rows, together=4, registers=isa.sums, convert=isa.convert, most=192, fewest=48, tasks=32)


def choices(isa):
    """Values of the plan's fields to try, by name."""
    return {
        "rows": (2, 3, 4, 6, 8, 12),
        "together": (1, 4),
        "registers": accumulator_choices(isa),
        "convert": (0, 1),
        "most": (48, 96, 192, 384),
        "fewest": (24, 48, 96),
        "tasks": (16, 32, 64, 128),
    }


def tile_tokens(plan, m, group, kv_heads):
    """Tokens of a task: whole register blocks."""
    fewest, most = (max(1, rows // group) for rows in (plan.fewest, plan.most))
    whole = plan.rows // math.gcd(plan.rows, group)
    return min(m, -(-min(most, max(fewest, m * kv_heads // plan.tasks)) // whole) * whole)


def _load_queries(Q, queries, kv, token0, rows, group, d):
    """The task's rows side by side, in order of tokens."""
    with T.serial(rows) as row, T.serial(d // LANES) as i:
        store(queries, Q[token0 + row // group, kv * group + row % group, at(i * LANES)], row, at(i * LANES))


class _Cached:
    """The keys and values of a KV head, `lanes` of a block of 64 at a time, as float32 in registers."""

    def __init__(self, isa, plan, Kc, Vc, kv, d):
        self.isa, self.Kc, self.Vc, self.kv, self.d = isa, Kc, Vc, kv, d
        self.converted = [scratch(d, BLOCK), scratch(BLOCK, d)] if plan.convert else None

    def emit_block(self, key0):
        """Goes on to the 64 keys and values from key0 on."""
        self.key0 = key0
        if not self.converted:
            return
        (keys, values), half = self.converted, self.isa.half
        with T.serial(self.d) as c:
            for tile in range(0, BLOCK, KEYS):
                store(keys, half(self.Kc[self.kv, (key0 + tile) // KEYS, c, at(0)]), c, at(tile))
        with T.serial(BLOCK) as key, T.serial(self.d // LANES) as i:
            store(values, half(self.Vc[self.kv, key0 + key, at(i * LANES)]), key, at(i * LANES))

    def keys(self, c, key):
        """Element c of keys key.. ."""
        lanes = self.isa.lanes
        if self.converted:
            return T.Bind(self.converted[0][c, at(key, lanes)])
        return self.isa.half(self.Kc[self.kv, (self.key0 + key) // KEYS, c, at(key % KEYS, lanes)], lanes)

    def values(self, key, c):
        """Elements c.. of a value."""
        lanes = self.isa.lanes
        if self.converted:
            return T.Bind(self.converted[1][key, at(c, lanes)])
        return self.isa.half(self.Vc[self.kv, self.key0 + key, at(c, lanes)], lanes)


def _ask_next(Kc, Vc, kv, key0, step, steps, d):
    """Asks for the share of `step` (of `steps`) in the 64 keys and values from key0 on."""
    each = -(-BLOCK * d // (LINE * steps))
    with T.serial(each) as i:
        place = opaque((step * each + i) * LINE)
        prefetch(Kc, kv, key0 // KEYS, 0, place, near=2)
        prefetch(Vc, kv, key0, place, near=2)


def _seen(first_key, row0, group, rows, key0):
    """How many of the 64 keys from key0 on any of the rows row0 .. row0+rows-1 sees."""
    return T.min(first_key + (row0 + rows - 1) // group - key0 + 1, T.int32(BLOCK))


def _emit_results(result, out, total, kv, token0, tokens, group, tile, d, p):
    """Divides each row by its total and stores it as token row // group, head kv*group + row % group."""
    head0, done = kv * group, 0
    if len(result) == 2 and tile % p == 0:
        whole = opaque(tokens // p)
        _emit_whole(result, out, total, head0, token0, whole, group, d, p)
        done = opaque(whole * (p * group))
    with T.serial(tokens * group - done) as i:
        row = opaque(done + i)
        token, head = T.Bind(token0 + row // group), T.Bind(head0 + row % group)
        inverse = splat(T.Bind(T.float32(1) / total[row]))
        with T.serial(d // QUANT) as block:
            halves = [block * QUANT + i * LANES for i in range(2)]
            y = [out[row, at(h)] * inverse for h in halves]
            if len(result) == 2:
                emit_quantize_block(*y, *result, token // p, head * (d // QUANT) + block, token % p)
            else:
                for h, value in zip(halves, y, strict=True):
                    store(result[0], value, token, at(head * d + h))


def _emit_whole(result, out, total, head0, token0, tiles, group, d, p):
    """The results of whole tiles of p tokens as int8 blocks."""
    inverses = registers(p)
    with T.serial(tiles) as t, T.serial(group) as g:
        first = opaque(t * (p * group) + g)
        with T.serial(p) as i:
            store(inverses, T.float32(1) / total[first + i * group], i)
        with T.serial(d // QUANT) as block:
            emit_quantize_tile(
                lambda i, c: out[first + i * group, at(block * QUANT + c)] * splat(inverses[i]),
                *result,
                opaque(token0 // p + t),
                opaque((head0 + g) * (d // QUANT) + block),
                p,
            )


def _emit_task(isa, plan, Q, Kc, Vc, result, kv, token0, tokens, position, group, tile, d, p):
    """One task: `tokens` live tokens from token0 of the chunk, whose first token stands at `position` in the
    sequence."""
    lanes, block_rows = isa.lanes, plan.rows
    whole = math.lcm(block_rows, LANES)
    padded = -(-tile * group // whole) * whole
    queries, out, cached = scratch(padded, d), scratch(padded, d), _Cached(isa, plan, Kc, Vc, kv, d)
    top, total = scratch(padded), scratch(padded, lanes)  # of the span
    joined = scratch(padded), scratch(padded), scratch(padded, d)  # of all spans so far
    together = plan.together * block_rows
    scores, shrink = scratch(together, BLOCK), registers(together)  # scratch memory is aligned, the stack is not
    rows = opaque(tokens * group)
    _load_queries(Q, queries, kv, token0, rows, group, d)
    emit_join_start(joined, padded, d)
    first_key = opaque(position + token0)  # the last key that the tile's first token sees
    blocks = opaque((first_key + tokens - 1) // BLOCK + 1)
    with T.serial((blocks + SPAN - 1) // SPAN) as span:
        emit_start(top, total, out, padded, d, lanes)
        with T.serial(T.min(blocks - span * SPAN, T.int32(SPAN))) as block:
            key0 = opaque((span * SPAN + block) * BLOCK)
            cached.emit_block(key0)
            # Register blocks before `skip` hold only tokens that stand before this block of keys.
            skip = opaque(T.max(key0 - first_key, T.int32(0)) * group // block_rows)
            left = opaque((rows + block_rows - 1) // block_rows - skip)
            with T.serial((left + plan.together - 1) // plan.together) as step:
                first = opaque((skip + step * plan.together) * block_rows)
                now = opaque(T.min(left - step * plan.together, T.int32(plan.together)))
                with T.serial(now) as i:
                    here = opaque(i * block_rows)
                    row0 = opaque(first + here)
                    _ask_next(
                        Kc, Vc, kv, key0 + BLOCK, (row0 - skip * block_rows) // block_rows, padded // block_rows, d
                    )
                    emit_product(
                        isa,
                        plan.registers,
                        block_rows,
                        BLOCK,
                        d,
                        left=lambda r, c: queries[row0 + r, c],
                        right=lambda c, columns: [cached.keys(c, key) for key in columns],
                        start=lambda r, key: f32(0.0, lanes),
                        finish=lambda r, key, x: store(scores, x, here + r, at(key, lanes)),
                        needed=opaque(_seen(first_key, row0, group, block_rows, key0)),
                    )
                emit_softmax(
                    isa,
                    scores,
                    now * block_rows,
                    top,
                    total,
                    shrink,
                    first,
                    key0,
                    last=lambda r: opaque(first_key + (first + r) // group),
                    whole=first_key + first // group >= key0 + (BLOCK - 1),
                )
                with T.serial(now) as i:
                    here = opaque(i * block_rows)
                    row0 = opaque(first + here)
                    seen = opaque(_seen(first_key, row0, group, block_rows, key0))
                    emit_product(
                        isa,
                        plan.registers,
                        block_rows,
                        d,
                        seen,
                        left=lambda r, key: scores[here + r, key],
                        right=lambda key, columns: [cached.values(key, c) for c in columns],
                        start=lambda r, c: out[row0 + r, at(c, lanes)] * splat(shrink[here + r], lanes),
                        finish=lambda r, c, x: store(out, x, row0 + r, at(c, lanes)),
                    )
        emit_join_rows(joined, rows, padded, top, total, out, d, lanes)
    _emit_results(result, joined[2], joined[1], kv, token0, tokens, group, tile, d, p)


def attention_prefill(heads, kv_heads, d, ctx, m, p, quantize, isa, name, plan=None) -> tirx.PrimFunc:
    """Kernel (state int32[4], Qo float32 [m, heads, d], Kc, Vc, then A, S of [m, heads*d] in tiles of p tokens if
    `quantize`, else O float32 [m, heads*d]).

    Token i sees the keys 0 .. state[0] + i. Tokens that are not live, or at or beyond ctx, are left out. plan: None is
    `default_plan`. UserError for shapes that `cache_shapes` refuses.
    """
    kshape, vshape = cache_shapes(kv_heads, ctx, d)
    group = heads // kv_heads
    plan = plan or default_plan(isa)
    tile = tile_tokens(plan, m, group, kv_heads)
    with IRBuilder() as ir, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"tirx.noalias": True, "global_symbol": name})
        state = T.arg("state", T.buffer((4,), "int32"))
        Q = T.arg("Qo", T.buffer((m, heads, d), "float32"))
        Kc, Vc = T.arg("Kc", T.buffer(kshape, "float16")), T.arg("Vc", T.buffer(vshape, "float16"))
        result = act_args(m, heads * d, p) if quantize else (T.arg("O", T.buffer((m, heads * d), "float32")),)
        position = T.Bind(T.max(state[0], T.int32(0)))
        live = T.Bind(T.min(live_tokens(state, m), ctx - position))
        tiles = T.Bind(T.max((live + tile - 1) // tile, T.int32(0)))
        with (
            T.attr(T.int32(0), "pragma_parallel_launch_point", 1),
            T.attr(T.int32(0), "pragma_parallel_stride_pattern", 1),
            T.parallel(tiles * kv_heads) as task,
        ):
            token0 = opaque((tiles - 1 - task // kv_heads) * tile)
            tokens = opaque(T.min(live - token0, T.int32(tile)))
            _emit_task(
                isa, plan, Q, Kc, Vc, result, opaque(task % kv_heads), token0, tokens, position, group, tile, d, p
            )
    return ir.get()
