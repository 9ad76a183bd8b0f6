"""Attention of single rows on CPUs: split-KV attention ("flash decoding"). A single row is the newest token of a
sequence, or a guess after it.

The query heads of a KV head share each key and value that is loaded. In latent attention all query heads share the one
KV head; they are divided into parts. Keys are processed in spans of 256. Each span produces (top, total, unscaled
output); these are joined in order.

A step of one row has a task for each span and KV head, and a second loop joins the results. A thread gets spans with
all their KV heads, because these are adjacent in a page. A step of several rows has a task for each row and KV head. No
sum crosses lanes: a lane is a key in scores, and a column in outputs.
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
    """The plan of attention of single rows. No plan changes the order of additions.

    registers  number of accumulators that are in registers at the same time
    ahead      number of blocks of 64 keys that are prefetched ahead of the loads; 0: none
    locality   cache levels that the prefetch fills, see `vector.prefetch`
    """

    registers: int
    ahead: int
    locality: int


def default_plan(isa: Isa) -> Plan:
    """The plan without tuning. A quarter of the registers is left for operands. While a block is used, the next one is
    prefetched into L2, because keys and values of both blocks would fill the L1 cache."""
    return Plan(registers=isa.registers * 3 // 4, ahead=1, locality=2)


def choices(isa: Isa) -> dict[str, tuple[int, ...]]:
    """The values of each field of the plan that tuning tries."""
    return {"registers": limits(isa), "ahead": (0, 1, 2), "locality": (2, 3)}


MAX_HEADS = 16  # largest number of heads in a task of latent attention


def _parts(spec: Attention) -> tuple[int, int]:
    """(number of parts of the query heads, heads of a part). A part is the heads of a KV head; in latent attention it
    is some of them."""
    if not spec.values:
        return spec.kv_heads, spec.group
    heads = largest_divisor(MAX_HEADS, spec.heads)
    return spec.heads // heads, heads


class _Row:
    """Row number `row` of the step. Query r of a part of the heads is the query of the part's head r.

    last: the row's position, clamped to 0 .. ctx-1. All keys that the row attends to are in the blocks first_block ..
    blocks-1, which are in `live_spans` spans from first_span on.
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
        """The CacheBlock of this number for the KV head of a part."""
        kv = T.int32(0) if self.spec.values else part
        return self.step.cache.block_until(kv, self.slot, number, self.last)

    def later_in_span(self, part: Expr, block: Expr, first: Expr, count: Expr) -> CacheBlock:
        """The CacheBlock that is used plan.ahead blocks after `block`, if all parts of a row are computed for a span
        before the next span: after the span's last block comes its first block for the next part, after the last part
        the next span. first, count: first block and number of blocks of the span."""
        block = T.Bind(block + self.plan.ahead)
        next_part = tirx.all(block >= first + count, part < _parts(self.spec)[0] - 1)
        next_span = tirx.all(block >= first + count, part == _parts(self.spec)[0] - 1)
        kv = T.Select(next_span, T.int32(0), part + T.Select(next_part, T.int32(1), T.int32(0)))
        return self.block(opaque(kv), opaque(block - T.Select(next_part, count, T.int32(0))))

    def later_in_part(self, part: Expr, block: Expr, first: Expr, count: Expr) -> CacheBlock:
        """The CacheBlock that is used plan.ahead blocks after `block`, if all spans of a part are computed before the
        next part. Arguments: see `later_in_span`."""
        block = T.Bind(block + self.plan.ahead)
        next_part = block >= self.blocks
        part = opaque(T.min(part + T.Select(next_part, T.int32(1), T.int32(0)), T.int32(_parts(self.spec)[0] - 1)))
        block = opaque(T.Select(next_part, block - self.blocks + self.first_block, block))
        return self.block(part, block)

    def sinks(self, head0: Expr) -> Callable[[Expr], Expr] | None:
        """The argument `sink` of `Joined.emit_start`, for the heads from head0 on; None for a layer without sinks."""
        sinks = self.step.sinks
        return None if sinks is None else lambda r: sinks[head0 + r]


def _most_spans(spec: Attention) -> int:
    """The largest number of spans that have keys that a row attends to."""
    span = SPAN * BLOCK
    keys = min(spec.ctx, spec.span) if spec.span else spec.ctx
    return min(-(-spec.ctx // span), (keys - 2) // span + 2)


def _emit_span(
    row: _Row, part: Expr, number: Expr, begins: Expr, following: Callable[[Expr, Expr, Expr, Expr], CacheBlock]
) -> Softmax:
    """Emits the softmax of span `number` (counted from first_span) for a part of a row's heads, and returns it.

    begins: a condition: no earlier span has prefetched the first block of this span. following: `_Row.later_in_span` or
    `later_in_part`, depending on the order of the spans.
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
    """Emits the body of the kernel of attention.py for m = 1, with the spans of the row in parallel."""
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
    """Emits the part of the kernel of attention.py for the single rows of a step: rows 0 .. state[0]-1."""
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
