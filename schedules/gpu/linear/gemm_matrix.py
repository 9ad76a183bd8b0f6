"""The GEMM tile on AMD's matrix units (WMMA of gfx11 and gfx12, MFMA of gfx9) of either API: each lane decodes its own
operands.

The distribution of operands over lanes is known (base/matrices.py), so nothing is staged in LDS, and waves do not wait
for each other. A lane loads a block of 32 columns of its own row, and decodes it into its operand registers
(`coop_load.py`). It loads the activations of the same columns, which are stored in the order of lanes (layout "lanes":
`quantize.py`). The weights of the next step are loaded while those of this step are multiplied. On gfx11, where both
halves of a wave hold the same operands, each half decodes a block, and they exchange these through LDS.

The order of columns does not matter for a sum. The groups of 16 lanes (two or four) that hold different columns of an
instruction's operand have a block each, and an instruction takes some columns of each of these blocks.

The waves of a workgroup divide its tokens, rows and columns between them; sums of waves with different columns are
added in LDS. A lane's accumulators are of one token and consecutive rows, so results are stored in wide vectors. On
units that assign rows to accumulators in another order, lanes load rows in the inverse order (`MatrixUnit.row`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tvm.tirx.script import builder as T

from mlc_amd.runtime.gpus import RATES
from mlc_amd.schedules.gpu.base.device import WAVE_SHARED, barrier, computed_here, schedule_fence, uniform, wave_meets
from mlc_amd.schedules.gpu.base.matrices import SIDE, UNITS, wave_matrices
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.quantize import RUN, RUNS, TOKENS, unit_size
from mlc_amd.schedules.gpu.base.registers import Held, at, elements, put, vector
from mlc_amd.schedules.gpu.base.step import when
from mlc_amd.schedules.gpu.linear import coop_load, gemm_tile, load
from mlc_amd.schedules.gpu.linear.deferred_norm import Units, token_lanes
from mlc_amd.schedules.gpu.linear.gemm_tile import Gemm, Product, Tile, TileWork
from mlc_amd.schedules.tir import Expr

Run = Callable[[Expr], Expr]  # of a block of weights: number of a run -> float16x8
Piece = tuple[int, int, int]  # a part of a group of columns: (block, first run, number of runs)

SUMS = 192  # upper limit of the sums of a lane
QUAD, UNIT_BYTES = 4, 16  # float32 values of a unit of LDS, its bytes
NONE = 0  # for `schedule_fence`: nothing may cross
BATCH = 4  # token tiles whose activations are loaded at the same time
LDS = 64 << 10  # upper limit of the bytes of LDS of a workgroup; LLVM ends the process for more


@dataclass(frozen=True)
class MatrixTile(Tile):
    waves_m: int  # waves along tokens; waves_n, waves_k: along rows and columns
    waves_n: int
    waves_k: int
    int8: int = 0  # 1: int8 products (`gemm_matrix_int8.py`)


class MatrixGemm(Gemm[MatrixTile]):
    """See the module. Activations: H in the layout "lanes". `store` gets vectors of `unit.acc` rows. crosses: whether
    the sums of a lane are of several tokens, so that lanes must exchange them."""

    row_stride = SIDE
    cuts_tiles = True
    crosses = False
    choices: ClassVar = {
        "tokens": (16, 32, 64, 128), "rows": (16, 32, 64, 128, 256), "waves_m": (1, 2, 4), "waves_n": (1, 2, 4, 8),
        "waves_k": (1, 2, 4, 8), "int8": (0, 1),
    }  # fmt: skip

    def __init__(self, of: Product, tile: MatrixTile):
        super().__init__(of, tile)
        self.unit, lanes = UNITS[of.arch.lane_unit], of.arch.wave
        self.group = lanes // SIDE  # blocks of a unit of the layout "lanes"
        self.groups = -(-of.k // (self.group * BLOCK))
        self.whole = of.k % (self.group * BLOCK) == 0
        self.waves = tile.waves_m * tile.waves_n * tile.waves_k
        self.threads = self.waves * lanes
        self.tiles_m, self.tiles_n = tile.tokens // tile.waves_m // SIDE, tile.rows // tile.waves_n // SIDE
        self.count = self.tiles_m * self.weights * self.tiles_n  # matrices of sums of a wave
        if tile.tokens % (tile.waves_m * SIDE) or tile.rows % (tile.waves_n * SIDE) or of.k % BLOCK:
            raise ValueError(f"{tile} does not divide into {SIDE} x {SIDE} matrices of {of.k} columns")
        # The LDS is first used for the exchange between the halves of a wave, then for the sums of waves along columns.
        exchanged = self.weights * self.tiles_n * self.group * RUNS * SIDE if self.unit.whole and not tile.int8 else 0
        self.at_once = min(tile.waves_k, self.tiles_m * self.tiles_n)
        handed = self.at_once * self.weights * lanes * self.unit.acc // QUAD if tile.waves_k > 1 or self.crosses else 0
        self.handed, self.own = handed, max(exchanged, handed)
        size, room = UNIT_BYTES * self.waves * self.own, min(of.arch.lds, LDS)
        if size > room or self.threads > of.arch.threads:
            raise ValueError(f"{tile} takes {size} bytes of LDS and {self.threads} threads")
        factors = lanes // token_lanes(of.arch, tile.tokens, self.threads) if self.threads >= tile.tokens else 0
        with_factors = max(exchanged, handed + factors)
        self.completes_norms = factors > 0 and UNIT_BYTES * self.waves * with_factors <= room
        if self.completes_norms:
            self.own = with_factors

    def loads(self) -> float:
        if self.count * self.unit.acc > SUMS:
            raise ValueError(f"{self.tile} has too many sums of a lane")
        return self.weights * self.tiles_n * load.block_bytes(self.of.formats[0])

    def allocate(self, thread: Expr) -> None:
        tile, lanes, self.thread = self.tile, self.arch.wave, thread
        self.wave = wave = uniform(self.arch, thread // lanes)
        self.wave_m = T.Bind(wave % tile.waves_m * (self.tiles_m * SIDE))
        self.wave_n = T.Bind(wave // tile.waves_m % tile.waves_n * (self.tiles_n * SIDE))
        self.wave_k = T.Bind(wave // (tile.waves_m * tile.waves_n))
        tokens = min(BATCH, self.tiles_m)
        self.matrices = wave_matrices(self.arch, self.weights * self.tiles_n, tokens, self.count)
        if self.own:
            size = self.waves * self.own
            of = ((size * QUAD,), "float32") if self.crosses else ((size,), "uint32x4")
            self.lds = T.alloc_buffer(*of, scope=WAVE_SHARED)
            self.factor_units = Units(self.lds, lambda wave, i: T.Bind(wave * self.own + (self.handed + i)))

    def emit(self, work: TileWork) -> None:
        # LLVM would otherwise compute common values of several segments' tiles before all loops, and keep them in
        # registers
        self.lane = T.Bind(computed_here(self.arch, T.Bind(self.thread % self.arch.wave)))
        self.matrices.clear()
        self._sum_up(work)
        if work.factors is not None:
            wave_meets(self.arch)  # the factors use the LDS through which lanes have exchanged weights
            work.factors.compute()
            barrier()
        self._finish(work)

    def _sum_up(self, work: TileWork) -> None:
        weights = work.viewed().weights
        first, own, part = T.Bind(work.row0 + self.wave_n), self.unit.row(self.lane % SIDE), T.Bind(self.lane // SIDE)
        rows = [
            [work.weight_row(first + (i * SIDE + own), w, self.tile.rows) for i in range(self.tiles_n)] for w in weights
        ]
        tokens = self._tokens(work, part)

        def fetch(group: Expr) -> list:
            block = group * self.group + part
            block = T.Bind(block if self.whole else T.min(block, T.int32(self.k // BLOCK - 1)))
            pairs = zip(weights, rows, strict=True)
            return [coop_load.fetch(w.fmt, w.planes, row, block, 1) for w, own in pairs for row in own]

        def multiply(group: Expr, fetched: list) -> None:
            formats = [w.fmt for w in weights for _ in range(self.tiles_n)]
            blocks = zip(formats, fetched, strict=True)
            runs = [coop_load.decoder(self.arch, fmt, raw, exponents=exponents) for fmt, raw in blocks]
            self._multiply(work, runs, tokens, group)

        exponents = (
            coop_load.hidden(computed_here(self.arch, T.int32(0))) if self.arch.wave == 64 else coop_load.EXPONENTS
        )
        self._each_step(fetch, multiply, not work.has_floats)

    def _each_step(
        self, fetch: Callable[[Expr], list], multiply: Callable[[Expr, list], None], ahead: bool = True
    ) -> None:
        """Calls multiply(group, fetch(group)) for the wave's groups of columns. ahead: whether the next group is
        fetched before this one is multiplied; not for float weights, because kept registers must be scalars."""
        waves, last = self.tile.waves_k, T.int32(self.groups - 1)
        steps = self.groups if waves == 1 else T.Bind((self.groups - self.wave_k + (waves - 1)) // waves)
        if not ahead:
            with T.serial(steps) as i:
                group = T.Bind(i * waves + self.wave_k)
                multiply(group, fetch(group))
            return
        held = Held(fetch(T.Bind(T.min(self.wave_k, last))))
        with T.serial(steps) as i:
            group = T.Bind(i * waves + self.wave_k)
            fetched, following = held.values(), fetch(T.Bind(T.min(group + waves, last)))
            multiply(group, fetched)
            held.keep(following)

    def _tokens(self, work: TileWork, part: Expr) -> list[Expr]:
        """For each token tile, the offset of a lane's activations within a group of columns, in float16 elements."""
        lane = self.lane % SIDE
        first = T.Bind((work.token0 + self.wave_m) // TOKENS + lane // TOKENS)
        own = lane % TOKENS * self.group + (0 if self.unit.whole else part)
        row = int(work.acts[0].shape[1]) * unit_size(self.group)  # halves of eight tokens
        tiles = [first + i * (SIDE // TOKENS) for i in range(self.tiles_m)]
        if self.of.m % self.tile.tokens:  # after the last tokens lanes read these
            tiles = [T.min(tile, T.int32(-(-self.of.m // TOKENS) - 1)) for tile in tiles]
        return [T.Bind(tile * row + own * RUN) for tile in tiles]

    def _multiply(self, work: TileWork, runs: list[Run], tokens: list[Expr], step: Expr) -> None:
        """Adds the products of a group of columns to the sums. The activations of the next few instructions are loaded
        during the current ones; fences prevent LLVM from loading more, for which registers would spill."""
        load = self._loader(work, tokens, step)
        first, *others = self._batches()
        x = load(*first)
        if self.unit.whole:
            self._exchange(runs, work.has_floats)
        for (piece, tiles), following in zip([first, *others], [*others, None], strict=True):
            if tiles[0] == 0:
                a = [self._weights(run, i, *piece) for i, run in enumerate(runs)]
            loaded, x = x, load(*following) if following else []
            schedule_fence(NONE)
            for number, (t, of) in enumerate(zip(tiles, loaded, strict=True)):
                for part, b in enumerate(self.matrices.operands("b", number, of)):
                    for i, weight in enumerate(a):
                        self.matrices.add_product(t * len(a) + i, weight[part], b)

    def _batches(self) -> list[tuple[Piece, range]]:
        """[(piece that an instruction multiplies, or two instructions of four elements; token tiles whose activations
        are loaded at the same time)]."""
        count = self.unit.units
        blocks = range(self.group) if self.unit.whole else range(1)
        return [
            ((block, j, count), range(t, min(t + BATCH, self.tiles_m)))
            for block in blocks for j in range(0, RUNS, count) for t in range(0, self.tiles_m, BATCH)
        ]  # fmt: skip

    def _weights(self, run: Run, i: int, block: int, j: int, count: int) -> Sequence:
        """The operands of row tile i for a piece."""
        places = range(j, j + count)
        own = [self._exchanged(i, block, e) if self.unit.whole else run(e) for e in places]
        return self.matrices.operands("a", i, own)

    def _loader(self, work: TileWork, tokens: list[Expr], step: Expr) -> Callable[[Piece, range], list[list[Expr]]]:
        """Returns load(piece, token tiles), which loads the activations of a piece for each of these tiles."""
        group, run = self.group, self.matrices.activations(work.acts[0], step)

        def load(piece: Piece, tiles: range) -> list[list[Expr]]:
            block, j, count = piece
            found = []
            for t in tiles:
                x = [run(tokens[t] + ((j + e) * TOKENS * group + block) * RUN) for e in range(count)]
                if not self.whole:
                    mine = block if self.unit.whole else self.lane // SIDE
                    zero, exists = T.broadcast(T.float16(0), RUN), step * group + mine < self.k // BLOCK
                    x = [T.Bind(T.Select(T.broadcast(exists, RUN), of, zero)) for of in x]
                found.append(x)
            return found

        return load

    def _exchange(self, runs: list[Run], floats: bool) -> None:
        """Stores runs to LDS, for the other half of the wave. floats: whether weights are floats, for which LLVM would
        convert all rows at the same time and spill registers."""
        wave_meets(self.arch)
        for i, run in enumerate(runs):
            if floats:
                schedule_fence(NONE)
            for j in range(RUNS):
                put(self.lds, T.reinterpret("uint32x4", run(j)), self._run_place(i, self.lane // SIDE, j))
        wave_meets(self.arch)

    def _exchanged(self, i: int, block: Expr, j: int) -> Expr:
        return T.Bind(T.reinterpret("float16x8", self.lds[self._run_place(i, block, j)]))

    def _run_place(self, i: int, block: Expr, j: int) -> Expr:
        """The place in LDS of a run of row tile i; neighbouring lanes have neighbouring places."""
        run = (i * self.group + block) * RUNS + j
        return T.Bind(self.wave * self.own + (run * SIDE + self.lane % SIDE))

    # ---- results

    def _finish(self, work: TileWork) -> None:
        """Stores the results. Sums of waves with different columns are added through LDS: at a time as many places as
        there are such waves, each of which adds up one place."""
        waves_k, weights, tiles_n = self.tile.waves_k, range(self.weights), self.tiles_n
        # LLVM would otherwise compute places, and load residuals and biases, before the loop over columns
        lane = computed_here(self.arch, self.lane)
        token, row = T.Bind(work.token0 + self.wave_m + lane % SIDE), T.Bind(work.row0 + self.wave_n)
        own_row = T.Bind(lane // SIDE * self.unit.acc)

        def store(number: Expr, values: list[Expr]) -> None:
            """Stores the values of a place of the wave, except for rows beyond the weight's and tokens beyond m."""
            first, target = T.Bind(row + number % tiles_n * SIDE), T.Bind(token + number // tiles_n * SIDE)
            with when(work.if_row(first, self.tile.rows)), when(work.if_token(target, self.of.m, self.tile.tokens)):
                work.store(target, T.Bind(first + own_row), values)

        places = self.tiles_m * tiles_n
        for first in range(0, places, self.at_once):
            if waves_k == 1:
                schedule_fence(NONE)
                store(first, self._own(first, [self._number(first, w) for w in weights]))
                continue
            count = min(self.at_once, places - first)
            barrier()
            for place in range(count):
                for w in weights:
                    self._hand_over(place, w, self._number(first + place, w))
            barrier()
            with when(None if count == waves_k else self.wave_k < count):
                store(T.Bind(first + self.wave_k), [self._added(w) for w in weights])

    def _own(self, place: int, numbers: list[int]) -> list[Expr]:
        """The results of a place (the matrices of sums with these numbers), if no other wave has a part of them."""
        return [self.matrices.result(number) for number in numbers]

    def _number(self, place: int, weight: int) -> int:
        """The number of the matrix of sums of a place and weight."""
        t, j = divmod(place, self.tiles_n)
        return (t * self.weights + weight) * self.tiles_n + j

    def _hand_over(self, place: int, weight: int, number: int) -> None:
        sums = elements(self.matrices.result(number))
        for quad in range(self.unit.acc // QUAD):
            four = T.reinterpret("uint32x4", vector(sums[quad * QUAD : (quad + 1) * QUAD]))
            put(self.lds, four, self._quad(self.wave, place, weight, quad))

    def _added(self, weight: int) -> Expr:
        """The results of this wave's place: the sums of all waves with different columns, added."""
        waves, quads = self.tile.waves_m * self.tile.waves_n, []
        for quad in range(self.unit.acc // QUAD):
            found = []
            for k in range(self.tile.waves_k):
                place = self._quad(self.wave % waves + k * waves, self.wave_k, weight, quad)
                four = self.lds[at(place * QUAD, QUAD)] if self.crosses else self.lds[place]
                found.append(four if self.crosses else T.reinterpret("float32x4", four))
            quads.append(T.Bind(sum(found[1:], found[0])))
        return quads[0] if len(quads) == 1 else vector([x for quad in quads for x in elements(quad)])

    def _quad(self, wave: Expr, place: Expr, weight: int, quad: int) -> Expr:
        """The place of four sums of a wave in LDS; neighbouring lanes have neighbouring places."""
        number = (place * self.weights + weight) * (self.unit.acc // QUAD) + quad
        return T.Bind(wave * self.own + (number * self.arch.wave + self.lane))


# ---- the rule

MOST = 128  # upper limit of the sums of a lane in a default tile
# Registers of a lane, estimated. HELD: for the loaded and decoded weights of a row tile. ROOM: for these and sums, by
# lanes of a wave.
HELD, ROOM = 32, {32: 192, 64: 384}
# Clocks of a compute unit for the operands of an instruction, estimated. DECODED: to decode weights. LOADED: to load
# activations, at 64 bytes per clock from the cache. ISSUED: to issue these loads.
DECODED, LOADED, ISSUED = 9, 8, 2
THREADS = 256  # threads of a workgroup
LEAST_GROUPS = 3  # least number of groups of columns of each wave, if several waves share the columns


def choose(of: Product) -> MatrixTile:
    """The default tile: the one with the least estimated work of the busiest compute unit; among equal ones, that with
    the fewest waves along columns. Raises ValueError unless k is a multiple of 32."""
    waves, found = THREADS // of.arch.wave, []
    for tokens in [size for size in (16, 32, 64, 128) if of.tokens % size == 0] or [SIDE]:
        for tiles_n in (1, 2, 4):
            for waves_k in (size for size in (1, 2, 4, 8) if size <= waves):
                tile = MatrixTile(tokens, tiles_n * SIDE * (waves // waves_k), 1, waves // waves_k, waves_k)
                try:
                    gemm = MatrixGemm(of, tile)
                except ValueError:
                    continue
                sums, rows = gemm.count * gemm.unit.acc, of.weights * tiles_n
                if sums > MOST or sums + rows * HELD > ROOM[of.arch.wave]:
                    continue
                if waves_k == 1 or gemm.groups >= LEAST_GROUPS * waves_k:
                    found.append((_load(of, gemm), waves_k, tile))
    if not found:
        raise ValueError(f"{of.arch.name} has no tile for {of.tokens} tokens of {of.k} columns")
    return min(found, key=lambda each: each[:2])[-1]


def _load(of: Product, gemm: MatrixGemm) -> float:
    """The estimated clocks of 16 columns on the busiest compute unit, except for a factor that all tiles share."""
    product = 2 * SIDE**3 / RATES[of.arch.family]["matrix16"]
    work = gemm.count * product + of.weights * gemm.tiles_n * DECODED + gemm.tiles_m * ISSUED
    work = max(work, gemm.tiles_m * LOADED)
    rounds = gemm_tile.workgroups(gemm.tile, of) / of.arch.units
    # the last round counts less if there are many, because workgroups do not end at the same time
    return (rounds if of.expert_slots else (rounds + math.ceil(rounds)) / 2) * work / gemm.tile.waves_k
