"""The kernel of `SelectedAttention` on GPUs (schedules/operators/indexer.py). Latent attention on archs with
cooperative matrices is in selected_tiles.py.

Otherwise a workgroup has some heads of a row that share a KV head, and all chosen keys of the row or a split of them.
Each thread computes the scores of some keys, then some columns of the output. A second launch joins the splits.
"""

from collections.abc import Callable
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.choices import choices, keys_of
from mlc_amd.schedules.gpu.attention.attention_step import LOWEST, Step, with_sink
from mlc_amd.schedules.gpu.attention.cache import KEYS, UNIT, Cache, clamped_position, place_args, row_slot
from mlc_amd.schedules.gpu.base.device import barrier, exp2, fma, launch, maximum, rcp
from mlc_amd.schedules.gpu.base.group import Group
from mlc_amd.schedules.gpu.base.norm import workgroup_sum
from mlc_amd.schedules.gpu.base.profiles import Device, Profile
from mlc_amd.schedules.gpu.base.registers import at, elements, filled, put
from mlc_amd.schedules.gpu.base.step import builds, if_live, when
from mlc_amd.schedules.gpu.latent import selected_tiles
from mlc_amd.schedules.operators.attention import PAGE, CausalAttention
from mlc_amd.schedules.operators.indexer import SelectedAttention
from mlc_amd.schedules.tir import Buffer, Expr, declared

THREADS = 256
HEADS = 4  # largest number of heads of a workgroup
LEAST = 64  # smallest number of keys of a split, unless the row has fewer
FILL = 2  # keys are split so that there are about so many workgroups for each compute unit
EXTRA = 2  # float32 after the columns of a head in Parts: top and total


class Shape(NamedTuple):
    """heads: heads of a workgroup. splits: largest number of splits of a row's keys. keys: largest number of keys of a
    split."""

    heads: int
    splits: int
    keys: int

    def lds_bytes(self) -> int:
        return 4 * ((self.heads + 1) * self.keys + THREADS * UNIT) + 1024

    def active(self, count: Expr) -> Expr:
        """The number of splits of `count` keys."""
        return T.Bind(T.max(T.min((count + (LEAST - 1)) // LEAST, T.int32(self.splits)), T.int32(1)))


def shape_of(op: SelectedAttention, arch: Device) -> Shape:
    """The Shape with the most heads whose scores fit into LDS. Raises UserError if those of one head do not fit."""
    for heads in range(HEADS, 0, -1):
        if op.layer.group % heads == 0:
            groups = op.layer.heads // heads * op.m
            splits = max(min(FILL * arch.units // groups, op.most_keys // LEAST), 1)
            shape = Shape(heads, splits, max(LEAST, -(-op.most_keys // splits)))
            if shape.lds_bytes() <= arch.lds:
                return shape
    raise UserError(
        f"attention to {op.most_keys} chosen keys does not fit the shared memory of {arch.name}; compile with a "
        "smaller --ctx, or for another target"
    )


@builds(SelectedAttention)
def selected_attention(op: SelectedAttention, arch: Device, state: Buffer, plan: None) -> None:
    """Kernel (state, rows, pages, Qo, Ids, Kc, [Vc], [Sinks], Y), with the shapes of `SelectedAttention`. Raises
    UserError if the scores do not fit into LDS."""
    spec, m, tile = op.layer, op.m, selected_tiles.plan_for(op, arch)
    rows, pages = place_args(m, spec)
    Q = T.arg("Qo", T.buffer((m, spec.heads, spec.width), "float16"))
    (Ids,) = declared("int32", Ids=(m, op.sets * op.used))
    cache, sinks = Cache(spec, pages), declared(Sinks=(spec.heads,) if spec.sinks else None)[0]
    (Y,) = declared(Y=(m, spec.heads * spec.value_d))
    if tile and isinstance(arch, Profile):
        rowwise = CausalAttention(layer=spec, m=m, single=m, layout="")
        step = Step(rowwise, state, rows, Q, None, cache, sinks, [], [Y])
        selected_tiles.emit(op, step, Ids, arch, tile)
        return
    shape, d = shape_of(op, arch), spec.value_d
    Parts = T.alloc_buffer((m, shape.splits, spec.heads, d + EXTRA), "float32") if shape.splits > 1 else None

    def seen(row: Expr, kv: Expr) -> tuple[Expr, Expr, Expr]:
        """(position of the row, index of the first id for this KV head, number of chosen keys)."""
        last = clamped_position(rows, row, spec.ctx)
        first, many = T.Bind(kv // (spec.kv_heads // op.sets) * op.used), choices(op, last)
        return last, first, keys_of(op, many, Ids[row, first + many - 1], last)

    waves = max(min(THREADS, arch.threads) // arch.wave, 1)
    grid = spec.heads // shape.heads, shape.splits, m
    with launch(grid, (arch.wave, waves)) as (group, split, row, lane, wave), if_live(state, m, row):
        head = T.Bind(group * shape.heads)
        kv = T.Bind(head // spec.group)
        last, first, count = seen(row, kv)
        active, begin, end = None, T.int32(0), count
        if Parts is not None:
            active = shape.active(count)
            begin, end = (T.Bind(T.truncdiv((split + i) * count, active)) for i in range(2))
        work = _Work(op, arch, shape, waves, (Q, cache, sinks), (row, head, kv), (lane, wave))
        # a loop of 0 or 1 steps instead of an `if`, in which barriers are not allowed
        with T.serial(1 if active is None else T.cast(split < active, "int32")):
            slot = row_slot(rows, row)

            def place(number: Expr) -> Expr:
                """The place of chosen key `number` in the cache: page * PAGE + place in the page."""
                position = Ids[row, first + number // op.block] * op.block + number % op.block
                position = T.Bind(T.max(T.min(position, last), T.int32(0)))
                return T.Bind(pages[slot, position // PAGE] * PAGE + position % PAGE)

            tops, totals = work.weigh(place, begin, T.Bind(end - begin))
            for h, column, value, valid in work.sums(T.Bind(end - begin)):
                own = T.Bind(head + h)
                with when(valid):
                    if Parts is None:
                        put(Y, value * rcp(with_sink(sinks, own, totals[h], tops[h], 0)), row, own * d + column)
                    else:
                        put(Parts, value, row, split, own, column)
            if Parts is not None:
                for h in range(shape.heads):
                    with T.If(work.thread == 0), T.Then():
                        put(Parts, tops[h], row, split, head + h, d)
                        put(Parts, totals[h], row, split, head + h, d + 1)
    if Parts is not None:
        with launch((spec.heads, m), (arch.wave, waves)) as (head, row, lane, wave), if_live(state, m, row):
            _, _, count = seen(row, T.Bind(head // spec.group))
            _join(Parts, Y, sinks, (row, head), shape.active(count), T.Bind(wave * arch.wave + lane), waves * arch.wave)


def _join(Parts: Buffer, Y: Buffer, sinks: Buffer, of, active: Expr, thread: Expr, threads: int) -> None:
    """Joins the results of the splits of a head of a row, and stores the output."""
    (row, head), d = of, int(Parts.shape[3]) - EXTRA
    largest, total = filled(T.float32(LOWEST)), filled(T.float32(0))
    with T.serial(active) as split:
        put(largest, maximum(largest[0], Parts[row, split, head, d]), 0)
    with T.serial(active) as split:
        weight = exp2(Parts[row, split, head, d] - largest[0])
        put(total, fma(weight, Parts[row, split, head, d + 1], total[0]), 0)
    inverse = rcp(with_sink(sinks, head, total[0], largest[0], 0))
    for first in range(0, d, threads):
        column, result = T.Bind(T.min(first + thread, T.int32(d - 1))), filled(T.float32(0))
        with T.serial(active) as split:
            weight = exp2(Parts[row, split, head, d] - largest[0])
            put(result, fma(weight, Parts[row, split, head, column], result[0]), 0)
        with T.If(first + thread < d), T.Then():
            put(Y, result[0] * inverse, row, head * d + column)


class _Work:
    """A workgroup's work for some heads of a row. buffers: (queries, cache, sinks). of: (row, first head, KV head)."""

    def __init__(self, op: SelectedAttention, arch: Device, shape: Shape, waves: int, buffers, of, place):
        (self.Q, self.cache, _), (self.row, self.head, self.kv), (lane, wave) = buffers, of, place
        self.spec, self.heads, self.group = op.layer, shape.heads, Group(arch, lane, wave, waves)
        self.threads, self.thread = self.group.threads, self.group.tid
        self.scores = T.alloc_buffer((shape.heads, shape.keys), "float32", scope="shared")
        self.places = T.alloc_buffer((shape.keys,), "int32", scope="shared")

    def _element(self, there: Expr, column: Expr, size: int) -> Expr:
        tile, within = T.Bind(there % PAGE // KEYS), T.Bind(there % KEYS)
        return self.cache.Kc[there // PAGE, self.kv, tile, column // UNIT, within, at(column % UNIT, size)]

    def weigh(self, place: Callable[[Expr], Expr], begin: Expr, count: Expr) -> tuple[list[Expr], list[Expr]]:
        """Stores the weights of `count` keys, from chosen key `begin` on, to LDS. Returns for each head the largest
        score and the sum of weights."""
        scores, places, threads, thread = self.scores, self.places, self.threads, self.thread
        steps, top = T.Bind((count + (threads - 1)) // threads), filled(T.float32(LOWEST), self.heads)
        with T.serial(steps) as step:
            number = T.Bind(step * threads + thread)
            with T.If(number < count), T.Then():
                there, product = place(T.Bind(begin + number)), filled(T.float32(0), self.heads)
                with T.serial(self.spec.d // UNIT) as unit:
                    key = [
                        T.Bind(T.cast(x, "float32")) for x in elements(T.Bind(self._element(there, unit * UNIT, UNIT)))
                    ]
                    for h in range(self.heads):
                        query = elements(T.Bind(self.Q[self.row, self.head + h, at(unit * UNIT, UNIT)]))
                        for a, b in zip(key, query, strict=True):
                            put(product, fma(a, T.cast(b, "float32"), product[h]), h)
                put(places, there, number)
                for h in range(self.heads):
                    put(scores, product[h], h, number)
                    put(top, maximum(top[h], product[h]), h)
        tops, totals, group = [], [], self.group
        for h in range(self.heads):
            part = T.alloc_buffer((group.waves,), "float32", scope="shared")
            largest, total = T.Bind(group.reduce((top[h], "max"))[0]), filled(T.float32(0))
            with T.serial(steps) as step:
                number = T.Bind(step * threads + thread)
                score = T.Bind(scores[h, T.min(number, count - 1)])
                with T.If(number < count), T.Then():
                    weight = exp2(maximum(score - largest, T.float32(-120)))
                    put(scores, weight, h, number)
                    put(total, total[0] + weight, 0)
            totals.append(workgroup_sum(group.arch, group.waves, total[0], part, group.wave, group.lane))
            tops.append(largest)
        return tops, totals

    def sums(self, count: Expr):
        """The thread's elements of the outputs: (head, column, weighted sum of `count` values, whether it exists)."""
        if self.spec.values and self.spec.value_d // UNIT <= self.threads:
            yield from self._sums_of_units(count)
            return
        for first in range(0, self.spec.value_d, self.threads):
            column = T.Bind(T.min(first + self.thread, T.int32(self.spec.value_d - 1)))
            results = filled(T.float32(0), self.heads)
            with T.serial(count) as number:
                there = T.Bind(self.places[number])
                if self.spec.values:
                    value = self._element(there, column, 1)
                else:
                    value = self.cache.Vc[there // PAGE, self.kv, there % PAGE // UNIT, column, there % UNIT]
                value = T.Bind(T.cast(value, "float32"))
                for h in range(self.heads):
                    put(results, fma(self.scores[h, number], value, results[h]), h)
            for h in range(self.heads):
                yield h, column, results[h], first + self.thread < self.spec.value_d

    def _sums_of_units(self, count: Expr):
        """`sums` if there are more threads than units of columns: several threads share a unit, and divide the keys.
        Their sums are added in LDS, one head after the other."""
        d, threads = self.spec.value_d, self.threads
        units = d // UNIT
        slices = threads // units
        unit, part = T.Bind(self.thread % units), T.Bind(self.thread // units)
        shared = T.alloc_buffer((slices, d), "float32", scope="shared")
        own = filled(T.float32(0), self.heads * UNIT)
        with T.serial(T.max((count - part + (slices - 1)) // slices, T.int32(0))) as step:
            number = T.Bind(T.min(step * slices + part, count - 1))
            value = elements(T.Bind(self._element(T.Bind(self.places[number]), unit * UNIT, UNIT)))
            value = [T.Bind(T.cast(x, "float32")) for x in value]
            for h in range(self.heads):
                weight = T.Bind(self.scores[h, number])
                for i, x in enumerate(value):
                    put(own, fma(weight, x, own[h * UNIT + i]), h * UNIT + i)
        for h in range(self.heads):
            if h:
                barrier()
            with T.If(part < slices), T.Then():
                for i in range(UNIT):
                    put(shared, own[h * UNIT + i], part, unit * UNIT + i)
            barrier()
            for first in range(0, d, threads):
                column, total = T.Bind(T.min(first + self.thread, T.int32(d - 1))), T.float32(0)
                for i in range(slices):
                    total = total + shared[i, column]
                yield h, column, T.Bind(total), first + self.thread < d
