"""The GEMM tile without matrix units: int8 activations with dot4 (float formats: plain float32 arithmetic), register
tiles fed by LDS.

A workgroup computes `tokens` tokens by `rows` rows of each of its weights, in steps of one block of 32 columns staged
in LDS: weights as signed bytes with their float32 scales, activations as they come. 32 neighbouring lanes hold 32
neighbouring rows and share their tokens, so that LDS reads of activations are broadcasts, those of weights free of bank
conflicts, and 32 rows can be reduced within a wave. Per block, with dot the int32 dot product of a group of columns (16
or 32) and d, d*sum(q) of the activations' plane S:

    y += d * scale * dot + minimum * d*sum(q)
"""

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.device import barrier, computed_here, dot4, each, fma
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.quantize import FIELDS
from mlc_amd.schedules.gpu.base.registers import at, lane_of
from mlc_amd.schedules.gpu.linear.gemm_load import PIECE, byte_piece, columns_of, fetch, float_piece
from mlc_amd.schedules.gpu.linear.load import QUADS

LANES = 32  # rows side by side
PAD = 4  # words added to each row of LDS: eight consecutive rows, read 128 bits wide, are in different banks


@dataclass(frozen=True)
class DotTile:
    """A workgroup's tile: tokens and rows (of one weight, a multiple of 32); threads_m groups of 32 threads share out
    the tokens."""

    tokens: int
    rows: int
    threads_m: int


# The tiles that `choose` considers, largest first.
TILES = (DotTile(64, 128, 8), DotTile(32, 64, 8), DotTile(16, 64, 4), DotTile(16, 32, 1))

EXACT_TILES = (DotTile(64, 64, 8), DotTile(32, 64, 8), DotTile(16, 32, 4))
SPANS = (4, 2, 1)  # blocks of a step where few workgroups leave time to wait for loads


def choose(arch, m, weights=1):
    """The default DotTile for m tokens; `weights` share the accumulators. ValueError unless m is a multiple of 16."""
    # Without a dot product instruction code is four times as long, and so is compile time. Where LANES lanes are no
    # part of a wave that exchanges values, the epilogue uses LDS, too.
    few = not arch.dot or not arch.subgroups or arch.wave < LANES
    tile = next((t for t in TILES[few:] if m % t.tokens == 0 and t.threads_m * LANES <= arch.threads), None)
    if tile is None:
        raise ValueError(f"{m} tokens are no tiles of 16")
    return DotTile(tile.tokens, max(LANES, tile.rows // weights), tile.threads_m)


def choose_exact(arch, m, rows):
    """The default DotTile of a float32 product with few rows, such as a router's: the largest that fills the GPU, else
    the smallest. ValueError unless m is a multiple of 16."""
    tiles = [tile for tile in EXACT_TILES if m % tile.tokens == 0 and tile.threads_m * LANES <= arch.threads]
    if not tiles:
        raise ValueError(f"{m} tokens are no tiles of 16")
    fills = (tile for tile in tiles if m // tile.tokens * -(-rows // tile.rows) >= arch.units)
    return next(fills, tiles[-1])


class _RegisterTile:
    """What both kinds of arithmetic share. Use as `gemm_matrix.MatrixGemm`."""

    width: int  # elements of an LDS row
    dtype: str  # of LDS rows
    factors = 0  # bytes of scales and the like beside an LDS row
    span = 1  # blocks of 32 columns of a step
    rows_side_by_side = LANES  # rows that neighbouring lanes hold in the epilogue, one each

    def __init__(self, arch, tile, k, weights=1):
        self.arch, self.tile, self.k, self.weights = arch, tile, k, weights
        self.threads, self.ld = tile.threads_m * LANES, self.width + PAD
        self.token_count, self.row_count = tile.tokens // tile.threads_m, tile.rows // LANES
        whole = (
            self.token_count * tile.threads_m == tile.tokens and self.row_count * LANES == tile.rows and k % BLOCK == 0
        )
        if not whole or self.threads > arch.threads:
            raise ValueError(f"{tile} does not divide {self.threads} threads and {k} columns")

    def allocate(self, thread):
        """Declares LDS and accumulators inside the launch; `thread`: threadIdx.x."""
        tile = self.tile
        self.thread, self.lane = thread, T.Bind(thread % LANES)
        self.token = T.Bind(thread // LANES * self.token_count)
        self.x_lds = T.alloc_buffer((tile.tokens * self.ld,), self.dtype, scope="shared")
        self.w_lds = [T.alloc_buffer((tile.rows * self.ld,), self.dtype, scope="shared") for _ in range(self.weights)]
        self.sums = T.alloc_buffer((self.weights * self.token_count * self.row_count,), "float32", scope="local")

    def emit(self, acts, weights, token0, row0, epilogue, first=None):
        """One tile: tokens token0.. of the activations, rows row0.. of the weights [(fmt, bufs, padded rows)]. first:
        the row of a stack of weights that is row 0 of these.

        Calls epilogue(token, row, values): per weight the float32 result of one token and one row below the padded
        number of rows; 32 neighbouring lanes hold 32 neighbouring rows, the first a multiple of 32.
        """
        self.first = first
        for i in range(self.weights * self.token_count * self.row_count):
            T.buffer_store(self.sums, T.float32(0), [i])
        last = self.k // (BLOCK * self.span) - 1
        self._stage(weights, self._fetch(acts, weights, token0, row0, T.int32(0)))
        barrier()
        with T.serial(last + 1) as block:
            following = self._fetch(acts, weights, token0, row0, T.Bind(T.min(block + 1, last)))
            self._multiply(weights)
            barrier()
            self._stage(weights, following)
            barrier()
        padded = weights[0][2]
        if padded % self.tile.rows and self.arch.api == "rocm":
            for i in range(self.weights * self.token_count * self.row_count):
                T.buffer_store(self.sums, computed_here(self.sums[i]), [i])
        for i in range(self.row_count):
            row = T.Bind(row0 + i * LANES + self.lane)

            def store(i=i, row=row):
                for t in range(self.token_count):
                    epilogue(
                        T.Bind(token0 + self.token + t),
                        row,
                        [self.sums[self._sum(w, t, i)] for w in range(self.weights)],
                    )

            if padded % self.tile.rows:
                with T.If(row < padded), T.Then():
                    store()
            else:
                store()

    @property
    def lds_bytes(self) -> int:
        """Bytes of LDS, without those of an epilogue."""
        return (self.tile.tokens + self.weights * self.tile.rows) * (self.ld * 4 + self.factors)

    def _sum(self, weight, token, row):
        return (weight * self.token_count + token) * self.row_count + row

    def _pieces(self, total):
        """Numbers of the pieces that this thread stages, out of `total`; with too few, several threads stage the same
        ones."""
        for i in range(-(-total // self.threads)):
            yield (self.thread + i * self.threads) % total

    def _w_pieces(self):
        """Row and part of each piece of a weight that this thread stages."""
        for c in self._pieces(self.tile.rows * (BLOCK // PIECE)):
            yield c // 2, c % 2

    def _held(self, row0, row, padded):
        """The row to load, of those that the weight has."""
        held = T.min(row0 + row, padded - 1) if padded % self.tile.rows else row0 + row
        return T.Bind(held if self.first is None else self.first + held)

    def _fetch_weights(self, weights, row0, block):
        return [
            [fetch(fmt, bufs, self._held(row0, row, padded), block, part) for row, part in self._w_pieces()]
            for fmt, bufs, padded in weights
        ]


class DotGemm(_RegisterTile):
    """int8 formats; activations (A seen as int32 [m, K/32, 8], S float32 [m, K/32, 4])."""

    width, dtype, factors = QUADS, "int32", 4 * FIELDS

    def allocate(self, thread):
        super().allocate(thread)
        rows = 2 * self.tile.rows  # two groups of columns at most

        def shared(size):
            return T.alloc_buffer((size,), "float32", scope="shared")

        self.s_lds = shared(self.tile.tokens * FIELDS)
        self.scales, self.minimums = ([shared(rows) for _ in range(self.weights)] for _ in range(2))

    def _fetch(self, acts, weights, token0, row0, block):
        A, S = acts
        words = [T.Bind(A[token0 + c // 2, block, at(c % 2 * 4, 4)]) for c in self._pieces(self.tile.tokens * 2)]
        parts = [T.Bind(S[token0 + c, block, at(0, FIELDS)]) for c in self._pieces(self.tile.tokens)]
        return words, parts, self._fetch_weights(weights, row0, block)

    def _stage(self, weights, loaded):
        words, parts, pieces = loaded
        for c, x in zip(self._pieces(self.tile.tokens * 2), words, strict=True):
            T.buffer_store(self.x_lds, x, [at(c // 2 * self.ld + c % 2 * 4, 4)])
        for c, s in zip(self._pieces(self.tile.tokens), parts, strict=True):
            T.buffer_store(self.s_lds, s, [at(c * FIELDS, FIELDS)])
        for w, (fmt, _, _) in enumerate(weights):
            for (row, part), raw in zip(self._w_pieces(), pieces[w], strict=True):
                runs, scales, minimums = byte_piece(self.arch, fmt, raw, part)
                for column, run in zip(columns_of(part), runs, strict=True):
                    T.buffer_store(self.w_lds[w], run, [at(row * self.ld + column // 4, 2)])
                # both parts of a block write the same
                for values, lds in ((scales, self.scales[w]), (minimums or (), self.minimums[w])):
                    for g, value in enumerate(values):
                        T.buffer_store(lds, value, [g * self.tile.rows + row])

    def _multiply(self, weights):
        # On Vulkan all weights share the activations' registers: drivers merge equal loads, and would keep those of all
        # tokens.
        together = [range(len(weights))] if self.arch.api == "vulkan" else [[w] for w in range(len(weights))]
        for group in together:
            operands = {w: self._operands(w, weights[w][0]) for w in group}
            for t in each(self.arch, self.token_count):
                x = self._words(self.x_lds, self.token + t)
                s = T.Bind(self.s_lds[at((self.token + t) * FIELDS, FIELDS)])
                for w, (codes, scales, minimums) in operands.items():
                    self._accumulate(w, t, codes, scales, minimums, x, s)

    def _operands(self, w, fmt):
        """Words, scales and minimums (or None) of this lane's rows of a weight: a list for each row."""
        rows, groups = [self.lane + i * LANES for i in range(self.row_count)], BLOCK // fmt.group
        codes = [self._words(self.w_lds[w], row) for row in rows]

        def factors(lds):
            return [[T.Bind(lds[g * self.tile.rows + row]) for g in range(groups)] for row in rows]

        return codes, factors(self.scales[w]), factors(self.minimums[w]) if fmt.minimum else None

    def _accumulate(self, w, t, codes, scales, minimums, x, s):
        """Adds the block's part of this lane's rows of a weight and token t. x: the token's words; s: its fields."""
        groups = len(scales[0])
        first_sum = groups  # field of S with d*sum(q) of the first group: 1 for all 32 columns, 2 and 3 for 16
        for i in range(self.row_count):
            total = self.sums[self._sum(w, t, i)]
            for g in range(groups):
                dot = T.int32(0)
                for j in range(g * QUADS // groups, (g + 1) * QUADS // groups):
                    dot = dot4(self.arch, codes[i][j], x[j], dot)
                total = fma(T.cast(dot, "float32") * scales[i][g], lane_of(s, 0), total)
                if minimums:
                    total = fma(minimums[i][g], lane_of(s, first_sum + g), total)
            T.buffer_store(self.sums, total, [self._sum(w, t, i)])

    def _words(self, lds, row):
        """The eight words of a row of LDS."""
        halves = [T.Bind(lds[at(row * self.ld + first, 4)]) for first in (0, 4)]
        return [lane_of(half, i) for half in halves for i in range(4)]


class FloatGemm(_RegisterTile):
    """Float formats; activations (X float32 [m, K],)."""

    width, dtype = BLOCK, "float32"

    def _fetch(self, acts, weights, token0, row0, block):
        (X,) = acts
        x = [T.Bind(X[token0 + c // 4, at(block * BLOCK + c % 4 * 8, 8)]) for c in self._pieces(self.tile.tokens * 4)]
        return x, self._fetch_weights(weights, row0, block)

    def _stage(self, weights, loaded):
        for c, x in zip(self._pieces(self.tile.tokens * 4), loaded[0], strict=True):
            T.buffer_store(self.x_lds, x, [at(c // 4 * self.ld + c % 4 * 8, 8)])
        for w, (fmt, _, _) in enumerate(weights):
            for (row, part), raw in zip(self._w_pieces(), loaded[1][w], strict=True):
                for column, run in zip(columns_of(part), float_piece(fmt, raw), strict=True):
                    T.buffer_store(self.w_lds[w], run, [at(row * self.ld + column, 8)])

    def _multiply(self, weights):
        with T.serial(QUADS * self.span) as quad:
            for w in range(self.weights):
                rows = [self._quad(self.w_lds[w], self.lane + i * LANES, quad) for i in range(self.row_count)]
                for t in each(self.arch, self.token_count):
                    x = self._quad(self.x_lds, self.token + t, quad)
                    for i, row in enumerate(rows):
                        total = self.sums[self._sum(w, t, i)]
                        for c in range(4):
                            total = fma(row[c], x[c], total)
                        T.buffer_store(self.sums, total, [self._sum(w, t, i)])

    def _quad(self, lds, row, quad):
        """Four neighbouring columns of a row of LDS."""
        four = T.Bind(lds[at(row * self.ld + quad * 4, 4)])
        return [lane_of(four, c) for c in range(4)]


class ExactGemm(FloatGemm):
    """The same in steps of several blocks: for few rows, whose workgroups do not fill the GPU."""

    def __init__(self, arch, tile, k, weights=1):
        for self.span in SPANS:
            self.width = self.span * BLOCK
            super().__init__(arch, tile, k, weights)
            if k % self.width == 0 and self.lds_bytes <= arch.lds:
                return
        raise ValueError(f"{tile} takes {self.lds_bytes} bytes of LDS")

    def _x_places(self):
        """Token and first column of each run of eight activations that this thread stages."""
        runs = self.width // 8
        for c in self._pieces(self.tile.tokens * runs):
            yield c // runs, c % runs * 8

    def _w_places(self):
        """Row, block and part of each piece of a weight that this thread stages."""
        pieces = self.width // PIECE
        for c in self._pieces(self.tile.rows * pieces):
            yield c // pieces, c % pieces // 2, c % 2

    def _fetch(self, acts, weights, token0, row0, block):
        (X,) = acts
        x = [T.Bind(X[token0 + token, at(block * self.width + column, 8)]) for token, column in self._x_places()]
        return x, [
            [
                fetch(fmt, bufs, self._held(row0, row, padded), block * self.span + i, part)
                for row, i, part in self._w_places()
            ]
            for fmt, bufs, padded in weights
        ]

    def _stage(self, weights, loaded):
        for (token, column), x in zip(self._x_places(), loaded[0], strict=True):
            T.buffer_store(self.x_lds, x, [at(token * self.ld + column, 8)])
        for lds, (fmt, _, _), pieces in zip(self.w_lds, weights, loaded[1], strict=True):
            for (row, i, part), raw in zip(self._w_places(), pieces, strict=True):
                for column, run in zip(columns_of(part), float_piece(fmt, raw), strict=True):
                    T.buffer_store(lds, run, [at(row * self.ld + i * BLOCK + column, 8)])
