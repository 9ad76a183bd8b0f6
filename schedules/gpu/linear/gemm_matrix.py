"""The GEMM tile on matrix units (WMMA of gfx11 and gfx12, MFMA of gfx9): float16 operands, float32 sums.

A workgroup computes `tokens` tokens by `rows` rows of each of its weights. Per step it stages `columns` columns of both
in LDS as float16, the weights dequantized on the way (`gemm_load.py`); each of its waves_m x waves_n waves then
multiplies its share of the tile.

The weight is the matrix unit's A operand and the activations are B: then a lane's accumulators belong to one token and
to consecutive rows, and results are stored in wide vectors. Where the unit scatters rows over accumulators, weight rows
are placed in LDS in the order that undoes it (`slot`). The next step's global loads are issued before this step's
multiplications.
"""

from dataclasses import dataclass, replace

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.device import IN_ORDER, barrier, schedule_fence
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.registers import at
from mlc_amd.schedules.gpu.linear.gemm_load import PIECE, columns_of, fetch, half_piece

PAD = 8  # halves added to each row of LDS: eight consecutive rows are then in different banks


# ---- matrix units: 16 x 16 tiles; `load` gives the operands of `columns` columns as a list, one per instruction


class Wmma11:
    """Of gfx11: a lane holds all 16 columns of row lane % 16, both halves of the wave alike. Accumulator i of half h:
    row 2*i + h."""

    side, columns, acc = 16, 16, 8

    @staticmethod
    def slot(n):
        return n % 8 * 2 + n // 8

    @staticmethod
    def load(lds, row, ld, column, lane):
        return [T.Bind(lds[at((row + lane % 16) * ld + column, 16)])]

    @staticmethod
    def multiply(a, b, c):
        return T.call_llvm_pure_intrin("float32x8", "llvm.amdgcn.wmma.f32.16x16x16.f16", a, b, c)


class Wmma12(Wmma11):
    """Of gfx12: half h of the wave holds columns 8*h .. 8*h + 7. Accumulator i of half h: row 8*h + i."""

    @staticmethod
    def slot(n):
        return n

    @staticmethod
    def load(lds, row, ld, column, lane):
        return [T.Bind(lds[at((row + lane % 16) * ld + column + lane // 16 * 8, 8)])]


class Mfma:
    """Of gfx9: quarter g of the wave holds four columns. Which four does not matter as long as both operands agree:
    columns 8*g .. 8*g + 7 of 32 serve two instructions, and LDS reads are 128 bits wide. Accumulator i of quarter g:
    row 4*g + i."""

    side, columns, acc = 16, 32, 4

    @staticmethod
    def slot(n):
        return n

    @staticmethod
    def load(lds, row, ld, column, lane):
        x = T.Bind(lds[at((row + lane % 16) * ld + column + lane // 16 * 8, 8)])
        return [T.vectorlow("float16x4", x), T.vectorhigh("float16x4", x)]

    @staticmethod
    def multiply(a, b, c):
        return T.call_llvm_pure_intrin(
            "float32x4", "llvm.amdgcn.mfma.f32.16x16x16f16", a, b, c, T.int32(0), T.int32(0), T.int32(0)
        )


UNITS = {"wmma11": Wmma11, "wmma12": Wmma12, "mfma": Mfma}


@dataclass(frozen=True)
class MatrixTile:
    """A workgroup's tile: tokens and rows (of one weight), columns of a step, waves along tokens and rows. buffers: 2
    alternate, with one barrier a step; 1 uses half the LDS and two barriers. waves_k: waves that share out a step's
    columns; their sums are added last."""

    tokens: int
    rows: int
    columns: int
    waves_m: int
    waves_n: int
    buffers: int
    waves_k: int = 1


# (kind of matrix unit, tokens): the tiles that `choose` starts from, and how fast their rows are where all compute
# units are busy, by the static model of gfx1100 and gfx942 (Q4_0, 4096 x 4096). Few tokens: few rows, or too few
# workgroups to fill the GPU, and many columns, so that enough bytes of weights are on their way: 512 columns of 4096
# rows of 4 bits are 1 MB. Where there is no more than one workgroup per compute unit, and so one wave per SIMD (16
# tokens by 4096 rows on gfx942), only the next step's loads hide latency: half the columns would take twice as many
# steps of the same latency. 64 tokens in each wave do not fit RDNA3's registers beside the operands.
TILES = {
    ("wmma", 128): ((MatrixTile(128, 128, 32, 4, 2, 2), 1.0), (MatrixTile(128, 64, 64, 2, 2, 1, 2), 0.9)),
    ("wmma", 64): ((MatrixTile(64, 32, 128, 2, 2, 1, 2), 1.0),),
    ("wmma", 32): ((MatrixTile(32, 32, 128, 1, 2, 1, 4), 1.0),),
    ("wmma", 16): ((MatrixTile(16, 32, 256, 1, 2, 1, 4), 1.0),),
    ("mfma", 128): (
        (MatrixTile(128, 128, 32, 2, 2, 1), 1.0), (MatrixTile(128, 64, 64, 2, 2, 1), 1.0),
        (MatrixTile(128, 32, 128, 2, 1, 1, 2), 0.9),
    ),
    ("mfma", 64): ((MatrixTile(64, 32, 128, 2, 1, 1, 2), 1.0), (MatrixTile(64, 16, 256, 1, 1, 1, 4), 0.8)),
    ("mfma", 32): ((MatrixTile(32, 32, 128, 1, 1, 1, 4), 1.0),),
    ("mfma", 16): ((MatrixTile(16, 16, 512, 1, 1, 1, 4), 1.0),),
}  # fmt: skip


def lds_bytes(tile, weights=1) -> int:
    """LDS of a workgroup: what is staged, or later in the same place the sums of the waves along the columns."""
    staged = tile.buffers * (tile.tokens + weights * tile.rows) * (tile.columns + PAD) * 2
    return max(staged, (tile.waves_k - 1) * weights * tile.tokens * tile.rows * 4)


def choose(arch, m, k, rows, weights=1):
    """The default MatrixTile for m tokens, k columns and `rows` rows on an arch: the one with the minimum load of the
    busiest compute unit. `weights` share the accumulators (gate and up: 2). ValueError unless m is a multiple of 16 and
    k of 32."""
    tokens = next((t for t in (128, 64, 32, 16) if m % t == 0), None)
    if tokens is None or k % BLOCK:
        raise ValueError(f"{m} tokens of {k} columns are no tiles of 16 x {BLOCK}")
    loads = {}
    for tile, speed in TILES[arch.matrix[:4], tokens]:
        found = _fit(tile, arch, m, k, rows, weights)
        loads.setdefault(found, -(-_workgroups(found, m, rows) // arch.units) * found.rows / speed)
    return min(loads, key=lambda tile: loads[tile])


def _workgroups(tile, m, rows) -> int:
    return m // tile.tokens * -(-rows // tile.rows)


def _fit(tile, arch, m, k, rows, weights):
    """The tile with as many rows of several weights, and columns, as registers and LDS are for."""
    # what a thread holds of several weights is to be what it would of one: fewer rows of each, or else fewer columns
    held, limit = tile.rows // weights, tile.columns
    if held < 16 * tile.waves_n:
        held, limit = tile.rows, max(BLOCK, tile.columns // weights)
    fewer = replace(tile, rows=held, columns=limit)
    # more than one workgroup per compute unit: two run at once with half the columns, else one after the other
    if _workgroups(fewer, m, rows) > arch.units and lds_bytes(fewer, weights) > arch.lds // 2:
        limit = max(BLOCK, limit // 2)
    columns = next(c for c in (512, 256, 128, 64, 32) if c <= limit and k % c == 0)
    return replace(fewer, columns=columns, waves_k=min(tile.waves_k, columns // UNITS[arch.matrix].columns))


# (kind of matrix unit, slots of a tile of one expert): tiles for one weight and for two. There are workgroups enough:
# many rows share the activations. Ranked by the static model of gfx1100 and gfx942 for qwen3-30b-a3b.
EXPERT_TILES = {
    ("wmma", 32): (MatrixTile(32, 128, 32, 1, 4, 1), MatrixTile(32, 128, 32, 1, 4, 1)),
    ("wmma", 16): (MatrixTile(16, 128, 64, 1, 4, 1), MatrixTile(16, 64, 64, 1, 4, 1)),
    ("mfma", 32): (MatrixTile(32, 128, 32, 1, 4, 1), MatrixTile(32, 64, 64, 1, 4, 1)),
    ("mfma", 16): (MatrixTile(16, 128, 64, 1, 4, 1), MatrixTile(16, 64, 64, 1, 4, 1)),
}


def choose_expert(arch, formats, slots, k, weights=1):
    """The default MatrixTile for `slots` slots of one expert, see `choose`; None if that has to find one."""
    tiles = EXPERT_TILES.get((arch.matrix[:4], slots))
    if tiles is None or k % BLOCK:
        return None
    tile = tiles[weights - 1]
    return tile if k % tile.columns == 0 else replace(tile, columns=BLOCK)


def _shares(total, threads):
    """Numbers of the pieces that each thread stages, out of `total`: with fewer pieces than threads several threads
    stage the same."""
    if total % threads and threads % total:
        raise ValueError(f"{total} pieces do not divide among {threads} threads")
    return range(max(1, total // threads))


class MatrixGemm:
    """The tile routine of one kernel: launch the grid with `threads` threads, `allocate` there, then `emit` the code of
    any number of tiles, of which a workgroup computes one. `weights`: how many weights of one shape share a tile (gate
    and up: 2). ValueError for a tile that does not fit."""

    rows_side_by_side = 1  # rows that neighbouring lanes hold in the epilogue

    def __init__(self, arch, tile, k, weights=1):
        self.arch, self.unit, self.tile, self.k, self.weights, self.wave = (
            arch,
            UNITS[arch.matrix],
            tile,
            k,
            weights,
            arch.wave,
        )
        self.threads = tile.waves_m * tile.waves_n * tile.waves_k * arch.wave
        self.ld, side = tile.columns + PAD, self.unit.side
        self.tiles_m, self.tiles_n = tile.tokens // tile.waves_m // side, tile.rows // tile.waves_n // side
        self.steps, self.share = k // tile.columns, tile.columns // tile.waves_k
        size = lds_bytes(tile, weights)
        if (
            self.tiles_m * tile.waves_m * side != tile.tokens
            or self.tiles_n * tile.waves_n * side != tile.rows
            or k % tile.columns
        ):
            raise ValueError(f"{tile} does not divide into {side} x {side} tiles of {k} columns")
        if self.share % self.unit.columns or self.share * tile.waves_k != tile.columns:
            raise ValueError(f"the {tile.columns} columns of {tile} do not divide among its waves")
        if size > min(arch.lds, 64 << 10) or self.threads > 256:  # LLVM ends the process above 64 KiB
            raise ValueError(f"{tile} takes {size} bytes of LDS and {self.threads} threads")

    def allocate(self, thread):
        """Declares LDS and accumulators inside the launch; `thread`: threadIdx.x."""
        tile, unit = self.tile, self.unit
        self.thread, self.lane, wave = thread, T.Bind(thread % self.wave), thread // self.wave
        self.wave_m = T.Bind(wave % tile.waves_m * (self.tiles_m * unit.side))
        self.wave_n = T.Bind(wave // tile.waves_m % tile.waves_n * (self.tiles_n * unit.side))
        self.wave_k = T.Bind(wave // (tile.waves_m * tile.waves_n))

        self.sums = T.alloc_buffer((self._count() * unit.acc,), "float32", scope="local")
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

    def emit(self, acts, weights, token0, row0, epilogue, first=None):
        """One tile: tokens token0.. of the activations (X [m, k],), float16 or float32; rows row0.. of the weights, a
        list of (fmt, bufs, padded rows). first: the row of a stack of weights that is row 0 of these.

        Calls epilogue(token, row, values): per weight a float32 vector of results of the token for the rows from `row`
        on, all of them below the padded number of rows.
        """
        self.first = first
        for i in range(self._count()):
            T.buffer_store(self.sums, T.broadcast(T.float32(0), self.unit.acc), [self._slice(i)])
        (X,), count = acts, self.tile.buffers
        self._stage(0, weights, self._fetch(X, weights, token0, row0, T.int32(0)))
        barrier()
        with T.serial(self.steps // count) as outer:
            for s in range(count):
                following = self._fetch(
                    X, weights, token0, row0, T.Bind(T.min(outer * count + (s + 1), self.steps - 1))
                )
                self._multiply(s)
                if count == 1:
                    barrier()
                self._stage((s + 1) % count, weights, following)
                barrier()
        if self.steps % count:
            self._multiply(0)
        if self.tile.waves_k == 1:
            self._finish(weights, token0, row0, epilogue)
            return
        if self.steps % count:
            barrier()  # the sums go where operands are still read
        with T.If(self.wave_k > 0), T.Then():
            for i in range(self._count()):
                halves = T.reinterpret(f"float16x{2 * self.unit.acc}", self.sums[self._slice(i)])
                T.buffer_store(self.partial, halves, [self._partial(self.wave_k - 1, i)])
        barrier()
        with T.If(self.wave_k == 0), T.Then():
            for i in range(self._count()):
                total = self.sums[self._slice(i)]
                for w in range(self.tile.waves_k - 1):
                    total = total + T.reinterpret(f"float32x{self.unit.acc}", self.partial[self._partial(w, i)])
                T.buffer_store(self.sums, total, [self._slice(i)])
            self._finish(weights, token0, row0, epilogue)

    def _count(self):
        """Accumulator tiles of a wave."""
        return self.weights * self.tiles_m * self.tiles_n

    def _partial(self, wave_k, i):
        """Where the accumulator tile i of the waves along k lies for this lane, in halves: lanes side by side."""
        part = self.thread % (self.threads // self.tile.waves_k) // self.wave
        waves, halves = self.threads // self.tile.waves_k // self.wave, 2 * self.unit.acc
        return at((((wave_k * waves + part) * self._count() + i) * self.wave + self.lane) * halves, halves)

    def _slice(self, i):
        """The accumulators of tile i."""
        return at(i * self.unit.acc, self.unit.acc)

    def _x_pieces(self):
        """Row and first column of each run of eight activations that this thread stages."""
        runs = self.tile.columns // 8
        for i in _shares(self.tile.tokens * runs, self.threads):
            c = (self.thread + i * self.threads) % (self.tile.tokens * runs)
            yield c // runs, c % runs * 8

    def _w_pieces(self):
        """Row, block and part of each piece of a weight that this thread stages."""
        pieces = self.tile.columns // PIECE
        for i in _shares(self.tile.rows * pieces, self.threads):
            c = (self.thread + i * self.threads) % (self.tile.rows * pieces)
            yield c // pieces, c % pieces // 2, c % 2

    def _fetch(self, X, weights, token0, row0, step):
        """The global loads of a step, in registers."""
        x = [T.Bind(X[token0 + row, at(step * self.tile.columns + column, 8)]) for row, column in self._x_pieces()]
        w = []
        for fmt, bufs, padded in weights:

            def clamp(row, padded=padded):
                held = T.min(row0 + row, padded - 1) if padded % self.tile.rows else row0 + row
                return T.Bind(held if self.first is None else self.first + held)

            blocks = self.tile.columns // BLOCK
            w.append(
                [fetch(fmt, bufs, clamp(row), step * blocks + block, part) for row, block, part in self._w_pieces()]
            )
        return x, w

    def _stage(self, buffer, weights, loaded):
        """Registers to LDS buffer number `buffer`, as float16."""
        (lds, start), *places = self.staged[buffer]
        for (row, column), x in zip(self._x_pieces(), loaded[0], strict=True):
            T.buffer_store(lds, T.cast(x, "float16x8"), [at(start + row * self.ld + column, 8)])
        side = self.unit.side
        for (fmt, _, _), (lds, start), pieces in zip(weights, places, loaded[1], strict=True):
            for (row, block, part), raw in zip(self._w_pieces(), pieces, strict=True):
                place = row // side * side + self.unit.slot(row % side)
                base = T.Bind(start + place * self.ld + block * BLOCK)
                for column, run in zip(columns_of(part), half_piece(self.arch, fmt, raw, part), strict=True):
                    T.buffer_store(lds, run, [at(base + column, 8)])

    def _multiply(self, buffer):
        """LDS buffer number `buffer` into the accumulators. LLVM would start so many tiles, or load so many operands
        early, that registers spill: vector and matrix instructions stay within their chunk of columns."""
        unit = self.unit
        for column in range(0, self.share, unit.columns):
            if column:
                schedule_fence(IN_ORDER)

            def operands(place, row, tiles, column=column):
                lds, start = place
                first = start + self.wave_k * self.share + column
                return [unit.load(lds, row + i * unit.side, self.ld, first, self.lane) for i in range(tiles)]

            x_place, *w_places = self.staged[buffer]
            a = [operand for place in w_places for operand in operands(place, self.wave_n, self.tiles_n)]
            b = operands(x_place, self.wave_m, self.tiles_m)
            for part in range(len(b[0])):
                for i in range(self.tiles_m):
                    for j, weight in enumerate(a):
                        where = self._slice(i * len(a) + j)
                        T.buffer_store(self.sums, unit.multiply(weight[part], b[i][part], self.sums[where]), [where])

    def _finish(self, weights, token0, row0, epilogue):
        """Hands the accumulators to the epilogue; tiles of 16 rows beyond the weight's are left out."""
        unit, padded = self.unit, weights[0][2]
        for j in range(self.tiles_n):
            first = T.Bind(row0 + self.wave_n + j * unit.side)

            def store(j=j, first=first):
                for i in range(self.tiles_m):
                    token = T.Bind(token0 + self.wave_m + i * unit.side + self.lane % unit.side)
                    values = [
                        T.Bind(self.sums[self._slice((i * self.weights + w) * self.tiles_n + j)])
                        for w in range(self.weights)
                    ]
                    epilogue(token, T.Bind(first + self.lane // unit.side * unit.acc), values)

            if padded % self.tile.rows:
                with T.If(first < padded), T.Then():
                    store()
            else:
                store()
