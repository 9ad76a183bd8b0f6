"""The GEMM tile on matrix units (WMMA of gfx11 and gfx12, MFMA of gfx9): float16 operands, float32 sums.

A workgroup computes `tokens` tokens by `rows` rows of each of its weights. Per step it stages `columns` columns of both
in LDS as float16, the weights dequantized on the way (`gemm_load.py`); each of its waves_m x waves_n waves then
multiplies its share of the tile.

The weight is the matrix unit's A operand and the activations are B: then a lane's accumulators belong to one token and
to consecutive rows, and results are stored in wide vectors. Where the unit scatters rows over accumulators, weight rows
are placed in LDS in the order that undoes it (`slot`).
"""

from dataclasses import dataclass, replace

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.device import IN_ORDER, barrier, schedule_fence
from mlc_amd.schedules.gpu.base.matrix_unit import SIDE, UNITS
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.registers import at, local, put
from mlc_amd.schedules.gpu.base.step import when
from mlc_amd.schedules.gpu.linear import gemm_tile
from mlc_amd.schedules.gpu.linear.gemm_load import PIECE, columns_of, half_piece
from mlc_amd.schedules.gpu.linear.gemm_tile import Loaded, Product, TileWork, UnitGemm, UnitTile
from mlc_amd.schedules.tir import Buffer, Expr

PAD = 8  # halves added to each row of LDS: eight consecutive rows are then in different banks
LDS = 64 << 10  # bytes of a workgroup, at most: LLVM ends the process above that


@dataclass(frozen=True)
class MatrixTile(UnitTile):
    """buffers: 2 alternate, with one barrier a step; 1 uses half the LDS and two barriers. waves_k: waves that share
    out a step's columns; their sums are added last."""

    buffers: int
    waves_k: int = 1


# (lanes of a wave, tokens): the tiles that `choose` starts from, and how fast their rows are where all compute units
# are busy, as estimated: no such GPU was measured. The wave decides, since all workgroups have 256 threads: eight waves
# of 32 lanes share out a tile, or four of 64. Few tokens: few rows, or too few workgroups to fill the GPU, and many
# columns, so that enough bytes of weights are on their way: 512 columns of 4096 rows of 4 bits are 1 MB. Where there is
# no more than one workgroup per compute unit, and so one wave of 64 lanes per SIMD (16 tokens by 4096 rows on 304
# units), only the next step's loads hide latency: half the columns would take twice as many steps of the same latency.
# 64 tokens in each wave of 32 lanes do not fit its registers beside the operands.
TILES = {
    (32, 128): ((MatrixTile(128, 128, 32, 4, 2, 2), 1.0), (MatrixTile(128, 64, 64, 2, 2, 1, 2), 0.9)),
    (32, 64): ((MatrixTile(64, 32, 128, 2, 2, 1, 2), 1.0),),
    (32, 32): ((MatrixTile(32, 32, 128, 1, 2, 1, 4), 1.0),),
    (32, 16): ((MatrixTile(16, 32, 256, 1, 2, 1, 4), 1.0),),
    (64, 128): (
        (MatrixTile(128, 128, 32, 2, 2, 1), 1.0), (MatrixTile(128, 64, 64, 2, 2, 1), 1.0),
        (MatrixTile(128, 32, 128, 2, 1, 1, 2), 0.9),
    ),
    (64, 64): ((MatrixTile(64, 32, 128, 2, 1, 1, 2), 1.0), (MatrixTile(64, 16, 256, 1, 1, 1, 4), 0.8)),
    (64, 32): ((MatrixTile(32, 32, 128, 1, 1, 1, 4), 1.0),),
    (64, 16): ((MatrixTile(16, 16, 512, 1, 1, 1, 4), 1.0),),
}  # fmt: skip


def expert_tile(of: Product) -> MatrixTile | None:
    """The tile for slots of one expert; None: that of as many tokens. There are workgroups enough: many rows share the
    activations, of two weights half as many where that leaves each lane more than a few sums. Estimated, not
    measured."""
    slots = of.expert_slots
    if slots not in (16, 32) or of.k % BLOCK:
        return None
    rows = 128 if of.weights == 1 or (slots == 32 and of.arch.wave == 32) else 64
    columns = 32 if slots * rows > 32 * 64 else 64
    return MatrixTile(slots, rows, columns if of.k % columns == 0 else BLOCK, 1, 4, 1)


def lds_bytes(tile: MatrixTile, weights: int = 1) -> int:
    """LDS of a workgroup: what is staged, or later in the same place the sums of the waves along the columns."""
    staged = tile.buffers * (tile.tokens + weights * tile.rows) * (tile.columns + PAD) * 2
    return max(staged, (tile.waves_k - 1) * weights * tile.tokens * tile.rows * 4)


def choose(of: Product) -> MatrixTile:
    """The default tile. ValueError unless tokens are a multiple of 16 and columns of 32."""
    tiles = TILES[of.arch.wave, gemm_tile.whole_tokens(of)]
    tile = expert_tile(of) or gemm_tile.least_loaded(of, ((_fit(tile, of), speed) for tile, speed in tiles))
    assert tile
    return tile


def _fit(tile: MatrixTile, of: Product) -> MatrixTile:
    """The tile with as many rows of several weights, and columns, as registers and LDS are for."""
    # what a thread holds of several weights is as much as of one: fewer rows of each, or else fewer columns
    held, limit = tile.rows // of.weights, tile.columns
    if held < 16 * tile.waves_n:
        held, limit = tile.rows, max(BLOCK, tile.columns // of.weights)
    fewer = replace(tile, rows=held, columns=limit)
    # more than one workgroup per compute unit: two run at once with half the columns, else one after the other
    if gemm_tile.workgroups(fewer, of) > of.arch.units and lds_bytes(fewer, of.weights) > of.arch.lds // 2:
        limit = max(BLOCK, limit // 2)
    columns = next(c for c in (512, 256, 128, 64, 32) if c <= limit and of.k % c == 0)
    return replace(fewer, columns=columns, waves_k=min(tile.waves_k, columns // UNITS[of.arch.matrix].columns))


class MatrixGemm(UnitGemm[MatrixTile]):
    """Activations: X [m, k], float16 or float32. Values are vectors of `unit.acc` rows."""

    choices = gemm_tile.UNIT_CHOICES | {"buffers": (1, 2), "waves_k": (1, 2, 4)}

    def __init__(self, of: Product, tile: MatrixTile):
        self.unit = UNITS[of.arch.matrix]
        super().__init__(of, tile, tile.waves_k, (SIDE, SIDE, self.unit.columns))
        self.ld, size = tile.columns + PAD, lds_bytes(tile, of.weights)
        if size > min(of.arch.lds, LDS) or self.threads > of.arch.threads:
            raise ValueError(f"{tile} takes {size} bytes of LDS and {self.threads} threads")

    def loads(self) -> float:
        pieces = [self.tile.tokens * (self.columns // 8), self.tile.rows * (self.columns // PIECE)]
        if any(total % self.threads and self.threads % total for total in pieces):
            raise ValueError(f"{self.tile}: {pieces} pieces do not divide among {self.threads} threads")
        return self._loads(gemm_tile.CODE * gemm_tile.HELD * 2, self.unit.acc, self.unit.columns)

    def allocate(self, thread: Expr) -> None:
        tile, unit, lanes = self.tile, self.unit, self.arch.wave
        self.thread, self.lane, wave = thread, T.Bind(thread % lanes), thread // lanes
        self.wave_m = T.Bind(wave % tile.waves_m * (self.tiles_m * SIDE))
        self.wave_n = T.Bind(wave // tile.waves_m % tile.waves_n * (self.tiles_n * SIDE))
        self.wave_k = T.Bind(wave // (tile.waves_m * tile.waves_n))

        self.sums = local(self.count * unit.acc)
        # (buffer, first element) of each step's activations and weights. Separate buffers let LLVM move the stores of
        # one step between the loads of another; sums of several waves need all of the place.
        counts = [rows * self.ld for rows in [tile.tokens] + [tile.rows] * self.weights]
        if tile.waves_k == 1:
            self.staged = [
                [(T.alloc_buffer((n,), "float16", scope="shared"), 0) for n in counts] for _ in range(tile.buffers)
            ]
            return
        self.partial = T.alloc_buffer((lds_bytes(tile, self.weights) // 2,), "float16", scope="shared")
        self.staged = [
            [(self.partial, i * sum(counts) + sum(counts[:j])) for j in range(len(counts))] for i in range(tile.buffers)
        ]

    def emit(self, work: TileWork) -> None:
        acc, waves_k = self.unit.acc, self.tile.waves_k
        for i in range(self.count):
            put(self.sums, T.broadcast(T.float32(0), acc), self._slice(i))
        self._sum_up(work, self.tile.buffers)
        if waves_k == 1:
            self._finish(work)
            return
        if self.steps % self.tile.buffers:
            barrier()  # the sums go where operands are still read
        with T.If(self.wave_k > 0), T.Then():
            for i in range(self.count):
                halves = T.reinterpret(f"float16x{2 * acc}", self.sums[self._slice(i)])
                put(self.partial, halves, self._partial(self.wave_k - 1, i))
        barrier()
        with T.If(self.wave_k == 0), T.Then():
            for i in range(self.count):
                total = self.sums[self._slice(i)]
                for w in range(waves_k - 1):
                    total = total + T.reinterpret(f"float32x{acc}", self.partial[self._partial(w, i)])
                put(self.sums, total, self._slice(i))
            self._finish(work)

    def _partial(self, wave_k: Expr, i: int) -> Expr:
        """Where the accumulator tile i of the waves along k lies for this lane, in halves: lanes side by side."""
        threads, lanes, halves = self.threads // self.tile.waves_k, self.arch.wave, 2 * self.unit.acc
        part = self.thread % threads // lanes
        return at((((wave_k * (threads // lanes) + part) * self.count + i) * lanes + self.lane) * halves, halves)

    def _slice(self, i: int) -> Expr:
        """The accumulators of tile i."""
        return at(i * self.unit.acc, self.unit.acc)

    def _stage(self, work: TileWork, loaded: Loaded, buffer: int) -> None:
        (lds, start), *places = self.staged[buffer]
        for (row, column), x in zip(self._x_pieces(), loaded[0], strict=True):
            put(lds, T.cast(x, "float16x8"), at(start + row * self.ld + column, 8))
        for weight, (lds, start), pieces in zip(work.weights, places, loaded[1], strict=True):
            for (row, block, part), raw in zip(self._w_pieces(), pieces, strict=True):
                place = row // SIDE * SIDE + self.unit.slot(row % SIDE)
                base = T.Bind(start + place * self.ld + block * BLOCK)
                for column, run in zip(columns_of(part), half_piece(self.arch, weight.fmt, raw, part), strict=True):
                    put(lds, run, at(base + column, 8))

    def _multiply(self, work: TileWork, buffer: int) -> None:
        """LLVM would start so many tiles, or load so many operands early, that registers spill: vector and matrix
        instructions stay within their chunk of columns."""
        unit = self.unit
        x_place, *w_places = self.staged[buffer]
        for column in range(0, self.share, unit.columns):
            if column:
                schedule_fence(IN_ORDER)

            def operands(place: tuple[Buffer, int], row: Expr, tiles: int, column: int = column) -> list[list[Expr]]:
                lds, start = place
                first = start + self.wave_k * self.share + column
                return [unit.load(lds, row + i * SIDE, self.ld, first, self.lane) for i in range(tiles)]

            a = [operand for place in w_places for operand in operands(place, self.wave_n, self.tiles_n)]
            b = operands(x_place, self.wave_m, self.tiles_m)
            for part in range(len(b[0])):
                for i in range(self.tiles_m):
                    for j, weight in enumerate(a):
                        where = self._slice(i * len(a) + j)
                        put(self.sums, unit.multiply(weight[part], b[i][part], self.sums[where]), where)

    def _finish(self, work: TileWork) -> None:
        """Stores the accumulators; tiles of 16 rows beyond the weight's are left out."""
        unit, lane = self.unit, self.lane
        for j in range(self.tiles_n):
            first = T.Bind(work.row0 + self.wave_n + j * SIDE)
            with when(work.if_row(first, self.tile.rows)):
                for i in range(self.tiles_m):
                    token = T.Bind(work.token0 + self.wave_m + i * SIDE + lane % SIDE)
                    tiles = [(i * self.weights + w) * self.tiles_n + j for w in range(self.weights)]
                    values = [T.Bind(self.sums[self._slice(tile)]) for tile in tiles]
                    work.store(token, T.Bind(first + lane // SIDE * unit.acc), values)
