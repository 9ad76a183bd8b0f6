"""How the keys of decode attention's rows are distributed: over splits, which workgroups have, and their waves.

`splits_of` gives a shape's splits and what each has, as an arch's plan says. In a step of several rows `split_of`
determines, in the kernel, which split of which row a workgroup has: a row that sees many keys has more splits than
others, none has more than it would have alone, and there are no more workgroups than splits with something to do.

Splits join in device memory, within one launch (`join_splits`): each stores its rows' outputs, maxima and sums of
weights into Parts and then increments the atomic counter Arrived of its rows. The split that finds all others arrived
joins the results and stores the output. Why it reads what the others stored: `arrival.py`.
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
    threads: int = 128  # of a workgroup, at most
    fill: int = 2  # workgroups per compute unit that a long context is split into
    step: int = STEP  # keys between two looks at the maximum; on "rocm" STEP
    batch: int = 8  # splits whose results are loaded at once
    # query heads that a workgroup has, at least; where more share a KV head, several workgroups read its keys
    rows: int = MAX_GROUP
    loads: int = LOADS  # this and `ahead`: of attention_rows_size.KeyLoads; of no effect on "rocm"
    ahead: int = 0


class MatrixDecodePlan(DecodePlan):
    """Of rows on matrix units whose lanes are known (`attention_rows_matrix.py`)."""


LATENT_ROWS = 4  # of latent attention, whose rows have the most columns: as many as registers hold
MATRIX_GROUP = 4  # query heads of a KV head, at least, that are worth matrices
# What matrices are fed with: whole blocks of 32 keys, all splits' results at once, 8 query heads.
MATRIX = MatrixDecodePlan(step=32, batch=32, rows=8)
MATRIX_THREADS = (256, 128, 96, 64)  # of a workgroup
# Threads that a compute unit runs at once: heads of 128 columns take 184 to 193 of 512 registers, so that 320 fit. With
# more splits some begin when others end. ROW_THREADS: with a workgroup for each row, where that is worth it.
UNIT_THREADS, ROW_THREADS, UNIT_COLUMNS = 256, 384, 128
FIELD = 7  # bits of a word for a row, or for a number of splits


def alone_of(arch: Device) -> int:
    """Blocks of keys that each wave of a workgroup processes before there are splits, as joining them in device memory
    takes time, too: about a microsecond a block."""
    return 1 + int(arch.join_us)


def default_plan(attention: Attention, arch: Device, m: int = 1) -> DecodePlan:
    """The rule, of a layer for m rows: matrices where their lanes are known and enough query heads share a KV head;
    else rows of queries in registers."""
    plan = DecodePlan(loads=LOADS if arch.registers else FEWER_LOADS)
    unit = known_unit(arch) if attention_rows_size.suits(arch, attention) else None
    if unit and unit.knows_sums and attention_rows_size.pays(arch, attention.group):
        plan = MatrixDecodePlan()
    elif attention.values:
        plan = replace(plan, rows=LATENT_ROWS)
    elif attention.span and alone_of(arch) > 1:  # one split has all keys: workgroups for each head fill the GPU
        plan = replace(plan, rows=1, step=32)
    elif unit and not unit.knows_sums and not attention.span and attention.group >= MATRIX_GROUP:
        plan = _on_matrices(attention, arch, m)
    return plan if m == 1 else replace(plan, batch=DecodePlan.batch)  # a step of several rows gains by little code


def _on_matrices(attention: Attention, arch: Device, m: int) -> MatrixDecodePlan:
    """Workgroups that fill the registers of all compute units. In steps of more than FEW rows a workgroup for a part of
    each row's heads comes first, and has as many threads as they leave each: in smaller ones the rows may be few."""
    narrow = max(UNIT_COLUMNS // attention.d, 1)
    if m <= FEW:
        unit = UNIT_THREADS * narrow if m == 1 else UNIT_THREADS
        return replace(MATRIX, fill=max(unit // MATRIX.threads, 1))
    groups = m * attention.heads // _group(MATRIX, attention.group)
    sizes = [threads for threads in MATRIX_THREADS if threads % arch.wave == 0]
    threads = next((n for n in sizes if n * groups <= ROW_THREADS * narrow * arch.units), sizes[-1])
    return replace(MATRIX, threads=threads, fill=max(UNIT_THREADS // threads, 1))


def _group(plan: DecodePlan, shared: int) -> int:
    """The query heads that a workgroup has, of `shared` ones with the same KV head."""
    return next(n for n in range(min(plan.rows, shared), shared + 1) if shared % n == 0)


class Splits(NamedTuple):
    """How a KV head's keys are distributed: up to `count` workgroups of `waves` waves, which take blocks of `step` keys
    round robin, for each `group` of the query heads; `parts` such groups share a KV head."""

    count: int
    waves: int
    threads: int
    group: int
    d: int  # columns of an output
    step: int
    batch: int  # splits whose results are loaded at once
    parts: int
    maximum: int  # splits for which there is memory
    alone: int  # of `alone_of`
    fill: int  # splits that all rows together should have
    matrix: bool = False  # of a `MatrixDecodePlan`
    loads: KeyLoads | None = None

    def workgroups(self, m: int) -> int:
        """Of m rows, for each group of query heads: as many as there may be splits with something to do."""
        return min(m * self.count, self.fill + m) if m > 1 else self.count

    def least(self, total: Expr) -> Expr:
        """The blocks that a split of several rows has at least. total: of all rows."""
        return opaque(T.max((total + (self.fill - 1)) // self.fill, T.int32(self.waves)))

    def least_whole(self, arch: Device, steps: list[Expr], least: Expr) -> Expr:
        """As `least`, where each of a row's splits counts as if it had `least` blocks: of more than `fill` the last
        would begin when the first end. steps: blocks of the rows of a lane; least: of `least`."""
        whole = [opaque(T.Select(x > least, self._count(x, least) * least, x)) for x in steps]
        return self.least(wave_sum(arch, opaque(sum(whole[1:], whole[0]))))

    def _count(self, steps: Expr, least: Expr) -> Expr:
        """The splits of so many blocks."""
        if not self.matrix:
            return T.truncdiv(steps + least - 1, least)
        # exact below 2**20 blocks, and faster than a division of integers
        return T.cast((T.cast(steps + least, "float32") - T.float32(0.5)) / T.cast(least, "float32"), "int32")

    def active(self, steps: Expr, least: Expr = None) -> Expr:
        """The number of splits that have a block to process, at least one. steps: blocks in all; least: of `least`,
        None for one row."""
        one = least is None
        splits = (steps + self.waves - 1) // self.waves if one else self._count(steps, least)
        count = T.max(T.min(splits, T.int32(self.count)), T.int32(1))
        return T.Bind(count if self.alone == 1 else T.Select(steps <= self.waves * self.alone, T.int32(1), count))

    def share(self, steps: Expr, split: Expr, wave: Expr, active: Expr, several: bool) -> tuple[Expr, Expr, Expr]:
        """(the first block of a wave, the distance to its next one, how many it has) of `steps` blocks. With `several`
        rows blocks are divided among the active splits; with one to all splits, unless one is active alone."""

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
    """The splits of a layer for m rows: no more than the visible keys have blocks for, than fill the GPU, than a wave
    has lanes to join them. ValueError for a plan that the arch cannot run."""
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
    keys = min(attention.ctx, span + plan.step) if span else attention.ctx  # what is seen may begin within a block
    fill, maximum = -(-plan.fill * arch.units // (kv_heads * parts)), max_splits(m)
    count = min(-(-keys // (plan.step * waves)), fill, maximum, arch.wave)
    batch, alone = min(plan.batch, arch.wave), alone_of(arch)
    threads, value_d = waves * arch.wave, attention.value_d
    loads = None if matrix or arch.api == "rocm" else KeyLoads(plan.loads, plan.step, bool(plan.ahead))
    return Splits(count, waves, threads, group, value_d, plan.step, batch, parts, maximum, alone, fill, matrix, loads)


def split_of(
    arch: Device, attention: Attention, splits: Splits, places: Buffer, m: int, count: Expr, workgroup: Expr, lane: Expr
) -> tuple[Expr, Expr, Expr, Expr]:
    """Assigns the splits of the first `count` of m rows to workgroups, those of row 0 first. (Whether this workgroup
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


def splits_of_rows(
    arch: Device, attention: Attention, splits: Splits, places: Buffer, m: int, count: Expr, lane: Expr
) -> Iterator[tuple[Expr, Expr, Expr]]:
    """Yields, for each row that a lane has: (row, its splits, those of all rows before it)."""
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
    """Joins `active` splits of part `part` of the heads of row `token` of a step, of which this workgroup has number
    `split`, and stores the output. place: (token, part); thread: (wave, lane); quad(row, column): the workgroup's
    results, of `attention_step.join`."""
    (token, part), (wave, lane), (Parts, Arrived) = place, thread, step.scratch
    tid, parts, group, d = T.Bind(wave * arch.wave + lane), step.layer.kv_heads * splits.parts, splits.group, splits.d
    number = part if isinstance(token, int) else T.Bind(token * parts + part)  # of all parts of all tokens

    def each_quad() -> Iterator[tuple[Expr | None, Expr, Expr]]:
        return quads(arch, splits.threads, tid, group, d)

    def head(row: Expr) -> Expr:
        return part * group + row

    def there(split: Expr, element: Expr) -> Expr:
        """Where a split's element is in Parts."""
        stride = stride_of(group, d)
        return number * (splits.maximum * stride) + split * stride + element

    def store(values: Sequence[Expr], row: Expr, column: Expr, valid: Expr) -> None:
        column, y = head(row) * d + column, [T.Bind(y) for y in values]
        if isinstance(step.op, CausalAttention) and step.op.back:  # neighbouring lanes have neighbouring columns
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
            # On Vulkan whole 16 bytes of each row, as the outputs are stored.
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
