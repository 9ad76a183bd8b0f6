"""Tiles of `gemm_lanes.py` whose activations go through shared memory, for many tokens.

There each subgroup of a workgroup has rows of its own and all columns: ROWS rows of two weights, gate and up, or twice
as many of one. All of them read the same activations, which the workgroup stages in shared memory, a group of columns
at a time and one ahead; the weights are loaded one group ahead, too. The loop's body has two groups, so that none of
these registers is copied, which would wait for its load.
"""

from tvm.tirx.script import builder as T

from mlc_amd.schedules.formats import FP4_VALUES
from mlc_amd.schedules.gpu.base.device import WAVE_SHARED, barrier
from mlc_amd.schedules.gpu.base.pairs import GROUP, LANES, RUN, RUNS, TOKENS, lanes_shape
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.registers import Held, at, lane_of, vector
from mlc_amd.schedules.gpu.base.step import all_of, kept, when
from mlc_amd.schedules.gpu.linear.gemm_lanes import UNIT_BYTES, UNIT_WORDS, WAVE, LaneGemm
from mlc_amd.schedules.gpu.linear.lane_results import PAD, QUAD, ROWS

TILE_UNITS = LANES // RUN  # units of 16 bytes of eight tokens and a group
AHEAD = 2  # groups of the loop's body
# Subgroups of a workgroup, at most, of which each thread stages so many activations that no registers are left.
SHORT_OF_REGISTERS = 4
TILES = 2  # of ROWS rows that a subgroup has: with more, registers would hold no activations for them


def suits(formats) -> bool:
    """Whether weights of these formats can have such a tile: registers hold codes only."""
    return all(fmt.kind != "float" for fmt in formats)


def smallness(formats) -> int:
    """How few registers a block of weights of these formats takes: see `lane_tiles.Share`."""
    if any(fmt.table not in (None, FP4_VALUES) for fmt in formats):
        return 0
    if any(len(fmt.codes) != 1 or fmt.table for fmt in formats):
        return 1
    return 3 if _nibbles(formats) and all(tuple(fmt.scales) == ("D",) for fmt in formats) else 2


def adds_up(tile, formats) -> bool:
    """Whether the loop of a tile of weights of these formats has registers left to add up something in each step."""
    enough = smallness(formats) > 2 or (_nibbles(formats) and tile.waves_n > SHORT_OF_REGISTERS)
    return bool(tile.staged) and enough


def _nibbles(formats) -> bool:
    """Whether codes are nibbles, which no table gives values."""
    return all(tuple(fmt.codes) == ("Q4",) and not fmt.table for fmt in formats)


class StagedGemm(LaneGemm):
    """The tile routine of one kernel: use as `LaneGemm`. ValueError for a tile that does not fit."""

    scope = WAVE_SHARED  # TVM would add a barrier behind each store of activations

    def __init__(self, arch, tile, m, k, weights=1):
        super().__init__(arch, tile, m, k, weights)
        self.whole = k % (AHEAD * GROUP * BLOCK) == 0  # bodies of the loop; else activations behind the columns are 0
        self.columns = GROUP * BLOCK if self.whole else 0
        if tile.waves_m * tile.waves_k * tile.ahead != 1 or weights * self.tiles_n != TILES:
            raise ValueError(
                f"{tile} shares out other things than rows of {weights} weights, or loads no weights ahead"
            )
        self.buffer = self.tiles_m * TILE_UNITS
        self.units = max(self.units, 2 * self.buffer)
        if self.units * UNIT_BYTES + 4 * tile.tokens > arch.lds:
            raise ValueError(f"{tile} takes too much shared memory")

    def _sum_up(self, X, weights, token0, row0, first):
        row, block = T.Bind(self.lane // GROUP), T.Bind(self.lane % GROUP)
        rows = self._rows(weights, row0, row, first)
        formats, last = [fmt for fmt, _, _ in weights], T.int32(self.groups - 1)

        def fetch(group):
            unit = group * GROUP + block
            return self._fetch(weights, rows, T.Bind(unit if self.whole else T.min(unit, self.k // BLOCK - 1)))

        def multiply(number, group, fetched):
            """The products of a group, number 0 or 1 of the body; stages the activations of the next one."""
            x = self._activations(X, token0, T.Bind(group + 1))
            self.each_step(group)
            decoders = self._decoders(formats, fetched)
            following = self._staged_run(number, 0)
            for j in range(RUNS):
                units = following
                runs = [[run(j) for run in each] for each in decoders]
                self._add_products(runs, [T.Bind(T.reinterpret("float16x8", unit)) for unit in units])
                if j + 1 < RUNS:
                    following = self._staged_run(number, j + 1)
            self._stage(x, 1 - number)
            barrier()

        self._stage(self._activations(X, token0, T.int32(0)), 0)
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

    def _staged_run(self, number, j):
        """Run j of the activations in buffer number 0 or 1, of each of the token tiles."""
        place = T.Bind(self.lane + (number * self.buffer + j * WAVE))
        return [T.Bind(self.lds[place + t * TILE_UNITS]) for t in range(self.tiles_m)]

    def _pieces(self):
        """Units of a group's activations that this thread stages; the last one of several threads may be the same."""
        pieces = [self.thread + i * self.threads for i in range(-(-self.buffer // self.threads))]
        if self.buffer % self.threads:
            pieces[-1] = T.min(pieces[-1], T.int32(self.buffer - 1))
        return [T.Bind(c) for c in pieces]

    def _activations(self, X, token0, group):
        """The loads of these units. Behind the columns they are 0; anything where bodies are whole: none has these."""
        tile0, last = token0 // TOKENS, lanes_shape(self.m, self.k)[0] - 1
        held, loaded = T.Bind(T.min(group, T.int32(self.groups - 1))), []
        for c in self._pieces():
            tile = tile0 + c // TILE_UNITS
            tile = T.min(tile, T.int32(last)) if self.m % self.tile.tokens else tile
            x = T.Bind(X[T.Bind(tile), held, at(T.Bind(c % TILE_UNITS * RUN), RUN)])
            x = T.Bind(T.reinterpret("uint32x4", x))
            if not self.whole:
                counts = group * GROUP + c % GROUP < self.k // BLOCK
                x = T.Bind(T.Select(T.broadcast(counts, UNIT_WORDS), x, T.broadcast(T.uint32(0), UNIT_WORDS)))
            loaded.append(x)
        return loaded

    def _stage(self, loaded, number):
        """To buffer number 0 or 1."""
        for c, unit in zip(self._pieces(), loaded, strict=True):
            T.buffer_store(self.lds, unit, [c + number * self.buffer])


class StagedPair(StagedGemm):
    """Of two weights. The epilogue's values are a float32x8 for each, of rows row.. and row + 16.., four each: those of
    a run (`pairs.py`), which a thread writes at once."""

    def __init__(self, arch, tile, m, k, weights=2):
        super().__init__(arch, tile, m, k, weights)
        if weights != TILES or tile.rows % BLOCK or self.at_once != self.tiles_m:
            raise ValueError(f"{tile} has no whole blocks of rows, or too many for shared memory")

    def _finish(self, first_row, first, padded, token0, row0, epilogue, early):
        tile, blocks = self.tile, self.tile.rows // BLOCK
        with kept(tile.tokens * blocks * RUNS // self.threads) as step:
            c = T.Bind(step * self.threads + self.thread)
            block, run = T.Bind(c % blocks), T.Bind(c // blocks % RUNS)
            token = T.Bind(c // (blocks * RUNS))
            row, target = T.Bind(row0 + block * BLOCK + run * QUAD), T.Bind(token0 + token)
            conditions = [row < padded] if padded % tile.rows else []
            conditions += [target < self.m] if self.m % tile.tokens else []

            def values(weight):
                parts = []
                for half in range(2):
                    place = T.Bind(self._sums_unit(block * 2 + half, weight, token) + run)
                    parts.append(T.Bind(T.reinterpret("float32x4", T.Bind(self.lds[place]))))
                return T.Bind(vector([lane_of(part, e) for part in parts for e in range(QUAD)]))

            with when(all_of(conditions)):
                epilogue(target, row, [values(w) for w in range(self.weights)])


class StagedTiles(StagedGemm):
    """Of two weights, with rows that make no whole blocks, or too many for shared memory: the epilogue gets four rows
    as of `LaneGemm`. Neighbouring threads have those of neighbouring tiles of ROWS, which the layout "lanes" has side
    by side."""

    def _units(self, row_tiles, token_tiles) -> int:
        return super()._units(row_tiles, token_tiles) + self.waves * PAD

    def _sums_unit(self, wave, weight, token):
        """Those of neighbouring threads are in different banks."""
        return super()._sums_unit(wave, weight, token) + wave * PAD

    def _place(self, c, first_row, first, token0, row0):
        wave, own = T.Bind(c % self.tile.waves_n), T.Bind(c // self.tile.waves_n)
        quad, token = T.Bind(own % self.quads), T.Bind(own // self.quads)
        row = T.Bind(row0 + wave * ROWS + quad * QUAD)
        return (wave, token, quad), T.Bind(token0 + first * TOKENS + token), row
