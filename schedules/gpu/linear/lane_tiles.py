"""Two things for `gemm_lanes.py`: tiles whose activations are staged in shared memory, for many tokens (`StagedGemm`);
and the rule that chooses the tile of a kernel (`choose`).

In a staged tile each subgroup of a workgroup has rows of its own and all columns: ROWS rows of two weights (gate and
up), or twice as many of one weight. All subgroups read the same activations, which the workgroup stages in shared
memory, one group of columns ahead. Weights are also loaded one group ahead. The loop's body has two groups, so that no
register is copied: a copy would have to wait for the register's load.

The constants of the rule were measured on an H200, with the layers of models of 8 and 30 billion weights in four
formats. With few tokens, kernels wait for weights: a workgroup has few rows, and its subgroups divide the columns, so
that each compute unit has enough subgroups to hide the latency of memory. With many tokens, kernels wait for matrix
units: tiles have 64 tokens by 64 rows; or by 128 or 256 rows, with staged activations, if there are enough workgroups.
"""

from collections.abc import Sequence
from dataclasses import replace

from tvm.tirx.script import builder as T

from mlc_amd.schedules.formats import FP4_VALUES, Format
from mlc_amd.schedules.gpu.base.device import WAVE_SHARED, barrier
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.quantize import RUN, RUNS, TOKENS
from mlc_amd.schedules.gpu.base.registers import Held, at
from mlc_amd.schedules.gpu.base.step import kept
from mlc_amd.schedules.gpu.linear.gemm_lanes import UNIT_WORDS, LaneGemm
from mlc_amd.schedules.gpu.linear.gemm_tile import Product, TileWork
from mlc_amd.schedules.gpu.linear.lane_results import GROUP, PAD, QUAD, ROWS, UNIT, UNIT_BYTES, WAVE, LaneTile, Place
from mlc_amd.schedules.tir import Expr

TILE_UNITS = UNIT // RUN  # units of 16 bytes for eight tokens and a group of columns
AHEAD = 2  # groups of columns in the loop's body
# With up to so many subgroups in a workgroup, each thread stages so many activations that no registers are left.
SHORT_OF_REGISTERS = 4
TILES = 2  # tiles of ROWS rows of a subgroup; with more, there would be no registers for activations


def smallness(formats: Sequence[Format]) -> int:
    """How few registers a block of weights of these formats needs: from 0 (many) to 3 (few)."""
    if any(fmt.table not in (None, FP4_VALUES) for fmt in formats):
        return 0
    if any(len(fmt.codes) != 1 or fmt.table for fmt in formats):
        return 1
    return 3 if _nibbles(formats) and all(tuple(fmt.scales) == ("D",) for fmt in formats) else 2


def _nibbles(formats: Sequence[Format]) -> bool:
    """Whether all codes are nibbles without a table."""
    return all(tuple(fmt.codes) == ("Q4",) and not fmt.table for fmt in formats)


class StagedGemm(LaneGemm):
    """A staged tile of one weight; the common part for two weights."""

    scope = WAVE_SHARED  # with "shared", TVM would add a barrier after each store of activations

    def __init__(self, of: Product, tile: LaneTile):
        super().__init__(of, tile)
        self.whole = of.k % (AHEAD * GROUP * BLOCK) == 0  # bodies of the loop; else activations after the columns are 0
        # whether the loop has registers left to add up something in each step
        enough = smallness(of.formats) > 2 or (_nibbles(of.formats) and tile.waves_n > SHORT_OF_REGISTERS)
        self.step_columns = GROUP * BLOCK if self.whole and enough else 0
        if tile.waves_m * tile.waves_k * tile.ahead != 1 or of.weights * self.tiles_n != TILES:
            raise ValueError(
                f"{tile} shares out other things than rows of {of.weights} weights, or loads no weights ahead"
            )
        self.buffer = self.tiles_m * TILE_UNITS
        self.units = max(self.units, 2 * self.buffer)
        if self.units * UNIT_BYTES + 4 * tile.tokens > of.arch.lds:
            raise ValueError(f"{tile} takes too much shared memory")

    def _sum_up(self, work: TileWork) -> None:
        row, block = T.Bind(self.lane // GROUP), T.Bind(self.lane % GROUP)
        rows, last = self._rows(work, row), T.int32(self.groups - 1)

        def fetch(group: Expr) -> list[list]:
            unit = group * GROUP + block
            return self._fetch(work, rows, T.Bind(unit if self.whole else T.min(unit, self.k // BLOCK - 1)))

        def multiply(number: int, group: Expr, fetched: list[list]) -> None:
            """The products of a group, number 0 or 1 of the body; stages the activations of the next one."""
            x = self._activations(work, T.Bind(group + 1))
            if work.factors is not None and work.factors.total is not None:
                work.factors.add(group)
            decoders = self._decoders(work, fetched)
            following = self._staged_run(number, 0)
            for j in range(RUNS):
                runs = [[run(j) for run in each] for each in decoders]
                self._add_products(runs, [T.Bind(T.reinterpret("float16x8", unit)) for unit in following])
                if j + 1 < RUNS:
                    following = self._staged_run(number, j + 1)
            self._stage(x, 1 - number)
            barrier()

        self._stage(self._activations(work, T.int32(0)), 0)
        held = Held(fetch(T.int32(0)))
        barrier()
        with kept(-(-self.groups // AHEAD)) as step:
            group = T.Bind(step * AHEAD)
            one, fetched = T.Bind(group + 1), held.values()
            following = fetch(one)
            multiply(0, group, fetched)
            after = fetch(T.Bind(T.min(one + 1, last)))
            multiply(1, one, following)
            held.keep(after)

    def _staged_run(self, number: int, j: int) -> list[Expr]:
        """Run j of the activations in buffer number 0 or 1, of each of the token tiles."""
        place = T.Bind(self.lane + (number * self.buffer + j * WAVE))
        return [T.Bind(self.lds[place + t * TILE_UNITS]) for t in range(self.tiles_m)]

    def _activations(self, work: TileWork, group: Expr) -> list[Expr]:
        """Loads the units of a group's activations that this thread stages. Beyond the last column they are 0; this is
        not necessary if the columns fill all bodies of the loop."""
        ((X,), tile0) = work.acts, work.token0 // TOKENS
        held, loaded = T.Bind(T.min(group, T.int32(self.groups - 1))), []
        for c in self._staged(self.buffer):
            tile = self._existing(tile0 + c // TILE_UNITS)
            x = T.Bind(X[T.Bind(tile), held, at(T.Bind(c % TILE_UNITS * RUN), RUN)])
            x = T.Bind(T.reinterpret("uint32x4", x))
            if not self.whole:
                counts = group * GROUP + c % GROUP < self.k // BLOCK
                x = T.Bind(T.Select(T.broadcast(counts, UNIT_WORDS), x, T.broadcast(T.uint32(0), UNIT_WORDS)))
            loaded.append(x)
        return loaded

    def _stage(self, loaded: list[Expr], number: int) -> None:
        """Stores loaded units to buffer number 0 or 1."""
        for c, unit in zip(self._staged(self.buffer), loaded, strict=True):
            T.buffer_store(self.lds, unit, [c + number * self.buffer])


class StagedPair(StagedGemm):
    """A staged tile of two weights. Neighbouring threads have results of neighbouring tiles of ROWS rows, which are
    side by side in the layout "lanes"."""

    def _units(self, row_tiles: int, token_tiles: int) -> int:
        return super()._units(row_tiles, token_tiles) + self.waves * PAD

    def _sums_unit(self, wave: Expr, weight: int, token: Expr) -> Expr:
        """See LaneResults. The units of neighbouring threads are in different banks."""
        return super()._sums_unit(wave, weight, token) + wave * PAD

    def _place(self, work: TileWork, c: Expr, first_row: Expr, first: Expr) -> tuple[Place, Expr, Expr]:
        wave, own = T.Bind(c % self.tile.waves_n), T.Bind(c // self.tile.waves_n)
        quad, token = T.Bind(own % self.quads), T.Bind(own // self.quads)
        row = T.Bind(work.row0 + wave * ROWS + quad * QUAD)
        return (wave, token, quad), T.Bind(work.token0 + first * TOKENS + token), row


# ---- the rule

FEW, MANY = (TOKENS, 16, 32), 64  # tokens of a tile
MOST_WAVES = 16  # upper limit of the subgroups of a workgroup
SIMDS = 4  # SIMDs of a compute unit: subgroups of a workgroup if there are several workgroups for each compute unit
# For few tokens. FULL: upper limit of the subgroups for each compute unit, by tokens of a tile. LEAST: least number of
# subgroups of a workgroup. LEAST_GROUPS: least number of groups of columns of a subgroup.
FULL, LEAST, LEAST_GROUPS = {TOKENS: 32, 16: 32, 32: 16}, 4, 3
# With the most tokens of FEW: if there are so many workgroups for each compute unit, they get twice as many rows.
WIDE = 2
# {weights: least number of workgroups for each compute unit with which tiles are staged}.
STAGED = {1: 4, 2: 1}
BUSY = 0.9  # fraction of the compute units that workgroups of twice the size must keep busy on average


def routine(of: Product, tile: LaneTile) -> LaneGemm:
    """The tile routine of a LaneTile. Raises ValueError for a tile that does not fit."""
    return (LaneGemm if not tile.staged else StagedGemm if of.weights == 1 else StagedPair)(of, tile)


def choose(of: Product) -> LaneTile:
    """The default tile. Raises ValueError if none fits."""
    if of.expert_slots:  # there are workgroups enough
        if of.expert_slots == TOKENS:
            return _fitting(of, LaneTile(TOKENS, ROWS, 1, 1, MOST_WAVES), 0)
        return LaneTile(of.expert_slots, 2 * MANY, 1, SIMDS * of.weights, 1, ahead=1, hidden=1, staged=1)
    tokens = next((tokens for tokens in FEW if of.m <= tokens), None)
    return _few(of, tokens) if tokens else _many(of)


def _few(of: Product, tokens: int) -> LaneTile:
    """The tile for few tokens. Activations are loaded ahead only for few rows and one weight: each segment (q, k and v)
    has code of its own, and twice as much code takes 20 instead of 16 us on an H200 (32 tokens, 6144 rows of 4096
    columns)."""
    most, units = tokens == FEW[-1], of.arch.units
    wide = most and of.rows >= WIDE * units * 2 * ROWS
    height = ROWS * (1 + wide)
    ahead, hidden = most and not wide and len(of.formats) == 1, most and not (wide and of.weights == 1)
    tile = LaneTile(tokens, height, 1, 1, MOST_WAVES, int(ahead), int(hidden))
    return _fitting(of, tile, FULL[tokens] * units // -(-of.rows // height))


def _many(of: Product) -> LaneTile:
    """The tile for many tokens. A workgroup has one subgroup for each SIMD, or two if no compute unit would have a
    second workgroup; and half the rows if half of the compute units would have no work otherwise. Staged tiles have two
    subgroups for each SIMD if such workgroups keep the compute units busy: activations are then read half as often.
    This takes as long in a single kernel, but 3 % less time in a prompt on an H100, whose clock depends on its
    power."""
    height, units = MANY // of.weights, of.arch.units
    if not of.has_floats and smallness(of.formats):  # staged tiles have registers only for codes
        wide, narrow = _workgroups(of, 4 * height), _workgroups(of, 2 * height)
        if len(of.formats) == of.weights <= smallness(of.formats) and wide >= BUSY * units * -(-wide // units):
            return LaneTile(MANY, 4 * height, 1, 2 * SIMDS, 1, ahead=1, hidden=1, staged=1)
        if narrow >= STAGED[of.weights] * units:
            return LaneTile(MANY, 2 * height, 1, SIMDS, 1, ahead=1, hidden=1, staged=1)
    waves_n = 2
    if 2 * _workgroups(of, height) <= units:
        height, waves_n = height // 2, 1
    waves = SIMDS * (1 + (_workgroups(of, height) <= units))
    # with tables, and with two weights, there are no registers for activations ahead
    ahead = 2 if of.weights == 1 and smallness(of.formats) else 1
    tile = LaneTile(MANY, height, 1, waves_n, waves // waves_n, ahead, hidden=1)
    return _fitting(of, tile, tile.waves_k)


def _workgroups(of: Product, height: int) -> int:
    return -(-of.m // MANY) * -(-of.rows // height)


def _fitting(of: Product, tile: LaneTile, most: int) -> LaneTile:
    """The tile with as many subgroups along columns as there is work and shared memory for: at most `most`, but at
    least as many as LEAST requires."""
    least = LEAST
    while least > 1 and of.k // (GROUP * BLOCK) < LEAST_GROUPS * least:
        least //= 2
    while tile.waves_k > least and tile.waves_k > most:
        tile = replace(tile, waves_k=tile.waves_k // 2)
    while True:
        try:
            return routine(of, tile).tile
        except ValueError:
            if tile.waves_k == 1:
                raise
            tile = replace(tile, waves_k=tile.waves_k // 2)
