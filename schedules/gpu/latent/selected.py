"""Attention to chosen keys on the GPU (schedules/operators/indexer.py). A workgroup has a head of a row: a thread
scores some keys, then sums some columns.
"""

from tvm.tirx.script import builder as T

from mlc_amd.schedules.choices import choices, keys_of
from mlc_amd.schedules.gpu.attention.attention_step import LOWEST, Step, with_sink
from mlc_amd.schedules.gpu.attention.cache import KEYS, UNIT, Cache, clamped_position, place_args, row_slot
from mlc_amd.schedules.gpu.base.device import barrier, exp2, fma, launch, maximum, rcp, wave_max
from mlc_amd.schedules.gpu.base.norm import workgroup_sum
from mlc_amd.schedules.gpu.base.profiles import Device, Profile
from mlc_amd.schedules.gpu.base.registers import at, elements, filled, put
from mlc_amd.schedules.gpu.base.step import builds, if_live
from mlc_amd.schedules.gpu.latent import selected_tiles
from mlc_amd.schedules.operators.attention import PAGE, CausalAttention
from mlc_amd.schedules.operators.indexer import SelectedAttention
from mlc_amd.schedules.tir import Buffer, Expr, declared

THREADS = 256


def _waves(arch: Device) -> int:
    return max(min(THREADS, arch.threads) // arch.wave, 1)


@builds(SelectedAttention)
def selected_attention(op: SelectedAttention, arch: Device, state: Buffer, plan: None) -> None:
    """Kernel (state, rows, pages, Qo, Ids, Kc, [Vc], [Sinks], Y). ValueError for more keys than shared memory holds the
    scores of."""
    spec, m, waves = op.layer, op.m, _waves(arch)
    threads, plan = arch.wave * waves, selected_tiles.plan_for(op, arch)
    if not plan and 8 * op.most_keys + 4 * THREADS * UNIT + 1024 > arch.lds:
        raise ValueError(f"{op.most_keys} keys: shared memory holds fewer")
    rows, pages = place_args(m, spec)
    Q = T.arg("Qo", T.buffer((m, spec.heads, spec.width), "float16"))
    (Ids,) = declared("int32", Ids=(m, op.sets * op.used))
    cache, sinks = Cache(spec, pages), declared(Sinks=(spec.heads,) if spec.sinks else None)[0]
    (Y,) = declared(Y=(m, spec.heads * spec.value_d))
    if plan and isinstance(arch, Profile):
        rowwise = CausalAttention(layer=spec, m=m, single=m, layout="")
        step = Step(rowwise, state, rows, Q, None, cache, sinks, [], [Y])
        selected_tiles.emit(op, step, Ids, arch, plan)
        return
    with launch((spec.heads, m), (arch.wave, waves)) as (head, row, lane, wave), if_live(state, m, row):
        thread, last = T.Bind(wave * arch.wave + lane), clamped_position(rows, row, spec.ctx)
        slot, many, kv = row_slot(rows, row), choices(op, last), T.Bind(head // spec.group)
        own = T.Bind(kv // (spec.kv_heads // op.sets))
        count = keys_of(op, many, Ids[row, own * op.used + many - 1], last)
        scores = T.alloc_buffer((op.most_keys,), "float32", scope="shared")
        places = T.alloc_buffer((op.most_keys,), "int32", scope="shared")
        parts = [T.alloc_buffer((waves,), "float32", scope="shared") for _ in range(2)]

        def element(there: Expr, column: Expr, size: int) -> Expr:
            tile, within = T.Bind(there % PAGE // KEYS), T.Bind(there % KEYS)
            return cache.Kc[there // PAGE, kv, tile, column // UNIT, within, at(column % UNIT, size)]

        top = filled(T.float32(LOWEST))
        steps = T.Bind((count + (threads - 1)) // threads)
        with T.serial(steps) as step:
            number = T.Bind(step * threads + thread)
            with T.If(number < count), T.Then():
                position = Ids[row, own * op.used + number // op.block] * op.block + number % op.block
                position = T.Bind(T.max(T.min(position, last), T.int32(0)))
                there = T.Bind(pages[slot, position // PAGE] * PAGE + position % PAGE)
                product = filled(T.float32(0))
                with T.serial(spec.d // UNIT) as unit:
                    k, q = (T.Bind(x) for x in (element(there, unit * UNIT, UNIT), Q[row, head, at(unit * UNIT, UNIT)]))
                    for a, b in zip(elements(k), elements(q), strict=True):
                        put(product, fma(T.cast(a, "float32"), T.cast(b, "float32"), product[0]), 0)
                put(scores, product[0], number)
                put(places, there, number)
                put(top, maximum(top[0], product[0]), 0)
        best = wave_max(arch, T.Bind(top[0]))
        with T.If(lane == 0), T.Then():
            put(parts[0], best, wave)
        barrier()
        largest = filled(T.float32(LOWEST))
        with T.serial(waves) as i:
            put(largest, maximum(largest[0], parts[0][i]), 0)
        total = filled(T.float32(0))
        with T.serial(steps) as step:
            number = T.Bind(step * threads + thread)
            score = T.Bind(scores[T.min(number, count - 1)])
            with T.If(number < count), T.Then():
                weight = exp2(maximum(score - largest[0], T.float32(-120)))
                put(scores, weight, number)
                put(total, total[0] + weight, 0)
        total = workgroup_sum(arch, waves, total[0], parts[1], wave, lane)
        inverse = rcp(with_sink(sinks, head, total, largest[0], 0))
        if spec.values and spec.value_d // UNIT <= threads:
            _sum_units(op, arch, threads, element, (scores, places, Y), (row, head), (thread, count), inverse)
            return
        for first in range(0, spec.value_d, threads):
            column, result = T.Bind(T.min(first + thread, T.int32(spec.value_d - 1))), filled(T.float32(0))
            with T.serial(count) as number:
                there = T.Bind(places[number])
                if spec.values:
                    value = element(there, column, 1)
                else:
                    value = cache.Vc[there // PAGE, kv, there % PAGE // UNIT, column, there % UNIT]
                value = T.cast(value, "float32")
                put(result, fma(scores[number], value, result[0]), 0)
            with T.If(first + thread < spec.value_d), T.Then():
                put(Y, result[0] * inverse, row, head * spec.value_d + column)


def _sum_units(op: SelectedAttention, arch: Device, threads: int, element, buffers, place, of, inverse: Expr) -> None:
    """The result of a head of a row. A thread has a unit of the columns, and of the keys as many as there are threads
    for each unit; their sums meet in shared memory."""
    (scores, places, Y), (row, head), (thread, count), d = buffers, place, of, op.layer.value_d
    units = d // UNIT
    slices = threads // units
    unit, part = T.Bind(thread % units), T.Bind(thread // units)
    sums, own = T.alloc_buffer((slices, d), "float32", scope="shared"), filled(T.float32(0), UNIT)
    with T.serial(T.max((count - part + (slices - 1)) // slices, T.int32(0))) as step:
        number = T.Bind(T.min(step * slices + part, count - 1))
        weight = T.Bind(scores[number])
        for i, x in enumerate(elements(T.Bind(element(T.Bind(places[number]), unit * UNIT, UNIT)))):
            put(own, fma(weight, T.cast(x, "float32"), own[i]), i)
    with T.If(part < slices), T.Then():
        for i in range(UNIT):
            put(sums, own[i], part, unit * UNIT + i)
    barrier()
    for first in range(0, d, threads):
        column, total = T.Bind(T.min(first + thread, T.int32(d - 1))), T.float32(0)
        for i in range(slices):
            total = total + sums[i, column]
        with T.If(first + thread < d), T.Then():
            put(Y, total * inverse, row, head * d + column)
