"""`SelectedAttention` for latent attention on cooperative matrices, with the code of attention_latent_wave.py: a
workgroup has a tile of a row's heads, and all chosen keys of the row or a split of them. A second launch joins the
splits.

A block of keys is consecutive ids of the row; its keys may be anywhere in the cache.
"""

from contextlib import nullcontext

from tvm.tirx.script import builder as T

from mlc_amd.schedules.choices import choices
from mlc_amd.schedules.gpu.attention.attention_step import Step
from mlc_amd.schedules.gpu.attention.cache import KEYS, UNIT, Cache, KeyBlock, Visible, clamped_position, row_slot
from mlc_amd.schedules.gpu.base.device import launch, uniform
from mlc_amd.schedules.gpu.base.profiles import Device, Profile
from mlc_amd.schedules.gpu.base.registers import at
from mlc_amd.schedules.gpu.base.step import is_live
from mlc_amd.schedules.gpu.latent.attention_latent_decode import LatentDecodePlan, plan_of
from mlc_amd.schedules.gpu.latent.attention_latent_tiles import part_size
from mlc_amd.schedules.gpu.latent.attention_latent_wave import WAVES, Wave, attend, chunks_of, join, place_in_tile
from mlc_amd.schedules.operators.attention import PAGE
from mlc_amd.schedules.operators.indexer import SelectedAttention
from mlc_amd.schedules.tir import Buffer, Expr


class ChosenBlock(KeyBlock):
    """A block of chosen keys. Each thread loads columns of one key: `page` is the place of this key in the cache,
    number of the page * PAGE + place in the page."""

    def key(self, place: Expr, c: Expr) -> Expr:
        page, place = self.page // PAGE, T.Bind(self.page % PAGE)
        return self.cache.Kc[page, self.kv, place // KEYS, c, place % KEYS, at(0, UNIT)]


class Chosen(Cache):
    """A Cache that has only the `count` keys that a row chose. own: the number within a block of the key that this
    thread loads."""

    def __init__(self, cache: Cache, ids: Buffer, row: Expr, count: Expr, last: Expr, own: Expr):
        vars(self).update(vars(cache))
        self.ids, self.row, self.count, self.last, self.own = ids, row, count, last, own

    def page(self, slot: Expr, position: Expr) -> Expr:
        """The place in the cache of this thread's key of the block whose first chosen key has number `position`."""
        number = T.Bind(T.min(position + self.own, self.count - 1))
        there = T.Bind(T.max(T.min(self.ids[self.row, number], self.last), T.int32(0)))
        return super().page(slot, there) * PAGE + there % PAGE

    def block(self, kv: Expr, key0: Expr, page: Expr, size: int) -> ChosenBlock:
        return ChosenBlock(self, kv, key0, page, 0)


def plan_for(op: SelectedAttention, arch: Device) -> LatentDecodePlan | None:
    """The plan for an operator; None if none fits: then the kernel of selected.py must be used."""
    if op.block > 1 or not op.layer.values:
        return None
    plan = plan_of(op.layer, op.m, arch)
    if not plan or plan.keys > KEYS:
        return None
    threads = plan.waves * arch.wave
    one_key = threads % plan.keys == 0 and plan.keys * op.layer.width // UNIT >= threads  # a thread loads one key
    return plan if one_key else None


def splits_of(op: SelectedAttention, plan: LatentDecodePlan, arch: Profile) -> int:
    """The number of splits of a row: as many as fill the GPU, if each has at least plan.least blocks of keys."""
    workgroups = -(-op.layer.heads // plan.rows) * op.m
    return max(min(plan.fill * arch.units // workgroups, op.used // (plan.keys * plan.least)), 1)


def emit(op: SelectedAttention, step: Step, Ids: Buffer, arch: Profile, plan: LatentDecodePlan) -> None:
    """Emits the launches. All rows of the step must be single rows."""
    layer, m, splits = op.layer, op.m, splits_of(op, plan, arch)
    heads, parts, size = layer.heads, -(-layer.heads // plan.rows), part_size(plan, layer)
    Parts = T.alloc_buffer((m * splits * parts * size,), "float32") if splits > 1 else None

    def active_of(count: Expr) -> tuple[Expr, Expr]:
        """(number of blocks of `count` keys, number of splits that have blocks)."""
        blocks = T.Bind((count + (plan.keys - 1)) // plan.keys)
        return blocks, T.Bind(T.min((blocks + (plan.least - 1)) // plan.least, T.int32(splits)))

    def place_of(row: Expr, split: Expr, part: Expr) -> Expr:
        return ((row * splits + split) * parts + part) * size

    with launch((parts, splits, m), (arch.wave, plan.waves)) as (part, split, row, lane, thread_wave):
        number, last = uniform(arch, thread_wave), clamped_position(step.rows, row, layer.ctx)
        count = choices(op, last)
        blocks, active = active_of(count)
        works = split < active
        with T.serial(T.cast(works if m == 1 else works & is_live(step.state, row), "int32")):
            seen, tid = Visible(None, count), T.Bind(number * arch.wave + lane)
            first = T.Bind(row * heads + part * plan.rows)
            wave = Wave(arch, step, plan, first, number, lane, lambda _: seen)
            wave.start()
            begin, end = (T.Bind(T.truncdiv((split + i) * blocks, active)) for i in range(2))
            keys = Chosen(step.cache, Ids, row, count, last, T.Bind(tid % plan.keys))
            attend(wave, keys, row_slot(step.rows, row), begin, end, tid, plan.waves * arch.wave)
            if Parts is None:
                wave.finish(lambda token: token == row)
            else:
                wave.store_parts(Parts, T.Bind(place_of(row, split, part)))
    if Parts is None:
        return
    chunks = chunks_of(layer, arch)
    with launch((heads * chunks, m), (arch.wave, WAVES)) as (place, row, lane, wave):
        head, chunk = T.Bind(place // chunks), T.Bind(place % chunks)
        _, active = active_of(choices(op, clamped_position(step.rows, row, layer.ctx)))
        part, own = T.Bind(head // plan.rows), T.Bind(row * heads + head)
        within = place_in_tile(own, T.Bind(row * heads + part * plan.rows), m * heads, arch.fragment[0])
        with nullcontext() if m == 1 else T.serial(T.cast(is_live(step.state, row), "int32")):
            found = Parts, splits, active, lambda split: place_of(row, split, part)
            join(step, arch, plan, found, within, (chunk, lane, wave), lambda: (row, head))
