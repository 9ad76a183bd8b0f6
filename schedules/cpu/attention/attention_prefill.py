"""Attention of a chunk of rows of one sequence, on CPUs: blocked, with online softmax ("flash attention"). The cache
already holds the keys and values of the chunk.

A task is one KV head and a tile of the chunk's tokens. Its queries are those of the tile's tokens, for all query heads
of the KV head. For each block of 64 keys it computes scores, softmax and outputs of its queries, in register blocks of
a few queries by as many vectors of keys as there are registers, and prefetches the next block meanwhile. It skips
blocks to which no query of a register block attends. Tasks of later tiles have more keys, so tasks are interleaved over
the threads, the longest first.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu.attention.attention_block import SPAN, Joined, Softmax, Step, limits, scratch, span_blocks
from mlc_amd.schedules.cpu.attention.cache import BLOCK, CacheBlock, Rows
from mlc_amd.schedules.cpu.base.arch import Isa
from mlc_amd.schedules.cpu.base.kernel import live_rows
from mlc_amd.schedules.cpu.base.vector import LANES, at, opaque, registers, splat, store
from mlc_amd.schedules.cpu.linear.quantize import BLOCK as QUANT
from mlc_amd.schedules.operators.attention import Attention
from mlc_amd.schedules.tir import Expr


@dataclass(frozen=True)
class Plan:
    """The plan of attention of a chunk. No plan changes the order of additions.

    rows             queries in a register block
    blocks_per_pass  register blocks in a pass, which computes scores, then softmax, then outputs of all of them; their
                     operands should stay in the L1 cache
    registers        number of accumulators that are in registers at the same time
    convert          1: keys and values are converted to float32 once for all queries; 0: in each product, for CPUs that
                     convert and multiply in parallel
    max_rows         largest number of queries in a task; many queries share the loads and conversions of keys
    min_rows         a short chunk is not divided into tasks with fewer queries than this
    tasks            number of tasks that a short chunk should have, so that all threads have work
    """

    rows: int
    blocks_per_pass: int
    registers: int
    convert: int
    max_rows: int
    min_rows: int
    tasks: int


def default_plan(isa: Isa) -> Plan:
    """The plan without tuning; arch.py has the values that depend on the instruction set."""
    return Plan(
        rows=isa.rows, blocks_per_pass=4, registers=isa.sums, convert=isa.convert, max_rows=192, min_rows=48, tasks=32
    )


def choices(isa: Isa) -> dict[str, tuple[int, ...]]:
    """The values of each field of the plan that tuning tries."""
    return {
        "rows": (2, 3, 4, 6, 8, 12),
        "blocks_per_pass": (1, 4),
        "registers": limits(isa),
        "convert": (0, 1),
        "max_rows": (48, 96, 192, 384),
        "min_rows": (24, 48, 96),
        "tasks": (16, 32, 64, 128),
    }


def tile_tokens(plan: Plan, m: int, group: int, kv_heads: int) -> int:
    """The number of tokens of a task. Its queries fill whole register blocks."""
    fewest, most = (max(1, rows // group) for rows in (plan.min_rows, plan.max_rows))
    multiple = plan.rows // math.gcd(plan.rows, group)
    return min(m, -(-min(most, max(fewest, m * kv_heads // plan.tasks)) // multiple) * multiple)


class _Task(NamedTuple):
    """A task: KV head `kv`, and `tokens` live rows from row `token0` of the step on; at most `tile` rows. chunk0: the
    number of the first row within the chunk."""

    kv: Expr
    token0: Expr
    chunk0: Expr
    tokens: Expr
    tile: int


class _Operands:
    """The keys and values of a block as float32 vectors. With plan.convert they are converted once, by `load`,
    otherwise whenever `keys` and `values` are called."""

    def __init__(self, isa: Isa, plan: Plan, spec: Attention):
        self.lanes, self.width = isa.lanes, spec.width
        convert = plan.convert and not spec.values  # keys of a latent cache are converted anyway
        self.converted = [scratch(self.width, BLOCK), scratch(BLOCK, self.width)] if convert else None

    def load(self, block: CacheBlock) -> None:
        """Makes a CacheBlock the current block."""
        self.block = block
        block.prepare()
        if not self.converted:
            return
        keys, values = self.converted
        with T.serial(self.width) as c:
            for key in range(0, BLOCK, LANES):
                store(keys, block.load_keys(c, key, LANES), c, at(key))
        with T.serial(BLOCK) as key, T.serial(self.width // LANES) as i:
            store(values, block.load_value(key, i * LANES, LANES), key, at(i * LANES))

    def keys(self, c: Expr, key: Expr) -> Expr:
        """Element c of the keys key .. key+lanes-1 of the current block, a vector."""
        if self.converted:
            return T.Bind(self.converted[0][c, at(key, self.lanes)])
        return self.block.load_keys(c, key, self.lanes)

    def values(self, key: Expr, c: Expr) -> Expr:
        """Elements c .. c+lanes-1 of a value of the current block, a vector."""
        if self.converted:
            return T.Bind(self.converted[1][key, at(c, self.lanes)])
        return self.block.load_value(key, c, self.lanes)


def _emit_results(step: Step, task: _Task, joined: Joined) -> None:
    """Divides the output of each query r by its total, and stores it as that of row token0 + r // group and head
    kv*group + r % group."""
    output, group, out, done = step.output, step.spec.group, joined.outs, 0
    head0, p = task.kv * group, output.p
    if output.quantized and task.tile % p == 0:
        tiles = opaque(T.Select(task.token0 % p == 0, task.tokens // p, T.int32(0)))
        _emit_output_tiles(step, task, joined, head0, tiles)
        done = opaque(tiles * (p * group))
    with T.serial(task.tokens * group - done) as i:
        r = opaque(done + i)
        token, head = T.Bind(task.token0 + r // group), T.Bind(head0 + r % group)
        inverse = T.Bind(T.float32(1) / joined.totals[r])
        output.store_head(lambda c, n: out[r, at(c, n)] * splat(inverse, n), token, head, step.spec.value_d)


def _emit_output_tiles(step: Step, task: _Task, joined: Joined, head0: Expr, tiles: Expr) -> None:
    """Stores the results of `tiles` full tiles of output.p tokens as int8 blocks."""
    p, group, blocks, out = step.output.p, step.spec.group, step.spec.value_d // QUANT, joined.outs
    inverses = registers(p)
    with T.serial(tiles) as t, T.serial(group) as g:
        first = opaque(t * (p * group) + g)
        with T.serial(p) as i:
            store(inverses, T.float32(1) / joined.totals[first + i * group], i)
        with T.serial(blocks) as block:
            step.output.store_tile(
                lambda i, c: out[first + i * group, at(block * QUANT + c)] * splat(inverses[i]),
                opaque(task.token0 // p + t),
                opaque((head0 + g) * blocks + block),
                p,
            )


def _emit_task(step: Step, plan: Plan, step_rows: Rows, task: _Task) -> None:
    """Emits a task. step_rows: the Rows of the chunk."""
    spec, isa, sinks = step.spec, step.isa, step.sinks
    block_rows, group, width = plan.rows, spec.group, spec.value_width
    multiple = math.lcm(block_rows, LANES)
    padded = -(-task.tile * group // multiple) * multiple
    queries, out, operands = scratch(padded, spec.width), scratch(padded, width), _Operands(isa, plan, spec)
    top, total = scratch(padded), scratch(padded, isa.lanes)  # results of a span
    joined = Joined(scratch(padded), scratch(padded), scratch(padded, width))
    pass_rows = plan.blocks_per_pass * block_rows
    scores, shrink = scratch(pass_rows, BLOCK), registers(pass_rows)  # scores in `scratch`, which is aligned
    softmax = Softmax(spec, isa, plan.registers, top, total, out, scores, shrink)
    count = opaque(task.tokens * group)
    with T.serial(count) as r, T.serial(spec.width // LANES) as i:  # copies the queries to a contiguous buffer
        store(queries, step.Q[task.token0 + r // group, task.kv * group + r % group, at(i * LANES)], r, at(i * LANES))
    joined.emit_start(padded, None if sinks is None else lambda r: sinks[task.kv * group + r % group])
    rows = step_rows.tile(task.chunk0)
    blocks = opaque(rows.last(task.tokens - 1) // BLOCK + 1)
    first_block = rows.first_block()
    first_span = first_block // SPAN
    with T.serial((blocks + SPAN - 1) // SPAN - first_span) as slot:
        softmax.emit_start(padded)
        begin, number = span_blocks(first_span + slot, first_block, blocks)
        with T.serial(number) as block:
            key0 = opaque((begin + block) * BLOCK)
            operands.load(step.cache.block(task.kv, rows.slot, begin + block))
            following = step.cache.block(task.kv, rows.slot, begin + block + 1)
            # Only the `left` register blocks from `skip` on have queries that attend to keys of this block.
            skip = opaque(rows.first_row(key0) * group // block_rows)
            end = T.min(rows.end_row(key0) * group, count) if spec.span else count
            left = opaque((end + block_rows - 1) // block_rows - skip)
            with T.serial((left + plan.blocks_per_pass - 1) // plan.blocks_per_pass) as turn:
                first = opaque((skip + turn * plan.blocks_per_pass) * block_rows)
                now = opaque(T.min(left - turn * plan.blocks_per_pass, T.int32(plan.blocks_per_pass)))
                with T.serial(now) as i:
                    here = opaque(i * block_rows)
                    row0 = opaque(first + here)
                    following.prefetch_part((row0 - skip * block_rows) // block_rows, padded // block_rows, 2)
                    softmax.emit_scores(
                        block_rows,
                        lambda r, c: queries[row0 + r, c],
                        lambda c, columns: [operands.keys(c, key) for key in columns],
                        here,
                        opaque(rows.keys_in_block((row0 + block_rows - 1) // group, key0)),
                    )
                softmax.emit_weights(
                    now * block_rows,
                    first,
                    key0,
                    lambda r: rows.visible((first + r) // group),
                    rows.see_block(first // group, (first + now * block_rows - 1) // group, key0),
                )
                with T.serial(now) as i:
                    here = opaque(i * block_rows)
                    row0 = opaque(first + here)
                    seen = opaque(rows.keys_in_block((row0 + block_rows - 1) // group, key0))
                    softmax.emit_outputs(
                        block_rows, seen, lambda key, columns: [operands.values(key, c) for c in columns], here, row0
                    )
        joined.emit_join_rows(count, softmax)
    _emit_results(step, task, joined)


def emit_attention(step: Step, plan: Plan, after_single: bool) -> None:
    """Emits the part of the kernel of attention.py for a chunk: all live rows, or with after_single those from state[0]
    on."""
    spec, m = step.spec, step.m
    tile = tile_tokens(plan, m, spec.group, spec.kv_heads)
    first, live = T.int32(0), live_rows(step.state, m)
    if after_single:
        first = T.Bind(T.max(T.min(step.state[0], live), T.int32(0)))
    begin = T.min(first, T.int32(m - 1))
    slot, position = (T.Bind(of(begin)) for of in (step.rows.slot, step.rows.position))
    rows = Rows(T.Bind(T.max(position, T.int32(0))), slot, spec)
    count = T.Bind(T.min(live - first, spec.ctx - rows.start))
    if spec.images:
        rows = rows._replace(image=T.Bind(rows.start + T.min(step.state[2], count) - 1))
    tiles = T.Bind(T.max((count + tile - 1) // tile, T.int32(0)))
    with (
        T.attr(T.int32(0), "pragma_parallel_launch_point", 1),
        T.attr(T.int32(0), "pragma_parallel_stride_pattern", 1),
        T.parallel(tiles * spec.kv_heads) as i,
    ):
        token0 = opaque((tiles - 1 - i // spec.kv_heads) * tile)
        tokens = opaque(T.min(count - token0, T.int32(tile)))
        task = _Task(opaque(i % spec.kv_heads), opaque(first + token0), token0, tokens, tile)
        _emit_task(step, plan, rows, task)
