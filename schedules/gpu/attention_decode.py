"""Attention of one token against the cache on a GPU: split-KV ("flash decoding"), with RoPE and the cache write in the
same launch.

In: the token's q, k, v rows as the projections left them (or queries that `rope_kv_write.py` rotated), and the caches
of that module. Out: the heads' outputs in an activation layout of `quantize.py`. A workgroup has a KV head and a split
of its live keys; it rotates the group's queries into LDS itself. A wave works through steps of 32 or 64 keys and keeps
its own softmax (`attention_rows.py`), so nothing waits in the loop; K and V are loaded once for the whole group. The
waves join through LDS at the end.

Splits join in device memory. The one that arrives last, by an atomic counter, joins them all: no second launch. (On
Vulkan a split that is alone stores the output itself.) A split's results go out as volatile stores, which are complete,
beyond the caches that workgroups do not share, before the counter moves. The last one's loads have addresses that
depend on what the counter returned, so neither compiler nor hardware can start them early; their cache lines belong to
one split each and nothing reads them earlier in the launch, so no cache holds an old copy. On Vulkan both buffers are
coherent, and a memory barrier stands before the counter moves and after it was read.

The token's own key and value never come from the cache: they are where the first wave's softmax starts.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention_rows import LOWEST, P_SHIFT, STEP, at, group_of, put
from mlc_amd.schedules.gpu.attention_rows_vulkan import query_dtype, rows_of, waves_of
from mlc_amd.schedules.gpu.device import (
    COHERENT,
    Outbox,
    dot2,
    each,
    exp2,
    fma,
    launch,
    memory_barrier,
    rcp,
    uniform,
    wave_max,
    wave_sum,
)
from mlc_amd.schedules.gpu.load import lane_of
from mlc_amd.schedules.gpu.quantize import WIDTH, act_args, emit_store, vector
from mlc_amd.schedules.gpu.rope_kv_write import (
    Rope,
    cache_shapes,
    query_scale,
    rope_args,
    rotated,
    store_key,
    store_valid,
    store_value,
)

MOST = 32  # splits
LINE = 32  # float32 of a cache line


@dataclass(frozen=True)
class Plan:
    """threads  of a workgroup, at most
    fill     workgroups per compute unit that a long context is split into
    step     keys between two looks at the maximum; on "rocm" STEP
    batch    splits whose results are loaded at once
    """

    threads: int
    fill: int
    step: int
    batch: int


PLANS = {"nvidia": Plan(threads=128, fill=2, step=32, batch=32)}
DEFAULT_PLAN = Plan(threads=128, fill=2, step=STEP, batch=8)


def default_plan(arch) -> Plan:
    return PLANS.get(arch.family, DEFAULT_PLAN)


class Splits(NamedTuple):
    """How a KV head's keys are dealt out: `count` workgroups of `waves` waves, steps of `step` keys in turns. batch:
    splits whose results are loaded at once."""

    count: int
    waves: int
    threads: int
    group: int
    d: int
    step: int
    batch: int

    def active(self, steps):
        """How many of the splits have something to do; at least one."""
        return T.Bind(T.max(T.min((steps + self.waves - 1) // self.waves, T.int32(self.count)), T.int32(1)))


def splits_of(heads, kv_heads, d, ctx, arch, plan=None) -> Splits:
    """The splits of a shape: no more than the context has work for, than fill the GPU, than a wave has lanes to join
    them. ValueError for a plan that the arch cannot run."""
    group, plan = group_of(heads, kv_heads), plan or default_plan(arch)
    if plan.step != STEP and (arch.api == "rocm" or plan.step % arch.wave or plan.step > STEP):
        raise ValueError(f"{arch.name} takes steps of up to {STEP} keys, not of {plan.step}")
    if plan.threads < arch.wave:
        raise ValueError(f"{plan.threads} threads are less than a wave of {arch.name}")
    waves = waves_of(arch, group, d, plan.threads)
    count = min(-(-ctx // (plan.step * waves)), -(-plan.fill * arch.units // kv_heads), MOST, arch.wave)
    return Splits(count, waves, waves * arch.wave, group, d, plan.step, min(plan.batch, arch.wave))


def stride_of(group, d) -> int:
    """float32 of a split's results in the scratch buffer, whole cache lines: the rows' outputs, then (top, total, 0, 0)
    of each row."""
    return -(-group * (d + WIDTH) // LINE) * LINE


def scratch_shapes(heads, kv_heads, d) -> dict:
    """Parameter name -> (shape, dtype) of the buffers that splits join through, large enough for every plan. "Arrived"
    must be zero before the first launch and is zero after each; "Parts" may hold anything."""
    return {
        "Parts": ((kv_heads, MOST, stride_of(group_of(heads, kv_heads), d)), "float32"),
        "Arrived": ((kv_heads,), "int32"),
    }


def attention_decode(
    heads, kv_heads, d, ctx, act_out, arch, name, rope: Rope | None = None, plan: Plan | None = None
) -> tirx.PrimFunc:
    """Kernel (state int32[4], then with `rope`: Q, K, V, [QN, KN], CS as for `rope_kv_write` with m = 1, Kc, Vc in
    place; without: Qo float16 [1, heads, d], Kc, Vc; then Parts, Arrived of `scratch_shapes`, then the output [1,
    heads*d] in the layout act_out).

    The token at state[0] sees the keys 0 .. state[0]; with `rope` its own key and value are written there, without they
    must be there already. One launch. plan: instead of the arch's; ValueError as for `splits_of`. UserError for shapes
    that `cache_shapes`, `rope_args` or `group_of` refuses.
    """
    splits, (kshape, vshape) = splits_of(heads, kv_heads, d, ctx, arch, plan), cache_shapes(kv_heads, ctx, d)
    group = splits.group
    with IRBuilder() as ir, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"tirx.noalias": True, "global_symbol": name, COHERENT: ["Parts", "Arrived"]})
        state = T.arg("state", T.buffer((4,), "int32"))
        if rope:
            Q, K, V, QN, KN, CS = rope_args(heads, kv_heads, d, ctx, 1, rope)
        else:
            Qo = T.arg("Qo", T.buffer((1, heads, d), "float16"))
        Kc, Vc = T.arg("Kc", T.buffer(kshape, "float16")), T.arg("Vc", T.buffer(vshape, "float16"))
        Parts, Arrived = (T.arg(n, T.buffer(*s)) for n, s in scratch_shapes(heads, kv_heads, d).items())
        out = act_args(1, heads * d, act_out)
        with launch((kv_heads, splits.count), (arch.wave, splits.waves)) as (kv, split, lane, thread_wave):
            wave = uniform(arch, thread_wave)
            position = T.Bind(T.max(T.min(state[0], T.int32(ctx - 1)), T.int32(0)))
            end = position if rope else T.Bind(position + 1)
            steps = T.Bind((end + splits.step - 1) // splits.step)
            active = splits.active(steps)
            with T.serial(T.cast(split < active, "int32")):
                queries = T.alloc_buffer((group, d), query_dtype(arch), scope="shared")
                rows = rows_of(arch, group, d, lane, wave, splits.waves, splits.step)
                rows.start()
                stream = T.Bind(split * splits.waves + wave)
                streams = splits.count * splits.waves
                ahead = arch.api == "vulkan" and rows.ahead
                if ahead:
                    # while the queries are on their way, too
                    rows.load_keys(Kc, kv, T.Bind(T.min(stream * splits.step, T.int32(ctx - splits.step))))
                if rope:
                    own_key = T.alloc_buffer((d,), query_dtype(arch), scope="shared")
                    _rotate(arch, splits, (Q, K, QN, KN, CS), rope, (queries, own_key), kv, position, wave, lane)
                    first = T.Bind((wave == 0) & (split == 0))
                    with T.If(first), T.Then():
                        _start_with_own(rows, queries, own_key, V, kv)
                else:
                    _load_queries(splits, Qo, queries, kv, wave * arch.wave + lane)
                with T.serial(T.max((steps - stream + streams - 1) // streams, T.int32(0))) as i:
                    place = T.Bind(stream + i * streams)
                    # the step after this one; the last one loads something that nobody looks at
                    following = {"following": T.Bind(T.min(place + streams, steps - 1) * splits.step)} if ahead else {}
                    rows.step(
                        Kc,
                        Vc,
                        kv,
                        T.Bind(place * splits.step),
                        queries,
                        lambda r: end,
                        T.Bind(state[3] & i),
                        **following,
                    )
                if rope:
                    with T.If(first & (state[0] == position)), T.Then():
                        store_key(Kc, kv, position, rotated(arch, K, 0, kv * d, CS, position, KN, lane, d, rope))
                        store_value(arch, Vc, kv, position, V, 0, lane, d)
                quad = rows.join_waves(wave, splits.waves)
                tid = T.Bind(wave * arch.wave + lane)
                if arch.api == "vulkan":
                    with T.serial(T.cast(active == 1, "int32")):
                        _store_alone(arch, splits, act_out, out, quad, kv, tid)
                with nullcontext() if arch.api == "rocm" else T.serial(T.cast(active > 1, "int32")):
                    _store_parts(splits, Parts, quad, kv, split, tid, arch)
                    old = _arrive(Arrived, kv, tid, arch)
                    with T.serial(T.cast(old == active - 1, "int32")):
                        # 0, and not known before `old` is
                        later = T.Bind(T.shift_right(old, T.int32(16)))
                        _join_splits(arch, splits, act_out, out, Parts, kv, active, later, wave, lane)
                        with T.If(tid == 0), T.Then():
                            put(Arrived, T.int32(0), kv)
    return ir.get()


def _rotate(arch, splits, sources, rope, buffers, kv, position, wave, lane):
    """Rotates the group's queries and the key into LDS; the waves take heads in turns."""
    (Q, K, QN, KN, CS), (queries, own_key) = sources, buffers
    group, d = splits.group, splits.d
    for i in each(arch, -(-group // splits.waves)):
        row = T.Bind(i * splits.waves + wave)
        with T.If(row < group), T.Then():
            for valid, values in rotated(arch, Q, 0, (kv * group + row) * d, CS, position, QN, lane, d, rope):
                store_valid(
                    valid, queries, [((row, e), _kept(y * T.float32(query_scale(d)), queries)) for e, y in values]
                )
    with T.If(wave == splits.waves - 1), T.Then():
        for valid, values in rotated(arch, K, 0, kv * d, CS, position, KN, lane, d, rope):
            store_valid(valid, own_key, [((e,), _kept(y, own_key)) for e, y in values])


def _kept(x, buffer):
    """The float32 x as float16, in the type of the buffer."""
    half = T.cast(x, "float16")
    return half if str(buffer.dtype) == "float16" else T.cast(half, "float32")


def _load_queries(splits, Qo, queries, kv, tid):
    """Copies the group's rotated queries into LDS."""
    elements = splits.group * splits.d
    for first in range(0, elements, splits.threads):
        e = T.Bind(first + tid)
        store_valid(
            None if first + splits.threads <= elements else e < elements,
            queries,
            [
                (
                    (e // splits.d, e % splits.d),
                    T.cast(Qo[0, kv * splits.group + e // splits.d, e % splits.d], queries.dtype),
                )
            ],
        )


def _start_with_own(rows, queries, own_key, V, kv):
    """The rows' state behind the token's own key, whose weight is 1."""
    arch, d = rows.arch, rows.d

    def part(r):
        """What this lane has of the row's score."""
        score = T.float32(0)
        for first in range(0, d // 2, arch.wave):
            pair = T.Bind(T.min(first + rows.lane, T.int32(d // 2 - 1)))
            product = _product(arch, queries[r, at(pair * 2, 2)], own_key[at(pair * 2, 2)])
            score = score + T.Select(first + rows.lane < d // 2, product, T.float32(0))
        return T.Bind(score)

    for r, score in enumerate(rows.sums(part(r) for r in range(rows.count))):
        put(rows.top, score, r)
        put(rows.total, T.Select(rows.lane == 0, T.float32(2**P_SHIFT), T.float32(0)), r)
    for x in range(rows.columns):
        value = T.Bind(T.cast(T.cast(V[0, kv * d + rows.column(x)], "float16"), "float32") * T.float32(2**P_SHIFT))
        for r in range(rows.count):
            put(rows.out, value, r * rows.columns + x)


def _product(arch, x, y):
    """x . y of two pairs of float16 or of float32."""
    if str(x.ty) == "float16x2":
        return dot2(arch, *(T.reinterpret("uint32", pair) for pair in (x, y)), T.float32(0))
    x, y = ([lane_of(pair, i) for i in range(2)] for pair in (T.Bind(x), T.Bind(y)))
    return fma(x[1], y[1], x[0] * y[0])


def _quads(arch, splits, tid):
    """Yields (valid, row, column) of the groups of four columns that a thread has; valid is None where all threads have
    one."""
    count = splits.group * splits.d // WIDTH
    for i in each(arch, -(-count // splits.threads)):
        first = i * splits.threads
        whole = count % splits.threads == 0 or (isinstance(i, int) and first + splits.threads <= count)
        valid = None if whole else first + tid < count
        place = T.Bind((first + tid if valid is None else T.min(first + tid, T.int32(count - 1))) * WIDTH)
        yield valid, T.Bind(place // splits.d), T.Bind(place % splits.d)


def _store_alone(arch, splits, act_out, out, quad, kv, tid):
    """Stores the output where one split has all keys."""
    for valid, row, column in _quads(arch, splits, tid):
        _, total, values = quad(row, column)
        inverse = rcp(total)
        emit_store(
            arch,
            act_out,
            out,
            [T.Bind(y * inverse) for y in values],
            0,
            (kv * splits.group + row) * splits.d + column,
            valid,
        )


def _store_parts(splits, Parts, quad, kv, split, tid, arch):
    """Stores the workgroup's results, each store complete in device memory before the thread goes on."""
    values, tails = (Outbox(arch, tid, splits.threads, WIDTH) for _ in range(2))
    for valid, row, column in _quads(arch, splits, tid):
        top, total, out = quad(row, column)
        values.hold(vector(out))
        tails.hold(vector([top, total, T.float32(0), T.float32(0)]))
        with nullcontext() if valid is None else T.If(valid), nullcontext() if valid is None else T.Then():
            values.send(Parts, kv, split, row * splits.d + column)
            with T.If(column == 0), T.Then():
                tails.send(Parts, kv, split, splits.group * splits.d + row * WIDTH)
    memory_barrier(arch)


def _arrive(Arrived, kv, tid, arch):
    """How many splits of this KV head arrived before, in a scalar register."""
    arrived = T.alloc_buffer((1,), "int32", scope="shared")
    T.evaluate(T.tvm_storage_sync("shared"))
    with T.If(tid == 0), T.Then():
        put(arrived, T.call_intrin("int32", "tirx.atomic_add", T.address_of(Arrived[kv]), T.int32(1)), 0)
    old = uniform(arch, arrived[0])
    memory_barrier(arch)
    return old


def _join_splits(arch, splits, act_out, out, Parts, kv, active, later, wave, lane):
    """Joins the splits' results and stores the output. later: 0, known when they may be loaded."""
    group, d, size = splits.group, splits.d, splits.batch
    weights = T.alloc_buffer((group, math.ceil(splits.count / size) * size), "float32", scope="shared")
    for i in each(arch, -(-group // splits.waves)):
        row = T.Bind(T.min(i * splits.waves + wave, T.int32(group - 1)))
        split, tail = T.Bind(T.min(lane, active - 1) + later), group * d + row * WIDTH
        top = T.Bind(T.Select(lane < active, Parts[kv, split, tail], T.float32(LOWEST)))
        weight = exp2(top - wave_max(arch, top))
        total = wave_sum(arch, T.Bind(weight * Parts[kv, split, tail + 1]))
        with T.If(lane < weights.shape[1]), T.Then():
            put(weights, weight * rcp(total), row, lane)
    for valid, row, column in _quads(arch, splits, T.Bind(wave * arch.wave + lane)):
        y = T.alloc_buffer((WIDTH,), "float32", scope="local")
        put(y, T.broadcast(T.float32(0), WIDTH), at(0, WIDTH))
        with T.serial((active + size - 1) // size) as batch:
            for i in range(size):
                split = T.Bind(batch * size + i)
                part = Parts[kv, T.min(split, active - 1) + later, at(row * d + column, WIDTH)]
                put(y, y[at(0, WIDTH)] + part * T.broadcast(weights[row, split], WIDTH), at(0, WIDTH))
        emit_store(arch, act_out, out, [T.Bind(y[i]) for i in range(WIDTH)], 0, (kv * group + row) * d + column, valid)
