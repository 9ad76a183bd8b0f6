"""Causal attention of a chunk of tokens on GPUs without matrix units (gfx10, gfx906, Vulkan): products per lane, with
online softmax.

In: the rotated queries and the caches of `rope_kv_write.py`, which already hold the chunk's own keys and values. Out:
the heads' outputs in an activation layout of `quantize.py`, of the live tokens.

A workgroup has a KV head and a tile of rows (token x head of the group), whose queries lie in LDS; each K and V that is
loaded serves the whole tile. Its waves take steps of 64 keys in turns, each with its own softmax (`attention_rows.py`),
and join at the end.
"""

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention_rows import STEP, at, group_of, hold, put
from mlc_amd.schedules.gpu.attention_rows_vulkan import query_dtype, rows_of, waves_of
from mlc_amd.schedules.gpu.device import each, launch, rcp, uniform
from mlc_amd.schedules.gpu.quantize import WIDTH, act_args, emit_store
from mlc_amd.schedules.gpu.rope_kv_write import UNIT, cache_shapes


@dataclass(frozen=True)
class Plan:
    """threads  of a workgroup, at most
    rows     of a workgroup: more share K and V, and need more registers
    """

    threads: int = 128
    rows: int = 8


def attention_prefill_dot(heads, kv_heads, d, ctx, m, act_out, arch, name, plan=None) -> tirx.PrimFunc:
    """Kernel (state int32[4], Qo float16 [m, heads, d], Kc, Vc, then the output [m, heads*d] in the layout act_out).

    Token i sees the keys 0 .. state[0] + i. Nothing is stored for tokens that are not live. UserError for shapes that
    `cache_shapes` or `group_of` refuses.
    """
    group, (kshape, vshape), plan = group_of(heads, kv_heads), cache_shapes(kv_heads, ctx, d), plan or Plan()
    count, waves = plan.rows, waves_of(arch, plan.rows, d, plan.threads)
    tiles = -(-m * group // count)
    threads = waves * arch.wave
    with IRBuilder() as ir, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"tirx.noalias": True, "global_symbol": name})
        state = T.arg("state", T.buffer((4,), "int32"))
        Q = T.arg("Qo", T.buffer((m, heads, d), "float16"))
        Kc, Vc = T.arg("Kc", T.buffer(kshape, "float16")), T.arg("Vc", T.buffer(vshape, "float16"))
        out = act_args(m, heads * d, act_out)
        with launch((kv_heads, tiles), (arch.wave, waves)) as (kv, tile, lane, thread_wave):
            wave = uniform(arch, thread_wave)
            tid = T.Bind(wave * arch.wave + lane)
            position = T.Bind(T.max(T.min(state[0], T.int32(ctx - 1)), T.int32(0)))
            tokens = T.Bind(T.min(T.min(state[1], T.int32(m)), ctx - position))
            first_row = T.Bind((tiles - 1 - tile) * count)  # the longest first

            def token(r):
                """The token of row r; rows beyond the chunk compute what its last one does."""
                return T.min((first_row + r) // group, tokens - 1)

            # a loop of 0 or 1 steps: TVM refuses barriers in an `if`
            with T.serial(T.cast(first_row // group < tokens, "int32")):
                queries = T.alloc_buffer((count, d), query_dtype(arch), scope="shared")
                _load_queries(Q, queries, token, kv, group, first_row, count, d, tid, threads)
                rows = rows_of(arch, count, d, lane, wave, waves)
                rows.start()
                ends = [T.Bind(position + token(r) + 1) for r in range(count)]
                steps = T.Bind((ends[-1] + STEP - 1) // STEP)
                with T.serial(T.max((steps - wave + waves - 1) // waves, T.int32(0))) as i:
                    rows.step(
                        Kc, Vc, kv, T.Bind((wave + i * waves) * STEP), queries, lambda r: ends[r], T.Bind(state[3] & i)
                    )
                quad = rows.join_waves(wave, waves)
                for i in each(arch, -(-count * d // WIDTH // threads)):
                    first = i * threads
                    place = T.Bind(T.min(first + tid, T.int32(count * d // WIDTH - 1)) * WIDTH)
                    r, column = T.Bind(place // d), T.Bind(place % d)
                    _, total, values = quad(r, column)
                    inverse = hold(rcp(total))
                    row = T.Bind(first_row + r)
                    valid = tirx.all(row // group < tokens, first + tid < count * d // WIDTH)
                    head_column = T.Bind((kv * group + row % group) * d + column)
                    emit_store(
                        arch, act_out, out, [hold(v * inverse) for v in values], T.Bind(token(r)), head_column, valid
                    )
    return ir.get()


def _load_queries(Q, queries, token, kv, group, first_row, count, d, tid, threads):
    """Copies the tile's queries into LDS, 16 bytes at a time."""
    units = count * d // UNIT
    for first in range(0, units, threads):
        place = T.Bind(T.min(first + tid, T.int32(units - 1)))  # surplus threads repeat the last one
        r, unit = T.Bind(place // (d // UNIT)), T.Bind(place % (d // UNIT))
        loaded = Q[token(r), kv * group + (first_row + r) % group, at(unit * UNIT, UNIT)]
        put(
            queries,
            loaded if str(queries.dtype) == "float16" else T.cast(loaded, f"{queries.dtype}x{UNIT}"),
            r,
            at(unit * UNIT, UNIT),
        )
