"""How the keys of decode attention's rows are distributed: over splits, which workgroups have, and their waves.

`splits_of` gives a shape's splits and what each has, as an arch's plan says. In a step of several rows `dealt` tells a
workgroup, in the kernel, which split of which row it has: a row that sees many keys has more splits than others, none
has more than it would have alone, and there are no more workgroups than splits with something to do.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention import attention_rows_matrix
from mlc_amd.schedules.gpu.attention.attention_join import max_splits
from mlc_amd.schedules.gpu.attention.attention_rows import STEP
from mlc_amd.schedules.gpu.attention.attention_rows_vulkan import waves_of
from mlc_amd.schedules.gpu.attention.cache import clamped_position, visible
from mlc_amd.schedules.gpu.attention.softmax import MAX_GROUP, group_of
from mlc_amd.schedules.gpu.base.device import uniform, wave_max, wave_scan, wave_sum
from mlc_amd.schedules.gpu.base.registers import opaque
from mlc_amd.schedules.gpu.base.step import FEW
from mlc_amd.schedules.operators.attention import Attention


@dataclass(frozen=True)
class Plan:
    """threads  of a workgroup, at most
    fill     workgroups per compute unit that a long context is split into
    step     keys between two looks at the maximum; on "rocm" STEP
    batch    splits whose results are loaded at once
    rows     query heads that a workgroup has, at least; where more share a KV head, several workgroups read its keys
    """

    threads: int
    fill: int
    step: int
    batch: int
    rows: int


class MatrixPlan(Plan):
    """Of rows on cooperative matrices (`attention_rows_matrix.py`)."""


# By family and `_kind` of the layer: what takes least time on an H200 with 0 to 16384 tokens in the cache. Several
# workgroups that read the same keys are faster than one with more rows, until reading counts.
PLANS = {
    ("nvidia", "wide"): Plan(threads=128, fill=2, step=32, batch=32, rows=4),
    ("nvidia", "narrow"): Plan(threads=128, fill=8, step=32, batch=32, rows=2),
    ("nvidia", "window"): Plan(threads=128, fill=4, step=32, batch=32, rows=1),
}
# The same of layers that `attention_rows_matrix.suits`, where MATRIX_GROUP query heads at least share a KV head.
MATRIX_PLANS = {
    ("nvidia", "wide"): MatrixPlan(threads=128, fill=2, step=32, batch=32, rows=8),
    ("nvidia", "narrow"): MatrixPlan(threads=128, fill=4, step=32, batch=32, rows=8),
}
MATRIX_GROUP = 4
# Of these in steps of several rows: (workgroups, at most, if each row has one for a part of its heads; threads), which
# take least time on an H100 in Llama 3 8B, Llama 3.2 1B and Qwen 3 30B A3B behind 512 to 4096 tokens. Besides these the
# plan's: in steps of FEW rows, which may be of two, 128 take 3 to 21 % less time for these than 256. 64 rows of 8 KV
# heads: 96 take 5 % less than 128 (on an H200 8 %), 64 as long as 96, but 4 to 10 % longer where rows have different
# lengths.
MATRIX_THREADS = {
    ("nvidia", "wide"): ((128, 256), (256, 128), (512, 96)),
    ("nvidia", "narrow"): ((256, 256),),
}
# That their splits give a compute unit: heads of 128 take 184 to 193 registers, so that 320 fit. With more splits some
# begin when others end.
UNIT_THREADS = 256
# Of latent attention, whose rows have the most columns: as many rows as registers hold. On an H200, GLM 4.7 Flash
# decodes a tenth slower with 4 rows than with one, but with 16384 tokens in the cache one and a half times as fast.
LATENT_PLAN = Plan(threads=128, fill=2, step=STEP, batch=8, rows=4)
DEFAULT_PLAN = Plan(threads=128, fill=2, step=STEP, batch=8, rows=MAX_GROUP)
NARROW = 64  # columns of a head, at most
FIELD = 7  # bits of a word for a row, or for a number of splits
# family: blocks of keys that each wave of a workgroup processes before there are splits, since joining them in device
# memory takes as long. Others: one.
ALONE = {"nvidia": 4}


def default_plan(attention: Attention, arch, m=1) -> Plan:
    """Of a layer, for m rows."""
    kind, plan = (arch.family, _kind(attention)), DEFAULT_PLAN
    if attention.values:
        plan = LATENT_PLAN
    elif kind in MATRIX_PLANS and attention.group >= MATRIX_GROUP and attention_rows_matrix.suits(arch, attention):
        plan = MATRIX_PLANS[kind] if m == 1 else _of_rows(kind, attention, m)
    else:
        plan = PLANS.get(kind, plan)
    return plan if m == 1 else replace(plan, batch=DEFAULT_PLAN.batch)  # a step of several rows gains by little code


def _of_rows(kind, attention, m) -> MatrixPlan:
    """The plan of a step of m > 1 rows on matrices."""
    plan = MATRIX_PLANS[kind]
    groups = m * attention.heads // _group(plan, attention.group)
    threads = next((threads for most, threads in MATRIX_THREADS[kind] if m > FEW and groups <= most), plan.threads)
    return replace(plan, threads=threads, fill=UNIT_THREADS // threads)


def _group(plan, shared) -> int:
    """The query heads that a workgroup has, of `shared` ones with the same KV head."""
    return next(n for n in range(min(plan.rows, shared), shared + 1) if shared % n == 0)


def _kind(attention) -> str:
    return "window" if attention.span else "narrow" if attention.d <= NARROW else "wide"


class Splits(NamedTuple):
    """How a KV head's keys are distributed: up to `count` workgroups of `waves` waves, which take blocks of `step` keys
    round robin, for each `group` of the query heads; `parts` such groups share a KV head. d: columns of an output.
    batch: splits whose results are loaded at once. maximum: splits for which there is memory. alone: of `ALONE`. fill:
    splits that all rows together should have. matrix: of a `MatrixPlan`."""

    count: int
    waves: int
    threads: int
    group: int
    d: int
    step: int
    batch: int
    parts: int
    maximum: int
    alone: int
    fill: int
    matrix: bool = False

    def workgroups(self, m) -> int:
        """Of m rows, for each group of query heads: as many as there may be splits with something to do."""
        return min(m * self.count, self.fill + m) if m > 1 else self.count

    def least(self, total):
        """The blocks that a split of several rows has at least. total: of all rows."""
        return T.Bind(T.max((total + (self.fill - 1)) // self.fill, T.int32(self.waves)))

    def least_whole(self, arch, steps, least):
        """As `least`, where each of a row's splits counts as if it had `least` blocks: of more than `fill` the last
        would begin when the first end. steps: blocks of the rows of a lane; least: of `least`."""
        whole = [T.Bind(T.Select(x > least, self._count(x, least) * least, x)) for x in steps]
        return self.least(wave_sum(arch, T.Bind(sum(whole[1:], whole[0]))))

    def _count(self, steps, least):
        """The splits of so many blocks."""
        if not self.matrix:
            return T.truncdiv(steps + least - 1, least)
        # exact below 2**20 blocks, and faster than a division of integers
        return T.cast((T.cast(steps + least, "float32") - T.float32(0.5)) / T.cast(least, "float32"), "int32")

    def active(self, steps, least=None):
        """The number of splits that have a block to process, at least one. steps: blocks in all; least: of `least`,
        None for one row."""
        one = least is None
        splits = (steps + self.waves - 1) // self.waves if one else self._count(steps, least)
        count = T.max(T.min(splits, T.int32(self.count)), T.int32(1))
        return T.Bind(count if self.alone == 1 else T.Select(steps <= self.waves * self.alone, T.int32(1), count))

    def share(self, steps, split, wave, active, several):
        """(the first block of a wave, the distance to its next one, how many it has) of `steps` blocks. With `several`
        rows blocks are dealt out to the active splits; with one to all splits, unless one is active alone."""

        def rest(streams):
            return T.max((steps - stream + streams - 1) // streams, T.int32(0))

        stream, streams = T.Bind(split * self.waves + wave), self.count * self.waves
        if several:
            distance = T.Bind(active * self.waves)
            return stream, distance, T.truncdiv(T.max(steps - stream, T.int32(0)) + distance - 1, distance)
        if self.alone == 1:
            return stream, streams, rest(streams)
        one = active == 1
        distance = T.Bind(T.Select(one, T.int32(self.waves), T.int32(streams)))
        return stream, distance, T.Select(one, rest(self.waves), rest(streams))


def splits_of(attention: Attention, arch, plan: Plan | None = None, m=1) -> Splits:
    """The splits of a layer for m rows: no more than the visible keys have blocks for, than fill the GPU, than a wave
    has lanes to join them. ValueError for a plan that the arch cannot run."""
    plan = plan or default_plan(attention, arch, m)
    heads, kv_heads, d, span = attention.heads, attention.kv_heads, attention.d, attention.span
    matrix, shared = isinstance(plan, MatrixPlan), heads if attention.values else group_of(heads, kv_heads)
    group = _group(plan, shared)
    parts = shared // group
    if plan.step != STEP and (arch.api == "rocm" or plan.step % arch.wave or plan.step > STEP):
        raise ValueError(f"{arch.name} takes steps of up to {STEP} keys, not of {plan.step}")
    if plan.threads < arch.wave:
        raise ValueError(f"{plan.threads} threads are less than a wave of {arch.name}")
    if matrix:
        if not attention_rows_matrix.suits(arch, attention) or plan.step % attention_rows_matrix.CHUNK:
            raise ValueError(f"{plan} does not suit {attention} on {arch.name}")
        waves = attention_rows_matrix.waves_of(arch, group, d, plan.threads, plan.step)
    else:
        waves = waves_of(arch, group, d, plan.threads)
    keys = min(attention.ctx, span + plan.step) if span else attention.ctx  # what is seen may begin within a block
    fill, maximum = -(-plan.fill * arch.units // (kv_heads * parts)), max_splits(m)
    count = min(-(-keys // (plan.step * waves)), fill, maximum, arch.wave)
    batch, alone = min(plan.batch, arch.wave), ALONE.get(arch.family, 1)
    threads, value_d = waves * arch.wave, attention.value_d
    return Splits(count, waves, threads, group, value_d, plan.step, batch, parts, maximum, alone, fill, matrix)


def dealt(arch, attention, splits, places, m, count, workgroup, lane):
    """Deals the splits of the first `count` of m rows out to workgroups, those of row 0 first. (Whether this workgroup
    has one, its row, the number of its split, the splits of that row), the same in all lanes. Each wave computes it: a
    lane has a row or several."""
    found = T.int32(0)
    for row, active, before in splits_of_rows(arch, attention, splits, places, m, count, lane):
        split = opaque(workgroup - before)
        mine = (split >= 0) & (split < active)
        word = T.shift_left(T.shift_left(row, T.int32(FIELD)) + split, T.int32(FIELD)) + active
        found = opaque(T.max(found, T.Select(mine, word, T.int32(0))))
    word = opaque(uniform(arch, wave_max(arch, found)))
    fields = [T.Bind(T.shift_right(word, T.int32(n * FIELD)) & ((1 << FIELD) - 1)) for n in range(3)]
    return word > 0, fields[2], fields[1], fields[0]


def splits_of_rows(arch, attention, splits, places, m, count, lane):
    """Yields, for each row that a lane has: (row, its splits, those of all rows before it)."""
    steps = []
    for first in range(0, m, arch.wave):
        row = T.Bind(T.min(first + lane, T.int32(m - 1)))
        seen = visible(attention, clamped_position(places, row, attention.ctx))
        blocks = seen.end_block(splits.step) - seen.first_block(splits.step)
        steps.append(T.Bind(T.Select(first + lane < count, blocks, T.int32(0))))
    least = splits.least(wave_sum(arch, T.Bind(sum(steps[1:], steps[0]))))
    if splits.matrix:
        least = splits.least_whole(arch, steps, least)
    before = T.int32(0)
    for i, own in enumerate(steps):
        row = T.Bind(i * arch.wave + lane)
        active = opaque(T.Select(row < count, splits.active(own, least), T.int32(0)))
        lower, whole = wave_scan(arch, active, lane)
        yield row, active, T.Bind(before + lower)
        before = opaque(before + whole)
