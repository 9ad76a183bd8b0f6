"""Latent attention of single rows, 1 to SLOTS tokens of any sequences, on cooperative matrices: split-KV
attention ("flash decoding") in two launches.

A workgroup computes a tile of a token's heads for a split of its keys (attention_latent_wave.py), and stores its
unscaled results in the buffer Parts. The second launch joins the splits.
"""

from dataclasses import dataclass, replace

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention.attention_splits import FIELD, Splits, split_of, splits_of_rows
from mlc_amd.schedules.gpu.attention.attention_step import Step, scratch_shapes
from mlc_amd.schedules.gpu.attention.cache import clamped_position, row_slot, visible
from mlc_amd.schedules.gpu.base.device import launch, uniform, wave_max
from mlc_amd.schedules.gpu.base.profiles import Device, Profile
from mlc_amd.schedules.gpu.base.registers import opaque
from mlc_amd.schedules.gpu.latent.attention_latent import CHOICES, rows_of
from mlc_amd.schedules.gpu.latent.attention_latent_tiles import Tile, checked_shape, part_size, shape_of, suits
from mlc_amd.schedules.gpu.latent.attention_latent_wave import WAVES, Wave, attend, chunks_of, join, place_in_tile
from mlc_amd.schedules.operators.attention import Attention, CausalAttention
from mlc_amd.schedules.space import Kernel, planned

MOST = (1 << FIELD) - 1  # largest number of splits of a row


@dataclass(frozen=True)
class LatentDecodePlan(Tile):
    """The tile of a token's heads. fill: number of workgroups for each compute unit into which long contexts are
    split."""


# Few queries in registers: for archs with few registers, or with an unknown number.
_SMALL = tuple(LatentDecodePlan(waves, rows, held=4, least=4) for rows in (32, 16) for waves in (8, 4, 2, 1))
# All queries in registers. This plan takes the least time on an H200 with 20 heads of 576 columns and 0 to 16384 tokens
# in the cache.
_NARROW = LatentDecodePlan(4, 16, buffers=2, fill=2, least=2)
_WIDE = LatentDecodePlan(4, 32, buffers=2, fill=2, least=4)


def _preferred(m: int, arch: Profile) -> tuple[LatentDecodePlan, ...]:
    """The plans for m rows, in the order of preference."""
    if not arch.registers or arch.query_registers:
        return _SMALL
    return (_NARROW, *_SMALL) if m == 1 else (_WIDE, _NARROW, *_SMALL)


def plan_of(attention: Attention, m: int, arch: Device) -> LatentDecodePlan | None:
    """The plan for m rows: the first of `_preferred` that fits the layer and the arch; None if none fits."""
    if not suits(arch, attention) or attention.heads < arch.fragment[0]:
        return None
    plans, most = _preferred(m, arch), attention.heads + arch.fragment[0]
    return next((plan for plan in plans if plan.rows < most and shape_of(plan, attention, arch)), None)


def splits_of(plan: LatentDecodePlan, attention: Attention, m: int, arch: Profile) -> Splits:
    """How the keys of m rows are split among workgroups. Raises ValueError for a plan that does not fit."""
    parts = -(-attention.heads // plan.rows)
    ((elements,), _), _ = scratch_shapes(attention.heads, attention.value_d).values()
    fill = min(-(-plan.fill * arch.units // parts), elements // part_size(plan, attention) // parts - m)
    if fill < 1 or not shape_of(plan, attention, arch):
        raise ValueError(f"{plan} does not suit {attention} on {arch.name}")
    count = min(-(-attention.ctx // (plan.keys * plan.least)), fill, MOST)
    return Splits(
        count, plan.least, plan.waves * arch.wave, plan.rows, attention.value_d, plan.keys, 0, parts, MOST, 1, fill
    )


def emit(step: Step, arch: Profile, plan: LatentDecodePlan | None = None) -> None:
    """Emits the launches for the single rows of a step. Raises ValueError for a plan that does not fit."""
    attention, m = step.layer, step.op.single
    plan = plan or plan_of(attention, m, arch)
    if plan is None:
        raise ValueError(f"latent attention of {attention} has no plan for {arch.name}")
    splits = splits_of(plan, attention, m, arch)
    _emit_parts(step, arch, plan, splits)
    _emit_join(step, arch, plan, splits)


def _emit_parts(step: Step, arch: Profile, plan: LatentDecodePlan, splits: Splits) -> None:
    attention, m = step.layer, step.op.single
    with launch((splits.parts, splits.workgroups(m)), (arch.wave, plan.waves)) as (part, group, lane, thread_wave):
        number, token, split, works = uniform(arch, thread_wave), 0, group, None
        if m > 1:
            count = step.singles()
            works, token, split, active = split_of(arch, attention, splits, step.rows, m, count, group, lane)
        seen = visible(attention, clamped_position(step.rows, token, attention.ctx))
        end, first = seen.end_block(plan.keys), seen.first_block(plan.keys)
        if works is None:
            active = splits.active(end - first)
            works = split < active
        with T.serial(T.cast(works, "int32")):
            row = T.Bind(token * attention.heads + part * plan.rows)
            wave = Wave(arch, step, plan, row, number, lane, lambda row: seen)
            wave.start()
            begin, behind = (T.Bind(first + T.truncdiv((split + i) * (end - first), active)) for i in range(2))
            tid = T.Bind(number * arch.wave + lane)
            attend(wave, step.cache, row_slot(step.rows, token), begin, behind, tid, splits.threads)
            place = T.Bind((group * splits.parts + part) * part_size(plan, attention))
            wave.store_parts(step.scratch[0], place)


def _emit_join(step: Step, arch: Profile, plan: LatentDecodePlan, splits: Splits) -> None:
    """Emits the second launch. A workgroup joins some columns of a head."""
    attention, m = step.layer, step.op.single
    heads, fragment = attention.heads, arch.fragment[0]
    chunks, size = chunks_of(attention, arch), part_size(plan, attention)
    with launch((heads * chunks, m), (arch.wave, WAVES)) as (place, token, lane, wave):
        head, chunk = T.Bind(place // chunks), T.Bind(place % chunks)
        before = T.int32(0)
        if m > 1:
            count, word = step.singles(), T.int32(0)
            for row, active, lower in splits_of_rows(arch, attention, splits, step.rows, m, count, lane):
                own = T.shift_left(lower, T.int32(FIELD)) + active
                word = opaque(T.max(word, T.Select(row == token, own, T.int32(0))))
            word = T.Bind(wave_max(arch, word))
            before, active = T.Bind(T.shift_right(word, T.int32(FIELD))), T.Bind(word & MOST)
        else:
            seen = visible(attention, clamped_position(step.rows, 0, attention.ctx))
            active = splits.active(seen.end_block(plan.keys) - seen.first_block(plan.keys))
        part = T.Bind(head // plan.rows)
        row = T.Bind(token * heads + head)
        row_place = place_in_tile(row, T.Bind(token * heads + part * plan.rows), rows_of(step), fragment)
        own = step.scratch[0], splits.count, active, lambda split: ((before + split) * splits.parts + part) * size
        with T.serial(T.cast(active > 0, "int32")):
            join(step, arch, plan, own, row_place, (chunk, lane, wave), lambda: (token, head))


@planned(CHOICES, lambda op, arch: plan_of(op.layer, op.m, arch))
def space(op: CausalAttention, arch: Profile, plan: LatentDecodePlan) -> Kernel:
    layer, splits = op.layer, splits_of(plan, op.layer, op.m, arch)
    held = min(plan.held, checked_shape(plan, layer, arch).steps)
    same = replace(plan, held=held, fill=splits.fill, least=splits.waves)
    loads = plan.keys * layer.width * 2 / splits.threads
    return Kernel(same, splits.parts * splits.workgroups(op.m), splits.threads, loads)
