"""Attention kernels without matrix instructions: rows of queries whose softmax a wave keeps in registers.

`WaveRows` is for AMD's own API; `attention_rows_vulkan.py` has the counterpart for Vulkan, `Rows` what both share.
Where enough rows share keys, matrix units take over (`attention_rows_matrix.py`).

A wave processes its keys in blocks of up to 64. While it scores them a lane has a key (two keys in a wave of 32), so a
dot product stays within a lane; for the outputs a lane has a column and the weights come from other lanes. Per row a
wave keeps
    top     the maximum score so far, the same in all lanes
    total   the sum of weights, still spread over the lanes
    out     the weighted sum of values, float32, column x*wave + lane at x; in latent attention, where a unit has
            columns of a value, unit (x//8)*wave + lane
`join_waves` adds up the results of a workgroup's waves.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention.cache import UNIT, KeyBlock
from mlc_amd.schedules.gpu.attention.cache_units import WORDS, Units
from mlc_amd.schedules.gpu.attention.softmax import LOWEST, P_SHIFT, Joined, Sees, join, soft_cap
from mlc_amd.schedules.gpu.base.device import (
    dot2,
    each,
    exp2,
    maximum,
    read_lane,
    schedule_fence,
    shuffle_xor,
    wave_max,
    wave_sum,
)
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.gpu.base.registers import at, local, opaque, put
from mlc_amd.schedules.gpu.base.step import when
from mlc_amd.schedules.operators.attention import PAGE, Attention
from mlc_amd.schedules.tir import Buffer, Expr

STEP = PAGE  # keys of a block, at most: the maximum is renewed once per block
LATENT_UNITS = 4  # of keys, loaded at once in latent attention, whose outputs take most registers
# Masks of llvm.amdgcn.sched.barrier: what LLVM's scheduler may move across. Without them it starts loads one by one,
# just before their use, to save registers; and all scalar weights at once, which are more than there are registers.
LOADS, SCALARS = 0x8F, 0x94  # all but loads from device memory; loads, LDS and scalar instructions


class Rows:
    """The state of `count` rows of an `Attention` layer in a wave. `lane` is threadIdx.x, the lane's number in it.
    Subclasses have `batch`, the units of values that are loaded at once, and registers for them, `value`."""

    batch: int
    value: Units
    prefetches = False  # as of `attention_rows_vulkan.VulkanRows`

    def __init__(self, arch: Device, attention: Attention, count: int, lane: Expr, step: int):
        self.arch, self.attention, self.count, self.d, self.lane = arch, attention, count, attention.d, lane
        self.value_d, self.latent = attention.value_d, attention.values > 0
        self.units = -(-attention.values // UNIT // arch.wave)  # of a lane, of a value in latent attention
        self.keys = step // arch.wave  # of a lane, as are its columns
        self.columns = self.units * UNIT if self.latent else -(-attention.d // arch.wave)
        self.top, self.total, self.out = local(count), local(count), local(count * self.columns)

    def column(self, x: Expr) -> Expr:
        """The column of this lane's element x (its own or, beyond the end, the last one)."""
        first = x * self.arch.wave
        whole = self.d % self.arch.wave == 0 or (isinstance(x, int) and first + self.arch.wave <= self.d)
        return T.Bind(first + self.lane if whole else T.min(first + self.lane, T.int32(self.d - 1)))

    def _unit(self, u: Expr) -> tuple[Expr, Expr]:
        """(this lane's unit number u of a value in latent attention, whether it has one; None: each lane has)."""
        first, count = u * self.arch.wave, self.value_d // UNIT
        if first + self.arch.wave <= count:
            return T.Bind(first + self.lane), None
        return T.Bind(T.min(first + self.lane, T.int32(count - 1))), first + self.lane < count

    def _own_columns(self) -> Iterator[tuple[int, Expr, Expr]]:
        """Yields (x, its column, whether the lane has one; None: it has) of this lane's elements."""
        for x in range(self.columns):
            if self.latent:
                unit, valid = self._unit(x // UNIT)
                yield x, unit * UNIT + x % UNIT, valid
            else:
                column = x * self.arch.wave + self.lane
                yield x, column, None if (x + 1) * self.arch.wave <= self.d else column < self.d

    def start(self) -> None:
        """Initializes the state: no key seen yet."""
        for r in each(self.arch, self.count):
            put(self.top, T.float32(LOWEST), r)
            put(self.total, T.float32(0), r)
            for x in range(self.columns):
                put(self.out, T.float32(0), r * self.columns + x)

    def _lane_keys(self, first: Expr) -> list[Expr]:
        """The keys that this lane scores, of the block whose first key is `first`; or their places, if that is the
        first one's."""
        return [T.Bind(first + (j * self.arch.wave + self.lane)) for j in range(self.keys)]

    def _cap_scores(self, scores: Sequence[Expr]) -> None:
        """Applies the layer's softcap, if it has one, to the registers `scores`."""
        if self.attention.softcap:
            for i in each(self.arch, self.count * self.keys):
                put(scores, soft_cap(self.attention, scores[i]), i)

    def rescale(self, r: Expr, largest: Expr) -> Expr:
        """Renews row r's maximum, given the largest score of the block. Returns it."""
        now = opaque(maximum(self.top[r], largest))
        shrink = opaque(exp2(self.top[r] - now))  # 1 while nothing was seen: both are LOWEST
        put(self.top, now, r)
        put(self.total, self.total[r] * shrink, r)
        for x in each(self.arch, self.columns):
            put(self.out, self.out[r * self.columns + x] * shrink, r * self.columns + x)
        return now

    def _load_values(self, block: KeyBlock, first: Expr) -> None:
        """Loads a batch of the block's values, units first .., or in latent attention as many keys as these have."""
        if self.latent:
            places = [self._unit(u)[0] for u in range(self.units)]
            for i in range(self.batch * UNIT):
                for u, unit in enumerate(places):
                    key = block.place0 + (first * UNIT + i)
                    key = key if isinstance(key, int) else T.Bind(key)  # TVM keeps & of constants
                    self.value.load_key(i * self.units + u, block, key, unit)
            return
        columns = [self.column(x) for x in range(self.columns)]
        for i in range(self.batch):
            for x, column in enumerate(columns):
                self.value.load_value(i * self.columns + x, block, first + i, column)


class WaveRows(Rows):
    """`Rows` in the instructions of AMD's own API. Weights are rounded to float16 for packed products, and reach the
    lanes as scalars."""

    def __init__(self, arch: Device, attention: Attention, count: int, lane: Expr):
        super().__init__(arch, attention, count, lane, STEP)
        share = 1 if count <= 8 else 4  # of the registers, that loads can have
        units = self.d // UNIT
        most = LATENT_UNITS if self.latent else max(1, units // share)
        # units of keys and of values that are loaded at once; keys' divide a key
        self.key_batch = next(n for n in range(most, 0, -1) if units % n == 0)
        self.batch = 1 if self.latent else STEP // UNIT // share
        self.scores = local(count * self.keys)
        self.key = Units(attention, self.keys * self.key_batch, "key")
        self.value = Units(attention, self.columns * self.batch, "value")

    def step(self, block: KeyBlock, queries: Buffer, sees: Sees, zero: Expr, following: KeyBlock | None = None) -> None:
        """Processes a `KeyBlock` of STEP keys. queries: float16 [count, d] in LDS; following: unused; zero: of
        `step.opaque_zero`, otherwise the compiler moves the loads of all queries out of the loop, into registers that
        do not exist."""
        keys = self._lane_keys(block.key0)
        self._score(block, self._lane_keys(block.place0), queries, zero)
        self._cap_scores(self.scores)
        self._load_values(block, 0)
        schedule_fence(LOADS)
        words = [self._weigh(r, [sees(r, key) for key in keys]) for r in range(self.count)]
        for first in range(0, STEP // UNIT, self.batch):
            if first:
                self._load_values(block, first)
            self._add_values(first, words)

    def _score(self, block: KeyBlock, places: Sequence[Expr], queries: Buffer, zero: Expr) -> None:
        for i in range(self.count * self.keys):
            put(self.scores, T.float32(0), i)
        for first in range(0, self.d // UNIT, self.key_batch):
            for c in range(self.key_batch):
                for j, place in enumerate(places):
                    self.key.load_key(c * self.keys + j, block, place, first + c)
            schedule_fence(LOADS)
            for c in range(self.key_batch):
                units = [self.key.pairs(c * self.keys + j) for j in range(self.keys)]
                for r in range(self.count):
                    query = local(WORDS, "uint32")
                    put(query, T.reinterpret("uint32x4", queries[r, at((first + c + zero) * UNIT, UNIT)]), at(0, WORDS))
                    words = [query[i] for i in range(WORDS)]
                    for j in range(self.keys):
                        self._dot_unit(self.scores, r * self.keys + j, *units[j], words)
                if self.latent:  # there are more queries than registers
                    schedule_fence(0)

    def _dot_unit(self, sums: Expr, place: Expr, unit: Expr, first: Expr, words: Sequence[Expr]) -> None:
        """sums[place] += the dot product of eight pairs of float16: unit[first:first+4] and `words`."""
        total = sums[place]
        for i, word in enumerate(words):
            total = dot2(self.arch, unit[first + i], word, total)
        put(sums, total, place)

    def _weigh(self, r: Expr, seen: Sequence[Expr]) -> list[Expr]:
        """Turns a row's scores into weights, rescales its state. Returns, per key of a lane, a word: in even lanes the
        float16 weights of the lane's key and the next lane's."""
        scores = [self.scores[r * self.keys + j] for j in range(self.keys)]
        masked = [T.Select(valid, s, T.float32(LOWEST)) for s, valid in zip(scores, seen, strict=True)]
        largest = functools.reduce(maximum, masked, T.float32(LOWEST))
        now = self.rescale(r, wave_max(self.arch, largest))
        words = []
        for s, valid in zip(scores, seen, strict=True):
            weight = T.Select(valid, exp2(s - now + T.float32(P_SHIFT)), T.float32(0))
            weight = opaque(T.cast(weight, "float16"))
            put(self.total, self.total[r] + T.cast(weight, "float32"), r)  # rounded, as the products use it
            low = opaque(T.cast(T.reinterpret("uint16", weight), "int32"))
            words.append(opaque(low | shuffle_xor(self.arch, opaque(T.shift_left(low, T.int32(16))), 1)))
        return words

    def _add_values(self, first: Expr, words: Sequence[Sequence[Expr]]) -> None:
        """Adds the loaded batch of values, weighted."""
        for i in range(self.batch):
            j, lane = divmod((first + i) * UNIT, self.arch.wave)
            if self.latent:
                self._add_keys(i * UNIT, [row[j] for row in words], lane)
                continue
            units = [self.value.pairs(i * self.columns + x) for x in range(self.columns)]
            for r in range(self.count):
                weights = [opaque(read_lane(words[r][j], lane + 2 * w)) for w in range(WORDS)]
                for x in range(self.columns):
                    self._dot_unit(self.out, r * self.columns + x, *units[x], weights)
            schedule_fence(SCALARS)

    def _add_keys(self, first: Expr, words: Sequence[Expr], lane: Expr) -> None:
        """Adds UNIT keys' loaded values, from number `first` of the batch on. Units of two keys have pairs of columns:
        products take pairs of keys. words: of each row, weights as of `_weigh`, those of these keys from `lane` on."""
        for pair in range(WORDS):
            weights = [opaque(read_lane(row, lane + 2 * pair)) for row in words]
            for u in range(self.units):
                (even, n), (odd, o) = (self.value.pairs((first + 2 * pair + key) * self.units + u) for key in range(2))
                for w in range(WORDS):
                    a, b = T.Bind(even[n + w]), T.Bind(odd[o + w])
                    low = T.Bind((a & T.uint32(0xFFFF)) | T.shift_left(b, T.uint32(16)))
                    high = T.Bind(T.shift_right(a, T.uint32(16)) | (b & T.uint32(0xFFFF0000)))
                    for half, columns in enumerate((low, high)):
                        for r, weight in enumerate(weights):
                            x = r * self.columns + u * UNIT + 2 * w + half
                            put(self.out, dot2(self.arch, columns, weight, self.out[x]), x)
            schedule_fence(SCALARS)
        schedule_fence(0)  # loads of the next keys would take the registers of these

    def sums(self, values: Iterable[Expr]) -> Iterable[Expr]:
        """Yields the sum over the wave's lanes of each of `values`, of which there is one per row."""
        for x in values:
            yield wave_sum(self.arch, x)

    def join_waves(self, wave: Expr, waves: int) -> Callable[[Expr, Expr], Joined]:
        """Stores the results of this wave (number `wave` of `waves`) into LDS. Returns quad(r, column) of
        `softmax.join`."""
        tops, totals = (T.alloc_buffer((self.count, waves), "float32", scope="shared") for _ in range(2))
        outs = T.alloc_buffer((waves, self.count, self.value_d), "float32", scope="shared")
        for r, total in enumerate(self.sums(self.total[r] for r in range(self.count))):
            with T.If(self.lane == 0), T.Then():
                put(tops, self.top[r], r, wave)
                put(totals, total, r, wave)
            for x, column, valid in self._own_columns():
                with when(valid):
                    put(outs, self.out[r * self.columns + x], wave, r, column)
        return join(tops, totals, waves, lambda w, r, column: [outs[w, r, column + i] for i in range(WIDTH)])
