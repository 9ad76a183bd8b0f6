"""Latent attention of single rows, one to SLOTS tokens of any sequences, on cooperative matrices: split-KV ("flash
decoding") in two launches.

In: the rotated queries and the cache, which already contains the rows' own keys. Out: the heads' outputs in an
activation layout of `quantize.py`. A workgroup has a tile of a token's heads and a split of its keys, as
`attention_latent.py` computes them, and leaves what it has in Parts. The second launch joins the splits of each head:
all heads' results of many splits are too much for one workgroup to load.
"""

from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.attention import SLOTS, Attention
from mlc_amd.schedules.gpu.attention_decode import FIELD, Splits, dealt, splits_of_rows
from mlc_amd.schedules.gpu.attention_join import scratch_shapes
from mlc_amd.schedules.gpu.attention_latent import Wave, attend
from mlc_amd.schedules.gpu.attention_latent_tiles import Tile, shape_of, suits
from mlc_amd.schedules.gpu.attention_step import Step, attention_step
from mlc_amd.schedules.gpu.cache import clamped_position, row_slot, visible
from mlc_amd.schedules.gpu.device import barrier, exp2, launch, maximum, rcp, uniform, wave_max, wave_sum
from mlc_amd.schedules.gpu.quantize import WIDTH, emit_store
from mlc_amd.schedules.gpu.registers import at, local, opaque, put
from mlc_amd.schedules.gpu.softmax import LOWEST

MOST = (1 << FIELD) - 1  # splits of a row
JOIN_WAVES, JOIN_BATCH = 4, 8  # of a workgroup that joins: its waves, and the splits that a wave loads at once


@dataclass(frozen=True)
class Plan(Tile):
    """A tile, and

    fill   workgroups per compute unit that long contexts are split into
    least  blocks of keys that a split has at least
    """

    fill: int = 1
    least: int = 4


def plan_of(attention: Attention, arch) -> Plan | None:
    """The arch's plan; None if there is none for such a layer."""
    if not suits(attention, arch) or attention.heads < arch.fragment[0]:
        return None
    rows = arch.fragment[0] * (1 if attention.heads <= arch.fragment[0] else 2)
    waves = (4, 2, 1) if arch.family == "nvidia" else (8, 4, 2, 1)
    buffers = 2 if arch.family == "nvidia" else 1
    plans = (Plan(n, rows, buffers=buffers, held=64 if arch.family == "nvidia" else 4) for n in waves)
    return next((plan for plan in plans if shape_of(plan, attention, arch)), None)


def part_size(plan, attention) -> int:
    """float32 of a workgroup in Parts: the outputs of its rows, then (top, total) of each."""
    return plan.rows * (attention.value_d + 2)


def splits_of(plan, attention, m, arch) -> Splits:
    """How the keys of m rows are distributed. ValueError for a plan that does not suit."""
    parts = -(-attention.heads // plan.rows)
    ((elements,), _), _ = scratch_shapes(attention.heads, attention.value_d).values()
    fill = min(-(-plan.fill * arch.units // parts), elements // part_size(plan, attention) // parts - m)
    if fill < 1 or not shape_of(plan, attention, arch):
        raise ValueError(f"{plan} does not suit {attention} on {arch.name}")
    count = min(-(-attention.ctx // (plan.keys * plan.least)), fill, MOST)
    return Splits(
        count, plan.least, plan.waves * arch.wave, plan.rows, attention.value_d, plan.keys, 0, parts, MOST, 1, fill
    )


def attention_latent_decode(attention: Attention, m, layout, arch, name, plan=None) -> tirx.PrimFunc:
    """Kernel of `attention_step`, with `splits`, of m rows, each with its own sequence and position. plan: instead of
    the arch's; ValueError for one that does not suit."""
    if m > SLOTS:
        raise ValueError(f"decode attention of {m} rows")
    with attention_step(attention, m, layout, name, splits=True) as (ir, step):
        emit(attention, m, layout, arch, step, plan)
    return ir.get()


def emit(attention: Attention, m, layout, arch, step: Step, plan=None, live=1) -> None:
    """The launches for rows 0 .. m-1 of a step, of which state[live] are computed. Errors: of
    `attention_latent_decode`."""
    plan = plan or plan_of(attention, arch)
    if plan is None:
        raise ValueError(f"latent attention of {attention} has no plan for {arch.name}")
    splits = splits_of(plan, attention, m, arch)
    _emit_parts(attention, m, arch, step, plan, splits, live)
    _emit_join(attention, m, layout, arch, step, plan, splits, live)


def _emit_parts(attention, m, arch, step, plan, splits, live):
    with launch((splits.parts, splits.workgroups(m)), (arch.wave, plan.waves)) as (part, group, lane, thread_wave):
        number, token, split, works = uniform(arch, thread_wave), 0, group, None
        if m > 1:
            count = T.Bind(T.min(step.state[live], T.int32(m)))
            works, token, split, active = dealt(arch, attention, splits, step.rows, m, count, group, lane)
        seen = visible(attention, clamped_position(step.rows, token, attention.ctx))
        end, first = seen.end_block(plan.keys), seen.first_block(plan.keys)
        if works is None:
            active = splits.active(end - first)
            works = split < active
        with T.serial(T.cast(works, "int32")):
            row = T.Bind(token * attention.heads + part * plan.rows)
            wave = Wave(arch, attention, plan, step.Q, row, number, lane, lambda row: seen)
            wave.start()
            begin, behind = (T.Bind(first + T.truncdiv((split + i) * (end - first), active)) for i in range(2))
            tid = T.Bind(number * arch.wave + lane)
            attend(wave, step.cache, row_slot(step.rows, token), begin, behind, tid, splits.threads)
            place = T.Bind((group * splits.parts + part) * part_size(plan, attention))
            wave.store_parts(step.scratch[0], place)


def _emit_join(attention, m, layout, arch, step, plan, splits, live):
    """A workgroup has some columns of a head, a lane WIDTH of them; the waves take splits round robin."""
    heads, d, Parts, fragment = attention.heads, attention.value_d, step.scratch[0], arch.fragment[0]
    chunks, size = -(-d // (arch.wave * WIDTH)), part_size(plan, attention)
    with launch((heads * chunks, m), (arch.wave, JOIN_WAVES)) as (place, token, lane, wave):
        head, chunk = T.Bind(place // chunks), T.Bind(place % chunks)
        before = T.int32(0)
        if m > 1:
            count, word = T.Bind(T.min(step.state[live], T.int32(m))), T.int32(0)
            for row, active, lower in splits_of_rows(arch, attention, splits, step.rows, m, count, lane):
                own = T.shift_left(lower, T.int32(FIELD)) + active
                word = opaque(T.max(word, T.Select(row == token, own, T.int32(0))))
            word = T.Bind(wave_max(arch, word))
            before, active = T.Bind(T.shift_right(word, T.int32(FIELD))), T.Bind(word & MOST)
        else:
            seen = visible(attention, clamped_position(step.rows, 0, attention.ctx))
            active = splits.active(seen.end_block(plan.keys) - seen.first_block(plan.keys))
        part = T.Bind(head // plan.rows)
        first = T.Bind(token * heads + part * plan.rows)
        begin = T.Bind(head % plan.rows // fragment * fragment)  # of the fragment in the tile
        start = T.min(first + begin, T.int32(int(step.Q.shape[0]) * heads - fragment))
        row = T.Bind(begin + (token * heads + head) - start)

        def element(split, offset):
            """Where an element of a split's part is."""
            return T.Bind(((before + split) * splits.parts + part) * size + offset)

        column = T.Bind((chunk * arch.wave + lane) * WIDTH)
        inside = None if d % (arch.wave * WIDTH) == 0 else column < d
        safe = column if inside is None else T.Bind(T.min(column, T.int32(d - WIDTH)))
        weights = T.alloc_buffer((-(-splits.count // arch.wave) * arch.wave,), "float32", scope="shared")
        sums = T.alloc_buffer((JOIN_WAVES, arch.wave * WIDTH), "float32", scope="shared")
        with T.serial(T.cast(active > 0, "int32")):
            tops, totals = [], []
            for n in range(0, splits.count, arch.wave):
                split = T.Bind(T.min(n + lane, active - 1))
                tail = element(split, plan.rows * d + row * 2)
                live_split = n + lane < active
                tops.append(T.Bind(T.Select(live_split, Parts[tail], T.float32(LOWEST))))
                totals.append(T.Bind(T.Select(live_split, Parts[tail + 1], T.float32(0))))
            largest = tops[0]
            for top in tops[1:]:
                largest = maximum(largest, top)
            largest = wave_max(arch, T.Bind(largest))
            powers = [T.Bind(exp2(top - largest)) for top in tops]
            total = T.float32(0)
            for power, own in zip(powers, totals, strict=True):
                total = total + power * own
            inverse = T.Bind(rcp(wave_sum(arch, T.Bind(total))))
            with T.If(wave == 0), T.Then():
                for n, power in enumerate(powers):
                    put(weights, power * inverse, n * arch.wave + lane)
            barrier()
            y = local(WIDTH)
            put(y, T.broadcast(T.float32(0), WIDTH), at(0, WIDTH))
            with T.serial((active + (JOIN_WAVES * JOIN_BATCH - 1)) // (JOIN_WAVES * JOIN_BATCH)) as batch:
                for i in range(JOIN_BATCH):
                    split = T.Bind((batch * JOIN_BATCH + i) * JOIN_WAVES + wave)
                    there = T.Bind(T.min(split, active - 1))
                    weight = T.Bind(T.Select(split < active, weights[there], T.float32(0)))
                    found = Parts[at(element(there, row * d + safe), WIDTH)]
                    put(y, y[at(0, WIDTH)] + found * T.broadcast(weight, WIDTH), at(0, WIDTH))
            put(sums, y[at(0, WIDTH)], wave, at(lane * WIDTH, WIDTH))
            barrier()
            with T.If(wave == 0), T.Then():
                for n in range(1, JOIN_WAVES):
                    put(y, y[at(0, WIDTH)] + sums[n, at(lane * WIDTH, WIDTH)], at(0, WIDTH))
                values = [T.Bind(y[i]) for i in range(WIDTH)]
                emit_store(arch, layout, step.out, values, token, T.Bind(head * d + column), inside)
