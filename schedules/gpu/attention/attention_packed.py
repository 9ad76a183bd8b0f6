"""Attention between the rows of each segment (a text, an image), without a cache. Matrix units are used where they suit
(`attention_packed_matrix.py`); otherwise this module computes an online softmax over tiles of keys in shared memory.

A workgroup has one head and some consecutive rows. Neighbouring lanes share a row; each has some of the head's columns.
The running maximum is rounded to a whole number, so that earlier sums are rescaled by powers of two, which is exact. A
weight is 2**(score - rounded score), which does not depend on the maximum, times a power of two. Therefore a row's
result does not depend on how its keys are divided into tiles, nor on rows of other segments.
"""

import math
from typing import Any

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.attention import attention_packed_matrix
from mlc_amd.schedules.gpu.attention.attention import prefill_of
from mlc_amd.schedules.gpu.attention.attention_step import LOWEST
from mlc_amd.schedules.gpu.base.activations import gated
from mlc_amd.schedules.gpu.base.device import barrier, each, exp2, fma, launch, maximum, rcp, rint, wave_sum
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import act_args, column_threads, emit_store, load_columns, own_columns
from mlc_amd.schedules.gpu.base.registers import at, elements, filled, local, opaque, put, vector
from mlc_amd.schedules.gpu.base.step import builds, if_live, is_live, live_rows, once
from mlc_amd.schedules.operators.attention import LOG2E
from mlc_amd.schedules.operators.packed import Activate, PackedAttention, Pool
from mlc_amd.schedules.space import Space
from mlc_amd.schedules.tir import Buffer, Expr, declared

THREADS = 128  # of a workgroup, at most
COLUMNS = 32  # of a lane, at most, where lanes can be more
SHARED = 1 << 12  # numbers of a tile's keys and values
QUAD = 4


def _lanes(op: PackedAttention, arch: Device) -> int:
    """The number of lanes that share a row, a power of two."""
    return 8 if op.d > QUAD * COLUMNS and op.d % 16 == 0 and arch.wave >= 8 else 4


def _power(x: Expr) -> Expr:
    """2**x, exactly, for a whole number x <= 0; results below 2**-126 are 0."""
    bits = T.cast(maximum(x, T.float32(-127)), "int32") + T.int32(127)
    return T.reinterpret("float32", T.shift_left(bits, T.int32(23)))


@builds(PackedAttention)
def packed_attention(op: PackedAttention, arch: Device, state: Buffer, plan: Any) -> None:
    """Kernel (state, segments int32 [m, 2], Q, K, V, Y). plan: of the launch on matrix units."""
    if attention_packed_matrix.suits(op, arch):
        prefill_of(op.layer, arch).emit(attention_packed_matrix.packed_step(op, state), arch, plan)
    else:
        _on_vector_units(op, arch, state)


@registry.plans(PackedAttention)
def plans(op: PackedAttention, arch: Device) -> Space | None:
    return prefill_of(op.layer, arch).space(op, arch) if attention_packed_matrix.suits(op, arch) else None


def _on_vector_units(op: PackedAttention, arch: Device, state: Buffer) -> None:
    d, m, lanes = op.d, op.m, _lanes(op, arch)
    width = QUAD if d % (QUAD * lanes) == 0 else 2
    own, threads = d // lanes, min(THREADS, arch.threads)
    rows, count = threads // lanes, max(4, min(16, SHARED // (2 * d) // 4 * 4))  # count: keys of a tile
    segments = T.arg("segments", T.buffer((m, 2), "int32"))
    Q, K, V, Y = declared(**op.shapes())
    with launch((-(-m // rows), op.heads), (threads,)) as (tile, head, thread):
        live, lane = live_rows(state, m), T.Bind(thread % lanes)
        seen = attention_packed_matrix.Segments(op, segments, live).visible

        def columns(base: Expr) -> list[Expr]:
            """The first columns of each of the lane's vectors."""
            return [base + (unit * lanes + lane) * width for unit in range(own // width)]

        with once(tile * rows < live):
            wanted = T.Bind(tile * rows + thread // lanes)
            row = T.Bind(T.min(wanted, live - 1))
            begin, end = seen(row)
            low, _ = seen(T.Bind(T.min(tile * rows, live - 1)))
            _, high = seen(T.Bind(T.min(tile * rows + (rows - 1), live - 1)))
            keys, values = (T.alloc_buffer((count, d), "float32", scope="shared") for _ in range(2))
            query, out, scores = local(own), local(own), local(count)
            for u, column in enumerate(columns(head * d)):
                for i, x in enumerate(elements(T.Bind(Q[row, at(column, width)]))):
                    put(query, x * T.float32(op.query_scale), u * width + i)
            for i in range(own):
                put(out, T.float32(0), i)
            slope = None
            if op.alibi:
                slope = exp2(op.exponent(T.cast(head, "float32"), T.Select) + T.float32(math.log2(LOG2E)))
            top, total = filled(T.float32(LOWEST)), filled(T.float32(0))
            with T.serial(T.max((high - low + (count - 1)) // count, T.int32(0))) as block:
                key0 = T.Bind(low + block * count)
                barrier()
                _load(op, thread, threads, ((K, keys), (V, values)), head, key0, high)
                barrier()
                for j in each(arch, count):
                    product = T.float32(0)
                    for u, column in enumerate(columns(0)):
                        for i, x in enumerate(elements(T.Bind(keys[j, at(column, width)]))):
                            product = fma(query[u * width + i], x, product)
                    score = wave_sum(arch, T.Bind(product), lanes)
                    if slope is not None:
                        distance = T.Bind(T.cast(key0 + j - row, "float32"))
                        score = fma(-slope, maximum(distance, -distance), score)
                    visible = (key0 + j >= begin) & (key0 + j < end)
                    put(scores, T.Select(visible, score, T.float32(LOWEST)), j)
                now = opaque(top[0])
                for j in range(count):
                    now = maximum(now, scores[j])
                now = opaque(T.Select(now > top[0], rint(now), top[0]))
                shrink = opaque(_power(top[0] - now))
                put(top, now, 0)
                put(total, total[0] * shrink, 0)
                for i in range(own):
                    put(out, out[i] * shrink, i)
                for j in each(arch, count):
                    score = T.Bind(scores[j])
                    whole = rint(score)
                    weight = T.Bind(exp2(score - whole) * _power(whole - top[0]))
                    weight = opaque(T.Select(score > T.float32(LOWEST / 2), weight, T.float32(0)))
                    put(total, total[0] + weight, 0)
                    for u, column in enumerate(columns(0)):
                        for i, x in enumerate(elements(T.Bind(values[j, at(column, width)]))):
                            put(out, fma(weight, x, out[u * width + i]), u * width + i)
            inverse = rcp(total[0])
            with T.If(wanted < live), T.Then():
                for u, column in enumerate(columns(head * d)):
                    found = [T.Bind(out[u * width + i] * inverse) for i in range(width)]
                    put(Y, vector(found), row, at(column, width))


def _load(op: PackedAttention, thread: Expr, threads: int, pairs, head: Expr, key0: Expr, high: Expr) -> None:
    """Loads a tile of keys and values of a head, from key0 on, into shared memory. Keys from `high` on are replaced by
    the last live one."""
    quads, count = op.d // QUAD, int(pairs[0][1].shape[0])
    base = T.Bind(head // op.group * op.d)
    for first in range(0, count * quads, threads):
        number = T.Bind(first + thread)
        with T.If(number < count * quads), T.Then():
            key, column = T.Bind(number // quads), T.Bind(number % quads * QUAD)
            source = T.Bind(T.min(key0 + key, high - 1))
            for whole, tile in pairs:
                put(tile, whole[source, at(base + column, QUAD)], key, at(column, QUAD))


@builds(Activate)
def activate(op: Activate, arch: Device, state: Buffer, plan: None) -> None:
    """Kernel (state, X float32 [m, k], then A and S, or H, or Y of [m, k], for op.layout): applies an activation
    function. A lane has four columns. Raises ValueError unless k is a multiple of 32."""
    k, m = op.k, op.m
    if k % BLOCK:
        raise ValueError(f"an activation of {k} columns: they must be a multiple of {BLOCK}")
    threads = column_threads(k, arch)
    (X,) = declared(X=(m, k))
    out = act_args(m, k, op.layout, None if op.layout else ["Y"])
    with launch((-(-k // (threads * QUAD)), m), (threads,)) as (part, row, thread), if_live(state, m, row):
        column, inside = own_columns(part, thread, threads, k)
        values = [gated(op.act, x, T.float32(1)) for x in load_columns(X, row, column)]
        emit_store(arch, op.layout, out, values, row, column, inside)


@builds(Pool)
def pool(op: Pool, arch: Device, state: Buffer, plan: None) -> None:
    """Kernel (state, pooled int32 [m, 2], X, Y float32 [m, k]): pools rows. A lane computes a column of a row of Y."""
    threads = min(THREADS, arch.threads)
    pooled = T.arg("pooled", T.buffer((op.m, 2), "int32"))
    X, Y = declared(X=(op.m, op.k), Y=(op.m, op.k))
    with launch((-(-op.k // threads), op.m), (threads,)) as (part, answer, thread):
        column = T.Bind(part * threads + thread)
        with T.If((column < op.k) & is_live(state, answer)), T.Then():
            first, end = T.Bind(T.max(pooled[answer, 0], 0)), T.Bind(T.min(pooled[answer, 1], op.m))
            total = filled(T.float32(0))
            with T.serial(T.max(end - first, 0)) as i:
                put(total, total[0] + X[first + i, column], 0)
            put(Y, total[0] / T.cast(T.max(end - first, 1), "float32"), answer, column)
