"""Rows of queries as in `attention_rows.py`, on AMD's matrix units (`matrix_unit.py`): of single rows and of chunks.

A wave has `tiles` of 16 rows. Everything is computed transposed, so that a lane's sums are of one row of each tile:
    scores   S^T = K Q^T: keys are operand A, queries, which stay in registers, operand B
    outputs  O^T = V^T P^T: values are operand A, weights operand B
Units of the cache are what a lane holds of an operand: keys and values go from the cache to registers to matrices, each
once for all tiles, without shared memory. Keys are given to rows of A in such an order that a lane's scores are of
eight consecutive keys: in the same registers, its part of the operand P^T; where a lane holds all of an operand, the
half-waves swap. A lane's state is that of row lane % 16 of each tile:
    top     weights are 2**(score - top). It is renewed, and the outputs are rescaled, when a weight would exceed
            2**LIMIT; looking whether one would takes one vote
    total   the sum of the weights of this lane's keys
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.runtime.gpus import RATES
from mlc_amd.schedules.gpu.attention.cache import UNIT, KeyBlock
from mlc_amd.schedules.gpu.attention.cache_units import WORDS, Units
from mlc_amd.schedules.gpu.attention.softmax import (
    LIMIT,
    LOWEST,
    OTHER_BYTES,
    P_SHIFT,
    START,
    Joined,
    Sees,
    join,
    soft_cap,
)
from mlc_amd.schedules.gpu.base.device import any_lane, dot2, exp2, half_pair, maximum, schedule_fence, shuffle_xor
from mlc_amd.schedules.gpu.base.matrix_unit import SIDE, UNITS
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.gpu.base.registers import at, local, opaque, put
from mlc_amd.schedules.gpu.base.step import when
from mlc_amd.schedules.operators.attention import Attention
from mlc_amd.schedules.tir import Buffer, Expr

CHUNK = 32  # keys that blocks are multiples of
MOVING = ("key0", "page", "place0")  # of a `KeyBlock`, what differs from block to block
PAD = 1  # units of WIDTH float32 after a row in LDS: rows begin in different banks
ONES = 0x3C003C00  # two float16
BATCH = 8  # operands, at most, that are loaded at once, while those before them are multiplied
# Of a lane's registers, those for outputs, queries, scores and what is loaded: LLVM needs some 50 more of 256.
ROOM = 176
WIDE = 208  # registers for the former without what is loaded, from which on queries do not stay there
# For `schedule_fence`: all but products on matrices and accesses to device memory may cross; everything may.
MATRICES, NOTHING = 0x86, 0x7FF


def lds_units(d: int) -> int:
    """Units of WIDTH float32 in LDS of a row's outputs."""
    return d // WIDTH + PAD


def _held(arch: Device, width: int) -> int:
    """Registers for what a wave has of a tile of rows, of so many columns: outputs, queries and scores."""
    unit = UNITS[arch.matrix]
    return width * SIDE // arch.wave + -(-width // unit.columns) * unit.units * WORDS + SIDE


def suits(arch: Device, attention: Attention) -> bool:
    """Whether the arch has such units and the layer is such as `UnitRows` takes for single rows: of whole tiles of
    columns that fit the registers."""
    if arch.matrix not in UNITS or attention.d % SIDE or attention.values:
        return False
    return _held(arch, attention.d) < ROOM


def pays(arch: Device, rows: int) -> bool:
    """Whether products of 16 rows, of which so many are needed, take no longer than dot products of float16 pairs of
    those alone, which are half as many a clock as those of four bytes."""
    return rows * RATES[arch.family]["matrix16"] >= SIDE * RATES[arch.family]["dot4"] // 2


def waves_of(arch: Device, count: int, d: int, threads: int, step: int) -> int:
    """Waves of a workgroup for `count` rows of `d` elements: those of `threads`, fewer where there is too little LDS
    for their outputs and keys. step: of no effect. ValueError if it does not suffice for one."""
    waves = min(threads, arch.threads) // arch.wave
    while waves and waves * (count * lds_units(d) * WIDTH * 4 + d * 2) + count * d * 2 + OTHER_BYTES > arch.lds:
        waves //= 2
    if not waves:
        raise ValueError(f"{arch.name} has too little LDS for {count} rows of {d} elements on matrices")
    return waves


class Operand(NamedTuple):
    """Keys or values on their way: load(n) starts loads into the registers of units n .., multiply(n) is of these."""

    load: Callable[[int], None]
    multiply: Callable[[int], None]


class UnitRows:
    """The state of `count` rows of an `Attention` layer in a wave. lane: its number in the wave; keys: of a block, a
    multiple of CHUNK."""

    def __init__(self, arch: Device, attention: Attention, count: int, lane: Expr, keys: int):
        self.arch, self.attention, self.count, self.d = arch, attention, count, attention.d
        self.tiles = tiles = -(-count // SIDE)
        self.unit = unit = UNITS[arch.matrix]
        self.lane, self.row, self.part = lane, opaque(lane % SIDE), opaque(lane // SIDE)
        self.place = T.Bind(unit.row(self.row))  # of a tile of columns of the values
        self.keys, self.own = keys, min(keys, arch.wave)  # of a block; of a step: 16 scores a lane
        self.groups = self.own // unit.columns  # of keys
        self.blocks = UNIT // unit.acc  # tiles of scores of a group
        self.chunks, self.columns = -(-attention.width // unit.columns), attention.width // SIDE
        self.held = unit.units * WORDS  # words of an operand
        self.holds, self.sources, self.zero = tiles * _held(arch, attention.width) < WIDE, [], 0
        self.query = local(tiles * self.chunks * self.held if self.holds else 1, "uint32")
        self.out = local(tiles * self.columns * unit.acc)
        self.top, self.total = local(tiles), local(tiles)
        words = unit.units * (WORDS + 2 * attention.quantized)  # codes have scales
        room = ROOM - tiles * _held(arch, attention.width)
        self.batch = max(1, min(BATCH, room // (2 * words)))
        self.key, self.value = (Units(attention, 2 * self.batch * unit.units, kind) for kind in ("key", "value"))

    def start(self) -> None:
        """Initializes the state: no key seen yet."""
        for t in range(self.tiles):
            put(self.top, T.float32(LOWEST / 2), t)  # above the scores of keys that are not seen: their weights are 0
            put(self.total, T.float32(0), t)
        self._clear(self.out, self.tiles * self.columns)

    def _clear(self, sums: Buffer, count: int) -> None:
        n = self.unit.acc
        for i in range(count):
            put(sums, T.broadcast(T.float32(0), n), at(i * n, n))

    def across(self, x: Expr, op: Callable[[Expr, Expr], Expr]) -> Expr:
        """op over the lanes that have the same row."""
        for distance in (SIDE, 2 * SIDE)[: self.arch.wave // (2 * SIDE)]:
            x = opaque(op(x, shuffle_xor(self.arch, x, distance)))
        return x

    # ---- operands

    def _unit(self, chunk: Expr, i: int) -> tuple[Expr, Expr | None]:
        """(this lane's unit i of a chunk of columns, whether there is one; None: there is)."""
        unit, units = self.unit.unit(chunk, i, self.part), self.attention.width // UNIT
        if (chunk + 1) * self.unit.columns <= self.attention.width:
            return unit, None
        return T.Bind(T.min(unit, T.int32(units - 1))), unit < units

    def load_queries(self, unit: Callable[[Expr, Expr], Expr], tile: int = 0) -> None:
        """unit(row, c): float16x8, unit c of a row's query, scaled and rotated. Rows after the last one have its
        query. Where registers do not hold the queries of wide heads, they are loaded for each product."""
        self.sources.append(unit)
        for c in range(self.chunks if self.holds else 0):
            self._load_query(self.query, (tile * self.chunks + c) * self.held, tile, c)

    def _load_query(self, words: Buffer, first: int, tile: int, c: Expr) -> None:
        row = T.Bind(T.min(tile * SIDE + self.row, T.int32(self.count - 1)))
        for i in range(self.unit.units):
            place, valid = self._unit(c, i)
            loaded = T.reinterpret(f"uint32x{WORDS}", self.sources[tile](row, place + self.zero))
            if valid is not None:
                loaded = T.Select(T.broadcast(valid, WORDS), loaded, T.broadcast(T.uint32(0), WORDS))
            put(words, loaded, at(first + i * WORDS, WORDS))

    def _query(self, tile: int, c: int) -> Sequence[Expr]:
        if self.holds:
            return self.unit.operands(self.query, (tile * self.chunks + c) * self.held)
        words = local(self.held, "uint32")
        self._load_query(words, 0, tile, c)
        return self.unit.operands(words, 0)

    def _operands(self, units: Units, first: int) -> Sequence[Expr]:
        """Operands of loaded units, from number `first` on."""
        words = local(self.held, "uint32")
        for i in range(self.unit.units):
            found, place = units.pairs(first + i)
            put(words, found[at(place, WORDS)], at(i * WORDS, WORDS))
        return self.unit.operands(words, 0)

    def _multiply(self, a: Sequence[Expr], b: Sequence[Expr], sums: Buffer, number: int) -> None:
        where = at(number * self.unit.acc, self.unit.acc)
        for x, y in zip(a, b, strict=True):
            put(sums, self.unit.multiply(x, y, sums[where]), where)

    # ---- blocks of keys

    def step(self, block: KeyBlock, sees: Sees, whole: Expr, zero: Expr) -> None:
        """Processes a `KeyBlock`. sees(tile, key): whether the lane's row sees a key; whole: whether all rows of the
        wave see all of the block; zero: of `step.opaque_zero`, otherwise LLVM unrolls the loop over parts of the block,
        and begins with all loads, for which there are no registers."""
        self.zero = zero
        if self.keys == self.own:
            self._step(block, sees, whole)
            return
        with T.serial(T.Bind(zero + self.keys // self.own)) as part:
            first = opaque(part * self.own)
            self._step(block._replace(key0=block.key0 + first, place0=block.place0 + first), sees, whole)

    def _step(self, block: KeyBlock, sees: Sees, whole: Expr) -> None:
        """Processes a part of a block."""
        # TVM would put what they are computed of into each load's address, and simplify that
        places = {name: opaque(x) for name, x in block._asdict().items() if name in MOVING and not isinstance(x, int)}
        block, scores = block._replace(**places), [local(self.groups * UNIT) for _ in range(self.tiles)]
        for of in scores:
            self._clear(of, self.groups * self.blocks)
        units, parts = self.unit.units, (list(self._keys(block, scores)), list(self._values(block, scores)))
        size = self.batch
        batches = [part[i : i + size] for part in parts for i in range(0, len(part), size)]

        def pending(i: int) -> Iterator[tuple[Operand, int]]:
            for n, operand in enumerate(batches[i] if i < len(batches) else []):
                yield operand, (i % 2 * size + n) * units

        for operand, n in pending(0):
            operand.load(n)
        for i, batch in enumerate(batches):
            if batch[0] is parts[1][0]:
                self._mask(scores, block.key0, sees, whole)
                self._renew([functools.reduce(maximum, [of[i] for i in range(self.groups * UNIT)]) for of in scores])
            for operand, n in pending(i + 1):
                operand.load(n)
            schedule_fence(MATRICES)
            for operand, n in pending(i):
                operand.multiply(n)

    def _keys(self, block: KeyBlock, scores: Sequence[Buffer]) -> Iterator[Operand]:
        """The scores of a lane are of eight consecutive keys of each group."""
        unit = self.unit
        rows = [T.Bind(block.place0 + unit.eighth_row(self.row, b)) for b in range(self.blocks)]
        for g, c, b in product(range(self.groups), range(self.chunks), range(self.blocks)):

            def load(n: int, g: int = g, c: int = c, b: int = b) -> None:
                for i in range(unit.units):
                    self.key.load_key(n + i, block, T.Bind(rows[b] + g * unit.columns), self._unit(c, i)[0])

            def multiply(n: int, g: int = g, c: int = c, b: int = b) -> None:
                key = self._operands(self.key, n)
                for t, of in enumerate(scores):
                    self._multiply(key, self._query(t, c), of, g * self.blocks + b)

            yield Operand(load, multiply)

    def _values(self, block: KeyBlock, scores: Sequence[Buffer]) -> Iterator[Operand]:
        weights: dict[int, list] = {}
        for g, x in product(range(self.groups), range(self.columns)):

            def load(n: int, g: int = g, x: int = x) -> None:
                for i in range(self.unit.units):
                    self.value.load_value(n + i, block, self.unit.unit(g, i, self.part), x * SIDE + self.place)

            def multiply(n: int, g: int = g, x: int = x) -> None:
                if g not in weights:
                    weights[g] = [self._weights(self._weigh(t, of, g)) for t, of in enumerate(scores)]
                value = self._operands(self.value, n)
                for t, of in enumerate(weights[g]):
                    self._multiply(value, of, self.out, t * self.columns + x)

            yield Operand(load, multiply)

    def _mask(self, scores: Sequence[Buffer], key0: Expr, sees: Sees, whole: Expr) -> None:
        if self.attention.softcap:
            for of in scores:
                for i in range(self.groups * UNIT):
                    put(of, soft_cap(self.attention, of[i]), i)
        with T.If(tirx.Not(whole)), T.Then():
            schedule_fence(NOTHING)  # LLVM would mask all blocks, without a branch
            for t, of in enumerate(scores):
                for i in range(self.groups * UNIT):
                    key = key0 + (i // UNIT * self.unit.columns + i % UNIT) + self.part * UNIT
                    put(of, T.Select(sees(t, key), of[i], T.float32(LOWEST)), i)

    def _renew(self, largest: Sequence[Expr]) -> None:
        """Rescales what came before if a weight would be too large. largest: of the lane's scores, of each tile."""
        worst = opaque(functools.reduce(maximum, [opaque(x - self.top[t]) for t, x in enumerate(largest)]))
        with T.If(any_lane(self.arch, worst > T.float32(LIMIT))), T.Then():
            for t, x in enumerate(largest):
                new = opaque(maximum(self.top[t], self.across(x, maximum) - T.float32(START)))
                shrink = opaque(exp2(self.top[t] - new))
                put(self.top, new, t)
                put(self.total, self.total[t] * shrink, t)
                for i in range(t * self.columns, (t + 1) * self.columns):
                    where = at(i * self.unit.acc, self.unit.acc)
                    put(self.out, self.out[where] * T.broadcast(shrink, self.unit.acc), where)

    def _weigh(self, t: int, scores: Buffer, group: int) -> list[Expr]:
        """The lane's weights of a group of keys, words of two float16, which are added to the row's total."""
        words = []
        for i in range(group * UNIT, (group + 1) * UNIT, 2):
            pair = half_pair(*(exp2(scores[i + e] - self.top[t]) for e in range(2)))
            words.append(opaque(T.reinterpret("uint32", pair)))
            put(self.total, dot2(self.arch, words[-1], T.uint32(ONES), self.total[t]), t)
        return words

    def _weights(self, own: Sequence[Expr]) -> Sequence[Expr]:
        """The lane's weights as operands."""
        words, low = local(self.held, "uint32"), self.part == 0
        for i, word in enumerate(own):
            if self.unit.whole:
                other = opaque(shuffle_xor(self.arch, word, SIDE))
                put(words, T.Select(low, word, other), i)
                put(words, T.Select(low, other, word), WORDS + i)
            else:
                put(words, word, i)
        return self.unit.operands(words, 0)

    # ---- a key that is not in the cache

    def add_key(self, keys: Buffer, begin: Expr, value: Callable[[Expr], Expr]) -> None:
        """Adds one key, which all rows see: that in LDS from `begin` on. value(column): its value, float16. The first
        lanes have its weight as that of their first key, all others 0."""
        scores = []
        for t in range(self.tiles):
            total = T.float32(0)
            for c in range(self.chunks):
                for i in range(self.unit.units):
                    place, first = self._unit(c, i)[0], (t * self.chunks + c) * self.held + i * WORDS
                    words = local(WORDS, "uint32")
                    put(words, T.reinterpret(f"uint32x{WORDS}", keys[at(begin + place * UNIT, UNIT)]), at(0, WORDS))
                    for w in range(WORDS):
                        total = dot2(self.arch, words[w], self.query[first + w], total)
            scores.append(opaque(soft_cap(self.attention, self._summed(total))))
        self._renew(scores)
        values = [opaque(value(T.Bind(x * SIDE + self.place))) for x in range(self.columns)]
        none, weights = [opaque(T.uint32(0))] * (WORDS - 1), []
        for t, score in enumerate(scores):
            pair = half_pair(exp2(score - self.top[t]), T.float32(0))
            word = opaque(T.Select(self.part == 0, T.reinterpret("uint32", pair), T.uint32(0)))
            put(self.total, dot2(self.arch, word, T.uint32(ONES), self.total[t]), t)
            weights.append(self._weights([word, *none]))
        for x, found in enumerate(values):
            words = local(self.held, "uint32")
            put(words, T.broadcast(T.uint32(0), self.held), at(0, self.held))
            put(words, T.cast(T.reinterpret("uint16", found), "uint32"), 0)  # also where its weight is 0
            for t, of in enumerate(weights):
                self._multiply(self.unit.operands(words, 0), of, self.out, t * self.columns + x)

    def _summed(self, x: Expr) -> Expr:
        """The sum over the parts of a row; where each lane holds all of it, that is in each lane."""
        return x if self.unit.whole else self.across(x, lambda a, b: a + b)

    # ---- the end

    def row_total(self, tile: int) -> Expr:
        """The sum of all weights of the lane's row."""
        return self.across(self.total[tile], lambda a, b: a + b)

    def own_columns(self, tile: int) -> Iterator[tuple[int, Expr, Expr | None]]:
        """Yields (where they are in `out`, the first one, whether there are such; None: there are) of WIDTH columns of
        the lane's row each."""
        for x in range(self.columns):
            for i in range(0, self.unit.acc, WIDTH):
                column = T.Bind(x * SIDE + self.part * self.unit.acc + i)
                whole = (x + 1) * SIDE <= self.d
                yield (tile * self.columns + x) * self.unit.acc + i, column, None if whole else column < self.d

    def join_waves(self, wave: Expr, waves: int) -> Callable[[Expr, Expr], Joined]:
        """As `attention_rows.Rows.join_waves`."""
        count = self.count
        tops, totals = (T.alloc_buffer((count, waves), "float32", scope="shared") for _ in range(2))
        outs = T.alloc_buffer((waves, count, lds_units(self.d) * WIDTH), "float32", scope="shared")
        for t in range(self.tiles):
            row, total = T.Bind(t * SIDE + self.row), self.row_total(t)
            with T.If(row < count), T.Then():
                with T.If(self.part == 0), T.Then():
                    put(tops, self.top[t] + T.float32(P_SHIFT), row, wave)  # the weights that others have are larger
                    put(totals, total, row, wave)
                for place, column, live in self.own_columns(t):
                    with when(live):
                        put(outs, self.out[at(place, WIDTH)], wave, row, at(column, WIDTH))
        return join(tops, totals, waves, lambda w, r, column: [outs[w, r, column + i] for i in range(WIDTH)])
