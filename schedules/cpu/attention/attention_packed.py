"""The kernels of schedules/operators/packed.py on the CPU. `packed_attention` is attention within segments, without a
cache: blocked, with online softmax.

A task is one KV head and a tile of rows. It processes one run at a time: the rows of the tile that are in the same
segment. Blocks of 64 keys begin at the first row of the segment, so that a row's result does not depend on the position
of its segment. The keys of a block are transposed first, so that a vector holds one column of several keys.
"""

from typing import NamedTuple

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.attention.attention_block import Softmax, scratch
from mlc_amd.schedules.cpu.attention.attention_prefill import Plan, default_plan, tile_tokens
from mlc_amd.schedules.cpu.attention.cache import BLOCK, KeyRange
from mlc_amd.schedules.cpu.base.activation import ACTIVATIONS
from mlc_amd.schedules.cpu.base.arch import Arch, Isa, tile_rows
from mlc_amd.schedules.cpu.base.kernel import kernel, live_rows, row_loop
from mlc_amd.schedules.cpu.base.vector import LANES, at, exp2, f32, opaque, registers, splat, store
from mlc_amd.schedules.cpu.linear.quantize import BLOCK as QUANT
from mlc_amd.schedules.cpu.linear.quantize import Output
from mlc_amd.schedules.operators.attention import LOG2E, Attention
from mlc_amd.schedules.operators.packed import Activate, PackedAttention, Pool
from mlc_amd.schedules.tir import Buffer, Expr, declared


@registry.builds(PackedAttention)
def packed_attention(op: PackedAttention, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], segments int32 [m, 2], Q, K, V, Y), with the shapes of `PackedAttention.shapes`."""
    with kernel(name) as (builder, state):
        segments = T.arg("segments", T.buffer((op.m, 2), "int32"))
        blocks = default_plan(arch.isa)
        tile = tile_tokens(blocks, op.m, op.group, op.kv_heads)
        live = live_rows(state, op.m)
        work = _Work(op, arch.isa, blocks, tile, segments, *declared(**op.shapes()))
        with T.parallel((live + tile - 1) // tile * op.kv_heads) as task:
            first = opaque(task // op.kv_heads * tile)
            work.emit(opaque(task % op.kv_heads), first, opaque(T.min(first + tile, live)), live)
    return builder.get()


def _transposed(vectors: list[Expr], n: int) -> list[Expr]:
    """Transposes n vectors of n lanes, in log2(n) steps; each step interleaves the first half of the vectors with the
    second half."""
    order = [[T.int32(part * n // 2 + i + odd * n) for i in range(n // 2) for odd in (0, 1)] for part in (0, 1)]
    for _ in range(n.bit_length() - 1):
        pairs = zip(vectors[: n // 2], vectors[n // 2 :], strict=True)
        vectors = [T.Bind(T.Shuffle(list(pair), part)) for pair in pairs for part in order]
    return vectors


class _Work(NamedTuple):
    """The operator, its plan, and the kernel's parameters."""

    op: PackedAttention
    isa: Isa
    plan: Plan
    tile: int  # rows of a task
    segments: Buffer
    Q: Buffer
    K: Buffer
    V: Buffer
    Y: Buffer

    @property
    def step(self) -> int:
        """The number of columns of a head that are copied as one vector."""
        return LANES if self.op.d % LANES == 0 else LANES // 2

    def emit(self, head: Expr, begin: Expr, end: Expr, live: Expr) -> None:
        """Emits the task of KV head `head` and the rows begin .. end-1."""
        op, rows = self.op, self.plan.rows
        spec = Attention(op.heads, op.kv_heads, op.d, op.m)
        most = -(-self.tile * op.group // rows) * rows
        queries, out = scratch(most, spec.width), scratch(most, spec.width)
        keys, values = scratch(spec.width, BLOCK), scratch(BLOCK, spec.width)
        total, scores = scratch(most, self.isa.lanes), scratch(most, BLOCK)
        softmax = Softmax(spec, self.isa, self.plan.registers, scratch(most), total, out, scores, registers(most))
        with T.serial(end - begin) as i:
            row = opaque(begin + i)
            first = opaque(T.max(self.segments[row, 0], T.int32(0)))
            with T.If(T.Or(i == 0, first == row)), T.Then():
                last = opaque(T.min(self.segments[row, 1], live))  # exclusive
                self._emit_run(softmax, (queries, keys, values), head, row, T.min(end, last) - row, first, last)

    def _emit_run(
        self, softmax: Softmax, buffers, head: Expr, row: Expr, tokens: Expr, first: Expr, last: Expr
    ) -> None:
        """Emits a run: the rows row .. row+tokens-1, whose segment has the rows first .. last-1. buffers: scratch for
        queries, keys and values."""
        op, isa, group, block_rows = self.op, self.isa, self.op.group, self.plan.rows
        (queries, keys, values), n, scores = buffers, self.step, softmax.scores
        count = opaque(T.max(tokens, T.int32(1)) * group)
        with T.serial(count) as r, T.serial(op.d // n) as c:
            column = at((head * group + r % group) * op.d + c * n, n)
            store(queries, self.Q[row + r // group, column] * f32(op.query_scale, n), r, at(c * n, n))
        padded = opaque((count + block_rows - 1) // block_rows)
        softmax.emit_start(padded * block_rows)
        begin, end = first, last
        if op.window:
            begin = first + T.max(row - op.window - first, T.int32(0)) // BLOCK * BLOCK
            end = T.min(last, row + tokens + op.window)
        if op.causal:
            end = T.min(end, row + tokens)
        begin, end = opaque(begin), opaque(end)
        with T.serial((end - begin + BLOCK - 1) // BLOCK) as block:
            key0 = opaque(begin + block * BLOCK)
            needed = opaque(T.min(end - key0, T.int32(BLOCK)))
            self._emit_load(keys, values, head, key0, needed)
            with T.serial(padded) as i:
                here = opaque(i * block_rows)
                softmax.emit_scores(
                    block_rows,
                    lambda r, c: queries[here + r, c],
                    lambda c, columns: [keys[c, at(column, isa.lanes)] for column in columns],
                    here,
                    needed,
                )
            if op.alibi:
                with T.serial(count) as r, T.serial(BLOCK // isa.lanes) as part:
                    place = at(part * isa.lanes, isa.lanes)
                    distance = T.cast(at(key0 - row - r // group + part * isa.lanes, isa.lanes), f"float32x{isa.lanes}")
                    exponent = op.exponent(T.cast(head * group + r % group, "float32"), T.Select)
                    slope = splat(exp2(exponent, 1) * T.float32(LOG2E), isa.lanes)
                    store(scores, scores[r, place] - slope * T.Bind(T.max(distance, -distance)), r, place)
            whole = None if op.window or op.causal else key0 + BLOCK <= end
            softmax.emit_weights(count, T.int32(0), key0, lambda r: self._seen(row + r // group, first, last), whole)
            with T.serial(padded) as i:
                here = opaque(i * block_rows)
                softmax.emit_outputs(
                    block_rows,
                    needed,
                    lambda key, columns: [values[key, at(column, isa.lanes)] for column in columns],
                    here,
                    here,
                )
        with T.serial(count) as r:
            inverse = T.Bind(T.float32(1) / softmax.sum(r))
            with T.serial(op.d // n) as c:
                column = at((head * group + r % group) * op.d + c * n, n)
                store(self.Y, softmax.out[r, at(c * n, n)] * splat(inverse, n), row + r // group, column)

    def _seen(self, row: Expr, first: Expr, last: Expr) -> KeyRange:
        """The keys to which a row attends. Its segment has the rows first .. last-1."""
        window = self.op.window
        low = T.max(first, row - window) if window else first
        high = last - 1
        if self.op.causal:
            high = row
        elif window:
            high = T.min(high, row + window)
        return KeyRange(opaque(low), opaque(high))

    def _emit_load(self, keys: Buffer, values: Buffer, head: Expr, key0: Expr, needed: Expr) -> None:
        """Copies the keys key0 .. key0+needed-1, transposed, and their values to scratch buffers. The rest of the last
        vector repeats the last key."""
        n, d = self.step, self.op.d
        with T.serial((needed + n - 1) // n) as part, T.serial(d // n) as c:
            column = opaque(head * d + c * n)
            rows = [opaque(key0 + T.min(part * n + i, needed - 1)) for i in range(n)]
            for i, x in enumerate(_transposed([T.Bind(self.K[row, at(column, n)]) for row in rows], n)):
                store(keys, x, c * n + i, at(part * n, n))
        with T.serial(needed) as key, T.serial(d // n) as c:
            store(values, self.V[key0 + key, at(head * d + c * n, n)], key, at(c * n, n))


@registry.builds(Activate)
def activate(op: Activate, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], X float32 [m, k], then A, S in tiles if `layout`, else Y float32 [m, k]). Raises
    ValueError unless k is a multiple of 32."""
    if op.k % QUANT:
        raise ValueError(f"an activation of {op.k} columns: they must be a multiple of {QUANT}")
    with kernel(name) as (builder, state):
        (X,) = declared(X=(op.m, op.k))
        output = Output(op.m, op.k, tile_rows(op.m, arch), bool(op.layout), "Y")
        with row_loop(state, op.m) as row, T.serial(op.k // QUANT) as block:
            first, second = (
                ACTIVATIONS[op.act](X[row, at(block * QUANT + half)], f32(1.0), arch.isa, LANES) for half in (0, LANES)
            )
            output.store_block(first, second, row, block)
    return builder.get()


@registry.builds(Pool)
def pool(op: Pool, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], pooled int32 [m, 2], X, Y float32 [m, k]). Raises ValueError unless k is a multiple of
    16."""
    if op.k % LANES:
        raise ValueError(f"rows of {op.k} columns: they must be a multiple of {LANES}")
    with kernel(name) as (builder, state):
        pooled = T.arg("pooled", T.buffer((op.m, 2), "int32"))
        X, Y = declared(X=(op.m, op.k), Y=(op.m, op.k))
        with row_loop(state, op.m) as answer, T.serial(op.k // LANES) as part:
            first, end = T.Bind(T.max(pooled[answer, 0], 0)), T.Bind(T.min(pooled[answer, 1], op.m))
            total = registers(LANES)
            store(total, f32(0.0), at(0))
            with T.serial(end - first) as i:
                store(total, total[at(0)] + X[first + i, at(part * LANES)], at(0))
            count = T.cast(T.max(end - first, 1), "float32")
            store(Y, total[at(0)] * splat(T.Bind(T.float32(1) / count)), answer, at(part * LANES))
    return builder.get()
