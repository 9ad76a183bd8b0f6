"""Causal attention of a chunk of tokens on AMD's matrix units (`attention_rows_matrix.py`), with online softmax.

In: the rotated queries and the cache, which already contains the chunk's own keys and values. Out: the heads' outputs
in an activation layout of `quantize.py`, of the live rows.

A wave has a KV head and tiles of 16 rows (token x head of the group), without shared memory or barriers. In a chunk of
so few rows that compute units would have nothing to do, the waves of a workgroup have the same rows and share out the
blocks of keys; what they have of each row joins through LDS in the end.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention.attention_rows_matrix import MatrixRows
from mlc_amd.schedules.gpu.attention.attention_rows_size import waves_of
from mlc_amd.schedules.gpu.attention.attention_step import Step
from mlc_amd.schedules.gpu.attention.cache import UNIT, Chunk, Pages, Visible, visible
from mlc_amd.schedules.gpu.attention.softmax import group_of, with_sink
from mlc_amd.schedules.gpu.base.device import launch, rcp, uniform
from mlc_amd.schedules.gpu.base.matrix_unit import SIDE
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.gpu.base.registers import at, opaque
from mlc_amd.schedules.gpu.base.step import once, opaque_zero, when
from mlc_amd.schedules.gpu.base.threads import checked_threads
from mlc_amd.schedules.operators.attention import Attention, CausalAttention
from mlc_amd.schedules.space import Kernel, Space
from mlc_amd.schedules.tir import Expr


@dataclass(frozen=True)
class Plan:
    """threads  of a workgroup
    keys     of a block: whether a weight would be too large is looked at once for all of them
    tiles    of 16 rows in a wave: each key and value that is loaded serves them all
    shared   whether the waves of a workgroup have the same rows
    """

    threads: int = 128
    keys: int = 32
    tiles: int = 1
    shared: int = 0

    def workgroups(self, layer: Attention, m: int, arch: Device) -> int:
        """Of each KV head."""
        waves = 1 if self.shared else self.threads // arch.wave
        return -(-m * layer.group // (SIDE * self.tiles * waves))


def default_plan(layer: Attention, m: int, arch: Device) -> Plan:
    """The rule for a chunk of m tokens: rows are shared where there are fewer workgroups than compute units."""
    plan = Plan(keys=arch.wave)
    few = layer.kv_heads * plan.workgroups(layer, m, arch) < arch.units
    return Plan(keys=arch.wave, shared=int(few and _fits(arch, layer, plan)))


def _fits(arch: Device, layer: Attention, plan: Plan) -> bool:
    """Whether LDS suffices for what all waves of a workgroup have of the same rows."""
    try:
        return waves_of(arch, SIDE * plan.tiles, layer.d, plan.threads, plan.keys) == plan.threads // arch.wave
    except ValueError:
        return False


class Place(NamedTuple):
    """Of a row: its token in the chunk and its row in the step, its head, and whether there is such a row."""

    token: Expr
    step_row: Expr
    head: Expr
    valid: Expr


def place_of(layer: Attention, chunk: Chunk, kv: Expr, row: Expr) -> Place:
    """Rows beyond the chunk compute the same as its last token and are not stored."""
    group = layer.group
    token = T.Bind(T.min(row // group, chunk.count - 1))
    return Place(token, T.Bind(chunk.row(token)), T.Bind(kv * group + row % group), row // group < chunk.count)


def emit(step: Step, arch: Device, plan: Plan | None = None) -> None:
    """The launch for the chunk of a step. Nothing is stored for rows that are not live. UserError for shapes that
    `group_of` refuses, or for the layout "rows"."""
    step.refuse_blocks()
    layer, m = step.layer, step.op.m
    group, plan, cache = group_of(layer), plan or default_plan(layer, m, arch), step.cache
    waves, size, count = plan.threads // arch.wave, plan.keys, SIDE * plan.tiles
    workgroups = plan.workgroups(layer, m, arch)
    with launch((layer.kv_heads, workgroups), (arch.wave, waves)) as (kv, reverse, lane, thread_wave):
        chunk, number = step.chunk(), uniform(arch, thread_wave)
        workgroup = workgroups - 1 - reverse  # the longest first
        first_row = T.Bind((workgroup if plan.shared else workgroup * waves + number) * count)
        first_token = T.Bind(first_row // group)
        with once(first_token < chunk.count):
            rows = MatrixRows(arch, layer, count, lane, number, waves, size)
            rows.start()
            places = [place_of(layer, chunk, kv, T.Bind(first_row + t * SIDE + rows.row)) for t in range(plan.tiles)]
            rows.load_queries(lambda t, c: step.Q[places[t].step_row, places[t].head, at(c * UNIT, UNIT)])
            seen = [visible(layer, chunk.position(place.token)) for place in places]
            last_token = T.min((first_row + count - 1) // group, chunk.count - 1)
            first, last = (visible(layer, chunk.position(token)) for token in (first_token, last_token))
            all_see = Visible(last.first, first.end)
            begin, end, distance = T.Bind(first.first_block(size)), last.end_block(size), 1
            if plan.shared:
                begin, distance = T.Bind(begin + number), waves

            def first_key(block: Expr) -> Expr:
                """Of the block with that number; of the last one for those after it."""
                return T.Bind(T.min(block, end - 1) * size)

            pages = Pages(cache, chunk.slot, [first_key(begin)])
            with T.serial(T.max((end - begin + (distance - 1)) // distance, T.int32(0))) as i:
                block = T.Bind(begin + i * distance)
                (page,) = pages.take(first_key(block + distance))
                keys = cache.block(kv, T.Bind(block * size), page, size)
                rows.step(
                    keys, lambda t, key: seen[t].sees(key), all_see.covers(keys.key0, size), opaque_zero(step.state, i)
                )
            if plan.shared:
                _store_joined(step, arch, rows, number, waves, lambda r: place_of(layer, chunk, kv, first_row + r))
            else:
                _store(step, arch, rows, places)


def _store(step: Step, arch: Device, rows: MatrixRows, places: list[Place]) -> None:
    """Stores what the lanes of a wave have."""
    for t, place in enumerate(places):
        total = with_sink(step.sinks, place.head, rows.row_total(t), rows.top[t], shift=0)
        inverse = opaque(rcp(total))
        with T.If(place.valid), T.Then():
            for sums, column, live in rows.own_columns(t):
                y = [opaque(x * inverse) for x in sums]
                step.store(arch, y, place.step_row, T.Bind(place.head * rows.d + column), live)


def _store_joined(step: Step, arch: Device, rows: MatrixRows, wave: Expr, waves: int, place_of_row) -> None:
    """Joins what the waves of a workgroup have of the same rows, and stores it."""
    quad, quads = rows.join_waves(), rows.d // WIDTH
    threads, count = waves * arch.wave, rows.count * quads
    for first in range(0, count, threads):
        number = T.Bind(first + wave * arch.wave + rows.lane)
        with when(None if first + threads <= count else number < count):
            r, column = T.Bind(number // quads), T.Bind(number % quads * WIDTH)
            top, total, values = quad(r, column)
            place = place_of_row(r)
            inverse = opaque(rcp(with_sink(step.sinks, place.head, total, top)))
            y = [opaque(x * inverse) for x in values]
            step.store(arch, y, place.step_row, T.Bind(place.head * rows.d + column), place.valid)


CHOICES = {"threads": (32, 64, 128, 256), "keys": (32, 64), "tiles": (1, 2), "shared": (0, 1)}


def space(op: CausalAttention, arch: Device) -> Space:
    layer = op.layer

    def kernel(plan: Plan) -> Kernel:
        threads = checked_threads(arch, plan.threads)
        if plan.shared and not _fits(arch, layer, plan):
            raise ValueError(f"{plan} takes more LDS than {arch.name} has")
        groups = layer.kv_heads * plan.workgroups(layer, op.m, arch)
        return Kernel(plan, groups, threads, plan.keys * layer.d * 2 / arch.wave)

    return Space(Plan, CHOICES, default_plan(layer, op.m, arch), kernel)
