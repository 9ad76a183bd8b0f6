"""Attention between the rows of each segment on matrix units. A first launch scales the queries and converts them to
float16, and stores keys and values as a KV cache of one sequence (`cache.py`). The launches for chunks then compute
attention, with segments instead of positions.

Other segments in a step change a row's result only by rounding: sums have another order, and weights other roundings.
"""

from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention.attention_step import MAX_GROUP, Step
from mlc_amd.schedules.gpu.attention.cache import DTYPE, KEYS, UNIT, Cache, Visible, cache_types, forms
from mlc_amd.schedules.gpu.base.device import launch
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import at, vector
from mlc_amd.schedules.gpu.base.step import live_rows
from mlc_amd.schedules.operators.attention import PAGE, Attention
from mlc_amd.schedules.operators.packed import PackedAttention
from mlc_amd.schedules.tir import Buffer, Expr, declared

THREADS = 128
FEW = 64  # with fewer rows, the additional launch takes longer than matrix units save


def suits(op: PackedAttention, arch: Device) -> bool:
    """Whether matrix units can compute the operator: without biases, and with whole tiles of rows."""
    fits = arch.matrix != "coop" or op.m % arch.fragment[0] == 0
    return bool(arch.matrix) and fits and op.m >= FEW and op.group <= MAX_GROUP and not op.alibi


class Segments(NamedTuple):
    """The rows of a step, with the interface of `cache.Chunk`. A row attends to the keys of its segment."""

    op: PackedAttention
    rows: Buffer
    count: Expr
    slot: int = 0

    def visible(self, token: Expr) -> Visible:
        """The keys that a row sees."""
        op, end = self.op, T.Bind(T.min(self.rows[token, 1], self.count))
        first = T.Bind(T.max(self.rows[token, 0], T.int32(0)))
        if op.window:
            first = T.Bind(T.max(first, token - op.window))
        if op.causal or op.window:
            end = T.Bind(T.min(end, token + (1 if op.causal else op.window + 1)))
        return Visible(first, end)

    def row(self, token: Expr) -> Expr:
        return token

    row0 = 0


class PackedStep(Step):
    """The step of a `PackedAttention`."""

    def chunk(self) -> Segments:
        assert isinstance(self.op, PackedAttention)
        return Segments(self.op, self.rows, live_rows(self.state, self.op.m))


class PackedCache(Cache):
    """A cache of one sequence with pages in order, which one launch of a kernel writes and the next one reads."""

    def __init__(self, attention: Attention):
        self.d, self.scales, self.shifts, self.forms = attention.d, [], False, forms(attention)
        self.Kc, self.Vc = (T.alloc_buffer(*of, scope="global") for of in cache_types(attention).values())

    def page(self, slot: Expr, position: Expr) -> Expr:
        return T.shift_right(position, T.int32(PAGE.bit_length() - 1))


def packed_step(op: PackedAttention, state: Buffer) -> PackedStep:
    """Declares the parameters after `state`: segments int32 [m, 2], Q, K, V, Y, and emits the launch that makes the
    queries float16 [m, heads, width] and the cache. A lane has a unit of eight elements."""
    layer, m = op.layer, op.m
    segments = T.arg("segments", T.buffer((m, 2), "int32"))
    Q, K, V, Y = declared(**op.shapes())
    Qh = T.alloc_buffer((m, layer.heads, layer.width), DTYPE, scope="global")
    cache = PackedCache(layer)
    units, d = layer.width // UNIT, op.d
    heads = layer.heads + 2 * layer.kv_heads
    with launch((-(-layer.ctx * units // THREADS), heads), (THREADS,)) as (block, head, thread):
        number = T.Bind(block * THREADS + thread)
        count = live_rows(state, m)

        def row_of(X: Buffer, row: Expr, column: Expr, unit: Expr, factor: float = 1.0) -> Expr:
            """A unit of a row, 0 where there is none."""
            there = (row < count) & (unit < d // UNIT)
            source = T.Bind(column + T.min(unit, T.int32(d // UNIT - 1)) * UNIT)
            x = T.Bind(X[T.min(row, count - 1), at(source, UNIT)])
            found = T.cast(x * T.broadcast(T.float32(factor), UNIT), f"{DTYPE}x{UNIT}")
            return T.Select(T.broadcast(there, UNIT), found, T.broadcast(T.float16(0), UNIT))

        with T.If(number < layer.ctx * units), T.Then(), T.If(head < layer.heads):
            with T.Then():
                row, unit = T.Bind(number // units), T.Bind(number % units)
                with T.If(row < m), T.Then():
                    found = row_of(Q, row, head * d, unit, layer.query_scale)
                    T.buffer_store(Qh, found, [row, head, at(unit * UNIT, UNIT)])
            with T.Else(), T.If(head < layer.heads + layer.kv_heads):
                with T.Then():
                    kv, place = T.Bind(head - layer.heads), T.Bind(number // units)
                    unit, page = T.Bind(number % units), T.Bind(place // PAGE)
                    found = row_of(K, place, kv * d, unit)
                    where = [page, kv, place % PAGE // KEYS, unit, place % KEYS, at(0, UNIT)]
                    T.buffer_store(cache.Kc, found, where)
                with T.Else():
                    kv = T.Bind(head - layer.heads - layer.kv_heads)
                    column, eight = T.Bind(number % layer.width), T.Bind(number // layer.width)
                    source, found = T.Bind(kv * d + T.min(column, T.int32(d - 1))), []
                    for i in range(UNIT):
                        x = T.Bind(V[T.min(eight * UNIT + i, count - 1), source])
                        there = (eight * UNIT + i < count) & (column < d)
                        found.append(T.cast(T.Select(there, x, T.float32(0)), DTYPE))
                    where = [eight // (PAGE // UNIT), kv, eight % (PAGE // UNIT), column, at(0, UNIT)]
                    T.buffer_store(cache.Vc, vector(found), where)
    return PackedStep(op, state, segments, Qh, None, cache, None, [], [Y])
