"""Causal attention of a chunk of tokens against the cache: blocked, with online softmax ("flash attention"), for x86 CPUs.

In: the rotated queries (times log2(e)/sqrt(d)) and the caches of `rope_kv_write.py`, which already hold the chunk's own keys and values.
Out: the heads' outputs, float32 or int8 blocks, of the live tokens.

A task is one KV head and a tile of tokens; its rows are the tile's tokens times the heads of the group. For each block of 64 keys it converts
K and V to float32 once, then works through its rows in register blocks of ROWS rows by as many vectors as fit: scores, softmax, outputs.
Blocks of keys that no row of a register block may see are skipped. Tasks of later tiles see more keys, so threads take them in turns.
"""
from mlc_amd.schedules.cpu.attention_decode import accumulators, local, widest
from mlc_amd.schedules.cpu.norm import live_tokens
from mlc_amd.schedules.cpu.quantize import BLOCK as QUANT
from mlc_amd.schedules.cpu.quantize import act_args, emit_quantize_block
from mlc_amd.schedules.cpu.rope_kv_write import KEYS, cache_shapes
from mlc_amd.schedules.cpu.softmax import BLOCK, emit_block, emit_clear, emit_sum
from mlc_amd.schedules.cpu.vector import LANES, at, f32, splat, store, widen
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

ROWS = 6                        # rows of a register block
TASK_ROWS = 96                  # rows of a task: enough to hide the conversion of K and V, few enough that they stay in the cache


def _load_queries(Q, queries, kv, token0, rows, group, d):
    """The task's rows side by side, in order of tokens."""
    with T.serial(rows) as row, T.serial(d // LANES) as i:
        store(queries, Q[token0 + row // group, kv * group + row % group, at(i * LANES)], row, at(i * LANES))


def _convert(Kc, Vc, keys, values, kv, key0, d):
    """64 keys and values to float32: keys [d, 64], values [64, d]."""
    with T.serial(d) as c:
        for tile in range(BLOCK // KEYS):
            store(keys, widen(Kc[kv, key0 // KEYS + tile, c, at(0)]), c, at(tile * KEYS))
    with T.serial(BLOCK) as key, T.serial(d // LANES) as i:
        store(values, widen(Vc[kv, key0 + key, at(i * LANES)]), key, at(i * LANES))


def _multiply(isa, left, right, start, finish, inner, columns):
    """Register blocks of a matrix product: `finish(row, column, sum)` gets start(row, column) + sum over i of left(row, i) * right[i, column..].

    Rows are 0 .. ROWS-1, columns step by a vector; `inner` is the trip count of i.
    """
    lanes = isa.lanes
    vectors = widest(accumulators(isa) // ROWS, columns // lanes)
    with T.serial(columns // (vectors * lanes)) as slab:
        places = [slab * (vectors * lanes) + v * lanes for v in range(vectors)]
        acc = [local(vectors * lanes) for _ in range(ROWS)]
        cells = [(acc[r], r, at(v * lanes, lanes), at(p, lanes)) for r in range(ROWS) for v, p in enumerate(places)]
        for a, row, lane, column in cells:
            store(a, start(row, column), lane)
        with T.serial(inner) as i:
            b = {id(p): T.Bind(right[i, at(p, lanes)]) for p in places}
            for r in range(ROWS):
                a = splat(left(r, i), lanes)
                for v, p in enumerate(places):
                    lane = at(v * lanes, lanes)
                    store(acc[r], acc[r][lane] + a * b[id(p)], lane)
        for a, row, lane, column in cells:
            finish(row, column, a[lane])


def _emit_results(result, out, total, lanes, kv, token0, rows, group, d, p):
    """Divides each row by its total and stores it as token row // group, head kv*group + row % group."""
    with T.serial(rows) as row:
        token, head = T.Bind(token0 + row // group), T.Bind(kv * group + row % group)
        inverse = splat(T.Bind(T.float32(1) / emit_sum(total, row, lanes)))
        with T.serial(d // QUANT) as block:
            halves = [block * QUANT + i * LANES for i in range(2)]
            y = [out[row, at(h)] * inverse for h in halves]
            if len(result) == 2:
                emit_quantize_block(*y, *result, token // p, head * (d // QUANT) + block, token % p)
            else:
                for h, value in zip(halves, y, strict=True):
                    store(result[0], value, token, at(head * d + h))


def _emit_task(isa, Q, Kc, Vc, result, kv, token0, tokens, position, group, tile, d, p):
    """One task: `tokens` live tokens from token0 of the chunk, whose first token stands at `position` in the sequence."""
    lanes = isa.lanes
    padded = -(-tile * group // ROWS) * ROWS
    queries, out, keys, values = local(padded, d), local(padded, d), local(d, BLOCK), local(BLOCK, d)
    scores, shrink, top, total = local(ROWS, BLOCK), local(ROWS), local(padded), local(padded, lanes)
    rows = T.Bind(tokens * group)
    _load_queries(Q, queries, kv, token0, rows, group, d)
    emit_clear(top, total, padded, lanes)
    with T.serial(padded) as row, T.serial(d // LANES) as i:
        store(out, f32(0.0), row, at(i * LANES))
    first_key = T.Bind(position + token0)           # the last key that the tile's first token sees
    with T.serial((first_key + tokens - 1) // BLOCK + 1) as key_block:
        key0 = T.Bind(key_block * BLOCK)
        _convert(Kc, Vc, keys, values, kv, key0, d)
        # Register blocks before `skip` hold only tokens that stand before this block of keys.
        skip = T.Bind(T.max(key0 - first_key, T.int32(0)) * group // ROWS)
        with T.serial((rows + ROWS - 1) // ROWS - skip) as step:
            row0 = T.Bind((skip + step) * ROWS)
            _multiply(isa, lambda r, i: queries[row0 + r, i], keys, lambda r, c: f32(0.0, lanes),
                      lambda r, c, x: store(scores, x, r, c), d, BLOCK)
            with T.serial(ROWS) as r:
                last = T.Bind(first_key + (row0 + r) // group)
                store(shrink, emit_block(scores, r, top, total, row0 + r, key0, last, lanes), r)
            seen = T.Bind(T.min(first_key + (row0 + ROWS - 1) // group - key0 + 1, T.int32(BLOCK)))
            _multiply(isa, lambda r, i: scores[r, i], values, lambda r, c: out[row0 + r, c] * splat(shrink[r], lanes),
                      lambda r, c, x: store(out, x, row0 + r, c), seen, d)
    _emit_results(result, out, total, lanes, kv, token0, rows, group, d, p)


def attention_prefill(heads, kv_heads, d, ctx, m, p, quantize, isa, name) -> tirx.PrimFunc:
    """Kernel (state int32[4], Qo float32 [m, heads, d], Kc, Vc, then A, S of [m, heads*d] in tiles of p tokens if `quantize`, else
    O float32 [m, heads*d]).

    Token i sees the keys 0 .. state[0] + i. Tokens that are not live, or at or beyond ctx, are left out. UserError for shapes that
    `cache_shapes` refuses.
    """
    kshape, vshape = cache_shapes(kv_heads, ctx, d)
    group = heads // kv_heads
    tile = min(m, max(1, TASK_ROWS // group))
    with IRBuilder() as ir, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"tirx.noalias": True, "global_symbol": name})
        state = T.arg("state", T.buffer((4,), "int32"))
        Q = T.arg("Qo", T.buffer((m, heads, d), "float32"))
        Kc, Vc = T.arg("Kc", T.buffer(kshape, "float16")), T.arg("Vc", T.buffer(vshape, "float16"))
        result = act_args(m, heads * d, p) if quantize else (T.arg("O", T.buffer((m, heads * d), "float32")),)
        position = T.Bind(T.max(state[0], T.int32(0)))
        live = T.Bind(T.min(live_tokens(state, m), ctx - position))
        with (T.attr(T.int32(0), "pragma_parallel_launch_point", 1), T.attr(T.int32(0), "pragma_parallel_stride_pattern", 1),
              T.parallel(T.max((live + tile - 1) // tile, T.int32(0)) * kv_heads) as task):
            token0 = T.Bind(task // kv_heads * tile)
            tokens = T.Bind(T.min(live - token0, T.int32(tile)))
            _emit_task(isa, Q, Kc, Vc, result, T.Bind(task % kv_heads), token0, tokens, position, group, tile, d, p)
    return ir.get()
