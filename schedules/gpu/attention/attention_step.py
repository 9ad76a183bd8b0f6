"""The common part of attention kernels: parameters, the rows of a chunk, the softmax, and the sizes of the buffers
through which splits join.

In: an operator. Out: `Step`. `attention_decode.py` emits the launch for the single rows of a step,
`attention_prefill*.py` those for its chunk, and `attention.py` combines them. If a launch does not rotate queries and
write keys and values itself, queries must be rotated already, and the cache must have the rows' own keys and values.
The outputs of live rows are stored in an activation layout of `quantize.py`.

The softmax. Scores are exponents of 2: the scale of queries includes log2(e). A row is one query of one head. For each
row a kernel keeps the maximum score so far, the sum of weights relative to it, and the weighted sum of values. Weights
are scaled by 2**P_SHIFT, so that as float16 those down to 2**-29 of the largest are normal numbers. (Cooperative
matrices use another scale, see `attention_prefill_coop.py`.)
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

LOWEST = -1e30  # replaces minus infinity, because LOWEST - LOWEST must be 0
P_SHIFT = 15  # weights are scaled by 2**15
OTHER_BYTES = 1 << 10  # bytes of shared memory for small buffers of fixed size
MAX_GROUP = 16  # upper limit of the rows that fit into registers
# On matrix units weights are 2**(score - top), for any `top` with which they fit into float16. If a weight would exceed
# 2**LIMIT, `top` is renewed so that the largest weight is 2**START. So weights down to 2**-22 of the largest are
# normal.
LIMIT, START = 15, 8
MAX_EXPONENT = 100  # upper limit of the exponent of a sink's weight: the sum stays finite, outputs are 0 within 2**-85


def group_of(layer: Attention) -> int:
    """The number of query heads per KV head. Raises UserError unless it is a whole number up to MAX_GROUP."""
    if layer.heads % layer.kv_heads or layer.group > MAX_GROUP:
        raise UserError(
            f"attention on the GPU needs 1 to {MAX_GROUP} query heads per KV head, not {layer.heads} to "
            f"{layer.kv_heads}"
        )
    return layer.group


def soft_cap(attention: Attention, score: Expr) -> Expr:
    """The score with the layer's softcap: softcap * tanh(s / softcap) * log2(e), where s = score / log2(e). The score
    itself for layers without softcap."""
    cap = attention.softcap
    if not cap:
        return score
    # tanh(x) = 1 - 2 / (exp(2x) + 1), which is 1 if the exponential overflows
    inverse = rcp(exp2(score * T.float32(2 / cap)) + T.float32(1))
    return T.Bind(T.float32(cap * LOG2E) - inverse * T.float32(2 * cap * LOG2E))


def with_sink(sinks: Buffer, head: Expr, total: Expr, top: Expr, shift: int = P_SHIFT) -> Expr:
    """The denominator of the softmax: `total` plus the weight of the head's sink. Both are relative to the maximum
    `top`, and scaled by 2**shift. To be used once for each row, when all parts of its keys are joined."""
    if sinks is None:
        return total
    exponent = sinks[head] * T.float32(LOG2E) - top + T.float32(shift)
    return T.Bind(total + exp2(minimum(exponent, T.float32(MAX_EXPONENT))))


def output_args(attention: Attention, m: int, layout: str) -> list:
    """Declares the output parameters, [m, heads*value_d] in a layout. Raises UserError for the layout "rows" if a head
    is not a multiple of 32 columns."""
    if layout == "rows" and attention.value_d % BLOCK:
        raise UserError(
            f"attention gives int8 blocks of {BLOCK} columns, not of heads of {attention.value_d}; quantize its output "
            "separately"
        )
    return act_args(m, attention.heads * attention.value_d, layout)


Sees = Callable[[int, Expr], Expr]  # (row, key) -> whether the row attends to the key


class Joined(NamedTuple):
    """The joined results of all waves for four consecutive columns of a row. Weights are relative to `top`; the output
    of attention is out / total."""

    top: Expr
    total: Expr
    out: list


def join(
    tops: Expr, totals: Expr, waves: int, out: Callable[[Expr, Expr, Expr], list[Expr]]
) -> Callable[[Expr, Expr], Joined]:
    """Returns quad(r, column) -> Joined, which any thread may call after a barrier; column: a multiple of 4. tops,
    totals: [rows, waves] in LDS. out(wave, r, column): a wave's sums of WIDTH columns."""

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

# A row may have up to MAX_SPLITS splits in steps of up to SEVERAL rows. With more rows the limit is lower, but at least
# SEVERAL.
MAX_SPLITS, SEVERAL = 32, 8
MAX_PARTS = SEVERAL * max(SLOTS, MAX_SPLITS)  # rows times splits for which there is memory


def max_splits(m: int) -> int:
    """The upper limit of the splits of each of m rows. It is lower for many rows, because a launch has workgroups for
    all splits, most of which would have nothing to do."""
    return max(SEVERAL, MAX_SPLITS * SEVERAL // max(m, SEVERAL))


def stride_of(group: int, d: int) -> int:
    """The number of float32 values of a split's results in Parts, a multiple of a cache line: the outputs of its rows,
    then (top, total, -, -) of each row."""
    return -(-group * (d + WIDTH) // LINE) * LINE


def scratch_shapes(heads: int, d: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """{parameter name: (shape, dtype)} of the buffers through which splits join, large enough for every plan and SLOTS
    rows. d: columns of a head's output. "Arrived" must be zero before the first launch, and is zero after each launch.
    "Parts" need not be initialized."""
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
        """(token, head) of a row, where rows are numbered token * heads + head."""
        heads = T.int32(self.layer.heads)
        return T.Bind(T.truncdiv(row, heads)), T.Bind(T.truncmod(row, heads))

    def store(self, arch: Device, y: Sequence[Expr], row: Expr, column: Expr, valid: Expr | None) -> None:
        """Stores four columns of a row of the output where `valid` holds (None: always)."""
        emit_store(arch, self.op.layout, self.out, list(y), row, column, valid)

    def refuse_blocks(self) -> None:
        """Raises UserError for the layout "rows": on matrix units, lanes do not have its blocks."""
        if self.op.layout == "rows":
            raise UserError(
                "attention on matrix units gives float32 or float16, not int8 blocks; quantize its output separately"
            )


def quads(arch: Device, threads: int, tid: Expr, rows: int, d: int) -> Iterator[tuple[Expr | None, Expr, Expr]]:
    """Yields (valid, row, column) for each group of four columns that thread `tid` has, of `rows` rows of d columns.
    valid: whether the thread has a group in this step; None if all threads do."""
    count = rows * d // WIDTH
    for i in each(arch, -(-count // threads)):
        own, valid = owned(i * threads, tid, threads, count)
        place = T.Bind(own * WIDTH)
        yield valid, T.Bind(place // d), T.Bind(place % d)


class ChunkRow(NamedTuple):
    """A row of a chunk."""

    token: Expr  # number of its token in the chunk
    step_row: Expr  # row of the step with this token
    head: Expr
    valid: Expr  # whether the row exists


class ChunkRows(NamedTuple):
    """The rows (pairs of a token and a query head) of KV head `kv` in the chunk of a step, from row `first` on. Rows
    beyond the chunk repeat its last token, and are not stored."""

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
        """Stores the outputs of `count` rows. quad: the joined results of the waves of a workgroup, from
        `attention_step.join`."""
        d = self.step.layer.value_d
        for valid, r, column in quads(arch, threads, tid, count, d):
            (top, total, values), place = quad(r, column), self.place(r)
            inverse = opaque(rcp(with_sink(self.step.sinks, place.head, total, top)))
            live = place.valid if valid is None else place.valid & valid
            y = [opaque(x * inverse) for x in values]
            self.step.store(arch, y, place.step_row, T.Bind(place.head * d + column), live)


def attention_step(op: Attending, state: Buffer) -> Step:
    """Declares the parameters after `state`: rows int32[m, 2]; pages; Qo float16 [m, heads, width] or the parameters of
    `rope_args`; the cache (`cache.py`); [Sinks float32 [heads]]; if there may be single rows, Parts and Arrived
    (`scratch_shapes`); the output [m, heads*value_d] in the operator's layout. Raises UserError for shapes that
    `cache_types`, `rope_args` or `output_args` refuses."""
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
