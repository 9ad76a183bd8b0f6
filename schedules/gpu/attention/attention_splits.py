"""Distribution of keys in decode attention: the visible keys of a row are divided into splits, one for each workgroup,
and the keys of a split between the waves of its workgroup.

`splits_of` returns the sizes of splits for a shape, from an arch's plan. In a step of several rows, `split_of` computes
in the kernel which split of which row a workgroup has. A row with many keys has more splits than others, but no row has
more than it would have alone, and there are no more workgroups than non-empty splits.

Splits join in device memory, within the launch (`join_splits`). Each split stores its rows' outputs, maxima and sums of
weights to Parts, and then increments the atomic counter Arrived of its rows. The split that finds that all others have
arrived joins the results, and stores the output. base/arrival.py explains why it reads what the others have stored.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention import attention_rows_size
from mlc_amd.schedules.gpu.attention.attention_rows_size import FEWER_LOADS, LOADS, STEP, KeyLoads, dot_waves_of
from mlc_amd.schedules.gpu.attention.attention_step import (
    LOWEST,
    MAX_GROUP,
    Joined,
    Step,
    group_of,
    max_splits,
    quads,
    stride_of,
    with_sink,
)
from mlc_amd.schedules.gpu.attention.cache import clamped_position, visible
from mlc_amd.schedules.gpu.base.arrival import Outbox, arrive, zero_after
from mlc_amd.schedules.gpu.base.device import each, exp2, rcp, uniform, wave_max, wave_scan, wave_sum
from mlc_amd.schedules.gpu.base.hadamard import hadamard
from mlc_amd.schedules.gpu.base.matrices import known_unit
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.gpu.base.registers import at, local, opaque, put
from mlc_amd.schedules.gpu.base.step import FEW
from mlc_amd.schedules.operators.attention import Attention, CausalAttention
from mlc_amd.schedules.tir import Buffer, Expr


@dataclass(frozen=True)
class DecodePlan:
    threads: int = 128  # upper limit of the threads of a workgroup
    fill: int = 2  # workgroups per compute unit into which a long context is split
    step: int = STEP  # keys between two renewals of the maximum; always STEP for rocm without matrix units
    batch: int = 8  # splits whose results are loaded at the same time
    # the least number of query heads of a workgroup; if more share a KV head, several workgroups may read its keys
    rows: int = MAX_GROUP
    loads: int = LOADS  # see attention_rows_size.KeyLoads, also for `ahead`; ignored for rocm
    ahead: int = 0


class MatrixDecodePlan(DecodePlan):
    """A plan for rows on matrix units whose lanes are known (`attention_rows_matrix.py`)."""


LATENT_ROWS = 4  # rows for latent attention, which has the most columns: as many as fit into registers
MATRIX_GROUP = 4  # matrix units are used if at least so many query heads share a KV head
# For matrix units: blocks of 32 keys, the results of all splits loaded at the same time, 8 query heads.
MATRIX = MatrixDecodePlan(step=32, batch=32, rows=8)
MATRIX_THREADS = (256, 128, 96, 64)  # threads of a workgroup to choose from
# Threads that a compute unit should run at the same time. Heads of UNIT_COLUMNS columns need 184 to 193 of 512
# registers, so 320 fit; with more splits, some would begin only when others end. ROW_THREADS: with a workgroup for each
# row.
UNIT_THREADS, ROW_THREADS, UNIT_COLUMNS = 256, 384, 128
FIELD = 7  # bits of a word that hold the number of a row, or a number of splits


def alone_of(arch: Device) -> int:
    """The number of blocks of keys that each wave processes before a row is divided into splits. Joining splits in
    device memory takes time, too; a block takes about a microsecond."""
    return 1 + int(arch.join_us)


def default_plan(attention: Attention, arch: Device, m: int = 1) -> DecodePlan:
    """The rule for m rows of a layer: matrix units if their lanes are known and enough query heads share a KV head;
    otherwise vector instructions."""
    plan = DecodePlan(loads=LOADS if arch.registers else FEWER_LOADS)
    unit = known_unit(arch) if attention_rows_size.suits(arch, attention) else None
    if unit and unit.knows_sums and attention_rows_size.pays(arch, attention.group):
        plan = MatrixDecodePlan()
    elif attention.values:
        plan = replace(plan, rows=LATENT_ROWS)
    elif attention.span and alone_of(arch) > 1:  # one split has all keys, so workgroups for each head fill the GPU
        plan = replace(plan, rows=1, step=32)
    elif unit and not unit.knows_sums and not attention.span and attention.group >= MATRIX_GROUP:
        plan = _on_matrices(attention, arch, m)
    return plan if m == 1 else replace(plan, batch=DecodePlan.batch)  # steps of several rows profit from less code


def _on_matrices(attention: Attention, arch: Device, m: int) -> MatrixDecodePlan:
    """The plan whose workgroups fill the registers of all compute units. In steps of more than FEW rows, there is first
    a workgroup for each row and part of its heads, with as many threads as all of these leave to each. In smaller steps
    there may be few rows."""
    narrow = max(UNIT_COLUMNS // attention.d, 1)
    if m <= FEW:
        unit = UNIT_THREADS * narrow if m == 1 else UNIT_THREADS
        return replace(MATRIX, fill=max(unit // MATRIX.threads, 1))
    groups = m * attention.heads // _group(MATRIX, attention.group)
    sizes = [threads for threads in MATRIX_THREADS if threads % arch.wave == 0]
    threads = next((n for n in sizes if n * groups <= ROW_THREADS * narrow * arch.units), sizes[-1])
    return replace(MATRIX, threads=threads, fill=max(UNIT_THREADS // threads, 1))


def _group(plan: DecodePlan, shared: int) -> int:
    """The number of query heads of a workgroup. shared: number of query heads with the same KV head."""
    return next(n for n in range(min(plan.rows, shared), shared + 1) if shared % n == 0)


class Splits(NamedTuple):
    """How the keys of a KV head are distributed: for each group of `group` query heads, up to `count` workgroups of
    `waves` waves, which take blocks of `step` keys round robin. `parts` such groups share a KV head."""

    count: int
    waves: int
    threads: int
    group: int
    d: int  # columns of an output
    step: int
    batch: int  # splits whose results are loaded at the same time
    parts: int
    maximum: int  # splits for which there is memory
    alone: int  # from `alone_of`
    fill: int  # splits that all rows together should have
    matrix: bool = False  # whether it is for matrix units (`MatrixDecodePlan`)
    loads: KeyLoads | None = None

    def workgroups(self, m: int) -> int:
        """The number of workgroups for m rows and a group of query heads: the largest number of non-empty splits."""
        return min(m * self.count, self.fill + m) if m > 1 else self.count

    def least(self, total: Expr) -> Expr:
        """The least number of blocks of a split, in a step of several rows. total: number of blocks of all rows."""
        return opaque(T.max((total + (self.fill - 1)) // self.fill, T.int32(self.waves)))

    def least_whole(self, arch: Device, steps: list[Expr], least: Expr) -> Expr:
        """`least`, increased so that there are at most `fill` splits if each counts as `least` blocks; further splits
        would begin only when the first ones end. steps: numbers of blocks of the rows of a lane. least: from
        `least`."""
        whole = [opaque(T.Select(x > least, self._count(x, least) * least, x)) for x in steps]
        return self.least(wave_sum(arch, opaque(sum(whole[1:], whole[0]))))

    def _count(self, steps: Expr, least: Expr) -> Expr:
        """The number of splits for `steps` blocks."""
        if not self.matrix:
            return T.truncdiv(steps + least - 1, least)
        # exact below 2**20 blocks, and faster than an integer division
        return T.cast((T.cast(steps + least, "float32") - T.float32(0.5)) / T.cast(least, "float32"), "int32")

    def active(self, steps: Expr, least: Expr = None) -> Expr:
        """The number of splits with at least one block; 1 if there are no blocks. steps: number of blocks. least: from
        `least`, None for a step of one row."""
        one = least is None
        splits = (steps + self.waves - 1) // self.waves if one else self._count(steps, least)
        count = T.max(T.min(splits, T.int32(self.count)), T.int32(1))
        return T.Bind(count if self.alone == 1 else T.Select(steps <= self.waves * self.alone, T.int32(1), count))

    def share(self, steps: Expr, split: Expr, wave: Expr, active: Expr, several: bool) -> tuple[Expr, Expr, Expr]:
        """(first block of a wave, distance between its blocks, number of its blocks). steps: number of blocks. several:
        whether the step has several rows: then blocks are divided between the active splits; otherwise between all
        splits, unless only one is active."""

        def rest(streams: Expr) -> Expr:
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


def splits_of(attention: Attention, arch: Device, plan: DecodePlan | None = None, m: int = 1) -> Splits:
    """The splits of a layer for m rows. Their number is limited by the blocks of visible keys, by what fills the GPU,
    and by the lanes of a wave, which join them. Raises ValueError for a plan that the arch cannot run."""
    plan = plan or default_plan(attention, arch, m)
    kv_heads, d, span = attention.kv_heads, attention.d, attention.span
    matrix, shared = isinstance(plan, MatrixDecodePlan), attention.group if attention.values else group_of(attention)
    group = _group(plan, shared)
    parts = shared // group
    if plan.step != STEP and ((arch.api == "rocm" and not matrix) or plan.step % arch.wave or plan.step > STEP):
        raise ValueError(f"{arch.name} takes steps of up to {STEP} keys, not of {plan.step}")
    if plan.threads < arch.wave:
        raise ValueError(f"{plan.threads} threads are less than a wave of {arch.name}")
    if matrix:
        if not attention_rows_size.suits(arch, attention) or plan.step % attention_rows_size.CHUNK:
            raise ValueError(f"{plan} does not suit {attention} on {arch.name}")
        waves = attention_rows_size.waves_of(arch, group, d, plan.threads, plan.step)
    else:
        waves = dot_waves_of(arch, group, d, plan.threads)
    keys = min(attention.ctx, span + plan.step) if span else attention.ctx  # visible keys may begin within a block
    fill, maximum = -(-plan.fill * arch.units // (kv_heads * parts)), max_splits(m)
    count = min(-(-keys // (plan.step * waves)), fill, maximum, arch.wave)
    batch, alone = min(plan.batch, arch.wave), alone_of(arch)
    threads, value_d = waves * arch.wave, attention.value_d
    loads = None if matrix or arch.api == "rocm" else KeyLoads(plan.loads, plan.step, bool(plan.ahead))
    return Splits(count, waves, threads, group, value_d, plan.step, batch, parts, maximum, alone, fill, matrix, loads)


def split_of(
    arch: Device, attention: Attention, splits: Splits, places: Buffer, m: int, count: Expr, workgroup: Expr, lane: Expr
) -> tuple[Expr, Expr, Expr, Expr]:
    """Assigns the splits of the first `count` of m rows to workgroups, those of row 0 first. Returns (whether this
    workgroup has a split, its row, the number of its split, the number of splits of the row), the same in all lanes.
    Each wave computes it; each lane has one row or several."""
    found = T.int32(0)
    for row, active, before in splits_of_rows(arch, attention, splits, places, m, count, lane):
        split = opaque(workgroup - before)
        mine = (split >= 0) & (split < active)
        word = T.shift_left(T.shift_left(row, T.int32(FIELD)) + split, T.int32(FIELD)) + active
        found = opaque(T.max(found, T.Select(mine, word, T.int32(0))))
    word = opaque(uniform(arch, wave_max(arch, found)))
    fields = [T.Bind(T.shift_right(word, T.int32(n * FIELD)) & ((1 << FIELD) - 1)) for n in range(3)]
    return word > 0, fields[2], fields[1], fields[0]


def splits_of_rows(
    arch: Device, attention: Attention, splits: Splits, places: Buffer, m: int, count: Expr, lane: Expr
) -> Iterator[tuple[Expr, Expr, Expr]]:
    """Yields for each row of a lane: (row, number of its splits, number of the splits of all rows before it)."""
    steps = []
    for first in range(0, m, arch.wave):
        row = T.Bind(T.min(first + lane, T.int32(m - 1)))
        seen = visible(attention, clamped_position(places, row, attention.ctx))
        blocks = seen.end_block(splits.step) - seen.first_block(splits.step)
        steps.append(opaque(T.Select(first + lane < count, blocks, T.int32(0))))
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


def join_splits(
    arch: Device, step: Step, splits: Splits, place: tuple[Expr, Expr], thread: tuple[Expr, Expr],
    quad: Callable[[Expr, Expr], Joined], split: Expr, active: Expr,
) -> None:  # fmt: skip
    """Joins the `active` splits of a row and a part of its heads, and stores the output. split: number of this
    workgroup's split. place: (row `token` of the step, number `part` of the group of query heads). thread: (wave,
    lane). quad(row, column): the workgroup's results, from `attention_step.join`."""
    (token, part), (wave, lane), (Parts, Arrived) = place, thread, step.scratch
    tid, parts, group, d = T.Bind(wave * arch.wave + lane), step.layer.kv_heads * splits.parts, splits.group, splits.d
    number = part if isinstance(token, int) else T.Bind(token * parts + part)  # among all parts of all tokens

    def each_quad() -> Iterator[tuple[Expr | None, Expr, Expr]]:
        return quads(arch, splits.threads, tid, group, d)

    def head(row: Expr) -> Expr:
        return part * group + row

    def there(split: Expr, element: Expr) -> Expr:
        """The index of a split's element in Parts."""
        stride = stride_of(group, d)
        return number * (splits.maximum * stride) + split * stride + element

    def store(values: Sequence[Expr], row: Expr, column: Expr, valid: Expr) -> None:
        column, y = head(row) * d + column, [T.Bind(y) for y in values]
        if isinstance(step.op, CausalAttention) and step.op.back:  # needs neighbouring columns in neighbouring lanes
            (y,) = hadamard(arch, lane, [y], step.layer.rotation)
        step.store(arch, y, token, column, valid)

    if arch.api == "vulkan":
        with T.serial(T.cast(active == 1, "int32")):  # one split has all keys
            for valid, row, column in each_quad():
                top, total, values = quad(row, column)
                inverse = rcp(with_sink(step.sinks, head(row), total, top))
                store([y * inverse for y in values], row, column, valid)
    with nullcontext() if arch.api == "rocm" else T.serial(T.cast(active > 1, "int32")):
        outbox = Outbox(arch, tid, splits.threads, (WIDTH, 2))
        for valid, row, column in each_quad():
            top, total, out = quad(row, column)
            tail = group * d + row * WIDTH
            # On Vulkan 16 bytes for each row, the same width as stores of outputs.
            row_values = [top, total] if arch.api == "rocm" else [top, total, *[T.float32(0)] * (WIDTH - 2)]
            outputs = out, None, (there(split, row * d + column),)
            outbox.send(valid, Parts, outputs, (row_values, column == 0, (there(split, tail),)))
        outbox.publish()
        old = arrive(arch, Arrived, number, tid)
        with T.serial(T.cast(old == active - 1, "int32")):  # the last one joins them all, and resets the counter
            later, size = zero_after(arch, old), splits.batch  # later: 0, known when results may be loaded
            weights = T.alloc_buffer((group, math.ceil(splits.count / size) * size), "float32", scope="shared")
            for i in each(arch, -(-group // splits.waves)):
                row = T.Bind(T.min(i * splits.waves + wave, T.int32(group - 1)))
                source, tail = T.Bind(T.min(lane, active - 1) + later), group * d + row * WIDTH
                top = T.Bind(T.Select(lane < active, Parts[there(source, tail)], T.float32(LOWEST)))
                largest = wave_max(arch, top)
                weight = exp2(top - largest)
                total = wave_sum(arch, T.Bind(weight * Parts[there(source, tail + 1)]))
                with T.If(lane < weights.shape[1]), T.Then():
                    put(weights, weight * rcp(with_sink(step.sinks, head(row), total, largest)), row, lane)
            for valid, row, column in each_quad():
                y = local(WIDTH)
                put(y, T.broadcast(T.float32(0), WIDTH), at(0, WIDTH))
                with T.serial((active + size - 1) // size) as batch:
                    for i in range(size):
                        source = T.Bind(batch * size + i)
                        found = Parts[at(there(T.min(source, active - 1) + later, row * d + column), WIDTH)]
                        put(y, y[at(0, WIDTH)] + found * T.broadcast(weights[row, source], WIDTH), at(0, WIDTH))
                store([y[i] for i in range(WIDTH)], row, column, valid)
            with T.If(tid == 0), T.Then():
                put(Arrived, T.int32(0), number)
