"""Attention of single rows, each the newest one of its sequence, against the cache: split-KV ("flash decoding") for x86
CPUs.

The queries of a row and a KV head are those of the group's heads, which share each key and value that is loaded; latent
attention, whose one KV head has all of them, takes them in parts. Keys go in spans of 256, which leave (top, total,
unscaled output) to be joined in order. A step of one row has a task for each span and KV head, and a second loop joins
their results; a thread's tasks are spans with all of their heads, as pages have them side by side. A step of several
rows has a task for each row and KV head. No sum crosses lanes: a lane is a key in the scores and a column in the
outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu.attention.attention_block import SPAN, Joined, Softmax, Step, limits, span_blocks
from mlc_amd.schedules.cpu.attention.cache import BLOCK, CacheBlock, Rows, visible_keys
from mlc_amd.schedules.cpu.base.arch import Isa
from mlc_amd.schedules.cpu.base.kernel import live_rows
from mlc_amd.schedules.cpu.base.vector import LANES, at, largest_divisor, opaque, registers, splat, store
from mlc_amd.schedules.operators.attention import Attention
from mlc_amd.schedules.tir import Expr


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


def default_plan(isa: Isa) -> Plan:
    """The plan: a quarter of the registers is for operands. The next block is prefetched while one is used, into L2:
    keys and values of both blocks fill an L1."""
    return Plan(registers=isa.registers * 3 // 4, ahead=1, locality=2)


def choices(isa: Isa) -> dict[str, tuple[int, ...]]:
    """Values of the plan's fields to try, by name."""
    return {"registers": limits(isa), "ahead": (0, 1, 2), "locality": (2, 3)}


MAX_HEADS = 16  # of a task of latent attention, whose heads all share the keys


def _parts(spec: Attention) -> tuple[int, int]:
    """(parts of the heads, heads of each): those of a KV head, or in latent attention some of these."""
    if not spec.values:
        return spec.kv_heads, spec.group
    heads = largest_divisor(MAX_HEADS, spec.heads)
    return spec.heads // heads, heads


class _Row:
    """Row number `row` of the step. Query r of a part of the heads is that of the part's head r.

    last: its position, which is clamped to those of a sequence; the blocks first_block .. blocks-1 and the live_spans
    spans from first_span on hold all keys that it sees.
    """

    def __init__(self, step: Step, plan: Plan, row: Expr):
        self.spec, self.step, self.plan, self.row = step.spec, step, plan, row
        spec = step.spec
        self.last = T.Bind(T.max(T.min(step.rows.position(row), T.int32(spec.ctx - 1)), T.int32(0)))
        self.slot = T.Bind(step.rows.slot(row))
        self.keys = visible_keys(spec, self.last)
        self.blocks = T.Bind(self.last // BLOCK + 1)
        self.first_block = Rows(self.last, self.slot, spec).first_block()
        self.first_span = self.first_block // SPAN
        self.live_spans = T.Bind((self.blocks + SPAN - 1) // SPAN - self.first_span)

    def block(self, part: Expr, number: Expr) -> CacheBlock:
        """The CacheBlock of that number, of the KV head of a part of the heads."""
        kv = T.int32(0) if self.spec.values else part
        return self.step.cache.block_until(kv, self.slot, number, self.last)

    def later_in_span(self, part: Expr, block: Expr, first: Expr, count: Expr) -> CacheBlock:
        """The CacheBlock that is used plan.ahead blocks after this one, where the parts of a row take a span, which has
        the blocks first .. first+count-1, one after the other: after the span's last block comes the next part's first,
        after the last part the next span."""
        block = T.Bind(block + self.plan.ahead)
        next_part = tirx.all(block >= first + count, part < _parts(self.spec)[0] - 1)
        next_span = tirx.all(block >= first + count, part == _parts(self.spec)[0] - 1)
        kv = T.Select(next_span, T.int32(0), part + T.Select(next_part, T.int32(1), T.int32(0)))
        return self.block(opaque(kv), opaque(block - T.Select(next_part, count, T.int32(0))))

    def later_in_part(self, part: Expr, block: Expr, first: Expr, count: Expr) -> CacheBlock:
        """The same where a part takes all its spans, and then the next part does."""
        block = T.Bind(block + self.plan.ahead)
        next_part = block >= self.blocks
        part = opaque(T.min(part + T.Select(next_part, T.int32(1), T.int32(0)), T.int32(_parts(self.spec)[0] - 1)))
        block = opaque(T.Select(next_part, block - self.blocks + self.first_block, block))
        return self.block(part, block)

    def sinks(self, head0: Expr) -> Callable[[Expr], Expr] | None:
        """The logits of the sinks of heads head0 .., as `Joined.emit_start` takes them."""
        sinks = self.step.sinks
        return None if sinks is None else lambda r: sinks[head0 + r]


def _most_spans(spec: Attention) -> int:
    """The largest number of spans with keys that a row sees."""
    span = SPAN * BLOCK
    keys = min(spec.ctx, spec.span) if spec.span else spec.ctx
    return min(-(-spec.ctx // span), (keys - 2) // span + 2)


def _emit_span(
    row: _Row, part: Expr, number: Expr, begins: Expr, following: Callable[[Expr, Expr, Expr, Expr], CacheBlock]
) -> Softmax:
    """The live span `number` of a part of a row's heads, whose results are in registers.

    begins: a condition, that no span before it has prefetched this one's first block. following: `_Row.later_in_span`
    or `later_in_part`, whichever has the order in which spans are taken.
    """
    isa, plan, (_, queries) = row.step.isa, row.plan, _parts(row.spec)
    width, lanes, locality = row.spec.value_width, isa.lanes, plan.locality
    shapes = (queries,), (queries, lanes), (queries, width), (queries, BLOCK), (queries,)
    softmax = Softmax(row.spec, isa, plan.registers, *(registers(*shape) for shape in shapes))
    softmax.emit_start(queries)
    if plan.ahead:
        with T.If(begins), T.Then():
            first = row.block(part, row.first_block)
            with T.serial(row.spec.width) as c:
                first.prefetch_keys(c, locality)
            with T.serial(first.live) as key:
                first.prefetch_value(key, locality)
    first, count = span_blocks(row.first_span + number, row.first_block, row.blocks)
    with T.serial(count) as i:
        place = T.Bind(first + i)
        block = row.block(part, place)
        later = following(part, place, first, count) if plan.ahead else None
        block.prepare()
        block.clamp_to(row.last)

        def load_keys(c: Expr, keys: list[Expr]) -> list[Expr]:
            if later:
                later.prefetch_keys(c, locality)
            return [block.load_keys(c, key, lanes) for key in keys]

        def load_values(key: Expr, columns: list[Expr]) -> list[Expr]:
            if later:
                later.prefetch_value(key, locality)
            return [block.load_value(key, c, lanes) for c in columns]

        softmax.emit_scores(queries, lambda r, c: row.step.Q[row.row, part * queries + r, c], load_keys)
        softmax.emit_weights(queries, 0, block.key0, lambda r: row.keys)
        softmax.emit_outputs(queries, block.live, load_values)
    return softmax


def _emit_output(row: _Row, head: Expr, joined: Joined, r: Expr = 0) -> None:
    """Stores a head's output, `joined` divided by its total."""
    out, output = joined.outs, row.step.output
    inverse = T.Bind(T.float32(1) / joined.totals[r])
    output.store_head(lambda c, n: out[r, at(c, n)] * splat(inverse, n), row.row, head, row.spec.value_d)


def emit_attention(step: Step, plan: Plan) -> None:
    """The body of the kernel of `attention.attention` for one row, whose spans are computed in parallel."""
    spec = step.spec
    (parts, heads), width = _parts(spec), spec.value_width
    shape = (parts, _most_spans(spec), heads)
    tops, totals, outs = (T.alloc_buffer((*shape, *rest), "float32") for rest in ((), (), (width,)))
    row = _Row(step, plan, 0)
    with T.parallel(parts * row.live_spans) as task:
        part, span = opaque(task % parts), opaque(task // parts)
        found = _emit_span(row, part, span, task == 0, row.later_in_span)
        with T.serial(heads) as r:
            store(tops, found.top[r], part, span, r)
            store(totals, found.sum(r), part, span, r)
            with T.serial(width // LANES) as i:
                store(outs, found.out[r, at(i * LANES)], part, span, r, at(i * LANES))
    with T.parallel(spec.heads) as head:
        part, r = T.Bind(head // heads), T.Bind(head % heads)
        joined = Joined(registers(1), registers(1), registers(1, width))
        joined.emit_start(1, row.sinks(head))
        with T.serial(row.live_spans) as i:
            top, total = T.Bind(tops[part, i, r]), T.Bind(totals[part, i, r])
            joined.emit_join(0, top, total, lambda c: outs[part, i, r, at(c)])
        _emit_output(row, head, joined)


def emit_single_rows(step: Step, plan: Plan) -> None:
    """The part of `attention.attention` for the single rows of a step: rows 0 .. state[0]-1."""
    (parts, heads), width = _parts(step.spec), step.spec.value_width
    count = T.Bind(T.max(T.min(step.state[0], live_rows(step.state, step.m)), T.int32(0)))
    with T.parallel(count * parts) as task:
        part = opaque(task % parts)
        row = _Row(step, plan, opaque(task // parts))
        joined = Joined(registers(heads), registers(heads), registers(heads, width))
        joined.emit_start(heads, row.sinks(part * heads))
        with T.serial(row.live_spans) as span:
            found = _emit_span(row, part, opaque(span), span == 0, row.later_in_part)
            with T.serial(heads) as r:
                joined.emit_join(r, T.Bind(found.top[r]), found.sum(r), lambda c: found.out[r, at(c)])
        with T.serial(heads) as r:
            _emit_output(row, T.Bind(part * heads + r), joined, r)
