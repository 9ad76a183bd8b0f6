"""The GEMM tile on cooperative matrices (KHR_cooperative_matrix of Vulkan): float16 operands, float32 sums.

A workgroup computes `tokens` tokens by `rows` rows of each of its weights. In each step it stages `columns` columns of
activations and weights in shared memory as float16: weights are dequantized on the way (`coop_load.py`), and columns
have the order of "pairs". Then each subgroup multiplies its share of the tile.

Which lane holds which element of a matrix is implementation-defined. So sums go through shared memory (the memory that
staging no longer needs) to the lanes that store them; each stores four consecutive rows of a token. Shared memory
consists of units of 16 bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.device import barrier, uniform
from mlc_amd.schedules.gpu.base.matrices import Fragments
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.quantize import RUN, RUNS
from mlc_amd.schedules.gpu.base.registers import at
from mlc_amd.schedules.gpu.base.step import SUMS, all_of, when
from mlc_amd.schedules.gpu.linear import coop_load, load
from mlc_amd.schedules.gpu.linear.gemm_tile import Loaded, Product, SteppedGemm, Tile, TileWork, workgroups
from mlc_amd.schedules.tir import Expr

PAD = 1  # units added to each row in shared memory, so that eight consecutive rows are in different banks
UNIT_BYTES = 16
ROWS = 4  # float32 of a unit: rows of a token that a lane stores at a time
SCALES = 4  # upper limit of the one-byte scales that a thread loads at a time: a word (`load.py`)
CODE = 2  # tuning may exceed the default tiles' limits of a thread by this factor; beyond, compilers take minutes
CHUNKS = 8  # upper limit of the matrices along the columns of a step, which are unrolled
HELD = 64  # weights of a step that a thread holds in registers, as blocks of codes
ACTIVATIONS = 128  # upper limit of the activations that a thread holds on the way to shared memory
EXPERT_HELD = 2  # for experts a thread may hold so many times as many weights, because their tiles have fewer sums


@dataclass(frozen=True)
class CoopTile(Tile):
    columns: int  # columns of a step
    waves_m: int  # subgroups along tokens; waves_n: along rows
    waves_n: int
    waves_k: int = 1  # subgroups along the columns of a step, whose sums are added at the end
    span: int = 1  # blocks of a row that a thread loads at a time


# {tokens: tiles with the speed of a compute unit on each, in percent of the fastest tile, for one weight and for two}.
# For few tokens, tiles have many columns, so that enough bytes of weights are in flight.
TILES = {
    128: (
        (CoopTile(128, 128, 64, 2, 2), (100, 100)), (CoopTile(128, 64, 64, 2, 2), (90, 90)),
        (CoopTile(64, 64, 64, 2, 2), (70, 70)),
    ),
    64: (
        (CoopTile(64, 32, 128, 2, 2), (100, 42)), (CoopTile(64, 128, 64, 2, 2), (56, 100)),
        (CoopTile(64, 64, 64, 2, 2), (50, 53)),
    ),
    32: ((CoopTile(32, 32, 256, 1, 2, 2), (100, 100)),),
    16: (
        (CoopTile(16, 16, 512, 1, 1, 4), (100, 44)), (CoopTile(16, 64, 128, 1, 2, 2), (67, 100)),
        (CoopTile(16, 16, 256, 1, 1, 4), (80, 81)),
    ),
}  # fmt: skip


def _held(of: Product) -> int:
    """The upper limit of the weights of a step that a thread holds in registers."""
    return HELD // 2 if of.has_floats else HELD


def choose(of: Product) -> CoopTile:
    """The default tile: for experts `expert_tile`, otherwise the one with which the busiest compute unit takes the
    least time. Raises ValueError unless tokens are a multiple of 16 and columns of 32."""
    if tile := expert_tile(of):
        return tile
    tokens = next((size for size in TILES if of.tokens % size == 0), None)
    if tokens is None or of.k % BLOCK:
        raise ValueError(f"{of.tokens} tokens of {of.k} columns are no tiles of 16 x {BLOCK}")
    found: dict[CoopTile, float] = {}
    for tile, speeds in TILES[tokens]:
        if fitting := _fit(tile, of):
            rounds = -(-workgroups(fitting, of) // of.arch.units)
            found.setdefault(fitting, rounds * fitting.tokens * fitting.rows / speeds[of.weights - 1])
    if found:
        return min(found, key=lambda tile: found[tile])
    raise ValueError(
        f"{of.arch.name} has no tile for {of.tokens} tokens: matrices of {of.arch.fragment}, {of.arch.lds} bytes of "
        "shared memory"
    )


def expert_tile(of: Product) -> CoopTile | None:
    """The tile for slots of one expert; None for the tile of as many tokens. There are always enough workgroups, so
    tiles have many rows, which share activations; fewer for two weights with few rows."""
    slots, weights = of.expert_slots, of.weights
    if slots not in (16, 32, 64):
        return None
    tile = CoopTile(slots, 128 if slots == 64 else 128 // weights, 64, 1, 4)
    most = EXPERT_HELD * _held(of) * tile.waves_n * of.arch.wave // (weights * tile.rows)
    return _widest(tile, of, [columns for columns in (tile.columns, BLOCK) if columns <= most])


def _fit(tile: CoopTile, of: Product) -> CoopTile | None:
    """The tile with as many columns as k, shared memory and registers allow; None if it does not fit at all."""
    rows = max(tile.rows // of.weights, of.arch.fragment[1] * tile.waves_n)
    threads = tile.waves_m * tile.waves_n * tile.waves_k * of.arch.wave
    most = max(_held(of) * threads // (of.weights * rows), BLOCK)
    limit = min(tile.columns, most, CHUNKS * of.arch.fragment[2] * tile.waves_k)
    return _widest(replace(tile, rows=rows), of, [columns for columns in (512, 256, 128, 64, 32) if columns <= limit])


def _widest(tile: CoopTile, of: Product, columns: list[int]) -> CoopTile | None:
    """The tile with the first of these numbers of columns with which it fits; None if there is none."""
    for count in columns:
        try:
            return CoopGemm(of, replace(tile, columns=count)).tile
        except ValueError:
            continue
    return None


class CoopGemm(SteppedGemm[CoopTile]):
    """See the module. Activations: H [m, k] in the layout "pairs". `store` gets float32x4 values."""

    choices: ClassVar = {
        "tokens": (16, 32, 64, 128, 256), "rows": (16, 32, 64, 128, 256), "columns": (32, 64, 128, 256, 512),
        "waves_m": (1, 2, 4, 8), "waves_n": (1, 2, 4, 8), "waves_k": (1, 2, 4), "span": (1, 2, 4),
    }  # fmt: skip

    def __init__(self, of: Product, tile: CoopTile):
        super().__init__(of, tile)
        arch, (self.fm, self.fn, self.fk) = of.arch, of.arch.fragment
        self.waves, self.columns = tile.waves_m * tile.waves_n * tile.waves_k, tile.columns
        self.threads, self.share = self.waves * arch.wave, tile.columns // tile.waves_k
        self.tiles_m, self.tiles_n = tile.tokens // tile.waves_m // self.fm, tile.rows // tile.waves_n // self.fn
        self.count = self.weights * self.tiles_m * self.tiles_n  # matrices of sums of a subgroup
        if tile.tokens % (tile.waves_m * self.fm) or tile.rows % (tile.waves_n * self.fn) or of.k % self.columns:
            raise ValueError(f"{tile} does not divide into {self.fm} x {self.fn} matrices of {of.k} columns")
        if tile.columns % (tile.waves_k * max(self.fk, RUN)) or tile.columns % (tile.span * BLOCK):
            raise ValueError(f"the {tile.columns} columns of {tile} do not divide among its subgroups and threads")
        self.ld, self.sums_ld = tile.columns // RUN + PAD, self.tiles_n * self.fn // ROWS + PAD
        sums = self.waves * of.weights * self.fm * self.sums_ld
        self.units = max((tile.tokens + of.weights * tile.rows) * self.ld, sums)
        size = self.units * UNIT_BYTES
        if size > arch.lds or self.threads > arch.threads:
            raise ValueError(f"{tile} takes {size} bytes of shared memory and {self.threads} threads")

    def loads(self) -> float:
        of, tile = self.of, self.tile
        scales = max((tile.span * BLOCK // fmt.group for fmt in of.formats if "S" in fmt.scales), default=0)
        if scales > SCALES:
            raise ValueError(f"{tile}: {scales} bytes of scales of a thread's blocks do not fit a word")
        mine, activations = (count * tile.columns // self.threads for count in (of.weights * tile.rows, tile.tokens))
        sums = self.count * (self.fm * self.fn // of.arch.wave)
        if mine > max(CODE * _held(of), of.weights * BLOCK) or activations > ACTIVATIONS or sums > SUMS:
            raise ValueError(f"{tile}: {mine} weights, {activations} activations and {sums} sums a thread are too many")
        if self.share > CODE * CHUNKS * self.fk:
            raise ValueError(f"{tile}: {self.share} columns unrolled are too many")
        return mine * load.block_bytes(of.formats[0]) / BLOCK + 2 * activations

    def allocate(self, thread: Expr) -> None:
        tile, shape, self.thread = self.tile, self.arch.fragment, thread
        wave = uniform(self.arch, thread // self.arch.wave)
        self.lane = T.Bind(thread % self.arch.wave)
        self.wave_m, self.wave_n = T.Bind(wave % tile.waves_m), T.Bind(wave // tile.waves_m % tile.waves_n)
        self.wave_k = T.Bind(wave // (tile.waves_m * tile.waves_n))
        self.lds = T.alloc_buffer((self.units,), "uint32x4", scope="shared")
        self.a = Fragments("a", self.tiles_m, shape)
        self.b = Fragments("b", self.weights * self.tiles_n, shape)
        self.sums = Fragments("sum", self.count, shape)

    def emit(self, work: TileWork) -> None:
        work = work.viewed(self.tile.span)
        self.sums.clear()
        self._sum_up(work)
        for i in range(self.tiles_m):
            self._hand_over(i)
            barrier()
            self._finish(work, i)
            barrier()

    def _weight_unit(self, weight: int) -> int:
        """The first unit of a weight in shared memory. Activations come before the weights."""
        return (self.tile.tokens + weight * self.tile.rows) * self.ld

    # ---- staging

    def _places(self, rows: int, per_row: int) -> Iterator[tuple[Expr, Expr]]:
        """(row, number in the row) of each piece that this thread copies to shared memory."""
        for c in self._staged(rows * per_row):
            yield T.Bind(c // per_row), T.Bind(c % per_row)

    def _fetch_acts(self, work: TileWork, step: Expr) -> list[tuple[Expr, list[Expr]]]:
        """(unit in shared memory, [run])."""
        (X,), found = work.acts, []
        for row, i in list(self._places(self.tile.tokens, self.columns // RUN)):
            run = T.Bind(X[work.token0 + row, at(step * self.columns + i * RUN, RUN)])
            found.append((row * self.ld + i, [run]))
        return found

    def _fetch_weights(self, work: TileWork, step: Expr) -> list:
        """(unit in shared memory, format, what `coop_load.fetch` returned)."""
        span, found = self.tile.span, []
        per_row = self.columns // (span * BLOCK)
        for n, weight in enumerate(work.weights):
            for row, i in self._places(self.tile.rows, per_row):
                held = self._weight_row(work, row, weight)
                unit = self._weight_unit(n) + row * self.ld + i * (span * RUNS)
                raw = coop_load.fetch(weight.fmt, weight.planes, held, step * per_row + i, span)
                found.append((unit, weight.fmt, raw))
        return found

    def _stage(self, work: TileWork, loaded: Loaded) -> None:
        acts, weights = loaded
        for unit, values in [
            *acts, *((unit, coop_load.runs(self.arch, fmt, raw, self.tile.span)) for unit, fmt, raw in weights)
        ]:  # fmt: skip
            for j, run in enumerate(values):
                T.buffer_store(self.lds, T.reinterpret("uint32x4", run), [unit + j])

    # ---- matrices

    def _multiply(self, work: TileWork) -> None:
        fm, fn, columns = self.fm, self.fn, self.weights * self.tiles_n
        for k in range(0, self.share, self.fk):
            first = self.wave_k * (self.share // RUN) + k // RUN
            for i in range(self.tiles_m):
                place = self.lds[(self.wave_m * (self.tiles_m * fm) + i * fm) * self.ld + first]
                self.a.load(i, place, self.ld * 4, "row_major")
            for w in range(self.weights):
                for j in range(self.tiles_n):
                    row = self.wave_n * (self.tiles_n * fn) + j * fn
                    place = self.lds[self._weight_unit(w) + row * self.ld + first]
                    self.b.load(w * self.tiles_n + j, place, self.ld * 4, "col_major")
            for i in range(self.tiles_m):
                for j in range(columns):
                    self.sums.add_product(i * columns + j, self.a, i, self.b, j)

    # ---- results

    def _sums_unit(self, wave_k: Expr, weight: int) -> Expr:
        """The first unit of a subgroup's sums of a weight. wave_k: selects among the subgroups with the same rows and
        tokens."""
        wave = (wave_k * self.tile.waves_m + self.wave_m) * self.tile.waves_n + self.wave_n
        return (wave * self.weights + weight) * (self.fm * self.sums_ld)

    def _hand_over(self, i: int) -> None:
        """Stores row i of the subgroup's matrices of sums to shared memory."""
        for w in range(self.weights):
            for j in range(self.tiles_n):
                place = self.lds[self._sums_unit(self.wave_k, w) + j * (self.fn // ROWS)]
                self.sums.store((i * self.weights + w) * self.tiles_n + j, place, self.sums_ld * 4, "row_major")

    def _finish(self, work: TileWork, i: int) -> None:
        """Passes row i of the matrices of sums to `TileWork.store`; rows beyond those of the weight are left out."""
        fm, tile = self.fm, self.tile
        units, lanes = self.tiles_n * self.fn // ROWS, self.arch.wave * tile.waves_k
        with T.serial(-(-fm * units // lanes)) as step:
            c = T.Bind(step * lanes + (self.wave_k * self.arch.wave + self.lane))
            token, unit = T.Bind(c // units), T.Bind(c % units)
            row = T.Bind(work.row0 + self.wave_n * (self.tiles_n * self.fn) + unit * ROWS)
            conditions = [work.if_row(row, tile.rows), c < fm * units if fm * units % lanes else None]
            with when(all_of(x for x in conditions if x is not None)):
                values = []
                for w in range(self.weights):
                    places = [self._sums_unit(k, w) + token * self.sums_ld + unit for k in range(tile.waves_k)]
                    parts = [T.reinterpret("float32x4", T.Bind(self.lds[place])) for place in places]
                    values.append(T.Bind(sum(parts[1:], parts[0])))
                work.store(T.Bind(work.token0 + (self.wave_m * self.tiles_m + i) * fm + token), row, values)
