"""Causal attention of a chunk of tokens on GPUs without matrix units (gfx10, gfx906, Vulkan), and latent attention on
all GPUs: products in vector instructions, with online softmax.

A row is a pair of a token and a query head. A workgroup has one KV head and a tile of rows, whose queries are in LDS;
each key and value is loaded once for the whole tile. The waves take blocks of 64 keys round robin, each with a softmax
of its own (`attention_rows.py`), and join their results at the end.
"""

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention.attention_rows import Rows
from mlc_amd.schedules.gpu.attention.attention_rows_size import STEP, dot_waves_of, query_dtype
from mlc_amd.schedules.gpu.attention.attention_step import ChunkRows, Step, group_of
from mlc_amd.schedules.gpu.attention.cache import UNIT, each_block
from mlc_amd.schedules.gpu.base.device import launch, uniform
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import at, put
from mlc_amd.schedules.gpu.base.step import opaque_zero
from mlc_amd.schedules.operators.attention import Attention, CausalAttention
from mlc_amd.schedules.space import Kernel, planned


@dataclass(frozen=True)
class Plan:
    threads: int = 128  # upper limit of the threads of a workgroup
    rows: int = 8  # rows of a workgroup; more rows share each load of K and V, but need more registers


FEWER_ROWS = 4  # rows for latent attention, which has the most columns, and if few lanes share a row's columns


def default_plan(attention: Attention, arch: Device) -> Plan:
    return Plan(rows=FEWER_ROWS) if attention.values or arch.wave < 16 else Plan()


def emit(step: Step, arch: Device, plan: Plan | None = None) -> None:
    """Emits the launch for the chunk of a step. Raises UserError for shapes that `group_of` refuses."""
    attention, m = step.layer, step.op.m
    kv_heads, d = attention.kv_heads, attention.d
    group = attention.group if attention.values else group_of(attention)
    plan, cache = plan or default_plan(attention, arch), step.cache.by_shifts()
    count, waves = plan.rows, dot_waves_of(arch, plan.rows, d, plan.threads)
    tiles = -(-m * group // count)
    threads = waves * arch.wave
    with launch((kv_heads, tiles), (arch.wave, waves)) as (kv, tile, lane, thread_wave):
        wave = uniform(arch, thread_wave)
        tid = T.Bind(wave * arch.wave + lane)
        chunk = step.chunk()
        first_row = T.Bind((tiles - 1 - tile) * count)  # workgroups with the most keys start first
        chunk_rows = ChunkRows(step, chunk, kv, first_row)
        # a loop of 0 or 1 iterations, because TVM does not allow barriers in an `if`
        with T.serial(T.cast(first_row // group < chunk.count, "int32")):
            queries = T.alloc_buffer((count, d), query_dtype(arch), scope="shared")
            units = count * d // UNIT
            for first in range(0, units, threads):
                place = T.Bind(T.min(first + tid, T.int32(units - 1)))  # threads without a unit repeat the last one
                r, unit = T.Bind(place // (d // UNIT)), T.Bind(place % (d // UNIT))
                columns, source = at(unit * UNIT, UNIT), chunk_rows.place(r)
                loaded = step.Q[source.step_row, source.head, columns]
                same = str(queries.dtype) == "float16"
                put(queries, loaded if same else T.cast(loaded, f"{queries.dtype}x{UNIT}"), r, columns)
            rows = Rows(arch, attention, queries, lane, wave, waves)
            rows.start()
            seen = [chunk.visible(chunk_rows.place(r).token) for r in range(count)]
            end, begin = seen[-1].end_block(STEP), T.Bind(seen[0].first_block(STEP) + wave)
            for i, block in each_block(cache, kv, chunk.slot, begin, end, waves, STEP):
                rows.step(block, lambda r, key: seen[r].sees(key), None, opaque_zero(step.state, i))
            chunk_rows.store(arch, rows.join_waves(), count, threads, tid)


CHOICES = {"threads": (32, 64, 128, 256), "rows": (4, 8, 16)}


@planned(CHOICES, lambda op, arch: default_plan(op.layer, arch))
def space(op: CausalAttention, arch: Device, plan: Plan) -> Kernel:
    waves = dot_waves_of(arch, plan.rows, op.layer.d, plan.threads)
    if not waves:
        raise ValueError(f"{plan} is less than a wave of {arch.name}")
    groups = op.layer.kv_heads * -(-op.m * op.layer.group // plan.rows)
    return Kernel((plan.rows, waves), groups, waves * arch.wave, plan.rows)
