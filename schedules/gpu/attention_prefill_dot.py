"""Causal attention of a chunk of tokens on GPUs without matrix units (gfx10, gfx906, Vulkan): products per lane, with
online softmax.

In: the rotated queries and the cache, which already contains the chunk's own keys and values. Out: the heads' outputs
in an activation layout of `quantize.py`, of the live rows.

A workgroup has a KV head and a tile of rows (token x head of the group), whose queries are in LDS; each K and V that is
loaded serves the whole tile. Its waves take blocks of 64 keys round robin, each with its own softmax
(`attention_rows.py`), and join at the end.
"""

from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.attention import Attention
from mlc_amd.schedules.gpu.attention_rows import STEP
from mlc_amd.schedules.gpu.attention_rows_vulkan import query_dtype, rows_of, waves_of
from mlc_amd.schedules.gpu.cache import UNIT, Cache, Chunk, visible
from mlc_amd.schedules.gpu.device import each, launch, rcp, uniform
from mlc_amd.schedules.gpu.quantize import WIDTH, emit_store
from mlc_amd.schedules.gpu.registers import at, opaque, put
from mlc_amd.schedules.gpu.softmax import group_of, output_args, sinks_arg, with_sink
from mlc_amd.schedules.gpu.step import kernel, opaque_zero, state_arg


@dataclass(frozen=True)
class Plan:
    """threads  of a workgroup, at most
    rows     of a workgroup: more share each load of K and V, and need more registers
    """

    threads: int = 128
    rows: int = 8


def attention_prefill_dot(attention: Attention, m, layout, arch, name, plan=None) -> tirx.PrimFunc:
    """Kernel (state int32[4], Qo float16 [m, heads, width], Kc, Vc, [Sinks float32 [heads]], then the output [m,
    heads*d] in that `layout`).

    Nothing is stored for rows that are not live. UserError for shapes that `cache_types`, `group_of` or `output_args`
    refuses.
    """
    heads, kv_heads, d = attention.heads, attention.kv_heads, attention.d
    group, plan = group_of(heads, kv_heads), plan or Plan()
    count, waves = plan.rows, waves_of(arch, plan.rows, d, plan.threads)
    tiles = -(-m * group // count)
    threads = waves * arch.wave
    with kernel(name) as ir:
        state = state_arg()
        Q = T.arg("Qo", T.buffer((m, heads, attention.width), "float16"))
        cache, sinks = Cache(attention, shifts=True), sinks_arg(attention)
        out = output_args(attention, m, layout)
        with launch((kv_heads, tiles), (arch.wave, waves)) as (kv, tile, lane, thread_wave):
            wave = uniform(arch, thread_wave)
            tid = T.Bind(wave * arch.wave + lane)
            chunk = Chunk(state, m, attention)
            first_row = T.Bind((tiles - 1 - tile) * count)  # the longest first

            def token(r):
                """The token of row r; rows beyond the chunk compute the same as its last one and are not stored."""
                return T.min((first_row + r) // group, chunk.count - 1)

            # a loop of 0 or 1 iterations: TVM refuses barriers in an `if`
            with T.serial(T.cast(first_row // group < chunk.count, "int32")):
                queries = T.alloc_buffer((count, d), query_dtype(arch), scope="shared")
                _load_queries(Q, queries, token, kv, group, first_row, count, d, tid, threads)
                rows = rows_of(arch, attention, count, lane, wave, waves)
                rows.start()
                seen = [visible(attention, chunk.position(token(r))) for r in range(count)]
                steps, first_step = seen[-1].end_block(STEP), seen[0].first_block(STEP)
                with T.serial(T.max((steps - first_step - wave + waves - 1) // waves, T.int32(0))) as i:
                    block = cache.block(kv, T.Bind((wave + i * waves + first_step) * STEP))
                    rows.step(block, queries, lambda r, key: seen[r].sees(key), opaque_zero(state, i))
                quad = rows.join_waves(wave, waves)
                for i in each(arch, -(-count * d // WIDTH // threads)):
                    first = i * threads
                    place = T.Bind(T.min(first + tid, T.int32(count * d // WIDTH - 1)) * WIDTH)
                    r, column = T.Bind(place // d), T.Bind(place % d)
                    top, total, values = quad(r, column)
                    row = T.Bind(first_row + r)
                    head = kv * group + row % group
                    inverse = opaque(rcp(with_sink(sinks, head, total, top)))
                    valid = tirx.all(row // group < chunk.count, first + tid < count * d // WIDTH)
                    values = [opaque(v * inverse) for v in values]
                    emit_store(arch, layout, out, values, T.Bind(token(r)), T.Bind(head * d + column), valid)
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
