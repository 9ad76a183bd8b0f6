"""From the sums of a tile of `gemm_lanes.py` to results. Sums go through shared memory, in several passes if there is
not enough of it. There, the sums of subgroups with different columns are added. Then each thread calls `TileWork.store`
with (token, row, values of each weight), for four rows at a time.
"""

from abc import abstractmethod
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.device import barrier, uniform
from mlc_amd.schedules.gpu.base.matrices import Fragments
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.quantize import TOKENS, unit_size
from mlc_amd.schedules.gpu.base.registers import chosen, lane_of, local, put, vector
from mlc_amd.schedules.gpu.base.step import all_of, when
from mlc_amd.schedules.gpu.linear.gemm_tile import Gemm, Product, Tile, TileWork
from mlc_amd.schedules.tir import Expr

ROWS = 16  # rows of a matrix
SHAPE = ROWS, TOKENS, 16  # shape of the matrices: rows x tokens x columns
WAVE = 32
GROUP = 4  # blocks of columns of a unit of activations: the number of lanes that share a row of a matrix
UNIT = unit_size(GROUP)
QUAD = 4  # float32 values of a unit of 16 bytes: rows of a token that a lane stores at a time
PAD = 1  # units added to a token's rows in shared memory
UNIT_BYTES = 16
SUMS = 128  # upper limit of the sums of a lane
# Upper limit of the bytes of shared memory per thread for the sums of several row tiles. With more, NVIDIA's compiler
# uses more registers, so that half as many threads are resident.
SHARED = 80

EARLY = 1, 2  # numbers of results of a thread with which inputs of `store` are loaded before the sums are complete
Pass = tuple[int, int]  # (first row tile, first token tile) of the sums that are in shared memory at the same time
Place = tuple[Expr, Expr, Expr]  # four rows of sums in shared memory: (subgroup, token, quad of the token)
Owned = tuple[Place, Expr, Expr]  # four rows of results: (place, token, first row)


@dataclass(frozen=True)
class LaneTile(Tile):
    waves_m: int  # subgroups along tokens; waves_n, waves_k: along rows and columns
    waves_n: int
    waves_k: int
    # 1: the weights of the next group of columns are loaded during the products of this group, except for float
    # weights. 2: and the activations of the next run are loaded during the products of this run.
    ahead: int = 0
    # 1: the exponents that are or'ed to codes are in registers whose values the compiler does not know. With constants,
    # NVIDIA's compiler makes two instructions for two weights instead of one.
    hidden: int = 0
    staged: int = 0  # 1: activations go through shared memory (`lane_tiles.py`)


class LaneResults(Gemm[LaneTile]):
    """The part of `LaneGemm` that divides the tile between subgroups, and turns sums into results."""

    scope = "shared"  # scope of its shared memory

    def __init__(self, of: Product, tile: LaneTile):
        super().__init__(of, tile)
        self.m, self.waves = of.m, tile.waves_m * tile.waves_n * tile.waves_k
        self.groups = -(-of.k // (GROUP * BLOCK))  # groups of GROUP blocks in a row
        self.threads = self.waves * WAVE
        self.tiles_m, self.tiles_n = tile.tokens // tile.waves_m // TOKENS, tile.rows // tile.waves_n // ROWS
        if tile.tokens % (tile.waves_m * TOKENS) or tile.rows % (tile.waves_n * ROWS) or of.k % BLOCK:
            raise ValueError(f"{tile} does not divide into {ROWS} x {TOKENS} matrices of {of.k} columns")
        if self.weights * self.tiles_n * self.tiles_m * (ROWS * TOKENS // WAVE) > SUMS:
            raise ValueError(f"{tile} has more than {SUMS} sums of a lane")
        # as many sums in a pass as fit, for all weights; preferably all rows of a token
        parts = [(rows, tokens) for tokens in (8, 4, 2, 1) for rows in range(self.tiles_n, 0, -1)]
        parts = [part for part in parts if self._holds(*part)]
        if not parts or self.threads > of.arch.most_threads:
            raise ValueError(f"{tile} takes more shared memory or threads than {of.arch.name} has")
        self.rows_at_once, self.at_once = max(parts, key=lambda part: part[0] * part[1])
        self.quads = self.rows_at_once * (ROWS // QUAD)  # quads of a token of a subgroup in a pass
        # quads that are in shared memory at the same time
        self.per_pass = tile.waves_m * tile.waves_n * self.at_once * TOKENS * self.quads
        self.ld = self.quads + PAD
        self.units = self._units(self.rows_at_once, self.at_once)

    def allocate(self, thread: Expr) -> None:
        tile, self.thread = self.tile, thread
        self.wave = wave = uniform(self.arch, thread // WAVE)
        self.lane = T.Bind(thread % WAVE)
        self.wave_m, self.wave_n = T.Bind(wave % tile.waves_m), T.Bind(wave // tile.waves_m % tile.waves_n)
        self.wave_k = T.Bind(wave // (tile.waves_m * tile.waves_n))
        self.lds = T.alloc_buffer((self.units,), "uint32x4", scope=self.scope)
        self.a = Fragments("a", self.weights * self.tiles_n, SHAPE)
        self.b = Fragments("b", self.tiles_m, SHAPE)
        self.sums = Fragments("sum", self.weights * self.tiles_n * self.tiles_m, SHAPE)

    @abstractmethod
    def _sum_up(self, work: TileWork) -> None:
        """The products of all columns."""

    def _holds(self, row_tiles: int, token_tiles: int) -> bool:
        size, factors = self._units(row_tiles, token_tiles) * UNIT_BYTES, 4 * self.tile.tokens  # of `deferred_norm.py`
        whole = self.tiles_m % token_tiles == 0 and self.tiles_n % row_tiles == 0
        return whole and size + factors <= self.arch.lds and (row_tiles == 1 or size <= SHARED * self.threads)

    def _units(self, row_tiles: int, token_tiles: int) -> int:
        """The units of shared memory for the sums of so many tiles of each subgroup."""
        return self.waves * self.weights * token_tiles * TOKENS * (row_tiles * (ROWS // QUAD) + PAD)

    def _sums_unit(self, wave: Expr, weight: int, token: Expr) -> Expr:
        """The first unit of a subgroup's sums of a weight and a token. token: its number among those of the pass."""
        return ((wave * self.weights + weight) * (self.at_once * TOKENS) + token) * self.ld

    def _hand_over(self, first_row: int, first: int) -> None:
        """Stores the sums of a pass to shared memory: row tiles from first_row on, token tiles from first on."""
        for w in range(self.weights):
            for i in range(self.rows_at_once):
                for t in range(self.at_once):
                    place = self.lds[self._sums_unit(self.wave, w, t * TOKENS) + i * (ROWS // QUAD)]
                    number = (w * self.tiles_n + first_row + i) * self.tiles_m + first + t
                    self.sums.store(number, place, self.ld * QUAD, "col_major")
        barrier()

    def _results(self, work: TileWork) -> None:
        """Adds up the sums and stores them."""
        rows, tokens = range(0, self.tiles_n, self.rows_at_once), range(0, self.tiles_m, self.at_once)
        passes = [(i, j) for i in rows for j in tokens]
        together = self.threads // self.per_pass  # number of passes in which, together, each thread has one result
        each = len(passes) / together if together * self.per_pass == self.threads else 0
        if work.early and self._is_whole(work.rows) and each in EARLY:
            return self._finish_early(work, [passes[i : i + together] for i in range(0, len(passes), together)])
        for number, (i, j) in enumerate(passes):
            if number:
                barrier()
            self._hand_over(i, j)
            self._finish(work, i, j)

    def _is_whole(self, rows: int) -> bool:
        """Whether all rows and tokens of every tile exist."""
        return not (rows % self.tile.rows or self.m % self.tile.tokens)

    def _place(self, work: TileWork, c: Expr, first_row: Expr, first: Expr) -> Owned:
        """The place, token and first row of quad number c of a pass."""
        tile, per_wave = self.tile, self.at_once * TOKENS * self.quads
        wave, own = T.Bind(c // per_wave), T.Bind(c % per_wave)
        wave_m, wave_n = T.Bind(wave % tile.waves_m), T.Bind(wave // tile.waves_m)
        token, quad = T.Bind(own // self.quads), T.Bind(own % self.quads)
        row = T.Bind(work.row0 + (wave_n * self.tiles_n + first_row) * ROWS + quad * QUAD)
        target = T.Bind(work.token0 + (wave_m * self.tiles_m + first) * TOKENS + token)
        return (wave, token, quad), target, row

    def _added(self, weight: int, place: Place) -> Expr:
        """The sums of a weight at a place, added over subgroups with different columns: float32x4."""
        (wave, token, quad), parts = place, []
        for k in range(self.tile.waves_k):
            source = wave + k * (self.tile.waves_m * self.tile.waves_n)
            unit = self._sums_unit(source, weight, token) + quad
            parts.append(T.reinterpret("float32x4", T.Bind(self.lds[unit])))
        return T.Bind(sum(parts[1:], parts[0]))

    def _finish_early(self, work: TileWork, groups: list[list[Pass]]) -> None:
        """Stores the results of groups of passes, if each thread has one result in each group. Inputs of `store` are
        loaded before the sums are complete."""
        mine, found = T.Bind(self.thread // self.per_pass), []
        for group in groups:
            first_row, first = (chosen([T.int32(x) for x in each], mine) for each in zip(*group, strict=True))
            owned = self._place(work, T.Bind(self.thread % self.per_pass), first_row, first)
            found.append((owned, _early(work, *owned[1:])))
        for number, (group, (owned, loaded)) in enumerate(zip(groups, found, strict=True)):
            if number:
                barrier()
            self._finish_group(work, group, mine, owned, loaded)

    def _finish_group(self, work: TileWork, passes: list[Pass], mine: Expr, owned: Owned, loaded: list[tuple]) -> None:
        """Stores the results of a group of passes. mine: the pass with the thread's result. owned: its place, token and
        row. loaded: the inputs of `store`."""
        place, target, row = owned
        cells = [[local(1) for _ in range(QUAD)] for _ in range(self.weights)]
        for number, (i, j) in enumerate(passes):
            if number:
                barrier()
            self._hand_over(i, j)
            with when(None if len(passes) == 1 else mine == number):
                for w, own in enumerate(cells):
                    value = self._added(w, place)
                    for e, cell in enumerate(own):
                        put(cell, lane_of(value, e), 0)
        work.store(target, row, [T.Bind(vector([cell[0] for cell in own])) for own in cells], *loaded)

    def _finish(self, work: TileWork, first_row: int, first: int) -> None:
        """Stores the results of a pass, except for rows beyond the weight's and tokens beyond m."""
        total = self.per_pass
        with T.serial(-(-total // self.threads)) as step:
            c = T.Bind(step * self.threads + self.thread)
            place, target, row = self._place(work, c, first_row, first)
            inside = c < total if total % self.threads else None
            with when(self._exists(work, target, row, inside)):
                loaded = _early(work, target, row)
                work.store(target, row, [self._added(w, place) for w in range(self.weights)], *loaded)

    def _exists(self, work: TileWork, token: Expr, row: Expr, inside: Expr | None = None) -> Expr | None:
        """Whether the row and the token exist, and `inside` holds; None if this is always so."""
        conditions = work.if_row(row, self.tile.rows), inside, work.if_token(token, self.m, self.tile.tokens)
        return all_of(x for x in conditions if x is not None)


def _early(work: TileWork, token: Expr, row: Expr) -> list[tuple]:
    return [work.early(token, row)] if work.early else []
