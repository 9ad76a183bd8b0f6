"""Attention of one row, or a few, against the cache: split-KV ("flash decoding") for x86 CPUs.

A task is one KV head and one span of 256 of the keys that any row sees; its queries are those of all rows and of the
group's heads, which share each key and value that is loaded. Tasks leave (top, total, unscaled output), and a second
loop joins those of each query. No sum crosses lanes: a lane is a key in the scores and a column in the outputs.
"""

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu.attention_block import (
    BLOCK,
    SPAN,
    accumulator_choices,
    accumulators,
    capped,
    emit_join,
    emit_join_start,
    emit_product,
    emit_softmax,
    emit_start,
    emit_total,
    span_blocks,
)
from mlc_amd.schedules.cpu.cache import Rows, row_position, visible_keys
from mlc_amd.schedules.cpu.kernel import live_rows
from mlc_amd.schedules.cpu.vector import LANES, at, f32, opaque, registers, splat, store


@dataclass(frozen=True)
class Plan:
    """How a task goes through its keys. No plan changes the order of additions.

    registers  accumulators that are in registers at once
    ahead      blocks of 64 keys that are prefetched ahead of the loads, 0: none
    locality   cache levels that the prefetch fills, see `vector.prefetch`
    """

    registers: int
    ahead: int
    locality: int


def default_plan(isa):
    """The plan: the next block is prefetched while one is used, into L2: keys and values of both blocks fill an L1."""
    return Plan(registers=accumulators(isa), ahead=1, locality=2)


def choices(isa):
    """Values of the plan's fields to try, by name."""
    return {"registers": accumulator_choices(isa), "ahead": (0, 1, 2), "locality": (2, 3)}


class _Step:
    """What all tasks share. Query r is that of row r // group and of the group's head r % group.

    live: rows to compute; last: the newest key that any row sees; the blocks first_block .. blocks-1 and the live_spans
    spans from first_span on hold all keys that any row sees.
    """

    def __init__(self, spec, m, args, isa, plan):
        self.spec, self.args, self.isa, self.plan = spec, args, isa, plan
        self.group, self.queries = spec.group, m * spec.group
        shape = (spec.kv_heads, _most_spans(spec, m), self.queries)
        self.partial = [T.alloc_buffer((*shape, *rest), "float32") for rest in ((), (), (spec.width,))]
        first = row_position(args.state, 0)
        position = T.Bind(T.max(T.min(first, T.int32(spec.ctx - 1)), T.int32(0)))
        self.rows, self.live, self.last = Rows(position, spec), T.int32(1), position
        if m > 1:
            self.live = T.Bind(T.max(T.min(live_rows(args.state, m), spec.ctx - first), T.int32(0)))
            self.last = T.Bind(self.rows.position(T.max(self.live, T.int32(1))) - 1)
        self.blocks = T.Bind(self.last // BLOCK + 1)
        self.first_block = self.rows.first_block()
        self.first_span = self.first_block // SPAN
        self.live_spans = T.Bind((self.blocks + SPAN - 1) // SPAN - self.first_span)

    def keys(self, r):
        """The KeyRange of query r. Rows that are not live see what the last one sees: their results are not used."""
        return visible_keys(self.spec, T.min(self.rows.position(r // self.group), self.last))

    def prefetched(self, kv, block):
        """The CacheBlock that is used plan.ahead blocks after this one: after a head's last block comes the next
        head."""
        block = T.Bind(block + self.plan.ahead)
        next_head = block >= self.blocks
        kv = opaque(kv + T.Select(next_head, T.int32(1), T.int32(0)))
        block = opaque(T.Select(next_head, block - self.blocks + self.first_block, block))
        return self.args.cache.block_until(kv, block, self.last)


def _most_spans(spec, m):
    """The largest number of spans with keys that m rows see."""
    span = SPAN * BLOCK
    keys = min(spec.ctx, spec.span + m - 1) if spec.span else spec.ctx
    return min(-(-spec.ctx // span), (keys - 2) // span + 2)


def _emit_span(step, kv, slot):
    """One task: the live span number `slot` of a KV head. Results go to step.partial (tops, totals, outs) at [kv,
    slot]."""
    isa, plan, cache, group, queries = step.isa, step.plan, step.args.cache, step.group, step.queries
    width, lanes, locality = step.spec.width, isa.lanes, plan.locality
    top, total, out, scores, shrink = (
        registers(*shape) for shape in ((queries,), (queries, lanes), (queries, width), (queries, BLOCK), (queries,))
    )
    emit_start(top, total, out, queries, width, lanes)
    if plan.ahead:
        # A span's first block has been prefetched by the span before it.
        with T.If(slot == 0), T.Then():
            first = cache.block_until(kv, step.first_block, step.last)
            with T.serial(width) as c:
                first.prefetch_keys(c, locality)
            with T.serial(first.live) as key:
                first.prefetch_value(key, locality)
    first, count = span_blocks(step.first_span + slot, step.first_block, step.blocks)
    with T.serial(count) as i:
        number = T.Bind(first + i)
        block = cache.block_until(kv, number, step.last)
        later = step.prefetched(kv, number) if plan.ahead else None
        block.clamp_to(step.last)

        def load_keys(c, keys):
            if later:
                later.prefetch_keys(c, locality)
            return [block.load_keys(c, key, lanes) for key in keys]

        def load_values(key, columns):
            if later:
                later.prefetch_value(key, locality)
            return [block.load_value(key, c, lanes) for c in columns]

        emit_product(
            isa,
            plan.registers,
            queries,
            BLOCK,
            step.spec.d,
            left=lambda r, c: step.args.Q[r // group, kv * group + r % group, c],
            right=load_keys,
            start=lambda r, key: f32(0.0, lanes),
            finish=lambda r, key, x: store(scores, capped(x, step.spec.softcap, isa), r, at(key, lanes)),
        )
        emit_softmax(isa, scores, queries, top, total, shrink, 0, block.key0, step.keys)
        emit_product(
            isa,
            plan.registers,
            queries,
            width,
            block.live,
            left=lambda r, key: scores[r, key],
            right=load_values,
            start=lambda r, c: out[r, at(c, lanes)] * splat(shrink[r], lanes),
            finish=lambda r, c, x: store(out, x, r, at(c, lanes)),
        )
    tops, totals, outs = step.partial
    with T.serial(queries) as r:
        store(tops, top[r], kv, slot, r)
        store(totals, emit_total(total, r, lanes), kv, slot, r)
        with T.serial(width // LANES) as i:
            store(outs, out[r, at(i * LANES)], kv, slot, r, at(i * LANES))


def _emit_head(step, row, head):
    """A row's output of one head from its spans' results."""
    (tops, totals, outs), width, group, sinks = step.partial, step.spec.width, step.group, step.args.sinks
    kv, r = T.Bind(head // group), T.Bind(row * group + head % group)
    joined = tuple(registers(*shape) for shape in ((1,), (1,), (1, width)))
    emit_join_start(joined, 1, width, None if sinks is None else lambda _: sinks[head])
    with T.serial(step.live_spans) as i:
        emit_join(joined, 0, T.Bind(tops[kv, i, r]), T.Bind(totals[kv, i, r]), lambda c: outs[kv, i, r, at(c)], width)
    _, total, out = joined
    inverse = T.Bind(T.float32(1) / total[0])
    step.args.output.store_head(lambda c, n: out[0, at(c, n)] * splat(inverse, n), row, head, step.spec.d)


def emit_attention(spec, m, args, isa, plan):
    """The body of the kernel of `attention.attention`."""
    step = _Step(spec, m, args, isa, plan)
    with T.parallel(spec.kv_heads * step.live_spans) as task:
        # truncdiv and opaque: TVM lowers `//` by a variable to selections, and simplifies for minutes where several of
        # them nest.
        kv, slot = (opaque(f(task, step.live_spans)) for f in (T.truncdiv, T.truncmod))
        _emit_span(step, kv, slot)
    with T.parallel(spec.heads * step.live) as i:
        _emit_head(step, i // spec.heads, i % spec.heads)
