"""The GEMM tile without matrix units: int8 activations with dot4 (float formats: plain float32 arithmetic), register
tiles fed by LDS.

A workgroup computes `tokens` tokens by `rows` rows of each of its weights, in steps of one block of 32 columns. A step
is staged in LDS: weights as signed bytes with float32 scales, activations unchanged. 32 neighbouring lanes have 32
neighbouring rows and the same tokens. So LDS reads of activations are broadcasts, LDS reads of weights have no bank
conflicts, and 32 rows can be reduced within a wave. For each block, where dot is the int32 dot product of a group of
columns (16 or 32), and d and d*sum(q) are from the activations' S:

    y += d * scale * dot + minimum * d*sum(q)
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from tvm.tirx.script import builder as T

from mlc_amd.schedules.formats import Format
from mlc_amd.schedules.gpu.base.device import computed_here, dot4, each, fma
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.quantize import FIELDS
from mlc_amd.schedules.gpu.base.registers import at, lane_of, local, put, vector
from mlc_amd.schedules.gpu.base.step import SUMS, when
from mlc_amd.schedules.gpu.linear import load
from mlc_amd.schedules.gpu.linear.gemm_tile import Loaded, Product, SteppedGemm, Tile, TileWork, Weight
from mlc_amd.schedules.gpu.linear.load import QUADS, block_bytes
from mlc_amd.schedules.tir import Buffer, Expr

PIECE = 16  # columns of a piece, which a thread stages at a time
LANES = 32  # neighbouring lanes with neighbouring rows
PAD = 4  # words added to each row in LDS, so that 128-bit reads of eight consecutive rows hit different banks


@dataclass(frozen=True)
class DotTile(Tile):
    """rows: a multiple of 32. threads_m: number of groups of 32 threads that share the tokens."""

    threads_m: int


# The tiles that `choose` considers, the largest first.
TILES = (DotTile(64, 128, 8), DotTile(32, 64, 8), DotTile(16, 64, 4), DotTile(16, 32, 1))

EXACT_TILES = (DotTile(64, 64, 8), DotTile(32, 64, 8), DotTile(16, 32, 4))
SPANS = (4, 2, 1)  # blocks of a step to choose from, if there are few workgroups to hide the latency of loads


def _fitting(tiles: tuple[DotTile, ...], of: Product) -> list[DotTile]:
    """The tiles whose tokens divide those of the product. Raises ValueError unless tokens are a multiple of 16."""
    found = [tile for tile in tiles if of.tokens % tile.tokens == 0 and tile.threads_m * LANES <= of.arch.threads]
    if not found:
        raise ValueError(f"{of.tokens} tokens are no tiles of 16")
    return found


def choose(of: Product) -> DotTile:
    """The default tile."""
    arch = of.arch
    # Without a dot product instruction, code is four times as long, and so is compile time. If LANES lanes cannot
    # exchange values within a wave, the epilogue uses LDS, too.
    few = not arch.dot or not arch.subgroups or arch.wave < LANES
    tile = _fitting(TILES[few:], of)[0]
    return DotTile(tile.tokens, max(LANES, tile.rows // of.weights), tile.threads_m)


def choose_exact(of: Product) -> DotTile:
    """The default tile of a float32 product with few rows, such as a router's: the largest one with enough workgroups
    for the GPU, otherwise the smallest."""
    tiles = _fitting(EXACT_TILES, of)
    fills = (tile for tile in tiles if of.tokens // tile.tokens * -(-of.rows // tile.rows) >= of.arch.units)
    return next(fills, tiles[-1])


# Weights are staged in pieces. A piece is half a block of 32 columns of one row: columns 8*part .. 8*part + 7 and
# 16 + 8*part .. 16 + 8*part + 7, for part 0 or 1. These are the columns of two words of nibbles.


def columns_of(part: Expr) -> tuple[Expr, Expr]:
    """The first columns, within the block, of the two times eight columns of a piece."""
    return 8 * part, 16 + 8 * part


# ---- the tiles


class _RegisterGemm(SteppedGemm[DotTile]):
    """The common part of both kinds of arithmetic. `store` gets the value of one row; 32 neighbouring lanes hold 32
    neighbouring rows, the first a multiple of 32."""

    choices: ClassVar = {"tokens": (16, 32, 64, 128), "rows": (32, 64, 128), "threads_m": (1, 2, 4, 8)}
    columns = BLOCK
    row_words = BLOCK  # words of a row in LDS
    dtype = "float32"  # dtype of these words
    factors_bytes = 0  # bytes of scales and minimums for a row in LDS
    rows_side_by_side = LANES

    def __init__(self, of: Product, tile: DotTile):
        super().__init__(of, tile)
        self.threads, self.ld = tile.threads_m * LANES, self.row_words + PAD
        self.token_count, self.row_count = tile.tokens // tile.threads_m, tile.rows // LANES
        self.count = of.weights * self.token_count * self.row_count
        # without those of an epilogue
        self.lds_bytes = (tile.tokens + of.weights * tile.rows) * (self.ld * 4 + self.factors_bytes)
        whole = self.token_count * tile.threads_m == tile.tokens and self.row_count * LANES == tile.rows
        if not whole or of.k % BLOCK or self.threads > of.arch.threads:
            raise ValueError(f"{tile} does not divide {self.threads} threads and {of.k} columns")

    def loads(self) -> float:
        if self.count > SUMS // 2 or self.lds_bytes > self.arch.lds:
            raise ValueError(f"{self.tile}: {self.count} sums a thread, {self.lds_bytes} bytes of shared memory")
        weights = self.weights * self.tile.rows * block_bytes(self.of.formats[0])
        return (weights + self.tile.tokens * BLOCK) / self.threads

    def allocate(self, thread: Expr) -> None:
        tile = self.tile
        self.thread, self.lane = thread, T.Bind(thread % LANES)
        self.token = T.Bind(thread // LANES * self.token_count)
        self.x_lds = T.alloc_buffer((tile.tokens * self.ld,), self.dtype, scope="shared")
        self.w_lds = [T.alloc_buffer((tile.rows * self.ld,), self.dtype, scope="shared") for _ in range(self.weights)]
        self.sums = local(self.count)

    def emit(self, work: TileWork) -> None:
        for i in range(self.count):
            put(self.sums, T.float32(0), i)
        self._sum_up(work.viewed())
        if work.rows % self.tile.rows and self.arch.api == "rocm":
            for i in range(self.count):
                put(self.sums, computed_here(self.arch, self.sums[i]), i)
        for i in range(self.row_count):
            row = T.Bind(work.row0 + i * LANES + self.lane)
            with when(work.if_row(row, self.tile.rows)):
                for t in range(self.token_count):
                    values = [self.sums[self._sum(w, t, i)] for w in range(self.weights)]
                    work.store(T.Bind(work.token0 + self.token + t), row, values)

    def _sum(self, weight: int, token: Expr, row: int) -> Expr:
        return (weight * self.token_count + token) * self.row_count + row

    def _fetch_acts(self, work: TileWork, step: Expr) -> list[Expr]:
        (X,) = work.acts
        first = step * self.columns
        return [T.Bind(X[work.token0 + token, at(first + column, 8)]) for token, column in self._x_pieces()]

    def _fetch_weights(self, work: TileWork, step: Expr) -> list:
        blocks = self.columns // BLOCK
        return [
            [
                self._fetch_piece(weight, self._weight_row(work, row, weight), step * blocks + block, part)
                for row, block, part in self._w_pieces()
            ]
            for weight in work.weights
        ]

    @abstractmethod
    def _fetch_piece(self, weight: Weight, row: Expr, block: Expr, part: Expr) -> Any:
        """Loads a piece into registers."""

    def _x_pieces(self) -> Iterator[tuple[Expr, Expr]]:
        """(token, first column) of each eight activations that this thread stages."""
        runs = self.columns // 8
        for c in self._staged(self.tile.tokens * runs):
            yield c // runs, c % runs * 8

    def _w_pieces(self) -> Iterator[tuple[Expr, Expr, Expr]]:
        """(row, block, part) of each piece of a weight that this thread stages."""
        pieces = self.columns // PIECE
        for c in self._staged(self.tile.rows * pieces):
            yield c // pieces, c % pieces // 2, c % 2


# of a row: (words of codes, scales of groups of columns, minimums of groups of columns)
Operands = tuple[list[Expr], list[Expr], list[Expr]]


class DotGemm(_RegisterGemm):
    """For int8 formats. Activations: A, viewed as int32 [m, K/32, 8], and S float32 [m, K/32, 4]."""

    row_words, dtype, factors_bytes = QUADS, "int32", 4 * FIELDS

    def prepared(self, state: Buffer, acts: list[Buffer]) -> list[Buffer]:
        return [T.decl_buffer((self.of.m, self.k // BLOCK, QUADS), "int32", data=acts[0].data), acts[1]]

    def allocate(self, thread: Expr) -> None:
        super().allocate(thread)
        rows = 2 * self.tile.rows  # two groups of columns at most

        def shared(size: int) -> Buffer:
            return T.alloc_buffer((size,), "float32", scope="shared")

        self.s_lds = shared(self.tile.tokens * FIELDS)
        self.scales, self.minimums = ([shared(rows) for _ in range(self.weights)] for _ in range(2))

    def _fetch_acts(self, work: TileWork, step: Expr) -> list[list[Expr]]:
        (A, S), tokens = work.acts, self.tile.tokens
        words = [T.Bind(A[work.token0 + c // 2, step, at(c % 2 * 4, 4)]) for c in self._staged(tokens * 2)]
        return [words, [T.Bind(S[work.token0 + c, step, at(0, FIELDS)]) for c in self._staged(tokens)]]

    def _fetch_piece(self, weight: Weight, row: Expr, block: Expr, part: Expr) -> load.Unit:
        return load.fetch(weight.fmt, weight.planes, row, block, 1, load.Part(part, 2))

    def _stage(self, work: TileWork, loaded: Loaded) -> None:
        (words, fields), weights = loaded
        for c, x in zip(self._staged(self.tile.tokens * 2), words, strict=True):
            put(self.x_lds, x, at(c // 2 * self.ld + c % 2 * 4, 4))
        for c, s in zip(self._staged(self.tile.tokens), fields, strict=True):
            put(self.s_lds, s, at(c * FIELDS, FIELDS))
        for w, pieces in enumerate(weights):
            fmt = work.weights[w].fmt
            for (row, _, part), raw in zip(self._w_pieces(), pieces, strict=True):
                codes, scales = (
                    load.codes(self.arch, fmt, raw, 0, load.Part(part, PIECE // 8)),
                    load.scales(fmt, raw, 0),
                )
                if fmt.zero and not (fmt.table or fmt.signed):
                    codes = [load.minus(word, fmt.zero) for word in codes]
                codes = [T.Bind(T.reinterpret("int32", word)) for word in codes]
                for i, column in enumerate(columns_of(part)):
                    put(self.w_lds[w], vector(codes[2 * i : 2 * i + 2]), at(row * self.ld + column // 4, 2))
                # both parts of a block write the same values
                lows = [T.Bind(x) for x in scales.lows()] if fmt.minimum else []
                for values, lds in ((scales.factors(), self.scales[w]), (lows, self.minimums[w])):
                    for g, value in enumerate(values):
                        put(lds, value, g * self.tile.rows + row)

    def _multiply(self, work: TileWork) -> None:
        # On Vulkan the loop over weights is inside that over tokens, so that weights share the activations' registers.
        # Otherwise drivers would merge equal loads, and keep the activations of all tokens in registers.
        numbers = range(self.weights)
        for group in [numbers] if self.arch.api == "vulkan" else [[w] for w in numbers]:
            operands = {w: self._operands(w, work.weights[w].fmt) for w in group}
            for t in each(self.arch, self.token_count):
                x = self._words(self.x_lds, self.token + t)
                s = T.Bind(self.s_lds[at((self.token + t) * FIELDS, FIELDS)])
                for w, rows in operands.items():
                    for i, own in enumerate(rows):
                        where = self._sum(w, t, i)
                        put(self.sums, self._added(self.sums[where], own, x, s), where)

    def _operands(self, w: int, fmt: Format) -> list[Operands]:
        """The operands of each of this lane's rows of a weight."""
        rows, groups = [self.lane + i * LANES for i in range(self.row_count)], BLOCK // fmt.group
        codes = [self._words(self.w_lds[w], row) for row in rows]

        def factors(lds: Buffer) -> list[list[Expr]]:
            return [[T.Bind(lds[g * self.tile.rows + row]) for g in range(groups)] for row in rows]

        scales = factors(self.scales[w])
        return list(zip(codes, scales, factors(self.minimums[w]) if fmt.minimum else [[] for _ in rows], strict=True))

    def _added(self, total: Expr, own: Operands, x: list[Expr], s: Expr) -> Expr:
        """The total plus the products of a row and a token in the block. x: the token's words; s: its fields of S."""
        codes, scales, minimums = own
        groups = len(scales)
        first_sum = groups  # field of S with d*sum(q) of the first group: 1 for all 32 columns, 2 and 3 for 16
        for g in range(groups):
            dot = T.int32(0)
            for j in range(g * QUADS // groups, (g + 1) * QUADS // groups):
                dot = dot4(self.arch, codes[j], x[j], dot)
            total = fma(T.cast(dot, "float32") * scales[g], lane_of(s, 0), total)
            if minimums:
                total = fma(minimums[g], lane_of(s, first_sum + g), total)
        return total

    def _words(self, lds: Buffer, row: Expr) -> list[Expr]:
        """The eight words of a row in LDS."""
        halves = [T.Bind(lds[at(row * self.ld + first, 4)]) for first in (0, 4)]
        return [lane_of(half, i) for half in halves for i in range(4)]


class FloatGemm(_RegisterGemm):
    """For float formats. Activations: X float32 [m, K]. An arch with matrix units uses it only for few rows, whose
    workgroups do not fill the GPU; a step then has several blocks."""

    def __init__(self, of: Product, tile: DotTile):
        for span in SPANS if of.arch.matrix else (1,):
            self.columns = self.row_words = span * BLOCK
            super().__init__(of, tile)
            if of.k % self.columns == 0 and self.lds_bytes <= of.arch.lds:
                return
        if of.arch.matrix:
            raise ValueError(f"{tile} takes {self.lds_bytes} bytes of LDS")

    def _fetch_piece(self, weight: Weight, row: Expr, block: Expr, part: Expr) -> list[Expr]:
        return [T.Bind(weight.planes["W"][row, at(block * BLOCK + column, 8)]) for column in columns_of(part)]

    def _stage(self, work: TileWork, loaded: Loaded) -> None:
        for (token, column), x in zip(self._x_pieces(), loaded[0], strict=True):
            put(self.x_lds, x, at(token * self.ld + column, 8))
        for weight, lds, pieces in zip(work.weights, self.w_lds, loaded[1], strict=True):
            for (row, block, part), raw in zip(self._w_pieces(), pieces, strict=True):
                runs = [T.Bind(load.real(weight.fmt, w)) for w in raw]
                for column, run in zip(columns_of(part), runs, strict=True):
                    put(lds, run, at(row * self.ld + block * BLOCK + column, 8))

    def _multiply(self, work: TileWork) -> None:
        with T.serial(self.columns // 4) as quad:
            for w in range(self.weights):
                rows = [self._quad(self.w_lds[w], self.lane + i * LANES, quad) for i in range(self.row_count)]
                for t in each(self.arch, self.token_count):
                    x = self._quad(self.x_lds, self.token + t, quad)
                    for i, row in enumerate(rows):
                        total = self.sums[self._sum(w, t, i)]
                        for c in range(4):
                            total = fma(row[c], x[c], total)
                        put(self.sums, total, self._sum(w, t, i))

    def _quad(self, lds: Buffer, row: Expr, quad: Expr) -> list[Expr]:
        """Four neighbouring columns of a row in LDS."""
        four = T.Bind(lds[at(row * self.ld + quad * 4, 4)])
        return [lane_of(four, c) for c in range(4)]
