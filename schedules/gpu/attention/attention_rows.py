"""The online softmax of some rows in a wave, with products in vector instructions. A row is a query of one head. If
enough rows share keys, matrix units are used instead (`attention_rows_matrix.py`).

A wave processes its keys in blocks of up to 64. For scores, a lane has one key (several in a small wave), so a dot
product stays within a lane. For outputs, a lane has one column or several, and reads the weights of all keys from
shared memory, of which each wave has a part. The state of a row:
    top     the maximum score so far, the same in all lanes
    total   the sum of weights; each lane has the sum over its own keys
    out     the weighted sum of values, float32: register x is column x*wave + lane; in latent attention, where a unit
            has columns of one value, unit (x//8)*wave + lane
`join_waves` joins the results of the waves of a workgroup.

For rocm, queries and weights are float16, products are dot products of pairs, and lanes get weights as scalars. On
Vulkan, both are float32, products are multiply-adds, keys and values are converted once for all rows, and loops over
rows stay loops for most drivers (`device.each`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention.attention_rows_size import KeyLoads, key_loads
from mlc_amd.schedules.gpu.attention.attention_step import LOWEST, P_SHIFT, Joined, Sees, join, soft_cap
from mlc_amd.schedules.gpu.attention.cache import UNIT, KeyBlock
from mlc_amd.schedules.gpu.attention.cache_units import WORDS, Units
from mlc_amd.schedules.gpu.base.device import (
    WAVE_SHARED,
    barrier,
    dot2,
    each,
    exp2,
    fma,
    maximum,
    read_lane,
    schedule_fence,
    shuffle_xor,
    wave_barrier,
    wave_max,
    wave_meets,
    wave_sum,
)
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.gpu.base.registers import at, lane_of, local, opaque, owned, put
from mlc_amd.schedules.gpu.base.step import when
from mlc_amd.schedules.operators.attention import Attention
from mlc_amd.schedules.tir import Buffer, Expr

# Masks for `schedule_fence`. Without fences, LLVM's scheduler moves each load to just before its use, to save
# registers, and starts the loads of all scalar weights at the same time, which need more registers than there are.
LOADS, SCALARS = 0x8F, 0x94  # may cross: all but loads from device memory; only loads, LDS and scalar instructions


def _part(count: int, most: int) -> int:
    """The largest divisor of `count` that is at most `most`, or 1."""
    return next(n for n in range(max(most, 1), 0, -1) if count % n == 0)


class Rows:
    """The state of some rows of an `Attention` layer in a wave. queries: [rows, d] in shared memory, of dtype
    `query_dtype`. lane: threadIdx.x, the number of the lane in the wave. wave: number of the wave among the `waves`
    waves of the workgroup. loads: by default those of the rule (`key_loads`)."""

    def __init__(
        self,
        arch: Device,
        attention: Attention,
        queries: Buffer,
        lane: Expr,
        wave: Expr,
        waves: int,
        loads: KeyLoads | None = None,
    ):
        self.arch, self.attention, self.queries, self.lane = arch, attention, queries, lane
        self.wave, self.waves, self.count, self.d = wave, waves, int(queries.shape[0]), attention.d
        self.loads = loads = loads or key_loads(arch, attention, self.count)
        self.pairs, count = str(queries.dtype) == "float16", self.count
        self.value_d, self.latent = attention.value_d, attention.values > 0
        self.units = -(-attention.values // UNIT // arch.wave)  # of a lane, of a value in latent attention
        self.keys = loads.step // arch.wave  # of a lane, as are its columns
        self.columns = self.units * UNIT if self.latent else -(-attention.d // arch.wave)
        self.top, self.total, self.out = local(count), local(count), local(count * self.columns)
        # units of keys and of values that are loaded at once
        self.key_batch = _part(self.d // UNIT, loads.loads // self.keys)
        self.batch = _part(loads.step // UNIT, loads.loads // self.columns)
        self.scores = local(count * self.keys)
        self.key = Units(attention, self.keys * self.key_batch, "key")
        self.value = Units(attention, self.columns * self.batch, "key" if self.latent else "value")
        if self.pairs:  # of each row, by keys of a lane, of which even lanes have the next lane's weight, too
            self.weights = [[T.int32(0)] * self.keys for _ in range(count)]
            return
        self.stride = max(self.value_d, loads.step)  # of a row in shared memory: weights of keys, in the end outputs
        self.shared = T.alloc_buffer((waves * count * self.stride,), "float32", scope=WAVE_SHARED)
        self.place = T.Bind(wave * (count * self.stride))

    @property
    def prefetches(self) -> bool:
        """Whether the caller may call `load_keys` for a block in advance: if all keys of a block are one batch of
        loads, and there are registers for them."""
        return self.loads.ahead and self.key_batch == self.d // UNIT

    def column(self, x: Expr) -> Expr:
        """The column of this lane's register x of an output; the last column if it is beyond the end."""
        return T.Bind(owned(x * self.arch.wave, self.lane, self.arch.wave, self.d)[0])

    def _unit(self, u: Expr) -> tuple[Expr, Expr]:
        """For latent attention: (number of this lane's unit u of a value, whether it exists; None if it does for all
        lanes)."""
        unit, valid = owned(u * self.arch.wave, self.lane, self.arch.wave, self.value_d // UNIT)
        return T.Bind(unit), valid

    def _own_columns(self) -> Iterator[tuple[int, Expr, Expr]]:
        """Yields (register x, its column, whether it exists; None if it does for all lanes) of this lane's outputs."""
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

    def _each_batch(self, count: int) -> Iterator[Expr]:
        """The numbers of batches of loads; constants if weights are scalars, whose places must be constant."""
        if self.pairs:
            yield from range(count)
            return
        with T.serial(count) as b:
            yield b

    def _fence(self, mask: int) -> None:
        """`schedule_fence` for LLVM."""
        if self.arch.api == "rocm":
            schedule_fence(mask)

    def _lane_keys(self, first: Expr) -> list[Expr]:
        """The keys of a block for which this lane computes scores. first: the first key of the block. If it is the
        place of the first key in its page, the places of the keys."""
        return [T.Bind(first + (j * self.arch.wave + self.lane)) for j in range(self.keys)]

    # ---- products

    def _operands(self, units: Units, first: Expr, count: int) -> list[list[Expr]]:
        """The loaded units from `first` on, each as four words of two float16, or as eight float32."""
        if not self.pairs:
            return units.reals(first, count)
        found = [units.pairs(first + i) for i in range(count)]
        return [[words[place + w] for w in range(WORDS)] for words, place in found]

    def _factors(self, buffer: Buffer, *index: Expr) -> list[Expr]:
        """The queries or weights with which a unit is multiplied, from an index on; in the form of `_operands`."""
        *row, first = index
        if not self.pairs:
            return [T.Bind(buffer[(*row, first + e)]) for e in range(UNIT)]
        words = local(WORDS, "uint32")
        put(words, T.reinterpret(f"uint32x{WORDS}", buffer[(*row, at(first, UNIT))]), at(0, WORDS))
        return [words[w] for w in range(WORDS)]

    def _multiply(self, sums: Buffer, first: Expr, units: Sequence[Sequence[Expr]], factors: Sequence[Expr]) -> None:
        """sums[first + i] += the dot product of units[i] and `factors`."""
        for i, unit in enumerate(units):
            total = sums[first + i]
            for x, factor in zip(unit, factors, strict=True):
                total = dot2(self.arch, x, factor, total) if self.pairs else fma(x, factor, total)
            put(sums, total, first + i)

    # ---- blocks of keys

    def load_keys(self, block: KeyBlock, first: Expr = 0) -> None:
        """Loads a batch of the block's keys: the units from `first` on."""
        places = self._lane_keys(block.place0)
        for c in range(self.key_batch):
            for j, place in enumerate(places):
                self.key.load_key(c * self.keys + j, block, place, first + c)

    def step(self, block: KeyBlock, sees: Sees, whole: Expr, zero: Expr, following: KeyBlock | None = None) -> None:
        """Processes a `KeyBlock`. sees(row, key): whether a row attends to a key. whole: not used. zero: from
        `step.opaque_zero`; without it LLVM would move the loads of all queries out of the loop, for which there are not
        enough registers. following: the next block, whose keys are loaded here, if those of this block were loaded
        before."""
        keys = self._lane_keys(block.key0)
        self._score(block, zero if self.arch.api == "rocm" else 0, following is not None)
        if self.attention.softcap:
            for i in each(self.arch, self.count * self.keys):
                put(self.scores, soft_cap(self.attention, self.scores[i]), i)
        batches = self.loads.step // UNIT // self.batch
        early = batches == 1 or self.pairs
        if early:
            self._load_values(block, 0)
        if following is not None:
            self.load_keys(following)
        self._fence(LOADS)
        self._weigh([[sees(r, key) for key in keys] for r in range(self.count)])
        wave_meets(self.arch)
        for b in self._each_batch(batches) if batches > 1 else [0]:
            if not early or b:
                self._load_values(block, b * self.batch)
            self._add_values(b * self.batch)
        wave_meets(self.arch)

    def _score(self, block: KeyBlock, zero: Expr, loaded: bool) -> None:
        for r in each(self.arch, self.count):
            for j in range(self.keys):
                put(self.scores, T.float32(0), r * self.keys + j)
        for b in self._each_batch(self.d // UNIT // self.key_batch):
            if not loaded:
                self.load_keys(block, b * self.key_batch)
            self._fence(LOADS)
            for c in range(self.key_batch):
                units = self._operands(self.key, c * self.keys, self.keys)
                for r in each(self.arch, self.count):
                    query = self._factors(self.queries, r, (b * self.key_batch + c + zero) * UNIT)
                    self._multiply(self.scores, r * self.keys, units, query)
                if self.latent:  # there are more queries than registers
                    self._fence(0)

    def rescale(self, r: Expr, largest: Expr) -> Expr:
        """Renews row r's maximum, given the largest score of the block, and rescales its state. Returns the maximum."""
        now = opaque(maximum(self.top[r], largest))
        shrink = opaque(exp2(self.top[r] - now))  # 1 as long as no key was unmasked: both are LOWEST
        put(self.top, now, r)
        put(self.total, self.total[r] * shrink, r)
        for x in each(self.arch, self.columns):
            put(self.out, self.out[r * self.columns + x] * shrink, r * self.columns + x)
        return now

    def _weigh(self, seen: Sequence[Sequence[Expr]]) -> None:
        """Computes weights from scores, stores them to shared memory, and rescales the state. seen: for each row,
        whether it attends to each of the lane's keys."""
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
                weight = T.Select(sees, weight, T.float32(0))
                weight = opaque(T.cast(weight, "float16") if self.pairs else weight)
                put(self.total, self.total[r] + T.cast(weight, "float32"), r)  # rounded as in the products
                if self.pairs:
                    low = opaque(T.cast(T.reinterpret("uint16", weight), "int32"))
                    high = shuffle_xor(self.arch, opaque(T.shift_left(low, T.int32(16))), 1)
                    self.weights[r][j] = opaque(low | high)
                else:
                    put(self.shared, weight, self.place + r * self.stride + j * self.arch.wave + self.lane)

    def _factors_of(self, r: Expr, key: Expr) -> list[Expr]:
        """A row's weights of the UNIT keys from number `key` of the block on."""
        if not self.pairs:
            return self._factors(self.shared, T.Bind(self.place + r * self.stride + key))
        j, lane = divmod(key, self.arch.wave)
        return [opaque(read_lane(self.weights[r][j], lane + 2 * w)) for w in range(WORDS)]

    def sums(self, values: Iterable[Expr]) -> list[Expr]:
        """The sums of `values` over the lanes of the wave. values: one for each row."""
        return self._across([opaque(x) for x in values], wave_sum, lambda a, b: a + b)

    def _across(
        self, values: Sequence[Expr], reduced: Callable[[Device, Expr], Expr], op: Callable[[Expr, Expr], Expr]
    ) -> list[Expr]:
        """The reductions of `values` (one for each row) over the lanes of the wave, in all lanes. Without subgroup
        operations, there is one pair of barriers for all rows."""
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

    def _load_values(self, block: KeyBlock, first: Expr) -> None:
        """Loads a batch of the block's values: the units from `first` on; in latent attention those of as many keys."""
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

    def _add_values(self, first: Expr) -> None:
        """Adds the loaded batch of values, times weights. first: the number of its first unit in the block."""
        for i in range(self.batch):
            if self.latent:
                self._add_keys(i * UNIT, (first + i) * UNIT)
                continue
            units = self._operands(self.value, i * self.columns, self.columns)
            for r in each(self.arch, self.count):
                self._multiply(self.out, r * self.columns, units, self._factors_of(r, (first + i) * UNIT))
            self._fence(SCALARS)

    def _add_keys(self, first: Expr, key: Expr) -> None:
        """For latent attention: adds the loaded values of UNIT keys, times weights. first: number of the first one in
        the batch; key: in the block."""
        if self.pairs:
            self._add_pairs_of_keys(first, key)
            return
        for i in range(UNIT):
            reals = self.value.reals((first + i) * self.units, self.units)
            for r in each(self.arch, self.count):
                weight = T.Bind(self.shared[self.place + r * self.stride + (key + i)])
                for u, unit in enumerate(reals):
                    for e, x in enumerate(unit):
                        place = r * self.columns + (u * UNIT + e)
                        put(self.out, fma(x, weight, self.out[place]), place)

    def _add_pairs_of_keys(self, first: Expr, key: Expr) -> None:
        """Units of two keys have pairs of columns: products take pairs of keys."""
        rows = [self._factors_of(r, key) for r in range(self.count)]
        for pair in range(WORDS):
            for u in range(self.units):
                numbers = [(first + 2 * pair + key) * self.units + u for key in range(2)]
                (even,), (odd,) = (self._operands(self.value, n, 1) for n in numbers)
                for w, (a, b) in enumerate(zip(even, odd, strict=True)):
                    a, b = T.Bind(a), T.Bind(b)
                    low = T.Bind((a & T.uint32(0xFFFF)) | T.shift_left(b, T.uint32(16)))
                    high = T.Bind(T.shift_right(a, T.uint32(16)) | (b & T.uint32(0xFFFF0000)))
                    for half, columns in enumerate((low, high)):
                        for r, weights in enumerate(rows):
                            x = r * self.columns + u * UNIT + 2 * w + half
                            put(self.out, dot2(self.arch, columns, weights[pair], self.out[x]), x)
            self._fence(SCALARS)
        self._fence(0)  # loads of the next keys would take the registers of these

    # ---- a key that is not in the cache

    def add_key(self, keys: Buffer, begin: Expr, value: Callable[[Expr], Expr]) -> None:
        """Adds a key that all rows attend to. keys: shared memory with the key from `begin` on. value(column): an
        element of its value, float16."""
        weights = []
        for r, score in enumerate(self.sums(self._partial_score(r, keys, begin) for r in range(self.count))):
            score = soft_cap(self.attention, score)
            weight = opaque(exp2(score - self.rescale(r, score) + T.float32(P_SHIFT)))
            put(self.total, self.total[r] + T.Select(self.lane == 0, weight, T.float32(0)), r)
            weights.append(weight)
        for x in range(self.columns):
            real = T.Bind(T.cast(value(self.column(x)), "float32"))
            for r, weight in enumerate(weights):
                put(self.out, fma(real, weight, self.out[r * self.columns + x]), r * self.columns + x)

    def _partial_score(self, r: int, keys: Buffer, begin: Expr) -> Expr:
        """This lane's part of the score of a row and a key in shared memory."""
        score, pairs = T.float32(0), self.d // 2
        for first in range(0, pairs, self.arch.wave):
            pair = T.Bind(T.min(first + self.lane, T.int32(pairs - 1)))
            x, y = (T.Bind(of) for of in (self.queries[r, at(pair * 2, 2)], keys[at(begin + pair * 2, 2)]))
            if self.pairs:
                product = dot2(self.arch, T.reinterpret("uint32", x), T.reinterpret("uint32", y), T.float32(0))
            else:
                product = fma(lane_of(x, 1), lane_of(y, 1), lane_of(x, 0) * lane_of(y, 0))
            score = score + T.Select(first + self.lane < pairs, product, T.float32(0))
        return T.Bind(score)

    # ---- the end

    def join_waves(self) -> Callable[[Expr, Expr], Joined]:
        """Stores this wave's results to shared memory. Returns the function quad(r, column) of
        `attention_step.join`."""
        tops, totals = (T.alloc_buffer((self.count, self.waves), "float32", scope="shared") for _ in range(2))
        stride = self.value_d if self.pairs else self.stride
        size = self.waves * self.count * stride
        outs = T.alloc_buffer((size,), "float32", scope=WAVE_SHARED) if self.pairs else self.shared
        first = T.Bind(self.wave * (self.count * stride))
        for r, total in enumerate(self.sums(self.total[r] for r in range(self.count))):
            with T.If(self.lane == 0), T.Then():
                put(tops, self.top[r], r, self.wave)
                put(totals, total, r, self.wave)
            for x, column, valid in self._own_columns():
                with when(valid):
                    put(outs, self.out[r * self.columns + x], first + r * stride + column)
        barrier()

        def out(w: Expr, r: Expr, column: Expr) -> list[Expr]:
            return [outs[(w * self.count + r) * stride + (column + i)] for i in range(WIDTH)]

        return join(tops, totals, self.waves, out)
