"""What the kernels of attention share: parameters, the rows of a chunk, the softmax.

In: an operator. Out: `Step`. `attention_decode.py` has the launch for the single rows of a step,
`attention_prefill*.py` those for its chunk; `attention.py` combines them. Where these do not rotate and write them, the
queries are rotated, and the cache contains the rows' own keys and values. The live rows' outputs are stored, in an
activation layout of `quantize.py`.

Splits of decode attention join through buffers in device memory, which are parameters, too: how many splits there may
be, and how large that makes them.

The softmax: scores are exponents of two: log2(e) is part of the scale of the queries. A kernel keeps, for each row (one
query of one head), the maximum score so far, the sum of weights relative to it, and the weighted sum of values. Weights
are scaled by 2**P_SHIFT: as float16, those down to 2**-29 of the largest are normal numbers. (Cooperative matrices have
a scale of their own, see `attention_prefill_coop.py`.)
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.attention.cache import Cache, Chunk, place_args
from mlc_amd.schedules.gpu.base.arrival import LINE
from mlc_amd.schedules.gpu.base.device import each, exp2, maximum, minimum, rcp
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH, act_args, emit_store
from mlc_amd.schedules.gpu.base.registers import opaque, owned
from mlc_amd.schedules.gpu.base.step import exchanges
from mlc_amd.schedules.kv_writes import Sources, rope_args
from mlc_amd.schedules.operators.attention import LOG2E, SLOTS, Attending, Attention, RopeAttention
from mlc_amd.schedules.operators.packed import PackedAttention
from mlc_amd.schedules.tir import Buffer, Expr, declared

# ---- the softmax

LOWEST = -1e30  # in place of minus infinity: may be subtracted from itself
P_SHIFT = 15  # weights are scaled by 2**15
OTHER_BYTES = 1 << 10  # of shared memory for what is small and of a fixed size
MAX_GROUP = 16  # rows that fit the registers
# On matrices weights are 2**(score - top) with any `top` that keeps them within float16: it is renewed when one would
# exceed 2**LIMIT; the new one makes the largest 2**START. Weights are normal float16 down to 2**-22 of it at least.
LIMIT, START = 15, 8
MAX_EXPONENT = 100  # of a sink's weight: the sum stays finite, and the outputs become 0 to within 2**-85


def group_of(layer: Attention) -> int:
    """Query heads per KV head. UserError unless it is a whole number up to MAX_GROUP."""
    if layer.heads % layer.kv_heads or layer.group > MAX_GROUP:
        raise UserError(
            f"attention on the GPU needs 1 to {MAX_GROUP} query heads per KV head, not {layer.heads} to "
            f"{layer.kv_heads}"
        )
    return layer.group


def soft_cap(attention: Attention, score: Expr) -> Expr:
    """The score with the layer's softcap: softcap * tanh(s / softcap) of s = score / log2(e), times log2(e) again. For
    layers without one, the score itself."""
    cap = attention.softcap
    if not cap:
        return score
    # tanh(x) = 1 - 2 / (exp(2x) + 1): an exponential that overflows gives 1
    inverse = rcp(exp2(score * T.float32(2 / cap)) + T.float32(1))
    return T.Bind(T.float32(cap * LOG2E) - inverse * T.float32(2 * cap * LOG2E))


def with_sink(sinks: Buffer, head: Expr, total: Expr, top: Expr, shift: int = P_SHIFT) -> Expr:
    """The softmax's denominator: `total`, relative to the maximum `top` and scaled by 2**shift, and the weight of the
    head's sink. To be used once per row, when all parts of its keys are joined."""
    if sinks is None:
        return total
    exponent = sinks[head] * T.float32(LOG2E) - top + T.float32(shift)
    return T.Bind(total + exp2(minimum(exponent, T.float32(MAX_EXPONENT))))


def output_args(attention: Attention, m: int, layout: str) -> list:
    """Declares the output [m, heads*value_d] in that `layout`. UserError for int8 blocks if heads are not whole
    blocks."""
    if layout == "rows" and attention.value_d % BLOCK:
        raise UserError(
            f"attention gives int8 blocks of {BLOCK} columns, not of heads of {attention.value_d}; quantize its output "
            "separately"
        )
    return act_args(m, attention.heads * attention.value_d, layout)


Sees = Callable[[int, Expr], Expr]  # whether a row sees a key


class Joined(NamedTuple):
    """Four consecutive columns of a row, from all waves: weights are relative to `top`; out / total is attention's
    output."""

    top: Expr
    total: Expr
    out: list


def join(
    tops: Expr, totals: Expr, waves: int, out: Callable[[Expr, Expr, Expr], list[Expr]]
) -> Callable[[Expr, Expr], Joined]:
    """quad(r, column) -> Joined, for any thread after a barrier; column % 4 == 0. tops, totals: [rows, waves] in LDS;
    out(wave, r, column): a wave's sums of WIDTH columns."""

    def quad(r: Expr, column: Expr) -> Joined:
        top = functools.reduce(maximum, [tops[r, w] for w in range(waves)], T.float32(LOWEST))
        total, sums = T.float32(0), [T.float32(0)] * WIDTH
        for w in range(waves):
            scale = exp2(tops[r, w] - top)
            total = total + totals[r, w] * scale
            sums = [opaque(y + x * scale) for y, x in zip(sums, out(w, r, column), strict=True)]
        return Joined(top, opaque(total), sums)

    return quad


# ---- parameters and rows

MAX_SPLITS, SEVERAL = 32, 8  # of a row, at most: with up to SEVERAL rows; the others have SEVERAL at least
MAX_PARTS = SEVERAL * max(SLOTS, MAX_SPLITS)  # rows times splits that there is memory for


def max_splits(m: int) -> int:
    """Splits that each of m rows may have: a launch with many rows has workgroups for all of them, most of which have
    nothing to do."""
    return max(SEVERAL, MAX_SPLITS * SEVERAL // max(m, SEVERAL))


def stride_of(group: int, d: int) -> int:
    """float32 of a split's results in Parts, whole cache lines: the rows' outputs, then (top, total, -, -) of each
    row."""
    return -(-group * (d + WIDTH) // LINE) * LINE


def scratch_shapes(heads: int, d: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Parameter name -> (shape, dtype) of the buffers that splits join through, large enough for every plan and SLOTS
    rows. d: columns of a head's output. "Arrived" must be zero before the first launch and is zero after each; "Parts"
    may hold anything."""
    return {"Parts": ((heads * MAX_PARTS * stride_of(1, d),), "float32"), "Arrived": ((SLOTS * heads,), "int32")}


class Step(NamedTuple):
    """An operator and its kernel's parameters."""

    op: Attending | PackedAttention
    state: Buffer
    rows: Buffer
    Q: Buffer  # rotated queries, or `sources`
    sources: Sources | None
    cache: Cache
    sinks: Buffer  # None for layers without
    scratch: list[Buffer]  # of `scratch_shapes`, empty where no row is single
    out: list[Buffer]  # of `output_args`

    @property
    def layer(self) -> Attention:
        return self.op.layer

    def chunk(self) -> Chunk:
        """The chunk of the step."""
        assert not isinstance(self.op, PackedAttention)
        return Chunk(self.op, self.state, self.rows)

    def singles(self) -> Expr:
        """The number of single rows, in a register."""
        live = self.state[1 if self.op.m == self.op.single else 0]
        return T.Bind(T.min(live, T.int32(self.op.single)))

    def token_and_head(self, row: Expr) -> tuple[Expr, Expr]:
        """Of a row that is counted by tokens and heads."""
        heads = T.int32(self.layer.heads)
        return T.Bind(T.truncdiv(row, heads)), T.Bind(T.truncmod(row, heads))

    def store(self, arch: Device, y: Sequence[Expr], row: Expr, column: Expr, valid: Expr | None) -> None:
        """Stores four columns of a row of the output where `valid` holds (None: always)."""
        emit_store(arch, self.op.layout, self.out, list(y), row, column, valid)

    def refuse_blocks(self) -> None:
        """UserError for the layout "rows", whose blocks no lane has on matrix units."""
        if self.op.layout == "rows":
            raise UserError(
                "attention on matrix units gives float32 or float16, not int8 blocks; quantize its output separately"
            )


def quads(arch: Device, threads: int, tid: Expr, rows: int, d: int) -> Iterator[tuple[Expr | None, Expr, Expr]]:
    """Yields (valid, row, column) of the groups of four of d columns of rows that thread `tid` has; valid is None where
    all threads have one."""
    count = rows * d // WIDTH
    for i in each(arch, -(-count // threads)):
        own, valid = owned(i * threads, tid, threads, count)
        place = T.Bind(own * WIDTH)
        yield valid, T.Bind(place // d), T.Bind(place % d)


class ChunkRow(NamedTuple):
    """A row of a chunk."""

    token: Expr  # of the chunk
    step_row: Expr  # its row in the step
    head: Expr
    valid: Expr  # whether there is such a row


class ChunkRows(NamedTuple):
    """The rows (token x head of the group) of KV head `kv` in the chunk of a step, from row `first` on. Rows beyond the
    chunk compute the same as its last token and are not stored."""

    step: Step
    chunk: Chunk
    kv: Expr
    first: Expr

    def place(self, r: Expr) -> ChunkRow:
        group, row = self.step.layer.group, T.Bind(self.first + r)
        token = T.Bind(T.min(row // group, self.chunk.count - 1))
        head = T.Bind(self.kv * group + row % group)
        return ChunkRow(token, T.Bind(self.chunk.row(token)), head, row // group < self.chunk.count)

    def store(self, arch: Device, quad: Callable[[Expr, Expr], Joined], count: int, threads: int, tid: Expr) -> None:
        """Stores what the waves of a workgroup have of `count` rows, joined by `quad` of `attention_step.join`."""
        d = self.step.layer.value_d
        for valid, r, column in quads(arch, threads, tid, count, d):
            (top, total, values), place = quad(r, column), self.place(r)
            inverse = opaque(rcp(with_sink(self.step.sinks, place.head, total, top)))
            live = place.valid if valid is None else place.valid & valid
            y = [opaque(x * inverse) for x in values]
            self.step.store(arch, y, place.step_row, T.Bind(place.head * d + column), live)


def attention_step(op: Attending, state: Buffer) -> Step:
    """Declares the parameters after `state`: rows int32[m, 2], pages, then Qo float16 [m, heads, width] or those of
    `rope_args`, the cache as in `cache.py`, [Sinks float32 [heads]], where rows may be single ones Parts, Arrived of
    `scratch_shapes`, the output [m, heads*value_d] in the operator's layout. UserError for shapes that `cache_types`,
    `rope_args` or `output_args` refuses."""
    layer, m = op.layer, op.m
    shapes = scratch_shapes(layer.heads, layer.value_d) if op.single else {}
    if shapes:
        exchanges(*shapes)
    rows, pages = place_args(m, layer)
    sources = rope_args(layer, m, op.rope) if isinstance(op, RopeAttention) else None
    Q = None if sources else T.arg("Qo", T.buffer((m, layer.heads, layer.width), "float16"))
    cache, sinks = Cache(layer, pages), declared(Sinks=(layer.heads,) if layer.sinks else None)[0]
    scratch = [T.arg(name, T.buffer(*shape)) for name, shape in shapes.items()]
    return Step(op, state, rows, Q, sources, cache, sinks, scratch, output_args(layer, m, op.layout))
