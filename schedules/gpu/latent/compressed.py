"""The kernel of `CompressedAttention` on GPUs (schedules/operators/indexer.py).

Two launches: the first writes the rows' keys to the caches. In the second, a workgroup computes a head of a row: each
thread computes the scores of some keys, then some columns of the output.
"""

from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.attention.attention_step import LOWEST, with_sink
from mlc_amd.schedules.gpu.attention.cache import UNIT, clamped_position, is_at, place_args, row_slot
from mlc_amd.schedules.gpu.base.device import exp2, fma, launch, maximum, rcp
from mlc_amd.schedules.gpu.base.group import Group
from mlc_amd.schedules.gpu.base.norm import workgroup_sum
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import at, elements, filled, put
from mlc_amd.schedules.gpu.base.step import builds, if_live
from mlc_amd.schedules.gpu.latent.choice import store_key
from mlc_amd.schedules.operators.attention import PAGE
from mlc_amd.schedules.operators.indexer import CompressedAttention
from mlc_amd.schedules.tir import Buffer, Expr, declared

THREADS = 256
LEAST = -120  # lower bound of the exponent of a weight


@builds(CompressedAttention)
def compressed_attention(op: CompressedAttention, arch: Device, state: Buffer, plan: None) -> None:
    """Kernel (state, rows, pages, Q, K, [C, [Ids]], Sinks, Kc, [Cc], Y), with the shapes of `CompressedAttention`.
    Raises UserError if the scores of all keys do not fit into LDS."""
    of, m, d, ratio = op.layer, op.m, op.layer.d, op.ratio
    waves = max(min(THREADS, arch.threads) // arch.wave, 1)
    threads = arch.wave * waves
    if 8 * op.most_keys + 1024 > arch.lds:
        raise UserError(
            f"attention to {op.most_keys} keys at once does not fit the shared memory of {arch.name}; compile with a "
            "smaller --ctx"
        )
    rows, pages = place_args(m, of)
    Q, K, C = declared(**op.inputs)
    (Ids,), (Sinks,) = declared("int32", Ids=(m, op.used) if op.used else None), declared(Sinks=(of.heads,))
    Kc, Cc = declared("float16", Kc=op.caches["wk"], Cc=op.caches.get("ck"))
    (Y,) = declared(Y=(m, of.heads * d))
    with launch((m,), (arch.wave,)) as (row, lane), if_live(state, m, row):
        last = clamped_position(rows, row, of.ctx)
        with T.If(is_at(rows, row, last)), T.Then():
            page = T.Bind(pages[row_slot(rows, row), last // PAGE])
            store_key(arch, Kc, K, row, (page, last % PAGE), lane)
            if ratio:
                with T.If((last + 1) % ratio == 0), T.Then():
                    store_key(arch, Cc, C, row, (page, last % PAGE // ratio), lane)
    with launch((of.heads, m), (arch.wave, waves)) as (head, row, lane, wave), if_live(state, m, row):
        group, last = Group(arch, lane, wave, waves), clamped_position(rows, row, of.ctx)
        thread = group.tid
        slot, near = row_slot(rows, row), T.Bind(T.min(last + 1, T.int32(of.window)))
        scores = T.alloc_buffer((op.most_keys,), "float32", scope="shared")
        places = T.alloc_buffer((op.most_keys,), "int32", scope="shared")
        part = T.alloc_buffer((waves,), "float32", scope="shared")
        top = filled(T.float32(LOWEST))

        def score(cache: Buffer, number: Expr, position: Expr, of_page: int, every: int, seen: Expr) -> None:
            page, place = T.Bind(pages[slot, position // PAGE]), T.Bind(position % PAGE // every)
            product = filled(T.float32(0))
            with T.serial(d // UNIT) as unit:
                key = T.Bind(cache[page, place, at(unit * UNIT, UNIT)])
                for i, x in enumerate(elements(key)):
                    put(product, fma(T.cast(x, "float32"), Q[row, head, unit * UNIT + i], product[0]), 0)
            found = T.Bind(product[0] if seen is None else T.Select(seen, product[0], T.float32(LOWEST)))
            put(scores, found, number)
            put(places, page * of_page + place, number)
            put(top, maximum(top[0], found), 0)

        def each(count: Expr, step_of) -> None:
            with T.serial((count + (threads - 1)) // threads) as step:
                number = T.Bind(step * threads + thread)
                with T.If(number < count), T.Then():
                    step_of(number)

        each(near, lambda number: score(Kc, number, T.Bind(last - number), PAGE, 1, None))
        count = near
        if ratio:
            far = T.int32(op.used) if op.used else T.Bind((last + 1) // ratio)
            count = T.Bind(near + far)

            def of_block(number: Expr) -> None:
                end = T.Bind(Ids[row, number] if op.used else (number + 1) * ratio - 1)
                seen = (end >= 0) & (end <= last) & ((end + 1) % ratio == 0)
                position = T.Bind(T.max(T.min(end, last), T.int32(0)))
                score(Cc, near + number, position, op.caches["ck"][1], ratio, seen)

            each(far, of_block)
        largest, total = T.Bind(group.reduce((top[0], "max"))[0]), filled(T.float32(0))
        with T.serial((count + (threads - 1)) // threads) as step:
            number = T.Bind(step * threads + thread)
            exponent = T.Bind(scores[T.min(number, count - 1)] - largest)
            with T.If(number < count), T.Then():
                weight = T.Bind(T.Select(exponent < LEAST, T.float32(0), exp2(maximum(exponent, T.float32(LEAST)))))
                put(scores, weight, number)
                put(total, total[0] + weight, 0)
        inverse = rcp(with_sink(Sinks, head, workgroup_sum(arch, waves, total[0], part, wave, lane), largest, 0))
        for first in range(0, d, threads):
            column, result = T.Bind(T.min(first + thread, T.int32(d - 1))), filled(T.float32(0))

            def add(cache: Buffer, number: Expr, of_page: int, column=column, result=result) -> None:
                there = T.Bind(places[number])
                value = T.cast(cache[there // of_page, there % of_page, column], "float32")
                put(result, fma(scores[number], value, result[0]), 0)

            with T.serial(near) as number:
                add(Kc, number, PAGE)
            if ratio:
                with T.serial(count - near) as number:
                    add(Cc, near + number, op.caches["ck"][1])
            with T.If(first + thread < d), T.Then():
                put(Y, result[0] * inverse, row, head * d + column)
