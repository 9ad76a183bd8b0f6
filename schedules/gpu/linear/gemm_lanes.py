"""The GEMM tile on cooperative matrices whose distribution over lanes is known: weights go from memory to registers to
matrix instructions, without shared memory.

As in `gemm_coop.py`, operands are float16 and sums float32. But weights are operand A (rows x columns) and activations
operand B (columns x tokens), and each lane decodes and loads exactly the elements that it holds of the matrices. The
driver must distribute matrices over lanes in a known way, which the runtime checks
(runtime/devices/vulkan/fragments.py).

The order of columns does not matter for a sum. A subgroup takes `GROUP` blocks of 32 columns at a time. Lane 4*r + q
has block q of rows r and r + 8 of every 16 rows, and block q of token r of every eight tokens. The four runs
(`quantize.py`) of its block are its elements of eight matrices. So a lane reads weights in 16 bytes at a time, and
activations, too, which are stored in the order of lanes (layout "lanes"). The weights of the next group of columns are
loaded while those of this group are multiplied.

The subgroups of a workgroup divide its rows, tokens and columns between them. At the end, sums are added in shared
memory (`lane_results.py`). `lane_tiles.py` chooses the tile.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import ClassVar

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.quantize import RUN, RUNS, TOKENS
from mlc_amd.schedules.gpu.base.registers import Held, at, lane_of, vector
from mlc_amd.schedules.gpu.base.step import kept, live_rows, unknown_zero
from mlc_amd.schedules.gpu.linear import coop_load, load
from mlc_amd.schedules.gpu.linear.deferred_norm import CompletedNorm, RowFactors
from mlc_amd.schedules.gpu.linear.gemm_tile import TileWork
from mlc_amd.schedules.gpu.linear.lane_results import GROUP, ROWS, UNIT, LaneResults
from mlc_amd.schedules.tir import Buffer, Expr

RUN_UNIT = UNIT // RUNS  # float16 elements that a subgroup loads of a run
UNIT_WORDS = 4
BLOCKS = 16  # upper limit of the blocks of 32 columns that a lane has loaded
RESIDENT = 4  # workgroups that a compute unit can hold at the same time

Decoder = Callable[[Expr], Expr]  # of a block: number of a run -> float16x8
Unit = tuple[Expr, Expr | None]  # (block of a row that a lane takes, whether it exists; None if it always does)


class LaneGemm(LaneResults):
    """See the module. Activations: H in the layout "lanes". `store` gets float32x4 values."""

    choices: ClassVar = {
        "tokens": (8, 16, 32, 64, 128), "rows": (16, 32, 48, 64, 80, 96, 112, 128, 256), "waves_m": (1, 2, 4),
        "waves_n": (1, 2, 3, 4, 5, 6, 7, 8),
        "waves_k": (1, 2, 4, 8, 16), "ahead": (0, 1, 2), "hidden": (0, 1), "staged": (0, 1),
    }  # fmt: skip
    completes_norms = True
    cuts_tiles = True
    step_columns = 0  # columns of a step of the loop, if the sums for a norm's factors can be added in it

    def loads(self) -> float:
        blocks = self.weights * self.tiles_n * 2 * (2 if self.tile.ahead else 1)
        if blocks > BLOCKS:
            raise ValueError(f"{self.tile}: a lane would load {blocks} blocks at once")
        return blocks * load.block_bytes(self.of.formats[0])

    def is_quick(self, workgroups: int) -> bool:
        """See `Gemm`. For gate and up only with staged tiles, as other tiles have no registers left for early loads."""
        return workgroups <= RESIDENT * self.arch.units and (self.weights == 1 or bool(self.tile.staged))

    def zero(self, state: Buffer) -> Expr:
        return unknown_zero(state) if self.tile.hidden else None

    def live_and_zero(self, state: Buffer, token0: Expr, quick: bool) -> tuple[Expr, Expr]:
        if not quick:
            return super().live_and_zero(state, token0, quick)
        zero = unknown_zero(state)
        live = T.Bind(live_rows(state, self.m) + zero)  # so that the driver loads both in one instruction
        # with a single token tile, some of its tokens are always live
        return T.bool(True) if self.token_tiles == 1 else token0 < live, zero

    def factors(self, norm: CompletedNorm | None, token0: Expr, first: Expr, quick: bool) -> RowFactors | None:
        """See `Gemm`. quick: whether their inputs are loaded with the columns or before them, instead of after the
        products."""
        factors = super().factors(norm, token0, first, quick)
        if factors and quick and not (self.step_columns and factors.begin(self.step_columns)):
            factors.loaded = factors.load()
        return factors

    def emit(self, work: TileWork) -> None:
        """See `Gemm`. The factors of a norm are computed after the products; a barrier follows before `store`."""
        work = work.viewed()
        for fragments in (self.a, self.b, self.sums):
            fragments.clear()
        hidden = self.tile.hidden and work.zero is not None
        self.exponents = coop_load.hidden(work.zero) if hidden else coop_load.EXPONENTS
        self._sum_up(work)
        if work.factors is not None:
            work.factors.compute()
        self._results(work)

    def _sum_up(self, work: TileWork) -> None:
        ahead = self.tile.ahead
        row, block = T.Bind(self.lane // GROUP), T.Bind(self.lane % GROUP)
        rows = self._rows(work, row)
        first = work.token0 // TOKENS
        tokens = [T.Bind(self._existing(first + (self.wave_m * self.tiles_m + i))) for i in range(self.tiles_m)]

        def fetch(step: Expr) -> tuple[Unit, list]:
            unit = self._unit(step, block)
            return unit, self._fetch(work, rows, unit[0])

        steps = T.Bind((self.groups - self.wave_k + (self.tile.waves_k - 1)) // self.tile.waves_k)
        if not ahead or work.has_floats:  # kept registers must be scalars, but float weights are loaded as vectors
            with T.serial(steps) as step:
                unit, fetched = fetch(step)
                self._multiply(work, fetched, tokens, unit)
        elif ahead == 1:
            held = Held(fetch(T.int32(0))[1])
            with T.serial(steps) as step:
                fetched, unit = held.values(), self._unit(step, block)
                following = fetch(T.Bind(T.min(step + 1, steps - 1)))[1]
                self._multiply(work, fetched, tokens, unit)
                held.keep(following)
        else:
            self._sum_up_ahead(work, tokens, steps, fetch, block)

    def _sum_up_ahead(
        self, work: TileWork, tokens: list[Expr], steps: Expr, fetch: Callable[[Expr], tuple[Unit, list]], block: Expr
    ) -> None:
        """The loop over columns for `ahead` = 2. fetch(step): (unit, weights) of a step. The loop's body has two steps
        if possible: then registers that one step loads for the next one need not be copied, which would wait for
        the load."""
        (X,) = work.acts
        (start, _), first = fetch(T.int32(0))
        weights, runs = Held(first), Held(self._load_run(X, tokens, start, 0))
        own, rest = divmod(self.groups, self.tile.waves_k)
        size = 1 if rest or own % 2 else 2
        with kept(steps if size == 1 else own // size) as body:
            fetched, words = weights.values(), runs.values()
            for i in range(size):
                step = T.Bind(body * size + i)
                unit, live = self._unit(step, block)
                (next_unit, _), following = fetch(T.Bind(T.min(step + 1, steps - 1)))
                decoders = self._decoders(work, fetched)
                for j in range(RUNS):
                    last = j == RUNS - 1
                    next_words = self._load_run(X, tokens, next_unit if last else unit, 0 if last else j + 1)
                    x = [T.Bind(T.reinterpret(f"float16x{RUN}", vector(of))) for of in words]
                    self._add_products([[run(j) for run in each] for each in decoders], self._counted(x, live))
                    words = next_words
                fetched = following
            weights.keep(fetched)
            runs.keep(words)

    def _load_run(self, X: Buffer, tokens: list[Expr], unit: Expr, j: int) -> list[list[Expr]]:
        """Loads run j of the activations of a group of columns, as words, for each token tile."""
        found = [T.Bind(T.reinterpret("uint32x4", x)) for x in self._run_of(X, tokens, unit, j)]
        return [[T.Bind(lane_of(x, word)) for word in range(UNIT_WORDS)] for x in found]

    def _run_of(self, X: Buffer, tokens: list[Expr], unit: Expr, j: Expr) -> list[Expr]:
        """Run j of the activations of a group of columns, for each token tile."""
        group = T.Bind(unit // GROUP)
        return [T.Bind(X[tile, group, at(j * RUN_UNIT + self.lane * RUN, RUN)]) for tile in tokens]

    @staticmethod
    def _counted(x: list[Expr], live: Expr | None) -> list[Expr]:
        """The activations; 0 if the lane has no block."""
        if live is None:
            return x
        zero = T.broadcast(T.float16(0), RUN)
        return [T.Bind(T.Select(T.broadcast(live, RUN), of, zero)) for of in x]

    def _rows(self, work: TileWork, row: Expr) -> list[list[Expr]]:
        """For each weight, the rows that a lane reads: two of each matrix. row: the lane's first row in a matrix."""
        first, halves = self.wave_n * (self.tiles_n * ROWS), range(0, self.tiles_n * ROWS, ROWS // 2)
        first, height = work.row0 + first, self.tile.rows
        return [[work.weight_row(first + (half + row), w, height) for half in halves] for w in work.weights]

    @staticmethod
    def _fetch(work: TileWork, rows: list[list[Expr]], unit: Expr) -> list[list]:
        """Loads a block of each of these rows."""
        weights = zip(work.weights, rows, strict=True)
        return [[coop_load.fetch(w.fmt, w.planes, row, unit, 1) for row in own] for w, own in weights]

    def _unit(self, step: Expr, block: Expr) -> Unit:
        """The unit of a lane in a step. A lane without a block reads the last one."""
        unit = (step * self.tile.waves_k + self.wave_k) * GROUP + block
        whole, last = self.k % (GROUP * BLOCK) == 0, self.k // BLOCK - 1
        if whole and self.groups % self.tile.waves_k == 0:
            return T.Bind(unit), None
        # limited, because a subgroup without any group of columns also loads one ahead
        return T.Bind(T.min(unit, T.int32(last))), None if whole else T.Bind(unit <= last)

    def _existing(self, tile: Expr) -> Expr:
        """The number of the eight tokens of a tile; the last ones if these do not exist."""
        last = -(-self.m // TOKENS) - 1
        return T.min(tile, T.int32(last)) if self.m % self.tile.tokens else tile

    def _multiply(self, work: TileWork, fetched: list[list], tokens: list[Expr], unit: Unit) -> None:
        """Adds the products of a group of columns to the sums."""
        (X,), decoders = work.acts, self._decoders(work, fetched)
        with ExitStack() as loop:
            # a loop makes a quarter of the code; not for float formats, whose runs are loaded vectors
            for j in range(RUNS) if work.has_floats else [loop.enter_context(T.serial(RUNS))]:
                x = self._run_of(X, tokens, unit[0], j)
                runs = [[run(j) for run in each] for each in decoders]
                self._add_products(runs, self._counted(x, unit[1]))

    def _add_products(self, runs: Sequence[Sequence[Expr]], x: Iterable[Expr]) -> None:
        """Adds the products of a run to the sums. runs: of the rows of each weight. x: of the tokens of each matrix."""
        for half in range(2):  # each half of a run has two pairs of columns
            pairs = [4 * half, 4 * half + 2]
            for w in range(self.weights):
                for i in range(self.tiles_n):
                    low, high = runs[w][2 * i], runs[w][2 * i + 1]
                    parts = [lane_of(of, p + e) for of in (low, high) for p in pairs for e in (0, 1)]
                    for e, part in enumerate(parts):
                        self.a.set(w * self.tiles_n + i, e, part)
            for t, of in enumerate(x):
                for e, place in enumerate(p + i for p in pairs for i in (0, 1)):
                    self.b.set(t, e, lane_of(of, place))
            for i in range(self.a.count):
                for t in range(self.tiles_m):
                    self.sums.add_product(i * self.tiles_m + t, self.a, i, self.b, t)

    def _decoders(self, work: TileWork, fetched: list[list]) -> list[list[Decoder]]:
        """The decoder of each loaded block of each weight."""
        decoder = functools.partial(coop_load.decoder, self.arch, exponents=self.exponents)
        return [[decoder(w.fmt, raw) for raw in each] for w, each in zip(work.weights, fetched, strict=True)]
