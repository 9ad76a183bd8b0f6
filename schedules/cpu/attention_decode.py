"""Attention of one token against the cache: split-KV ("flash decoding") for x86 CPUs.

In: the rotated query (times log2(e)/sqrt(d)) and the caches of `rope_kv_write.py`. Out: the heads' outputs, float32 or int8 blocks.

A task is one KV head and one of `splits` ranges of its live keys; the query heads of a group share each key and value that is loaded. Tasks
leave (top, total, unscaled output), and after a barrier in the same launch the heads merge theirs. How many ranges there are follows from
the number of live keys, so that short contexts make few tasks and long ones enough for many threads.

Registers: scores of `vectors` registers of keys for each row of the group, then outputs of as many registers of columns. No sum ever crosses
lanes: a lane is a key in the first half and a column in the second.
"""
from mlc_amd.schedules.cpu.quantize import BLOCK as QUANT
from mlc_amd.schedules.cpu.quantize import act_args, emit_quantize_block
from mlc_amd.schedules.cpu.rope_kv_write import KEYS, cache_shapes
from mlc_amd.schedules.cpu.softmax import BLOCK, LOWEST, emit_block, emit_clear, emit_sum
from mlc_amd.schedules.cpu.vector import LANES, at, exp2, f32, prefetch, splat, store, widen
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

TASKS = 64                      # tasks of a long context: up to a dozen threads stay evenly loaded


def local(*shape):
    """A float32 buffer of this thread. Those that are indexed by constants only become registers."""
    return T.alloc_buffer(shape, "float32", scope="local")


def accumulators(isa):
    """Registers that a loop may add to: three quarters of the machine's, which leaves room for its operands."""
    return isa.registers * 3 // 4


def row_chunks(rows, isa):
    """Splits the rows of a group in chunks that leave a register block at least one vector wide: [(first, rows), ...]."""
    pieces = -(-rows // accumulators(isa))
    bounds = [i * rows // pieces for i in range(pieces + 1)]
    return [(a, b - a) for a, b in zip(bounds, bounds[1:], strict=False)]


def widest(limit, count):
    """The largest divisor of `count` that does not exceed `limit` (at least 1)."""
    return next(n for n in range(max(1, min(limit, count)), 0, -1) if count % n == 0)


def _scores(isa, Q, Kc, scores, kv, key0, group, d):
    """scores[g, 0:64] = Q[0, kv*group + g] . K of 64 keys."""
    lanes = isa.lanes
    for first, rows in row_chunks(group, isa):
        vectors = widest(accumulators(isa) // rows, min(4, BLOCK // lanes))
        for start in range(0, BLOCK, vectors * lanes):
            acc = [local(vectors * lanes) for _ in range(rows)]
            for g in range(rows):
                for v in range(vectors):
                    store(acc[g], f32(0.0, lanes), at(v * lanes, lanes))
            places = [(start + v * lanes) for v in range(vectors)]
            with T.serial(d) as c:
                keys = [widen(Kc[kv, key0 // KEYS + p // KEYS, c, at(p % KEYS, lanes)], lanes) for p in places]
                for g in range(rows):
                    q = splat(Q[0, kv * group + first + g, c], lanes)
                    for v in range(vectors):
                        a = at(v * lanes, lanes)
                        store(acc[g], acc[g][a] + q * keys[v], a)
            for g in range(rows):
                for v, p in enumerate(places):
                    store(scores, acc[g][at(v * lanes, lanes)], first + g, at(p, lanes))


def _outputs(isa, Vc, scores, shrink, out, kv, key0, group, d):
    """out[g] = out[g] * shrink[g] + scores[g, 0:64] . V of 64 keys."""
    lanes = isa.lanes
    for first, rows in row_chunks(group, isa):
        vectors = widest(min(4, accumulators(isa) // rows), d // lanes)
        with T.serial(d // (vectors * lanes)) as slab:
            column = T.Bind(slab * (vectors * lanes))
            acc = [local(vectors * lanes) for _ in range(rows)]
            for g in range(rows):
                for v in range(vectors):
                    store(acc[g], out[first + g, at(column + v * lanes, lanes)] * splat(shrink[first + g], lanes), at(v * lanes, lanes))
            with T.serial(BLOCK) as key:
                values = [widen(Vc[kv, key0 + key, at(column + v * lanes, lanes)], lanes) for v in range(vectors)]
                for g in range(rows):
                    p = splat(scores[first + g, key], lanes)
                    for v in range(vectors):
                        a = at(v * lanes, lanes)
                        store(acc[g], acc[g][a] + p * values[v], a)
            for g in range(rows):
                for v in range(vectors):
                    store(out, acc[g][at(v * lanes, lanes)], first + g, at(column + v * lanes, lanes))


def _prefetch_next(Kc, Vc, kv, key0, d):
    """Asks for the next block's keys and values: its lines arrive while this block is worked on."""
    line = 32                   # float16 in a cache line
    with T.serial(BLOCK // KEYS) as tile, T.serial(d * KEYS // line) as i:
        prefetch(Kc, kv, key0 // KEYS + tile, i * (line // KEYS), 0, ahead=BLOCK * d)
    with T.serial(BLOCK) as key, T.serial(d // line) as i:
        prefetch(Vc, kv, key0 + key, i * line, ahead=BLOCK * d)


def _emit_split(isa, state_vars, buffers, group, d):
    """One task: the keys of blocks first .. stop-1 for one KV head; the partial results go to tops, totals and outs at [kv, split]."""
    kv, split, first, stop, position = state_vars
    Q, Kc, Vc, tops, totals, outs = buffers
    lanes = isa.lanes
    top, total, out, scores, shrink = local(group), local(group, lanes), local(group, d), local(group, BLOCK), local(group)
    emit_clear(top, total, group, lanes)
    with T.serial(group) as g, T.serial(d // LANES) as i:
        store(out, f32(0.0), g, at(i * LANES))
    with T.serial(stop - first) as step:
        key0 = T.Bind((first + step) * BLOCK)
        _prefetch_next(Kc, Vc, kv, key0, d)
        _scores(isa, Q, Kc, scores, kv, key0, group, d)
        with T.serial(group) as g:
            store(shrink, emit_block(scores, g, top, total, g, key0, position, lanes), g)
        _outputs(isa, Vc, scores, shrink, out, kv, key0, group, d)
    with T.serial(group) as g:
        store(tops, top[g], kv, split, g)
        store(totals, emit_sum(total, g, lanes), kv, split, g)
        with T.serial(d // LANES) as i:
            store(outs, out[g, at(i * LANES)], kv, split, g, at(i * LANES))


def _emit_merge(head, live_splits, splits, partial, result, group, d):
    """The output of one head from its ranges' partial results: weighted by 2**(top - largest top), divided by the total."""
    tops, totals, outs = partial
    kv, g = T.Bind(head // group), T.Bind(head % group)
    cell, weights = local(2), local(splits)
    store(cell, T.float32(LOWEST), 0)
    store(cell, T.float32(0), 1)
    with T.serial(live_splits) as i:
        store(cell, T.max(cell[0], tops[kv, i, g]), 0)
    with T.serial(live_splits) as i:
        store(weights, exp2(tops[kv, i, g] - cell[0], 1), i)
        store(cell, cell[1] + totals[kv, i, g] * weights[i], 1)
    inverse = T.Bind(T.float32(1) / cell[1])
    with T.serial(d // QUANT) as block:
        acc = local(QUANT)
        halves = [at(i * LANES) for i in range(2)]
        for h in halves:
            store(acc, f32(0.0), h)
        with T.serial(live_splits) as i:
            for h in halves:
                store(acc, acc[h] + outs[kv, i, g, at(block * QUANT + h.base)] * splat(weights[i]), h)
        y = [acc[h] * splat(inverse) for h in halves]
        if len(result) == 2:
            emit_quantize_block(*y, *result, 0, head * (d // QUANT) + block, 0)
        else:
            for h, value in zip(halves, y, strict=True):
                store(result[0], value, 0, at(head * d + block * QUANT + h.base))


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
                # truncdiv: TVM lowers `//` by a variable to nested selections that its simplifier takes minutes to look through.
                kv, split = (T.Bind(f(task, live_splits)) for f in (T.truncdiv, T.truncmod))
                first, stop = (T.Bind(T.truncdiv((split + i) * blocks, live_splits)) for i in range(2))
                _emit_split(isa, (kv, split, first, stop, position), (Q, Kc, Vc, *partial), group, d)
            with T.parallel(heads) as head:
                _emit_merge(head, live_splits, splits, partial, result, group, d)
    return ir.get()
