"""Attention of one token against the cache: split-KV ("flash decoding") for x86 CPUs.

In: the rotated query (times log2(e)/sqrt(d)) and the caches of `rope_kv_write.py`. Out: the heads' outputs, float32 or int8 blocks.

A task is one KV head and one of `splits` ranges of its live keys; the query heads of a group share each key and value that is loaded. Tasks
leave (top, total, unscaled output), and after a barrier in the same launch the heads merge theirs. How many ranges there are follows from
the number of live keys, so that short contexts make few tasks and long ones enough for many threads. No sum crosses lanes: a lane is a key
in the scores and a column in the outputs.
"""
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu.attention_block import (
    BLOCK,
    LOWEST,
    emit_product,
    emit_start,
    emit_total,
    emit_weights,
    opaque,
    registers,
    widen_half,
)
from mlc_amd.schedules.cpu.quantize import BLOCK as QUANT
from mlc_amd.schedules.cpu.quantize import act_args, emit_quantize_block
from mlc_amd.schedules.cpu.rope_kv_write import KEYS, cache_shapes
from mlc_amd.schedules.cpu.vector import LANES, at, exp2, f32, prefetch, splat, store

TASKS = 64                      # tasks of a long context: enough for a dozen threads to be evenly loaded
LINE = 32                       # float16 in a cache line


def _load_keys(isa, Kc, kv, key0, c, keys, d):
    """The vectors of element c of the keys that start at key0 + `keys`, as float32. Asks for the same of the next block: it arrives while
    this one is used."""
    lanes = isa.lanes
    for key in keys[::KEYS // lanes]:
        prefetch(Kc, kv, key0 // KEYS + key // KEYS, c, 0, ahead=BLOCK * d)
    return [widen_half(Kc[kv, key0 // KEYS + key // KEYS, c, at(key % KEYS, lanes)], isa, lanes) for key in keys]


def _load_values(isa, Vc, kv, key, columns, d):
    """The vectors of a value that start at `columns`, as float32. Asks for the same of the next block."""
    lanes = isa.lanes
    for c in columns[::LINE // lanes]:
        prefetch(Vc, kv, key, c, ahead=BLOCK * d)
    return [widen_half(Vc[kv, key, at(c, lanes)], isa, lanes) for c in columns]


def _emit_split(isa, Q, Kc, Vc, partial, kv, split, first, stop, position, group, d):
    """One task: the blocks first .. stop-1 of a KV head's keys. Its results go to `partial` (tops, totals, outs) at [kv, split]."""
    lanes = isa.lanes
    top, total, out, scores, shrink = (
        registers(*shape) for shape in ((group,), (group, lanes), (group, d), (group, BLOCK), (group,)))
    emit_start(top, total, out, group, d, lanes)
    with T.serial(stop - first) as step:
        key0 = T.Bind((first + step) * BLOCK)
        emit_product(isa, group, BLOCK, d,
                     left=lambda g, c: Q[0, kv * group + g, c],
                     right=lambda c, keys: _load_keys(isa, Kc, kv, key0, c, keys, d),
                     start=lambda g, key: f32(0.0, lanes),
                     finish=lambda g, key, x: store(scores, x, g, at(key, lanes)))
        with T.serial(group) as g:
            store(shrink, emit_weights(scores, g, top, total, g, key0, position, lanes), g)
        emit_product(isa, group, d, BLOCK,
                     left=lambda g, key: scores[g, key],
                     right=lambda key, columns: _load_values(isa, Vc, kv, key0 + key, columns, d),
                     start=lambda g, c: out[g, at(c, lanes)] * splat(shrink[g], lanes),
                     finish=lambda g, c, x: store(out, x, g, at(c, lanes)))
    tops, totals, outs = partial
    with T.serial(group) as g:
        store(tops, top[g], kv, split, g)
        store(totals, emit_total(total, g, lanes), kv, split, g)
        with T.serial(d // LANES) as i:
            store(outs, out[g, at(i * LANES)], kv, split, g, at(i * LANES))


def _emit_merge(partial, result, head, live_splits, splits, group, d):
    """The output of one head from its ranges' results: weighted by 2**(top - largest top), divided by the total."""
    tops, totals, outs = partial
    kv, g = T.Bind(head // group), T.Bind(head % group)
    top, total, weights = registers(1), registers(1), registers(splits)
    store(top, T.float32(LOWEST), 0)
    store(total, T.float32(0), 0)
    with T.serial(live_splits) as i:
        store(top, T.max(top[0], tops[kv, i, g]), 0)
    with T.serial(live_splits) as i:
        store(weights, exp2(tops[kv, i, g] - top[0], 1), i)
        store(total, total[0] + totals[kv, i, g] * weights[i], 0)
    inverse = splat(T.Bind(T.float32(1) / total[0]))
    with T.serial(d // QUANT) as block:
        sums = registers(QUANT)
        for half in (0, LANES):
            store(sums, f32(0.0), at(half))
        with T.serial(live_splits) as i:
            for half in (0, LANES):
                store(sums, sums[at(half)] + outs[kv, i, g, at(block * QUANT + half)] * splat(weights[i]), at(half))
        if len(result) == 2:
            emit_quantize_block(sums[at(0)] * inverse, sums[at(LANES)] * inverse, *result, 0, head * (d // QUANT) + block, 0)
        else:
            for half in (0, LANES):
                store(result[0], sums[at(half)] * inverse, 0, at(head * d + block * QUANT + half))


def attention_decode(heads, kv_heads, d, ctx, quantize, isa, name) -> tirx.PrimFunc:
    """Kernel (state int32[4], Qo float32 [1, heads, d], Kc, Vc, then A, S of [1, heads*d] if `quantize`, else O float32 [1, heads*d]).

    The token sees the keys 0 .. state[0]. UserError for shapes that `cache_shapes` refuses.
    """
    kshape, vshape = cache_shapes(kv_heads, ctx, d)
    group = heads // kv_heads
    splits = max(1, min(-(-TASKS // kv_heads), ctx // BLOCK))
    with IRBuilder() as ir, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"tirx.noalias": True, "global_symbol": name})
        state = T.arg("state", T.buffer((4,), "int32"))
        Q = T.arg("Qo", T.buffer((1, heads, d), "float32"))
        Kc, Vc = T.arg("Kc", T.buffer(kshape, "float16")), T.arg("Vc", T.buffer(vshape, "float16"))
        result = act_args(1, heads * d, 1) if quantize else (T.arg("O", T.buffer((1, heads * d), "float32")),)
        partial = [T.alloc_buffer((kv_heads, splits, group, *rest), "float32") for rest in ((), (), (d,))]
        position = T.Bind(T.max(T.min(state[0], T.int32(ctx - 1)), T.int32(0)))
        blocks = T.Bind(position // BLOCK + 1)
        live_splits = T.Bind(T.min(blocks, T.int32(splits)))
        with T.attr(T.int32(0), "pragma_parallel_launch_point", 1):
            with T.attr(T.int32(0), "pragma_parallel_barrier_when_finish", 1), T.parallel(kv_heads * live_splits) as task:
                # truncdiv and opaque: TVM lowers `//` by a variable to selections, and looks for minutes through several that nest.
                kv, split = (opaque(f(task, live_splits)) for f in (T.truncdiv, T.truncmod))
                first, stop = (opaque(T.truncdiv((split + i) * blocks, live_splits)) for i in range(2))
                _emit_split(isa, Q, Kc, Vc, partial, kv, split, first, stop, position, group, d)
            with T.parallel(heads) as head:
                _emit_merge(partial, result, head, live_splits, splits, group, d)
    return ir.get()
