"""Attention of one token, or a few, against the cache: split-KV ("flash decoding") for x86 CPUs.

In: the rotated query (times log2(e)/sqrt(d)) and the caches of `rope_kv_write.py`. Out: the heads' outputs, float32 or
int8 blocks.

A task is one KV head and one span of 256 of its live keys; its rows are the tokens times the heads of the group, and
they share each key and value that is loaded. Tasks leave (top, total, unscaled output), and a second loop joins those
of each row. No sum crosses lanes: a lane is a key in the scores and a column in the outputs.
"""

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu.attention_block import (
    BLOCK,
    LINE,
    SPAN,
    accumulator_choices,
    accumulators,
    emit_join,
    emit_join_start,
    emit_product,
    emit_softmax,
    emit_start,
    emit_total,
)
from mlc_amd.schedules.cpu.norm import live_tokens
from mlc_amd.schedules.cpu.quantize import BLOCK as QUANT
from mlc_amd.schedules.cpu.quantize import act_args, emit_quantize_block
from mlc_amd.schedules.cpu.rope_kv_write import KEYS, cache_shapes
from mlc_amd.schedules.cpu.vector import LANES, at, f32, opaque, prefetch, registers, splat, store


@dataclass(frozen=True)
class Plan:
    """How a task goes through its keys. No plan changes the order in which numbers are summed up.

    registers  sums that are in registers at once
    ahead      blocks of 64 keys that are prefetched ahead of the reads, 0: none
    near       cache levels that the prefetch fills, see `vector.prefetch`
    """

    registers: int
    ahead: int
    near: int


def default_plan(isa):
    """The plan: the next block arrives while one is used, in the level 2 cache: both blocks' keys and values fill a
    level 1 cache."""
    return Plan(registers=accumulators(isa), ahead=1, near=2)


def choices(isa):
    """Values of the plan's fields to try, by name."""
    return {"registers": accumulator_choices(isa), "ahead": (0, 1, 2), "near": (2, 3)}


class _Block:
    """64 keys and values of a KV head of which the first `live` are seen, at least one. What is not seen is not read,
    or read again."""

    def __init__(self, kv, block, last):
        self.kv, self.first = kv, T.Bind(block * BLOCK)
        self.live = opaque(T.max(T.min(last - self.first + 1, T.int32(BLOCK)), T.int32(1)))

    def ask_keys(self, plan, Kc, c, d):
        """Asks for a 1/d of the keys, in the order in which they lie: caches see one stream, where the reads are of
        four tiles in turns."""
        end = (self.live - 1) // KEYS * (KEYS * d) + (KEYS * d - LINE)
        for line in range(0, BLOCK, LINE):
            prefetch(Kc, self.kv, self.first // KEYS, 0, T.min(c * BLOCK + line, end), near=plan.near)

    def ask_values(self, plan, Vc, key, d):
        """Asks for one value."""
        for c in range(0, d, LINE):
            prefetch(Vc, self.kv, self.first + T.min(key, self.live - 1), c, near=plan.near)


def _later(plan, kv, block, blocks, last):
    """The _Block that is used plan.ahead blocks after this one: after a head's last live block comes the next head."""
    block = T.Bind(block + plan.ahead)
    beyond = block >= blocks
    return _Block(
        opaque(kv + T.Select(beyond, T.int32(1), T.int32(0))), opaque(T.Select(beyond, block - blocks, block)), last
    )


def _emit_span(isa, plan, Q, Kc, Vc, partial, kv, span, blocks, position, last, rows, group, d):
    """One task: a span of a KV head's keys, of which `blocks` blocks are live, up to key `last`. Row r is token r //
    group, which stands at position + r // group, and head kv*group + r % group. Results go to `partial` (tops, totals,
    outs) at [kv, span]."""
    lanes = isa.lanes
    top, total, out, scores, shrink = (
        registers(*shape) for shape in ((rows,), (rows, lanes), (rows, d), (rows, BLOCK), (rows,))
    )
    emit_start(top, total, out, rows, d, lanes)
    if plan.ahead:
        # Spans that follow one another were asked for by those before.
        with T.If(span == 0), T.Then():
            first = _Block(kv, 0, last)
            with T.serial(d) as c:
                first.ask_keys(plan, Kc, c, d)
            with T.serial(first.live) as key:
                first.ask_values(plan, Vc, key, d)
    with T.serial(T.min(blocks - span * SPAN, T.int32(SPAN))) as step:
        block = T.Bind(span * SPAN + step)
        this, later = _Block(kv, block, last), _later(plan, kv, block, blocks, last) if plan.ahead else None
        key0 = this.first
        tiles = registers(BLOCK // KEYS, kind="int32")
        for i in range(BLOCK // KEYS):
            store(tiles, T.min(key0 + i * KEYS, last) // KEYS, i)

        def keys_of(c, keys):
            if later:
                later.ask_keys(plan, Kc, c, d)
            return [isa.half(Kc[kv, tiles[key // KEYS], c, at(key % KEYS, lanes)], lanes) for key in keys]

        def values_of(key, columns):
            if later:
                later.ask_values(plan, Vc, key, d)
            return [isa.half(Vc[kv, key0 + key, at(c, lanes)], lanes) for c in columns]

        emit_product(
            isa,
            plan.registers,
            rows,
            BLOCK,
            d,
            left=lambda r, c: Q[r // group, kv * group + r % group, c],
            right=keys_of,
            start=lambda r, key: f32(0.0, lanes),
            finish=lambda r, key, x: store(scores, x, r, at(key, lanes)),
        )
        emit_softmax(isa, scores, rows, top, total, shrink, 0, key0, lambda r: T.min(position + r // group, last))
        emit_product(
            isa,
            plan.registers,
            rows,
            d,
            this.live,
            left=lambda r, key: scores[r, key],
            right=values_of,
            start=lambda r, c: out[r, at(c, lanes)] * splat(shrink[r], lanes),
            finish=lambda r, c, x: store(out, x, r, at(c, lanes)),
        )
    tops, totals, outs = partial
    with T.serial(rows) as r:
        store(tops, top[r], kv, span, r)
        store(totals, emit_total(total, r, lanes), kv, span, r)
        with T.serial(d // LANES) as i:
            store(outs, out[r, at(i * LANES)], kv, span, r, at(i * LANES))


def _emit_head(partial, result, token, head, live_spans, group, d, p):
    """A token's output of one head from its spans' results."""
    tops, totals, outs = partial
    kv, r = T.Bind(head // group), T.Bind(token * group + head % group)
    joined = tuple(registers(*shape) for shape in ((1,), (1,), (1, d)))
    emit_join_start(joined, 1, d)
    with T.serial(live_spans) as i:
        emit_join(joined, 0, T.Bind(tops[kv, i, r]), T.Bind(totals[kv, i, r]), lambda c: outs[kv, i, r, at(c)], d)
    _, total, out = joined
    inverse = splat(T.Bind(T.float32(1) / total[0]))
    with T.serial(d // QUANT) as block:
        halves = [block * QUANT + half for half in (0, LANES)]
        y = [out[0, at(c)] * inverse for c in halves]
        if len(result) == 2:
            emit_quantize_block(*y, *result, token // p, head * (d // QUANT) + block, token % p)
        else:
            for c, value in zip(halves, y, strict=True):
                store(result[0], value, token, at(head * d + c))


def attention_decode(heads, kv_heads, d, ctx, m, p, quantize, isa, name, plan=None) -> tirx.PrimFunc:
    """Kernel (state int32[4], Qo float32 [m, heads, d], Kc, Vc, then A, S of [m, heads*d] in tiles of p tokens if
    `quantize`, else O float32 [m, heads*d]).

    Token i sees the keys 0 .. state[0] + i. Tokens that are not live, or of several those at or beyond ctx, are left
    out. plan: None is `default_plan`. UserError for shapes that `cache_shapes` refuses.
    """
    kshape, vshape = cache_shapes(kv_heads, ctx, d)
    plan = plan or default_plan(isa)
    group = heads // kv_heads
    rows, spans = m * group, -(-ctx // (BLOCK * SPAN))
    with IRBuilder() as ir, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"tirx.noalias": True, "global_symbol": name})
        state = T.arg("state", T.buffer((4,), "int32"))
        Q = T.arg("Qo", T.buffer((m, heads, d), "float32"))
        Kc, Vc = T.arg("Kc", T.buffer(kshape, "float16")), T.arg("Vc", T.buffer(vshape, "float16"))
        result = act_args(m, heads * d, p) if quantize else (T.arg("O", T.buffer((m, heads * d), "float32")),)
        partial = [T.alloc_buffer((kv_heads, spans, rows, *rest), "float32") for rest in ((), (), (d,))]
        position = T.Bind(T.max(T.min(state[0], T.int32(ctx - 1)), T.int32(0)))
        live = T.int32(1) if m == 1 else T.Bind(T.max(T.min(live_tokens(state, m), ctx - state[0]), T.int32(0)))
        last = position if m == 1 else T.Bind(position + T.max(live, T.int32(1)) - 1)
        blocks = T.Bind(last // BLOCK + 1)
        live_spans = T.Bind((blocks + SPAN - 1) // SPAN)
        with T.parallel(kv_heads * live_spans) as task:
            # truncdiv and opaque: TVM lowers `//` by a variable to selections, and looks for minutes through several
            # that nest.
            kv, span = (opaque(f(task, live_spans)) for f in (T.truncdiv, T.truncmod))
            _emit_span(isa, plan, Q, Kc, Vc, partial, kv, span, blocks, position, last, rows, group, d)
        with T.parallel(heads * live) as i:
            _emit_head(partial, result, i // heads, i % heads, live_spans, group, d, p)
    return ir.get()
