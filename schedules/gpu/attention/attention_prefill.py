"""Causal attention of a chunk of tokens on AMD's matrix units (`attention_rows_matrix.py`), with online softmax.

A row is a pair of a token and a query head. A wave has one KV head and tiles of 16 rows; it uses neither shared memory
nor barriers. If a chunk has so few rows that compute units would be idle, the waves of a workgroup have the same rows
and share the blocks of keys; at the end they join their results through LDS.
"""

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention.attention_rows_matrix import MatrixRows
from mlc_amd.schedules.gpu.attention.attention_rows_size import waves_of
from mlc_amd.schedules.gpu.attention.attention_step import ChunkRow, ChunkRows, Step, group_of, with_sink
from mlc_amd.schedules.gpu.attention.cache import UNIT, Visible, each_block
from mlc_amd.schedules.gpu.base.device import launch, rcp, uniform
from mlc_amd.schedules.gpu.base.matrices import SIDE
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import at, opaque
from mlc_amd.schedules.gpu.base.step import checked_threads, once, opaque_zero
from mlc_amd.schedules.operators.attention import Attention, CausalAttention
from mlc_amd.schedules.space import Kernel, planned


@dataclass(frozen=True)
class Plan:
    threads: int = 128  # threads of a workgroup
    keys: int = 32  # keys of a block; whether a weight is too large is tested once for each block
    tiles: int = 1  # tiles of 16 rows of a wave; each key and value is loaded once for all of them
    shared: int = 0  # 1 if the waves of a workgroup have the same rows

    def workgroups(self, layer: Attention, m: int, arch: Device) -> int:
        """The number of workgroups for each KV head."""
        waves = 1 if self.shared else self.threads // arch.wave
        return -(-m * layer.group // (SIDE * self.tiles * waves))


def default_plan(layer: Attention, m: int, arch: Device) -> Plan:
    """The rule for a chunk of m tokens: waves share rows if there would be fewer workgroups than compute units."""
    plan = Plan(keys=arch.wave)
    few = layer.kv_heads * plan.workgroups(layer, m, arch) < arch.units
    return Plan(keys=arch.wave, shared=int(few and _fits(arch, layer, plan)))


def _fits(arch: Device, layer: Attention, plan: Plan) -> bool:
    """Whether LDS suffices for the results of all waves of a workgroup, if these have the same rows."""
    try:
        return waves_of(arch, SIDE * plan.tiles, layer.d, plan.threads, plan.keys) == plan.threads // arch.wave
    except ValueError:
        return False


def emit(step: Step, arch: Device, plan: Plan | None = None) -> None:
    """Emits the launch for the chunk of a step. Raises UserError for shapes that `group_of` refuses, and for the layout
    "rows"."""
    step.refuse_blocks()
    layer, m = step.layer, step.op.m
    group, plan, cache = group_of(layer), plan or default_plan(layer, m, arch), step.cache
    waves, size, count = plan.threads // arch.wave, plan.keys, SIDE * plan.tiles
    workgroups = plan.workgroups(layer, m, arch)
    with launch((layer.kv_heads, workgroups), (arch.wave, waves)) as (kv, reverse, lane, thread_wave):
        chunk, number = step.chunk(), uniform(arch, thread_wave)
        workgroup = workgroups - 1 - reverse  # workgroups with the most keys start first
        first_row = T.Bind((workgroup if plan.shared else workgroup * waves + number) * count)
        first_token = T.Bind(first_row // group)
        with once(first_token < chunk.count):
            rows = MatrixRows(arch, layer, count, lane, number, waves, size)
            rows.start()
            chunk_rows = ChunkRows(step, chunk, kv, first_row)
            places = [chunk_rows.place(t * SIDE + rows.row) for t in range(plan.tiles)]
            rows.load_queries(lambda t, c: step.Q[places[t].step_row, places[t].head, at(c * UNIT, UNIT)])
            seen = [chunk.visible(place.token) for place in places]
            last_token = T.min((first_row + count - 1) // group, chunk.count - 1)
            first, last = (chunk.visible(token) for token in (first_token, last_token))
            all_see = Visible(last.first, first.end)
            begin, end, distance = T.Bind(first.first_block(size)), last.end_block(size), 1
            if plan.shared:
                begin, distance = T.Bind(begin + number), waves
            for i, block in each_block(cache, kv, chunk.slot, begin, end, distance, size):
                whole = all_see.covers(block.key0, size)
                rows.step(block, lambda t, key: seen[t].sees(key), whole, opaque_zero(step.state, i))
            if plan.shared:
                tid = T.Bind(number * arch.wave + lane)
                chunk_rows.store(arch, rows.join_waves(), count, plan.threads, tid)
            else:
                _store(step, arch, rows, places)


def _store(step: Step, arch: Device, rows: MatrixRows, places: list[ChunkRow]) -> None:
    """Stores what the lanes of a wave have."""
    for t, place in enumerate(places):
        total = with_sink(step.sinks, place.head, rows.row_total(t), rows.top[t], shift=0)
        inverse = opaque(rcp(total))
        with T.If(place.valid), T.Then():
            for sums, column, live in rows.own_columns(t):
                y = [opaque(x * inverse) for x in sums]
                step.store(arch, y, place.step_row, T.Bind(place.head * rows.d + column), live)


CHOICES = {"threads": (32, 64, 128, 256), "keys": (32, 64), "tiles": (1, 2), "shared": (0, 1)}


@planned(CHOICES, lambda op, arch: default_plan(op.layer, op.m, arch))
def space(op: CausalAttention, arch: Device, plan: Plan) -> Kernel:
    layer, threads = op.layer, checked_threads(arch, plan.threads)
    if plan.shared and not _fits(arch, layer, plan):
        raise ValueError(f"{plan} takes more LDS than {arch.name} has")
    groups = layer.kv_heads * plan.workgroups(layer, op.m, arch)
    return Kernel(plan, groups, threads, plan.keys * layer.d * 2 / arch.wave)
