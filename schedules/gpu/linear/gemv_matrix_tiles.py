"""The inner part of `gemv_matrix.py`: tiles of 16 rows of weights times sets of up to 16 tokens, on int8 matrix units.

A wave holds, of each of its tiles and of each set of tokens, 16 rows by a set's sums. Weights become signed bytes right
in the registers that the matrix instruction takes, tokens come from the caches. A lane has one row of weights, so a
block's scales are scalars of the lane; the tokens' scales are what it has several of. Of each half of a block of 32
columns it has the words count*part .. count*part + count - 1 of four columns (`matrix_int8.py`). A step is some blocks
of a row, of which scales and the planes of one and two bits are loaded in one go.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.schedules.formats import PLANE_BITS, Format
from mlc_amd.schedules.gpu.base.device import IN_ORDER, WAVE_SHARED, fma, lanes_meet, schedule_fence
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import FIELDS, WIDTH
from mlc_amd.schedules.gpu.base.registers import at, lane_of, vector
from mlc_amd.schedules.gpu.linear import load
from mlc_amd.schedules.gpu.linear.load import Planes
from mlc_amd.schedules.gpu.linear.matrix_int8 import SIDE, products, unit_of
from mlc_amd.schedules.tir import Buffer, Expr

# LLVM would start so many blocks of a step that registers spill; with more than MANY tiles also load so many tokens
MANY = 2
LOADED = 0x84  # for `schedule_fence`: as IN_ORDER, and loads may not cross
# Words of tokens that a lane loads with a step's weights, and sums that it holds, at most: else tokens are loaded block
# by block. So they are where both halves of a wave hold the same words (gfx11): registers would spill.
AHEAD = 64

Field = tuple[int, int]  # of S: its number, and the factor that it is wanted times


class Wave(NamedTuple):
    """This wave of a workgroup: its lane, its number out of `count`."""

    arch: Device
    lane: Expr
    number: Expr
    count: int


def set_of(m: int) -> int:
    """Tokens of a set, of which m tokens make one or more."""
    return min(m, SIDE)


def fields_of(fmts: Sequence[Format]) -> list[Field]:
    """The fields of S, as (number, factor), that weights of these formats need."""
    found: list[Field] = [(0, 1)]
    for fmt in fmts:
        found += [(number, factor) for number in _sums_of(fmt) for factor in _factors(fmt)]
    return list(dict.fromkeys(found))


def _sums_of(fmt: Format) -> tuple[int, ...]:
    """Numbers of the fields with d * sum(q) of each group of a block's columns."""
    return (1,) if load.groups(fmt) == 1 else (2, 3)


def _factors(fmt: Format) -> list[int]:
    """What the sums are wanted times."""
    return ([-fmt.zero] if fmt.zero else []) + ([1] if fmt.minimum else [])


class Tokens:
    """The activations of m tokens as the lanes of a wave take them. params: A and S. fields: those of S that are
    wanted, as (number, factor).

    A lane wants a field of a set's tokens divided by `groups`, which lie far apart: each wave takes those of a step
    through LDS, where no other wave goes.
    """

    def __init__(self, params: Sequence[Buffer], m: int, k: int, fields: Sequence[Field], blocks: int, wave: Wave):
        (A, S), lane = params, wave.lane
        self.wave, self.m, self.lane, self.blocks, self.fields = wave, m, lane, blocks, fields
        self.unit, self.size = unit_of(wave.arch), set_of(m)
        unit = self.unit
        self.sets, self.held, self.count = m // self.size, self.size // unit.groups, k // BLOCK
        self.quads = T.decl_buffer((m, k // 4), "int32", data=A.data)
        self.s = T.decl_buffer((m * self.count, FIELDS), "float32", data=S.data)
        self.words = load.QUADS // 2 // unit.parts
        self.part = T.int32(0) if unit.parts == 1 else T.Bind(lane // SIDE)
        self.token = T.Bind(unit.token_of_row(lane % SIDE, self.size))
        self.sums = [T.Bind(unit.token_of_sum(lane // SIDE, i, self.size)) for i in range(self.held)]
        size = len(fields) * blocks * m
        self.own = T.Bind(wave.number * size)
        self.staged = T.alloc_buffer((wave.count * size,), "float32", scope=WAVE_SHARED)

    def block(self, number: int, block: Expr) -> list[list[Expr]]:
        """This lane's words of both halves of a block of set `number`."""
        half = load.QUADS // 2
        starts = [block * load.QUADS + p * half + self.part * self.words for p in range(2)]
        return [load.wide(self.quads, self.token + number * self.size, start, self.words) for start in starts]

    def fetch(self, first: Expr) -> None:
        """Loads the fields of a step from block `first` on: for each run of as many pairs of token and block as a wave
        has lanes."""
        numbers, wave = [number for number, _ in self.fields], self.wave.arch.wave
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
        """(number, factor) -> that field of the step's block number `block`: an element for each of this lane's sums
        of set `number`."""
        mine = T.Bind(self.own + self.lane // SIDE * self.held)
        return {
            field: T.Bind(self.staged[at(mine + (i * self.blocks + block) * self.m + number * self.size, self.held)])
            for i, field in enumerate(self.fields)
        }


class Sums:
    """A lane's sums of a tile, set by set; zero at first."""

    def __init__(self, tokens: Tokens):
        self.held = tokens.held
        self.buffer = T.alloc_buffer((tokens.sets * tokens.held,), "float32", scope="local")
        for number in range(tokens.sets):
            self.put(number, T.broadcast(T.float32(0), tokens.held))

    def of(self, number: int) -> Expr:
        """Those of set `number`, a vector."""
        return self.buffer[at(number * self.held, self.held)]

    def put(self, number: int, total: Expr) -> None:
        T.buffer_store(self.buffer, total, [at(number * self.held, self.held)])


class Tile:
    """A tile of 16 rows of a weight of format `fmt`, of which a lane has row `row`; its products are added to `sums`.
    planes: of `load.views`."""

    def __init__(self, fmt: Format, planes: Planes, row: Expr, tokens: Tokens, sums: Sums):
        self.fmt, self.planes, self.row, self.tokens, self.sums = fmt, planes, row, tokens, sums

    def fetch(self, first: Expr) -> None:
        """Loads a step, block `first` and the next ones. codes: plane -> words by block; held: plane -> registers, of S
        and Z words of bytes."""
        fmt, row, blocks, part, count = self.fmt, self.row, self.tokens.blocks, self.tokens.part, self.tokens.words
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
        """Makes bytes and factors of a step's block number `block`, for `multiply`. words: int32 of signed bytes, those
        of both halves."""
        fmt, part, count = self.fmt, self.tokens.part, self.tokens.words
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
        """Adds the decoded block times set `number`. acts: the tokens' words; fields: of `Tokens.scales`."""
        fmt, held = self.fmt, self.tokens.held
        total = self.sums.of(number)
        for g, product in enumerate(products(self.tokens.unit, acts, self.words, load.groups(fmt))):
            dots = T.Bind(T.cast(vector([lane_of(product, i) for i in range(held)]), f"float32x{held}"))
            d, field = fields[0, 1], _sums_of(fmt)[g]
            part = fma(dots, d, fields[field, -fmt.zero]) if fmt.zero else T.Bind(dots * d)
            total = fma(T.broadcast(self.factors[g], held), part, total)
            if fmt.minimum:
                total = fma(T.broadcast(self.lows[g], held), fields[field, 1], total)
        self.sums.put(number, total)


def emit_sums(tiles: Sequence[Tile], tokens: Tokens) -> None:
    """This wave's part of the products of tiles and tokens: its share of the steps."""
    wave, blocks = tokens.wave, tokens.blocks
    steps, waves = tokens.count // blocks, wave.count
    own = T.int32(steps // waves) if steps % waves == 0 else T.Bind((steps - wave.number + (waves - 1)) // waves)
    with T.serial(own) as i:
        first = T.Bind((i * waves + wave.number) * blocks)
        for tile in tiles:
            tile.fetch(first)
        tokens.fetch(first)
        parts = [(b, number) for b in range(blocks) for number in range(tokens.sets)]
        ahead, held = {}, len(parts) * 2 * tokens.words + len(tiles) * tokens.sets * tokens.held
        if tokens.unit.parts > 1 and held <= AHEAD:
            ahead = {(b, number): tokens.block(number, first + b) for b, number in parts}
            schedule_fence(LOADED)
        tokens.stage()
        for b in range(blocks):
            for number in range(tokens.sets):
                if b or number:
                    schedule_fence(IN_ORDER if len(tiles) <= MANY else LOADED)
                acts, fields = ahead.get((b, number)) or tokens.block(number, first + b), tokens.scales(number, b)
                for tile in tiles:
                    if number == 0:
                        tile.decode(wave.arch, b)
                    tile.multiply(number, acts, fields)


class Meeting:
    """The place in LDS where the sums of a workgroup's waves meet, one set of tokens after the other: [waves, size,
    rows]."""

    def __init__(self, waves: int, size: int, tiles: int):
        self.waves, self.size, self.rows = waves, size * tiles * SIDE, tiles * SIDE
        self.parts = T.alloc_buffer((waves * self.size,), "float32", scope="shared")

    def keep(self, sums: Sequence[Sums], tokens: Tokens, number: int) -> None:
        """Puts this wave's sums of each tile with set `number`."""
        wave, lane = tokens.wave.number, tokens.lane
        for i, token in enumerate(tokens.sums):
            base = T.Bind(wave * self.size + token * self.rows + lane % SIDE)
            for t, own in enumerate(sums):
                T.buffer_store(self.parts, own.buffer[number * own.held + i], [base + t * SIDE])

    def take(self, token: Expr, row: Expr) -> Expr:
        """The sums of all waves of a token of the set for rows row .. row + 3, a multiple of 4."""
        total = None
        for wave in range(self.waves):
            part = T.Bind(self.parts[at(wave * self.size + token * self.rows + row, WIDTH)])
            total = part if total is None else T.Bind(total + part)
        return total
