"""The GEMM tile on AMD's int8 matrix units: `gemm_matrix.py` with int8 activations, and the codes of weights as int8.

It is used only for gate and up. These are at least half of a model's products, and their input is the result of a norm,
whose rounding adds the least to the divergence from exact logits (docs/performance.md).

A launch before converts activations in the layout "lanes" to int8. GROUP columns of a token share a scale, amax / 127:

    A  uint32 [tiles of 16 tokens, groups, words]   in the order in which lanes (`Int8Unit`) load them, 16 bytes of each
                                                    lane side by side: for each block the words of its first half, then
                                                    those of its second half
    S  float32 [tiles, groups, 16]                  scales; those of a lane's sums are side by side
    Q  float16 [tiles, groups, elements]            sums of 8 columns of int8, in the same order; at most 1016, so exact

Tokens are the rows of the product. So all sums of a lane are of one row of a weight, whose scales are scalars of the
lane.

The int32 sums of a block need no conversion to float32. The instruction adds the products to the bits of BASE, a
float32 around which consecutive float32 differ by 1; so the bits of the result, as a float32, are BASE + sum. The total
of a group is

    sum over blocks of scale * (BASE + sum) - BASE * (sum over blocks of scale)

The computation starts with the last term, so that there is one multiply-add for each sum. Because BASE is about 2**23,
the total is rounded to some units of the scale. Codes are therefore shifted up until they fill a byte (`shift_of`).
Then this rounding is 1 to 4 % of the rounding of activations.

For formats with minimums, the product of minimums and Q is added, by one float16 instruction for a group, whose
products are exact. Then totals are multiplied by the tokens' scales. At the end, lanes exchange sums through LDS, so
that each has the sums of one token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

from tvm.tirx.script import builder as T

from mlc_amd.schedules.formats import Format
from mlc_amd.schedules.gpu.base.arch import GpuArch
from mlc_amd.schedules.gpu.base.device import fma, launch, schedule_fence, wave_meets, wave_sum
from mlc_amd.schedules.gpu.base.matrices import SIDE, Registers
from mlc_amd.schedules.gpu.base.planes import BLOCK, Planes
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import RUN, RUN_COLUMNS, RUNS, TOKENS, quantize_lanes, unit_size
from mlc_amd.schedules.gpu.base.registers import at, chosen, elements, lane_of, put, vector
from mlc_amd.schedules.gpu.base.step import if_live
from mlc_amd.schedules.gpu.linear import load
from mlc_amd.schedules.gpu.linear.gemm_matrix import NONE, MatrixGemm, MatrixTile
from mlc_amd.schedules.gpu.linear.gemm_tile import Product, TileWork
from mlc_amd.schedules.tir import Buffer, Expr

GROUP = 128  # columns of activations that share a scale
BLOCKS, LANES = GROUP // BLOCK, GROUP // RUN
SUMS = 16  # elements of Q for a token and a group: the columns of a float16 instruction
SUMMED = GROUP // SUMS  # columns that an element of Q sums up
QUAD = 4  # words of a load
BASE, BASE_BITS = 12582912.0, 0x4B400000  # 3 * 2**22: neighbouring float32 differ by 1, up to 2**22 away from it
AHEAD = 2  # loads of activations during the products of earlier ones; with more, LLVM spills registers
Halves = tuple[list[Expr], list[Expr]]  # a lane's int32 words of the two halves of a block
# {lanes of a wave: registers of a lane} for sums, bytes of weights and, if possible, the loads of the next group; with
# more, LLVM spills registers.
ROOM = {32: 150, 64: 300}


@dataclass(frozen=True)
class Int8Unit:
    """The instructions of waves of `groups` times 16 lanes, on signed bytes: WMMA of gfx12, MFMA of gfx942 and gfx950.
    Tokens are the rows of the product, 16 rows of a weight its columns. The order of columns within an instruction is
    free, as both operands have the same one; so a lane's words of both halves of a block come from the same words of
    nibbles."""

    groups: int
    # Groups of lanes that hold different columns of an operand; lane l belongs to part l // 16 % parts. Of the four
    # words of either half of a block of 32 columns, part g holds 4 // parts from word (4 // parts) * g on.
    parts: int
    acc: int  # sums of a lane in an instruction
    per_half: bool = True  # whether an instruction multiplies one half of a block, or both

    @property
    def words(self) -> int:
        """Of either half of a block, that a lane has."""
        return load.HALF // self.parts

    def multiply(self, acts: Sequence[Expr], weights: Sequence[Expr], sums: Expr) -> Expr:
        """sums (int32 vector) plus the product of words of tokens and of weights."""
        zero, signed, exact = T.int32(0), T.bool(True), T.bool(False)
        if self.groups == 2:
            operands = [signed, vector(acts), signed, vector(weights), sums, exact]
            name = "llvm.amdgcn.wmma.i32.16x16x16.iu8"
        else:
            a, b = (T.reinterpret("int64", vector(words)) for words in (acts, weights))
            name, operands = "llvm.amdgcn.mfma.i32.16x16x32.i8", [a, b, sums, zero, zero, zero]
        return T.Bind(T.call_llvm_pure_intrin(f"int32x{self.acc}", name, *operands))


# kind of matrix unit, columns of its int8 instructions; those of other GPUs are no faster than float16
UNITS = {("wmma12", 16): Int8Unit(2, 2, 8), ("mfma", 32): Int8Unit(4, 4, 4, per_half=False)}


def unit_of(arch: Device) -> Int8Unit | None:
    """The int8 matrix unit of an arch; None if it has none, or if int8 is not faster than float16."""
    return UNITS.get((arch.matrix, arch.code.int8_columns)) if isinstance(arch, GpuArch) else None


def products(
    unit: Int8Unit, acts: Sequence[Sequence[Expr]], weights: Sequence[Sequence[Expr]], groups: int, start: int
) -> list[Expr]:
    """The products of a block of tokens and weights, plus `start`: int32 vectors of `unit.acc` sums, one for the block,
    or one for each half of its columns (groups: 2). acts, weights: a lane's int32 words of each half."""
    zero = T.broadcast(T.int32(start), unit.acc)
    if not unit.per_half:
        first, last, nothing = *weights, [T.int32(0)] * len(weights[0])
        parts = [[*first, *last]] if groups == 1 else [[*first, *nothing], [*nothing, *last]]
        return [unit.multiply([*acts[0], *acts[1]], part, zero) for part in parts]
    low = unit.multiply(acts[0], weights[0], zero)
    if groups == 1:
        return [unit.multiply(acts[1], weights[1], low)]
    return [low, unit.multiply(acts[1], weights[1], zero)]


def int8_activations(of: Product, state: Buffer, H: Buffer) -> list[Buffer]:
    """Emits the launch that converts H, in the layout "lanes", to A, S and Q. Returns these. LANES lanes convert a
    group of a token; a workgroup converts a group of eight tokens. With experts, all slots are converted."""
    arch, m = of.arch, of.m
    unit, groups, tiles = unit_of(arch), of.k // GROUP, -(-m // SIDE)
    assert unit
    parts, own = unit.parts, unit.words
    A = T.alloc_buffer((tiles, groups, GROUP * SIDE // 4), "uint32", scope="global")
    S = T.alloc_buffer((tiles, groups, SIDE), "float32", scope="global")
    Q = T.alloc_buffer((tiles, groups, SIDE * SUMS), "float16", scope="global")
    blocks = int(H.shape[2]) // unit_size(1)
    grid = groups, -(-m // TOKENS)
    rows = 1 if of.expert_slots else m
    with launch(grid, (LANES * TOKENS,)) as (group, eight, thread), if_live(state, rows, eight * TOKENS):
        token, block, run = T.Bind(thread // LANES), T.Bind(thread % LANES // RUNS), T.Bind(thread % RUNS)
        source = T.Bind(group * BLOCKS + block)
        place = ((run * TOKENS + token) * blocks + source % blocks) * RUN
        x = [T.Bind(T.cast(v, "float32")) for v in elements(T.Bind(H[eight, source // blocks, at(place, RUN)]))]
        q, top = quantize_lanes(arch, x, LANES)
        tile, row = T.Bind(eight // (SIDE // TOKENS)), T.Bind(eight % (SIDE // TOKENS) * TOKENS + token)
        part, first = T.Bind(run // own), run % own
        for half in range(2):
            columns = [i for i, column in enumerate(RUN_COLUMNS[0]) if column // 16 == half]
            four = [q[i] for i in sorted(columns, key=lambda i: RUN_COLUMNS[0][i])]
            word = sum((T.shift_left(v & 255, T.int32(8 * i)) for i, v in enumerate(four)), T.int32(0))
            number = T.Bind((block * 2 + half) * own + first)
            lane = number // QUAD * (parts * SIDE) + part * SIDE + row
            T.buffer_store(A, T.reinterpret("uint32", T.Bind(word)), [tile, group, lane * QUAD + number % QUAD])
            total = wave_sum(arch, T.Bind(sum(four[1:], four[0])), SUMMED // 4)
            element = T.Bind((block * BLOCK + half * 16 + run * 4) // SUMMED)
            where = (element // (SUMS // parts) * SIDE + row) * (SUMS // parts) + element % (SUMS // parts)
            with T.If(run % (SUMMED // 4) == 0), T.Then():
                T.buffer_store(Q, T.cast(total, "float16"), [tile, group, where])
        with T.If(thread % LANES == 0), T.Then():
            T.buffer_store(S, top * T.float32(1 / 127), [tile, group, row])
    return [A, S, Q]


class _Group(NamedTuple):
    """A lane's decoded weights of a group of its row."""

    words: list[Halves]  # words of each block
    factors: list[Expr]  # float32 scale of each group of columns
    start: Expr  # the initial value of a total
    low: Expr | None  # factor on the product of minimums, None for 1
    minimums: Expr | None  # float16 minimums for the lane's elements of Q, or None


def shift_of(fmt: Format) -> int:
    """The number of bits by which codes are shifted up to fill a signed byte, so that the rounding of totals matters
    less."""
    low, high = -fmt.zero, (1 << fmt.code_bits) - 1 - fmt.zero
    if fmt.signed:
        return 0
    if fmt.table:
        low, high = min(fmt.table), max(fmt.table)
    return max(s for s in range(8) if low << s >= -128 and high << s < 128)


class _Row:
    """Loads and decodes groups of a lane's row; a group is a unit of `load.py`. part: the lane's part of a block."""

    def __init__(self, fmt: Format, planes: Planes, row: Expr, part: load.Part):
        self.shift = shift_of(fmt)
        if fmt.table:
            fmt = replace(fmt, table=tuple(value << self.shift for value in fmt.table))
        self.fmt, self.planes, self.row, self.part = fmt, planes, row, part

    def fetched(self, group: Expr) -> load.Unit:
        return load.fetch(self.fmt, self.planes, self.row, group, BLOCKS, self.part)

    def decoded(self, arch: Device, loaded: load.Unit) -> _Group:
        fmt, unit = self.fmt, T.float32(2.0**-self.shift)
        words = [load.codes(arch, fmt, loaded, b, self.part) for b in range(BLOCKS)]
        words = [[T.Bind(T.reinterpret("int32", x)) for x in block] for block in words]
        of = [load.scales(fmt, loaded, b) for b in range(BLOCKS)]
        factors = [T.Bind(x * unit) for each in of for x in each.factors()]
        start = T.Bind(sum(factors[1:], factors[0]) * T.float32(-BASE))
        low = T.Bind(T.float32(0) - of[0].minimum) if fmt.minimum == "DM" else None
        signed = [[self._signed(x) for x in block] for block in words]
        halves = [(block[: self.part.words], block[self.part.words :]) for block in signed]
        return _Group(halves, factors, start, low, self._minimums(loaded) if fmt.minimum else None)

    def _signed(self, word: Expr) -> Expr:
        """Words of codes as signed bytes: weights times 2**shift."""
        fmt, zero = self.fmt, self.fmt.zero << self.shift
        if fmt.table or fmt.signed:
            return word
        found = T.shift_left(T.reinterpret("uint32", word), T.uint32(self.shift))
        if zero == 128:
            found = found ^ T.uint32(load.SIGN)
        elif zero:
            found = load.minus(found, zero)
        return T.Bind(T.reinterpret("int32", found))

    def _minimums(self, loaded: load.Unit) -> Expr:
        fmt, parts = self.fmt, load.HALF // self.part.words
        if fmt.minimum == "M":
            found = loaded.scales["M"]
        else:
            words, first = (loaded.scales["S"], 4) if fmt.nibble_scales else (loaded.scales["Z"], 0)
            bits = [T.shift_right(words[i // 4], T.uint32(i % 4 * 8 + first)) for i in range(GROUP // fmt.group)]
            found = [T.Bind(T.cast(x & T.uint32(255 >> first), "float16")) for x in bits]
        own, repeated = len(found) // parts, SUMS // len(found)
        mine = [chosen([found[p * own + i] for p in range(parts)], self.part.number) for i in range(own)]
        return T.Bind(vector([x for x in mine for _ in range(repeated)]))


def suits(of: Product) -> bool:
    """Whether a kernel may use int8 products, and the arch has instructions for them."""
    gate_up, codes = of.weights == 2, all(fmt.kind == "int8" for fmt in of.formats)
    return gate_up and codes and of.k % GROUP == 0 and unit_of(of.arch) is not None


class Int8Gemm(MatrixGemm):
    """See the module. Only for int8 formats, whole groups of columns, and rocm."""

    crosses, cuts_tiles = True, False

    def __init__(self, of: Product, tile: MatrixTile):
        if not suits(of):
            raise ValueError(f"{of.arch.name} does not multiply {of.weights} of {of.formats} of {of.k} columns as int8")
        super().__init__(of, tile)
        self.completes_norms = False
        self.int8, self.groups = cast(Int8Unit, unit_of(of.arch)), of.k // GROUP

    def loads(self) -> float:
        if self._registers() > ROOM[self.arch.wave]:
            raise ValueError(f"{self.tile} takes too many registers of a lane")
        return super().loads()

    def _registers(self, ahead: bool = False) -> float:
        """The registers of a lane. ahead: with the codes of the next group."""
        codes = BLOCKS * max(map(load.block_bytes, self.of.formats)) if ahead else 0
        return self.count * self.unit.acc + self.weights * self.tiles_n * (GROUP + codes) / 4 / self.int8.parts

    def prepared(self, state: Buffer, acts: list[Buffer]) -> list[Buffer]:
        return int8_activations(self.of, state, acts[0])

    def _sum_up(self, work: TileWork) -> None:
        first, lane = T.Bind(work.row0 + self.wave_n), self.lane % SIDE
        part = load.Part(T.Bind(self.lane // SIDE) if self.int8.parts > 1 else T.int32(0), self.int8.words)
        rows = [
            _Row(w.fmt, w.planes, work.weight_row(first + (i * SIDE + lane), w, self.tile.rows), part)
            for w in work.viewed(BLOCKS).weights for i in range(self.tiles_n)
        ]  # fmt: skip
        tile0 = T.Bind((work.token0 + self.wave_m) // SIDE)
        place = T.Bind(self.lane % (SIDE * self.int8.parts))
        self._each_step(
            lambda group: [row.fetched(group) for row in rows],
            lambda group, loaded: self._add(work, tile0, place, group, rows, loaded),
            self._registers(True) <= ROOM[self.arch.wave],
        )

    def _add(self, work: TileWork, tile0: Expr, place: Expr, group: Expr, rows: list[_Row], loaded: list) -> None:
        """Adds the products of a group of columns to the sums."""
        A, S, Q = work.acts
        parts = self.int8.parts
        of = [row.decoded(self.arch, raw) for row, raw in zip(rows, loaded, strict=True)]
        ahead = AHEAD * BLOCKS // (GROUP // (4 * QUAD) // parts)  # AHEAD loads of 16 bytes, in blocks
        pieces = [(t, b) for t in range(self.tiles_m) for b in range(0, BLOCKS, ahead)]

        def fetch(t: int, b: int) -> list[Expr]:
            first = b // ahead * AHEAD
            found = [
                A[tile0 + t, group, at((i * (SIDE * parts) + place) * QUAD, QUAD)] for i in range(first, first + AHEAD)
            ]
            return [T.Bind(x) for x in found]

        following = fetch(*pieces[0])
        for (t, b), after in zip(pieces, [*pieces[1:], None], strict=True):
            words = [T.Bind(T.reinterpret("int32", lane_of(x, i))) for x in following for i in range(QUAD)]
            if b == 0:
                totals = [T.broadcast(x.start, self.int8.acc) for x in of]
            if b + ahead == BLOCKS:
                first = T.Bind(self.lane // SIDE * self.int8.acc)
                scales = T.Bind(S[tile0 + t, group, at(first, self.int8.acc)])
                sums = (
                    T.Bind(Q[tile0 + t, group, at(place * (SUMS // parts), SUMS // parts)])
                    if any(x.minimums is not None for x in of)
                    else None
                )
            if after:
                following = fetch(*after)
            schedule_fence(NONE)
            own = self.int8.words
            for i, (row, x) in enumerate(zip(rows, of, strict=True)):
                for n in range(ahead):
                    acts = [words[(n * 2 + half) * own :][:own] for half in range(2)]
                    totals[i] = self._block(row, x, b + n, acts, totals[i])
                if b + ahead == BLOCKS:
                    self._finish_group(t * len(rows) + i, x, totals[i], scales, sums)

    def _block(self, row: _Row, of: _Group, block: int, acts: Sequence, total: Expr) -> Expr:
        """The total of a group plus the products of a block."""
        count, acc = load.groups(row.fmt), self.int8.acc
        found = products(self.int8, acts, of.words[block], count, BASE_BITS)
        for factor, dots in zip(of.factors[block * count :][:count], found, strict=True):
            total = fma(T.broadcast(factor, acc), T.Bind(T.reinterpret(f"float32x{acc}", dots)), total)
        return total

    def _finish_group(self, number: int, of: _Group, total: Expr, scales: Expr, q: Expr | None) -> None:
        """Adds a group's total to matrix `number` of the sums."""
        acc = self.int8.acc
        if of.minimums is not None and of.low is None:
            total = T.Bind(self.unit.multiply(q, of.minimums, total))
        elif of.minimums is not None:
            low = T.Bind(self.unit.multiply(q, of.minimums, T.broadcast(T.float32(0), acc)))
            total = fma(low, T.broadcast(of.low, acc), total)
        where, sums = at(number * acc, acc), cast(Registers, self.matrices).sums
        put(sums, fma(total, scales, sums[where]), where)

    def _own(self, place: int, numbers: list[int]) -> list[Expr]:
        wave_meets(self.arch)
        for w, number in enumerate(numbers):
            self._hand_over(0, w, number)
        wave_meets(self.arch)
        return [self._added(w) for w in range(self.weights)]

    def _hand_over(self, place: int, weight: int, number: int) -> None:
        """See MatrixGemm. Here a lane has the sums of one row; the lane that reads them gets `acc` rows of one
        token."""
        acc, row = self.unit.acc, T.Bind(self.lane % SIDE)
        for i, x in enumerate(elements(self.matrices.result(number))):
            token = self.lane // SIDE * (SIDE // self.int8.groups) + i
            quad = (place * self.weights + weight) * (acc // QUAD) + row % acc // QUAD
            taker = T.Bind(quad * self.arch.wave + token + row // acc * SIDE)
            put(self.lds, x, T.Bind((self.wave * self.own + taker) * QUAD + row % QUAD))


def routine(of: Product, tile: MatrixTile) -> MatrixGemm:
    """The tile routine of a tile."""
    return (Int8Gemm if tile.int8 else MatrixGemm)(of, tile)
