"""Rows of queries as in `attention_rows.py`, for Vulkan: waves of any size, small code, no need for scalar registers.

The distribution of the work is the same: a wave processes a block of keys, a lane scores one key (several in a small
wave) and sums one column (or several) of the outputs. Weights reach the lanes through shared memory, of which each wave
has its own part, so that two loads read eight of them; products are float32 multiply-adds of values that are converted
once for all rows; and loops over rows stay loops for most drivers (`device.each`).
"""

from collections.abc import Callable, Iterable, Sequence
from math import gcd
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.attention.attention_rows import STEP, Rows, WaveRows
from mlc_amd.schedules.gpu.attention.cache import UNIT, KeyBlock
from mlc_amd.schedules.gpu.attention.cache_units import Units
from mlc_amd.schedules.gpu.attention.softmax import LOWEST, OTHER_BYTES, P_SHIFT, Joined, Sees, join
from mlc_amd.schedules.gpu.base.device import (
    WAVE_SHARED,
    barrier,
    each,
    exp2,
    fma,
    maximum,
    wave_barrier,
    wave_max,
    wave_sum,
)
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.gpu.base.registers import local, opaque, put
from mlc_amd.schedules.gpu.base.step import when
from mlc_amd.schedules.operators.attention import Attention
from mlc_amd.schedules.tir import Buffer, Expr

# 16-byte loads in flight per lane. Fewer loads make less code.
LOADS, FEWER_LOADS = 8, 4
SPLITS = 32  # maximum of splits whose weights are in shared memory


def query_dtype(arch: Device) -> str:
    """The type of queries in shared memory, that in which they are multiplied."""
    return "float16" if arch.api == "rocm" else "float32"


def waves_of(arch: Device, count: int, d: int, threads: int) -> int:
    """Waves of a workgroup for `count` rows of `d` elements: those of `threads`, fewer where the arch or its shared
    memory has no more. UserError if it does not suffice for one."""
    waves = min(threads, arch.threads) // arch.wave
    if arch.api == "rocm":
        return waves
    # of a wave: what its rows have there, and a key
    fixed, wave = count * (d + SPLITS) * 4 + OTHER_BYTES, (count * max(d, STEP) + d) * 4
    while waves * wave + fixed > arch.lds:
        waves //= 2
        if not waves:
            raise UserError(
                f"{arch.name} has too little shared memory for attention with {count} query heads of {d} elements per "
                "KV head"
            )
    return waves


class KeyLoads(NamedTuple):
    """loads: of 16 bytes that a lane has in flight. step: keys of a block. ahead: whether registers hold the keys of
    the next block, too."""

    loads: int
    step: int = STEP
    ahead: bool = False


def key_loads(arch: Device) -> KeyLoads:
    """The rule: fewer where nothing is known of a device's registers."""
    return KeyLoads(LOADS if arch.registers else FEWER_LOADS)


def rows_of(
    arch: Device, attention: Attention, count: int, lane: Expr, wave: Expr, waves: int, loads: KeyLoads | None = None
) -> "DotRows":
    """The state of `count` rows of a wave, number `wave` of `waves` in its workgroup. loads: of no effect on "rocm",
    None for those of the rule."""
    if arch.api == "rocm":
        return WaveRows(arch, attention, count, lane)
    return VulkanRows(arch, attention, count, lane, wave, waves, loads or key_loads(arch))


class VulkanRows(Rows):
    """`Rows` for Vulkan; weights are not rounded to float16."""

    def __init__(
        self, arch: Device, attention: Attention, count: int, lane: Expr, wave: Expr, waves: int, loads: KeyLoads
    ):
        super().__init__(arch, attention, count, lane, loads.step)
        self.loads = loads
        self.key_batch, self.batch = (
            gcd(units, max(1, loads.loads // share))
            for units, share in (
                (self.d // UNIT, self.keys),
                (loads.step // UNIT, 1 << (self.columns - 1).bit_length()),
            )
        )
        self.scores = local(count * self.keys)
        self.key = Units(attention, self.keys * self.key_batch, "key")
        self.value = Units(attention, self.columns * self.batch, "value")
        self.stride = max(self.value_d, loads.step)  # of a row in shared memory: weights of keys, in the end outputs
        self.shared = T.alloc_buffer((waves * count * self.stride,), "float32", scope=WAVE_SHARED)
        self.place = T.Bind(wave * (count * self.stride))

    @property
    def prefetches(self) -> bool:
        """Whether `load_keys` may be called before `step`: a block's keys are one batch of loads, which stay in
        registers for long."""
        return self.loads.ahead and self.key_batch == self.d // UNIT

    def load_keys(self, block: KeyBlock, first: Expr = 0) -> None:
        """Loads a batch of the block's keys, units first .."""
        places = self._lane_keys(block.place0)
        for c in range(self.key_batch):
            for j, place in enumerate(places):
                self.key.load_key(c * self.keys + j, block, place, first + c)

    def step(self, block: KeyBlock, queries: Buffer, sees: Sees, zero: Expr, following: KeyBlock | None = None) -> None:
        """Processes a `KeyBlock`. queries: [count, d] in shared memory; zero: unused; following: the block of the next
        step, if this one's keys are loaded already."""
        keys = self._lane_keys(block.key0)
        self._score(block, queries, following is not None)
        self._cap_scores(self.scores)
        batches = self.loads.step // UNIT // self.batch
        if batches == 1:
            self._load_values(block, 0)
        if following is not None:
            self.load_keys(following)
        self._weigh([[sees(r, key) for key in keys] for r in range(self.count)])
        wave_barrier()
        if batches == 1:
            self._add_values(0)
        else:
            with T.serial(batches) as b:
                self._load_values(block, b * self.batch)
                self._add_values(b * self.batch)
        wave_barrier()

    def _score(self, block: KeyBlock, queries: Buffer, loaded: bool) -> None:
        for r in each(self.arch, self.count):
            for j in range(self.keys):
                put(self.scores, T.float32(0), r * self.keys + j)
        with T.serial(self.d // UNIT // self.key_batch) as b:
            if not loaded:
                self.load_keys(block, b * self.key_batch)
            for c in range(self.key_batch):
                reals = self.key.reals(c * self.keys, self.keys)
                for r in each(self.arch, self.count):
                    first = (b * self.key_batch + c) * UNIT
                    query = [T.Bind(T.cast(queries[r, first + e], "float32")) for e in range(UNIT)]
                    self._multiply(self.scores, r * self.keys, reals, query)

    def _multiply(self, sums: Expr, first: Expr, units: Sequence[Sequence[Expr]], factors: Sequence[Expr]) -> None:
        """sums[first + i] += the dot product of units[i] and `factors`."""
        for i, unit in enumerate(units):
            total = sums[first + i]
            for x, factor in zip(unit, factors, strict=True):
                total = fma(x, factor, total)
            put(sums, total, first + i)

    def _weigh(self, seen: Sequence[Sequence[Expr]]) -> None:
        """Turns scores into weights, in shared memory, and rescales the state. seen: for each row, whether it sees the
        lane's keys."""
        tops = []
        for r, valid in enumerate(seen):
            largest = T.float32(LOWEST)
            for j, sees in enumerate(valid):
                largest = opaque(maximum(largest, T.Select(sees, self.scores[r * self.keys + j], T.float32(LOWEST))))
            tops.append(largest)
        tops = self._across(tops, wave_max, maximum)
        for r, valid in enumerate(seen):
            now = self.rescale(r, tops[r])
            for j, sees in enumerate(valid):
                weight = exp2(self.scores[r * self.keys + j] - now + T.float32(P_SHIFT))
                weight = opaque(T.Select(sees, weight, T.float32(0)))
                put(self.total, self.total[r] + weight, r)
                put(self.shared, weight, self.place + r * self.stride + j * self.arch.wave + self.lane)

    def sums(self, values: Iterable[Expr]) -> Iterable[Expr]:
        """As `attention_rows.Rows.sums`."""
        return self._across([opaque(x) for x in values], wave_sum, lambda a, b: a + b)

    def _across(
        self, values: Sequence[Expr], reduced: Callable[[Device, Expr], Expr], op: Callable[[Expr, Expr], Expr]
    ) -> list[Expr]:
        """The reduction of each of `values` (one per row) over the wave's lanes, in all lanes. Without subgroups, one
        pair of barriers serves all rows."""
        if self.arch.subgroups:
            return [opaque(reduced(self.arch, x)) for x in values]
        for r, x in enumerate(values):
            put(self.shared, x, self.place + r * self.stride + self.lane)
        wave_barrier()
        found = local(self.count)
        with T.serial(self.count) as r:
            result = T.Bind(self.shared[self.place + r * self.stride])
            for lane in range(1, self.arch.wave):
                result = T.Bind(op(result, self.shared[self.place + r * self.stride + lane]))
            put(found, result, r)
        wave_barrier()
        return [opaque(found[r]) for r in range(len(values))]

    def _add_values(self, first: Expr) -> None:
        """Adds the loaded batch of values, weighted; `first`: its first unit of the step."""
        for i in range(self.batch):
            if self.latent:
                self._add_keys(i * UNIT, (first + i) * UNIT)
                continue
            reals = self.value.reals(i * self.columns, self.columns)
            for r in each(self.arch, self.count):
                place = T.Bind(self.place + r * self.stride + (first + i) * UNIT)
                weights = [T.Bind(self.shared[place + e]) for e in range(UNIT)]
                self._multiply(self.out, r * self.columns, reals, weights)

    def _add_keys(self, first: Expr, key: Expr) -> None:
        """Adds UNIT keys' loaded values, from number `first` of the batch on; key: the number of the first in the
        block."""
        for i in range(UNIT):
            reals = self.value.reals((first + i) * self.units, self.units)
            for r in each(self.arch, self.count):
                weight = T.Bind(self.shared[self.place + r * self.stride + (key + i)])
                for u, unit in enumerate(reals):
                    for e, x in enumerate(unit):
                        place = r * self.columns + (u * UNIT + e)
                        put(self.out, fma(x, weight, self.out[place]), place)

    def join_waves(self, wave: Expr, waves: int) -> Callable[[Expr, Expr], Joined]:
        """As `attention_rows.Rows.join_waves`."""
        tops, totals = (T.alloc_buffer((self.count, waves), "float32", scope="shared") for _ in range(2))
        for r, total in enumerate(self.sums(self.total[r] for r in range(self.count))):
            with T.If(self.lane == 0), T.Then():
                put(tops, self.top[r], r, wave)
                put(totals, total, r, wave)
            for x, column, valid in self._own_columns():
                with when(valid):
                    put(self.shared, self.out[r * self.columns + x], self.place + r * self.stride + column)
        barrier()

        def out(w: Expr, r: Expr, column: Expr) -> list[Expr]:
            return [self.shared[(w * self.count + r) * self.stride + (column + i)] for i in range(WIDTH)]

        return join(tops, totals, waves, out)


DotRows = WaveRows | VulkanRows  # of products per lane
