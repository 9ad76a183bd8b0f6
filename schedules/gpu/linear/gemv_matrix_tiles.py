"""The inner part of `gemv_matrix.py`: tiles of 16 rows of weights times sets of up to 16 tokens, on int8 matrix units.

A wave holds, of each of its tiles and of each set of tokens, 16 rows by a set's sums. Weights become signed bytes right
in the registers that the matrix instruction takes, tokens come from the caches. A lane has one row of weights, so a
block's scales are scalars of the lane; the tokens' scales are what it has several of. Of each half of a block of 32
columns it has the words count*part .. count*part + count - 1 of four columns (`Int8Unit`). A step is some blocks
of a row, of which scales and the planes of one and two bits are loaded in one go.

AMD's matrix instructions are on signed bytes: tokens are the rows of the product,
16 rows of a weight its columns. All sums of a lane l are of weight row l % 16.

The order of columns within an instruction is free, as both operands have the same one; so a lane's words of both
halves of a block come from the same words of nibbles.

Tokens stand in the matrix so that m of them (as many as lanes have groups, or more) take m / groups sums of each lane:
with fewer than 16 the others are copies, which are left alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from mlc_amd.schedules.formats import PLANE_BITS, Format
from mlc_amd.schedules.gpu.base.arch import GpuArch
from mlc_amd.schedules.gpu.base.device import IN_ORDER, WAVE_SHARED, barrier, fma, lanes_meet, schedule_fence, uniform
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import FIELDS, WIDTH
from mlc_amd.schedules.gpu.base.registers import at, lane_of, vector
from mlc_amd.schedules.gpu.linear import load
from mlc_amd.schedules.gpu.linear.deferred_norm import RowFactors
from mlc_amd.schedules.gpu.linear.load import Planes
from mlc_amd.schedules.operators import GateUp, Linear
from mlc_amd.schedules.tir import Buffer, Expr

SIDE = 16  # rows and columns of a product
# LLVM would start so many blocks of a step that registers spill; with more than MANY tiles also load so many tokens
MANY = 2
LOADED = 0x84  # for `schedule_fence`: as IN_ORDER, and loads may not cross
# Words of tokens that a lane loads with a step's weights, and sums that it holds, at most: else tokens are loaded block
# by block. So they are where both halves of a wave hold the same words (gfx11): registers would spill.
AHEAD = 64

Field = tuple[int, int]  # of S: its number, and the factor that it is wanted times


@dataclass(frozen=True)
class Int8Unit:
    """The instructions of waves of `groups` times 16 lanes.

    parts       groups of lanes that hold different columns of an operand; lane l belongs to part l // 16 % parts. Of
                the four words of either half of a block of 32 columns, part g holds 4 // parts from word
                (4 // parts) * g on
    acc         sums of a lane in an instruction
    alternates  whether sum i of group g belongs to row groups*i + g, else to row acc*g + i
    per_half    whether an instruction multiplies one half of a block, or both
    """

    groups: int
    parts: int
    acc: int
    alternates: bool = False
    per_half: bool = True

    def token_of_row(self, row: Expr, m: int) -> Expr:
        held = m // self.groups
        return row % m if self.alternates else row // self.acc * held + row % self.acc % held

    def token_of_sum(self, group: Expr, i: int, m: int) -> Expr:
        return self.groups * i + group if self.alternates else group * (m // self.groups) + i

    def place(self, token: Expr, m: int) -> Expr:
        """The inverse: group * m / groups + i."""
        return token % self.groups * (m // self.groups) + token // self.groups if self.alternates else token

    def multiply(self, acts: Sequence[Expr], weights: Sequence[Expr], sums: Expr) -> Expr:
        """sums (int32 vector) plus the product of words of tokens and of weights."""
        zero, signed, exact = T.int32(0), T.bool(True), T.bool(False)
        if self.groups == 2:
            operands = [signed, vector(acts), signed, vector(weights), sums, exact]
            name = "llvm.amdgcn.wmma.i32.16x16x16.iu8"
        elif self.per_half:
            name, operands = "llvm.amdgcn.mfma.i32.16x16x16i8", [*acts, *weights, sums, zero, zero, zero]
        else:
            a, b = (T.reinterpret("int64", vector(words)) for words in (acts, weights))
            name, operands = "llvm.amdgcn.mfma.i32.16x16x32.i8", [a, b, sums, zero, zero, zero]
        return T.Bind(T.call_llvm_pure_intrin(f"int32x{self.acc}", name, *operands))


# kind of matrix unit, columns of its int8 instructions
UNITS = {
    ("wmma11", 16): Int8Unit(2, 1, 8, alternates=True),
    ("wmma12", 16): Int8Unit(2, 2, 8),
    ("mfma", 16): Int8Unit(4, 4, 4),
    ("mfma", 32): Int8Unit(4, 4, 4, per_half=False),
}


def has_unit(arch: Device) -> bool:
    """Whether an arch has an int8 matrix unit that kernels use."""
    return isinstance(arch, GpuArch) and (arch.matrix, arch.code.int8_columns) in UNITS


def unit_of(arch: Device) -> Int8Unit:
    """The int8 matrix unit of an arch; ValueError for one without."""
    if not isinstance(arch, GpuArch) or not has_unit(arch):
        raise ValueError(f"{arch.name} has no int8 matrix unit that kernels use")
    return UNITS[arch.matrix, arch.code.int8_columns]


def products(
    unit: Int8Unit, acts: Sequence[Sequence[Expr]], weights: Sequence[Sequence[Expr]], groups: int
) -> list[Expr]:
    """The products of a block of tokens and weights, int32 vectors of `unit.acc` sums: one, or one for each half of its
    columns (groups: 2). acts, weights: for each half a lane's words, int32."""
    zero = T.broadcast(T.int32(0), unit.acc)
    if not unit.per_half:
        whole = [*acts[0], *acts[1]]
        if groups == 1:
            return [unit.multiply(whole, [*weights[0], *weights[1]], zero)]
        nothing = [T.int32(0)] * len(weights[0])
        return [
            unit.multiply(whole, [*weights[0], *nothing], zero),
            unit.multiply(whole, [*nothing, *weights[1]], zero),
        ]
    low = unit.multiply(acts[0], weights[0], zero)
    if groups == 1:
        return [unit.multiply(acts[1], weights[1], low)]
    return [low, unit.multiply(acts[1], weights[1], zero)]


def fields_of(fmts: Sequence[Format]) -> list[Field]:
    """The fields of S, as (number, factor), that weights of these formats need."""
    found: list[Field] = [(0, 1)]
    for fmt in fmts:
        factors = ([-fmt.zero] if fmt.zero else []) + ([1] if fmt.minimum else [])
        found += [(number, factor) for number in _sums_of(fmt) for factor in factors]
    return list(dict.fromkeys(found))


def _sums_of(fmt: Format) -> tuple[int, ...]:
    """Numbers of the fields with d * sum(q) of each group of a block's columns."""
    return (1,) if load.groups(fmt) == 1 else (2, 3)


class Work:
    """What the waves of a workgroup do for a number of tiles: each wave's part of the columns, then sums meet. A wave
    has the number `wave` out of `waves`. fields: those of S that are wanted, as (number, factor).

    A lane wants a field of a set's tokens divided by `groups`, which lie far apart: each wave takes those of a step
    through LDS, where no other wave goes. The sums of waves meet there, too, one set of tokens after the other: [waves,
    size, rows].
    """

    def __init__(
        self, op: Linear | GateUp, acts: list[Buffer], arch: Device, place: tuple[Expr, Expr], waves: int, tiles: int,
        blocks: int,
    ):  # fmt: skip
        """place: a lane, and the number of its wave; blocks: of a step."""
        (A, S), (lane, wave), m, k = acts, place, op.m, op.k
        self.arch, self.m, self.lane, self.waves, self.blocks = arch, m, lane, waves, blocks
        # a scalar that LLVM knows to be no less than 0
        self.wave = T.Bind(uniform(arch, wave) & T.int32(waves - 1)) if waves > 1 else T.int32(0)
        self.fields = fields_of([fmt for fmt, _ in op.weights])
        self.unit, self.size = unit_of(arch), min(m, SIDE)
        unit = self.unit
        self.sets, self.held, self.count = m // self.size, self.size // unit.groups, k // BLOCK
        self.quads = T.decl_buffer((m, k // 4), "int32", data=A.data)
        self.s = T.decl_buffer((m * self.count, FIELDS), "float32", data=S.data)
        self.words = load.QUADS // 2 // unit.parts
        self.part = T.int32(0) if unit.parts == 1 else T.Bind(lane // SIDE)
        self.token = T.Bind(unit.token_of_row(lane % SIDE, self.size))
        self.places = [T.Bind(unit.token_of_sum(lane // SIDE, i, self.size)) for i in range(self.held)]
        size = len(self.fields) * blocks * m
        self.own = T.Bind(self.wave * size)
        self.staged = T.alloc_buffer((waves * size,), "float32", scope=WAVE_SHARED)
        self.rows = tiles * SIDE
        self.parts = T.alloc_buffer((waves * self.size * self.rows,), "float32", scope="shared")
        self.sums = [Sums(self.sets, self.held) for _ in range(tiles)]

    def block(self, number: int, block: Expr) -> list[list[Expr]]:
        """This lane's words of both halves of a block of set `number`."""
        half = load.QUADS // 2
        starts = [block * load.QUADS + p * half + self.part * self.words for p in range(2)]
        return [load.wide(self.quads, self.token + number * self.size, start, self.words) for start in starts]

    def fetch(self, first: Expr) -> None:
        """Loads the fields of a step from block `first` on, for runs of as many pairs of token and block as lanes."""
        numbers, wave = [number for number, _ in self.fields], self.arch.wave
        width = next(n for n in (1, 2, FIELDS) if max(numbers) < n)
        self.loaded = []
        for start in range(0, self.m * self.blocks, wave):
            pair = T.Bind(start + self.lane)
            if self.m * self.blocks % wave:
                pair = T.Bind(T.min(pair, T.int32(self.m * self.blocks - 1)))
            token, block = T.Bind(pair // self.blocks), T.Bind(pair % self.blocks)
            found = T.Bind(self.s[token * self.count + first + block, at(0, width)])
            self.loaded.append((token, block, [lane_of(found, i) if width > 1 else found for i in range(width)]))

    def stage(self) -> None:
        """Puts what `fetch` loaded in its place."""
        lanes_meet()
        for token, block, found in self.loaded:
            place = self.unit.place(token % self.size, self.size) + token // self.size * self.size
            base = T.Bind(self.own + block * self.m + place)
            for i, (number, factor) in enumerate(self.fields):
                value = found[number] if factor == 1 else found[number] * T.float32(factor)
                T.buffer_store(self.staged, value, [base + i * (self.blocks * self.m)])
        lanes_meet()

    def scales(self, number: int, block: int) -> dict[Field, Expr]:
        """(number, factor) -> that field of the step's block `block`, for each of this lane's sums of set `number`."""
        mine = T.Bind(self.own + self.lane // SIDE * self.held)
        return {
            field: T.Bind(self.staged[at(mine + (i * self.blocks + block) * self.m + number * self.size, self.held)])
            for i, field in enumerate(self.fields)
        }

    def sum_up(self, tiles: Sequence["Tile"]) -> None:
        """This wave's part of the products of tiles and tokens: its share of the steps."""
        blocks, waves, steps = self.blocks, self.waves, self.count // self.blocks
        own = T.int32(steps // waves) if steps % waves == 0 else T.Bind((steps - self.wave + (waves - 1)) // waves)
        with T.serial(own) as i:
            first = T.Bind((i * waves + self.wave) * blocks)
            for tile in tiles:
                tile.fetch(first)
            self.fetch(first)
            parts = [(b, number) for b in range(blocks) for number in range(self.sets)]
            ahead, held = {}, len(parts) * 2 * self.words + len(tiles) * self.sets * self.held
            if self.unit.parts > 1 and held <= AHEAD:
                ahead = {(b, number): self.block(number, first + b) for b, number in parts}
                schedule_fence(LOADED)
            self.stage()
            for b, number in parts:
                if b or number:
                    schedule_fence(IN_ORDER if len(tiles) <= MANY else LOADED)
                acts, fields = ahead.get((b, number)) or self.block(number, first + b), self.scales(number, b)
                for tile in tiles:
                    if number == 0:
                        tile.decode(self.arch, b)
                    tile.multiply(number, acts, fields)

    def meet(self, factors: RowFactors | None = None) -> Iterator[int]:
        """For each set of tokens: the number of its first one, when its sums have met, and the factors of a norm that
        is completed are there. (Computed before the first set's sums are stored, those would stay in registers.)"""
        for number in range(self.sets):
            if number:
                barrier()
            for i, token in enumerate(self.places):
                base = T.Bind(self.wave * (self.size * self.rows) + token * self.rows + self.lane % SIDE)
                for t, own in enumerate(self.sums):
                    T.buffer_store(self.parts, own.buffer[number * own.held + i], [base + t * SIDE])
            if factors is not None and number == 0:
                factors.compute()
            barrier()
            yield number * self.size

    def take(self, token: Expr, row: Expr) -> Expr:
        """The sums of all waves of a token of the set for rows row .. row + 3, a multiple of 4."""
        total = None
        for wave in range(self.waves):
            part = T.Bind(self.parts[at(wave * (self.size * self.rows) + token * self.rows + row, WIDTH)])
            total = part if total is None else T.Bind(total + part)
        return total


class Sums:
    """A lane's sums of a tile, `held` of each of `sets` sets; zero at first."""

    def __init__(self, sets: int, held: int):
        self.held = held
        self.buffer = T.alloc_buffer((sets * held,), "float32", scope="local")
        for number in range(sets):
            self.put(number, T.broadcast(T.float32(0), held))

    def of(self, number: int) -> Expr:
        """Those of set `number`, a vector."""
        return self.buffer[at(number * self.held, self.held)]

    def put(self, number: int, total: Expr) -> None:
        T.buffer_store(self.buffer, total, [at(number * self.held, self.held)])


class Tile:
    """A tile of 16 rows of a weight of format `fmt`, of which a lane has row `row`; its products are added to `sums`.
    planes: of `load.views`."""

    def __init__(self, fmt: Format, planes: Planes, row: Expr, work: Work, sums: Sums):
        self.fmt, self.planes, self.row, self.work, self.sums = fmt, planes, row, work, sums

    def fetch(self, first: Expr) -> None:
        """Loads a step, block `first` and the next ones. codes: plane -> words by block; held: plane -> registers, of S
        and Z words of bytes."""
        fmt, row, blocks, part, count = self.fmt, self.row, self.work.blocks, self.work.part, self.work.words
        self.codes: dict[str, list[list[Expr]]] = {}
        self.held: dict[str, list[Expr]] = {}
        for plane in fmt.codes:
            bits, buf = PLANE_BITS[plane], self.planes[plane]
            if bits <= 2:  # bits of all columns are in the same word
                found = load.wide(buf, row, first * bits, blocks * bits)
                self.codes[plane] = [found[b * bits : (b + 1) * bits] for b in range(blocks)]
                continue
            starts = range(0, bits, 4)
            self.codes[plane] = [
                [x for start in starts for x in load.wide(buf, row, (first + b) * bits + start + part * count, count)]
                for b in range(blocks)
            ]
        for name in fmt.scales:
            if name in ("S", "Z"):
                total = blocks * BLOCK // fmt.group
                width = min(load.WORD, total)
                found = load.wide(self.planes[name], row, first * (BLOCK // fmt.group) // width, total // width)
                self.held[name] = [T.Bind(T.cast(x, "uint32")) for x in found] if width < load.WORD else found
            elif fmt.block > BLOCK:
                self.held[name] = [T.Bind(self.planes[name][row, first // (fmt.block // BLOCK)])]
            else:
                self.held[name] = load.wide(self.planes[name], row, first, blocks)

    def decode(self, arch: Device, block: int) -> None:
        """Makes bytes and factors of a step's block, for `multiply`. words: of signed bytes, those of both halves."""
        fmt, part, count = self.fmt, self.work.part, self.work.words
        raw = {plane: self.codes[plane][block] for plane in fmt.codes}
        for plane, bits in (("Q2", 2), ("Q1", 1)):
            if plane in raw and count < load.WORD:
                raw[plane] = [T.Bind(T.shift_right(x, T.cast(part * (count * bits), "uint32"))) for x in raw[plane]]
        found = load.values(arch, fmt, None, lambda: load.bytes_of(raw, count))
        found = [T.Bind(T.reinterpret("int32", x)) for x in found]
        self.words = found[:count], found[count:]
        scales = self._scales(block)
        self.factors, self.lows = scales.factors(), []
        if fmt.minimum:
            low = scales.minimum if fmt.minimum == "M" else T.Bind(T.float32(0) - scales.minimum)
            self.lows = [low if sub is None else T.Bind(low * sub) for sub in scales.sub_minimum]

    def _scales(self, block: int) -> load.Scales:
        own, number = {}, 0
        for name, found in self.held.items():
            if name in ("S", "Z"):
                first = block * (BLOCK // self.fmt.group)
                own[name], number = [found[first // load.WORD]], first % load.WORD // (BLOCK // self.fmt.group)
            else:
                own[name] = [found[block if self.fmt.block == BLOCK else 0]]
        return load.scales(self.fmt, load.Unit({}, own), number)

    def multiply(self, number: int, acts: list[list[Expr]], fields: dict[Field, Expr]) -> None:
        """Adds the decoded block times set `number`. acts: the tokens' words; fields: of `Work.scales`."""
        fmt, held = self.fmt, self.work.held
        total = self.sums.of(number)
        for g, product in enumerate(products(self.work.unit, acts, self.words, load.groups(fmt))):
            dots = T.Bind(T.cast(vector([lane_of(product, i) for i in range(held)]), f"float32x{held}"))
            d, field = fields[0, 1], _sums_of(fmt)[g]
            part = fma(dots, d, fields[field, -fmt.zero]) if fmt.zero else T.Bind(dots * d)
            total = fma(T.broadcast(self.factors[g], held), part, total)
            if fmt.minimum:
                total = fma(T.broadcast(self.lows[g], held), fields[field, 1], total)
        self.sums.put(number, total)
