"""What the GPU attention kernels without matrix instructions are made of: rows of queries whose softmax a wave keeps in
registers.

`Rows` is for AMD's own API; `attention_rows_vulkan.py` has the same for Vulkan.

A row is one query of one head; scores are powers of two (log2(e) is in the query already). A wave goes through its keys
in steps of 64. While it scores them a lane is a key (two keys in a wave of 32), so a dot product stays in its lane; for
the outputs a lane is a column and the weights come from other lanes as scalars. Per row a wave keeps
    top     the largest score so far, the same in all lanes
    total   the sum of weights, still spread over the lanes
    out     the weighted sum of values, float32, column x*wave + lane at x
Weights are 2**(score - top + 15), rounded to float16 for the packed products: normal numbers down to 2**-29 of the
largest weight. `Rows.join_waves` adds up what the waves of a workgroup have.
"""

from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.device import dot2, exp2, maximum, read_lane, schedule_fence, shuffle_xor, wave_max, wave_sum
from mlc_amd.schedules.gpu.quantize import WIDTH
from mlc_amd.schedules.gpu.rope_kv_write import KEYS, UNIT

STEP = 64  # keys between two looks at the maximum
LOWEST = -1e30  # "minus infinity" that may be subtracted from itself
P_SHIFT = 15  # weights are times 2**15
MAX_GROUP = 16  # rows that fit the registers
WORDS = UNIT // 2  # of a 16-byte unit
# Masks of llvm.amdgcn.sched.barrier: what LLVM's scheduler may move across. It would start loads one by one, just
# before they are needed, to use few registers; and all scalar weights at once, which are more than there are registers.
LOADS, SCALARS = 0x8F, 0x94  # anything but loads from device memory; loads, LDS and scalar instructions


def group_of(heads, kv_heads):
    """Query heads per KV head. UserError unless it is a whole number up to 16."""
    if heads % kv_heads or heads // kv_heads > MAX_GROUP:
        raise UserError(
            f"attention on the GPU needs 1 to {MAX_GROUP} query heads per KV head, not {heads} to {kv_heads}"
        )
    return heads // kv_heads


def local(size, dtype="float32"):
    """A buffer in registers (indices must become constants)."""
    return T.alloc_buffer((size,), dtype, scope="local")


def put(buffer, value, *index):
    """Stores `value` at buffer[index]."""
    T.buffer_store(buffer, value, list(index))


def at(base, n):
    """The index vector base .. base+n-1."""
    return T.ramp(base, 1, n)


def hold(x):
    """The scalar `x` in a register that is opaque to TVM: it would put bound values back into the expressions that use
    them, so that chains of them take minutes to compile."""
    cell = local(1, str(x.ty))
    put(cell, x, 0)
    return cell[0]


class Joined(NamedTuple):
    """Four neighbouring columns of a row, from all waves: weights are relative to `top`; out / total is attention's
    output."""

    top: object
    total: object
    out: list


def join(tops, totals, waves, out):
    """quad(r, column) -> Joined, for any thread behind a barrier; column % 4 == 0. tops, totals: [rows, waves] in LDS;
    out(wave, r, column) is what a wave has of one column."""

    def quad(r, column):
        top = T.float32(LOWEST)
        for w in range(waves):
            top = maximum(top, tops[r, w])
        total, sums = T.float32(0), [T.float32(0)] * WIDTH
        for w in range(waves):
            scale = exp2(tops[r, w] - top)
            total = total + totals[r, w] * scale
            sums = [hold(y + out(w, r, column + i) * scale) for i, y in enumerate(sums)]
        return Joined(top, hold(total), sums)

    return quad


class Rows:
    """The state of `count` rows in a wave, for keys and values of `d` elements. `lane` is threadIdx.x, which counts a
    wave's lanes."""

    def __init__(self, arch, count, d, lane):
        self.arch, self.count, self.d, self.lane = arch, count, d, lane
        self.keys, self.columns = STEP // arch.wave, -(-d // arch.wave)  # of a lane
        few = 1 if count <= 8 else 4  # registers are left for loads
        self.key_batch, self.batch = (
            d // UNIT // few,
            STEP // UNIT // few,
        )  # units of keys and of values that are loaded together
        self.top, self.total, self.out = local(count), local(count), local(count * self.columns)
        self.scores, self.key, self.value = (
            local(n, t)
            for n, t in (
                (count * self.keys, "float32"),
                (self.keys * self.key_batch * WORDS, "uint32"),
                (self.columns * self.batch * WORDS, "uint32"),
            )
        )

    def column(self, x):
        """The column of this lane's element x (its own or, beyond the end, the last one)."""
        first = x * self.arch.wave
        return T.Bind(
            first + self.lane if first + self.arch.wave <= self.d else T.min(first + self.lane, T.int32(self.d - 1))
        )

    def start(self):
        """No key seen yet."""
        for r in range(self.count):
            put(self.top, T.float32(LOWEST), r)
            put(self.total, T.float32(0), r)
            for x in range(self.columns):
                put(self.out, T.float32(0), r * self.columns + x)

    def step(self, Kc, Vc, kv, key0, queries, end, zero):
        """Takes in the keys key0 .. key0+63. queries: float16 [count, d] in LDS; end(r): row r sees the keys before it.

        zero: an int32 that is 0, unknown to the compiler and new in each step: it would move the loads of all queries
        out of the loop, into registers that do not exist.
        """
        keys = [T.Bind(key0 + j * self.arch.wave + self.lane) for j in range(self.keys)]
        self._score(Kc, kv, keys, queries, zero)
        self._load_values(Vc, kv, key0, 0)
        schedule_fence(LOADS)
        words = [self._weigh(r, [key < end(r) for key in keys]) for r in range(self.count)]
        for first in range(0, STEP // UNIT, self.batch):
            if first:
                self._load_values(Vc, kv, key0, first)
            self._add_values(first, words)

    def _score(self, Kc, kv, keys, queries, zero):
        for i in range(self.count * self.keys):
            put(self.scores, T.float32(0), i)
        for first in range(0, self.d // UNIT, self.key_batch):
            for c in range(self.key_batch):
                for j, key in enumerate(keys):
                    unit = Kc[kv, T.shift_right(key, T.int32(5)), first + c, key & (KEYS - 1), at(0, UNIT)]
                    put(self.key, T.reinterpret("uint32x4", unit), at((c * self.keys + j) * WORDS, WORDS))
            schedule_fence(LOADS)
            for c in range(self.key_batch):
                for r in range(self.count):
                    query = local(WORDS, "uint32")
                    put(query, T.reinterpret("uint32x4", queries[r, at((first + c + zero) * UNIT, UNIT)]), at(0, WORDS))
                    words = [query[i] for i in range(WORDS)]
                    for j in range(self.keys):
                        self._dot_unit(self.scores, r * self.keys + j, self.key, (c * self.keys + j) * WORDS, words)

    def _dot_unit(self, sums, place, unit, first, words):
        """sums[place] += the dot product of eight pairs of float16: unit[first:first+4] and `words`."""
        total = sums[place]
        for i, word in enumerate(words):
            total = dot2(self.arch, unit[first + i], word, total)
        put(sums, total, place)

    def _weigh(self, r, seen):
        """Turns a row's scores into weights, rescales its state. Returns, per key of a lane, a word: in even lanes the
        float16 weights of the lane's key and the next lane's."""
        scores = [self.scores[r * self.keys + j] for j in range(self.keys)]
        largest = T.float32(LOWEST)
        for s, valid in zip(scores, seen, strict=True):
            largest = maximum(largest, T.Select(valid, s, T.float32(LOWEST)))
        now = hold(maximum(self.top[r], wave_max(self.arch, largest)))
        shrink = hold(exp2(self.top[r] - now))  # 1 while nothing was seen: both are LOWEST
        put(self.top, now, r)
        put(self.total, self.total[r] * shrink, r)
        for x in range(self.columns):
            put(self.out, self.out[r * self.columns + x] * shrink, r * self.columns + x)
        words = []
        for s, valid in zip(scores, seen, strict=True):
            weight = T.Select(valid, exp2(s - now + T.float32(P_SHIFT)), T.float32(0))
            weight = hold(T.cast(weight, "float16"))
            put(self.total, self.total[r] + T.cast(weight, "float32"), r)  # rounded, as the products use it
            low = hold(T.cast(T.reinterpret("uint16", weight), "int32"))
            words.append(hold(low | shuffle_xor(self.arch, hold(T.shift_left(low, T.int32(16))), 1)))
        return words

    def _load_values(self, Vc, kv, key0, first):
        """Loads the units first .. of the step's values, a batch."""
        columns = [self.column(x) for x in range(self.columns)]
        for i in range(self.batch):
            for x, column in enumerate(columns):
                unit = Vc[kv, T.shift_right(key0, T.int32(3)) + first + i, column, at(0, UNIT)]
                put(self.value, T.reinterpret("uint32x4", unit), at((i * self.columns + x) * WORDS, WORDS))

    def _add_values(self, first, words):
        """Adds the loaded batch of values, weighted."""
        for i in range(self.batch):
            j, lane = divmod((first + i) * UNIT, self.arch.wave)
            for r in range(self.count):
                weights = [hold(read_lane(words[r][j], lane + 2 * w)) for w in range(WORDS)]
                for x in range(self.columns):
                    self._dot_unit(self.out, r * self.columns + x, self.value, (i * self.columns + x) * WORDS, weights)
            schedule_fence(SCALARS)

    def sums(self, values):
        """Yields the sum over the wave's lanes of each of `values`, of which there is one per row."""
        for x in values:
            yield wave_sum(self.arch, x)

    def join_waves(self, wave, waves):
        """Puts the waves' results into LDS. Returns quad(r, column) of `join`."""
        tops, totals = (T.alloc_buffer((self.count, waves), "float32", scope="shared") for _ in range(2))
        outs = T.alloc_buffer((waves, self.count, self.d), "float32", scope="shared")
        for r, total in enumerate(self.sums(self.total[r] for r in range(self.count))):
            with T.If(self.lane == 0), T.Then():
                put(tops, self.top[r], r, wave)
                put(totals, total, r, wave)
            for x in range(self.columns):
                column = x * self.arch.wave + self.lane
                if (x + 1) * self.arch.wave <= self.d:
                    put(outs, self.out[r * self.columns + x], wave, r, column)
                else:
                    with T.If(column < self.d), T.Then():
                        put(outs, self.out[r * self.columns + x], wave, r, column)
        return join(tops, totals, waves, lambda w, r, column: outs[w, r, column])
