"""GEMM tiles that go through the columns in steps: both operands of a step are staged in shared memory, from which all
threads of the workgroup multiply them. The next step's global loads are issued before this step's multiplications.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.device import barrier
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.registers import at
from mlc_amd.schedules.gpu.linear.gemm_load import PIECE, fetch
from mlc_amd.schedules.gpu.linear.gemm_tile import Gemm, Product, Tile, TileT, TileWork, UnitT, Weight
from mlc_amd.schedules.gpu.linear.load import block_bytes
from mlc_amd.schedules.tir import Expr

Loaded = tuple[list, list]  # registers of a step: of the activations, and for each weight

SUMS = 256  # float32 accumulators of a lane, at most: more leave no registers for anything else
CODE = 2  # how much more than the default tiles' limits a thread may hold and unroll: then compilers take minutes
CHUNKS = 8  # matrices along the columns of a step: they are unrolled
HELD = 64  # weights of a step that a thread holds in registers, in blocks of codes
ACTIVATIONS = 128  # that a thread has on the way to shared memory, at most
UNIT_CHOICES = {
    "tokens": (16, 32, 64, 128, 256), "rows": (16, 32, 64, 128, 256), "columns": (32, 64, 128, 256, 512),
    "waves_m": (1, 2, 4, 8), "waves_n": (1, 2, 4, 8),
}  # fmt: skip


def whole_tokens(of: Product) -> int:
    """Of the largest tiles that divide the tokens. ValueError unless these are a multiple of 16, and columns of 32."""
    found = next((t for t in (128, 64, 32, 16) if of.tokens % t == 0), None)
    if found is None or of.k % BLOCK:
        raise ValueError(f"{of.tokens} tokens of {of.k} columns are no tiles of 16 x {BLOCK}")
    return found


def workgroups(tile: Tile, of: Product) -> int:
    return of.tokens // tile.tokens * -(-of.rows // tile.rows)


def least_loaded(of: Product, tiles: Iterable[tuple[UnitT, float]]) -> UnitT | None:
    """Of (tile, how fast a compute unit is with it) the tile with which the busiest compute unit has least to do; None
    without any."""
    loads: dict[UnitT, float] = {}
    for tile, speed in tiles:
        loads.setdefault(tile, -(-workgroups(tile, of) // of.arch.units) * tile.tokens * tile.rows / speed)
    return min(loads, key=lambda tile: loads[tile], default=None)


class SteppedGemm(Gemm[TileT]):
    """columns: of a step."""

    columns: int
    thread: Expr

    @property
    def steps(self) -> int:
        return self.k // self.columns

    @abstractmethod
    def _stage(self, work: TileWork, loaded: Loaded, buffer: int) -> None:
        """Registers to shared memory, its buffer number `buffer`."""

    @abstractmethod
    def _multiply(self, work: TileWork, buffer: int) -> None:
        """Adds the products of what is in that buffer to the sums."""

    def _sum_up(self, work: TileWork, buffers: int = 1) -> None:
        """The products of all columns. buffers: 2 alternate, with one barrier a step; 1 takes two barriers."""
        self._stage(work, self._fetch(work, T.int32(0)), 0)
        barrier()
        with T.serial(self.steps // buffers) as outer:
            for i in range(buffers):
                following = self._fetch(work, T.Bind(T.min(outer * buffers + (i + 1), self.steps - 1)))
                self._multiply(work, i)
                if buffers == 1:
                    barrier()
                self._stage(work, following, (i + 1) % buffers)
                barrier()
        if self.steps % buffers:
            self._multiply(work, 0)

    def _fetch(self, work: TileWork, step: Expr) -> Loaded:
        """The global loads of a step."""
        return self._fetch_acts(work, step), self._fetch_weights(work, step)

    def _fetch_acts(self, work: TileWork, step: Expr) -> list[Expr]:
        (X,) = work.acts
        first = step * self.columns
        return [T.Bind(X[work.token0 + token, at(first + column, 8)]) for token, column in self._x_pieces()]

    def _fetch_weights(self, work: TileWork, step: Expr) -> list:
        blocks = self.columns // BLOCK
        return [
            [
                fetch(weight.fmt, weight.planes, self._weight_row(work, row, weight), step * blocks + block, part)
                for row, block, part in self._w_pieces()
            ]
            for weight in work.weights
        ]

    def _weight_row(self, work: TileWork, row: Expr, weight: Weight) -> Expr:
        """The row to load for row number `row` of the tile."""
        return work.weight_row(work.row0 + row, weight, self.tile.rows)

    def _pieces(self, total: int) -> Iterator[Expr]:
        """Numbers of the pieces that this thread stages, out of `total`; with too few, several threads stage the same
        ones."""
        for i in range(-(-total // self.threads)):
            yield (self.thread + i * self.threads) % total

    def _x_pieces(self) -> Iterator[tuple[Expr, Expr]]:
        """Token and first column of each run of eight activations that this thread stages."""
        runs = self.columns // 8
        for c in self._pieces(self.tile.tokens * runs):
            yield c // runs, c % runs * 8

    def _w_pieces(self) -> Iterator[tuple[Expr, Expr, Expr]]:
        """Row, block and part of each piece of a weight that this thread stages."""
        pieces = self.columns // PIECE
        for c in self._pieces(self.tile.rows * pieces):
            yield c // pieces, c % pieces // 2, c % 2


class UnitGemm(SteppedGemm[UnitT]):
    """On matrix units: each of waves_m x waves_n x waves_k waves multiplies tiles_m x tiles_n matrices of `share`
    columns of a step."""

    def __init__(self, of: Product, tile: UnitT, waves_k: int, sides: tuple[int, int, int]):
        """waves_k: waves that share out a step's columns. sides: tokens, rows and columns of an instruction."""
        super().__init__(of, tile)
        waves_m, waves_n, (side_m, side_n, side_k) = tile.waves_m, tile.waves_n, sides
        self.waves, self.columns, self.share = waves_m * waves_n * waves_k, tile.columns, tile.columns // waves_k
        self.threads = self.waves * of.arch.wave
        self.tiles_m, self.tiles_n = tile.tokens // waves_m // side_m, tile.rows // waves_n // side_n
        if (
            self.tiles_m * waves_m * side_m != tile.tokens
            or self.tiles_n * waves_n * side_n != tile.rows
            or of.k % self.columns
        ):
            raise ValueError(f"{tile} does not divide into {side_m} x {side_n} matrices of {of.k} columns")
        if self.share * waves_k != self.columns or self.share % side_k:
            raise ValueError(f"the {self.columns} columns of {tile} do not divide among its waves")

    @property
    def count(self) -> int:
        """Matrices of sums of a wave."""
        return self.weights * self.tiles_m * self.tiles_n

    def _loads(self, most: int, acc: int, columns: int) -> float:
        """`loads`. most: weights that a thread has on the way to shared memory; acc: sums of a lane in a matrix
        instruction, columns: of that."""
        mine, sums = self.weights * self.tile.rows * self.columns // self.threads, self.count * acc
        if mine > most or sums > SUMS or self.share > CODE * CHUNKS * columns:
            raise ValueError(
                f"{self.tile}: {mine} weights and {sums} sums a thread, {self.share} columns unrolled are too many"
            )
        count = self.tile.tokens * self.columns // self.threads
        if count > ACTIVATIONS:
            raise ValueError(f"{self.tile}: a thread would load {count} activations at once")
        return mine * block_bytes(self.of.formats[0]) / BLOCK + 2 * count
