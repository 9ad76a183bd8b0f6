"""The GEMM tile on cooperative matrices whose lanes are known: weights go from memory to registers to matrices.

As in `gemm_coop.py`, operands are float16 and sums float32, but weights are operand A (rows x columns) and activations
operand B (columns x tokens), and nothing is staged in shared memory: each lane decodes just those weights that are its
components of the matrices, and loads just those activations. That takes a driver that distributes matrices over the
lanes in a known way, which the runtime checks (runtime/devices/vulkan/fragments.py).

The columns are taken in an order of our own, which a sum over them allows. A subgroup takes `GROUP` blocks of 32
columns at a time. Of its lanes lane 4*r + q has block q of rows r and r + 8 of every 16, and block q of the token r of
every eight: the four runs (`pairs.py`) of a block are the lane's components of eight matrices. Weights are therefore
read in 16 bytes a lane, and so are activations, which come in the order of the lanes ("lanes", `pairs.py`). The weights
of a subgroup's next group are loaded while those of this one are multiplied.

The subgroups of a workgroup share out its rows, its tokens and the columns; at the end the sums meet in shared memory
(`lane_results.py`). Which tile a kernel has: `lane_tiles.py`.
"""

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.coop_fragments import Fragments
from mlc_amd.schedules.gpu.base.device import uniform
from mlc_amd.schedules.gpu.base.pairs import GROUP, LANES, RUN, RUNS, TOKENS, lanes_shape
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.registers import Held, at, lane_of, vector
from mlc_amd.schedules.gpu.base.step import kept
from mlc_amd.schedules.gpu.linear import coop_load
from mlc_amd.schedules.gpu.linear.lane_results import PAD, QUAD, ROWS, LaneResults

COLUMNS = 16
SHAPE = ROWS, TOKENS, COLUMNS  # of the matrices: rows x tokens x columns
WAVE = 32
RUN_UNIT = LANES // RUNS  # halves of a subgroup's loads of a run
UNIT_BYTES, UNIT_WORDS = 16, 4


@dataclass(frozen=True)
class LaneTile:
    """A workgroup's tile: tokens and rows (of one weight), subgroups along tokens, rows and columns.

    ahead   1: the weights of a subgroup's next group are loaded while those of one are multiplied, except float ones;
            2: so are the activations of each next run
    hidden  1: what codes are or'ed with is in registers, as numbers that the compiler does not know. Of two constants
            NVIDIA's makes two instructions for two weights instead of one.
    staged  1: activations go through shared memory (`gemm_staged.py`)
    """

    tokens: int
    rows: int
    waves_m: int
    waves_n: int
    waves_k: int
    ahead: int = 0
    hidden: int = 0
    staged: int = 0


SUMS = 128  # of a lane, at most
# Bytes of shared memory of a thread for the sums of several row tiles at once, at most: with more, NVIDIA's compiler
# takes more registers, and half as many threads are resident.
SHARED = 80


def _each_run(formats):
    """`for j in _each_run(..):` the runs of a block, in a loop of the kernel, which has a fourth of the code; of float
    formats, whose runs are loaded vectors, in copies of the body."""
    if any(fmt.kind == "float" for fmt in formats):
        yield from range(RUNS)
        return
    with T.serial(RUNS) as j:
        yield j


class LaneGemm(LaneResults):
    """The tile routine of one kernel: use as `gemm_matrix.MatrixGemm`. ValueError for a tile that does not fit."""

    rows_side_by_side = 1
    columns = 0  # of each step of the loop, if that calls `each_step`
    scope = "shared"  # of its shared memory

    def __init__(self, arch, tile, m, k, weights=1):
        self.arch, self.tile, self.m, self.k, self.weights = arch, tile, m, k, weights
        self.waves = tile.waves_m * tile.waves_n * tile.waves_k
        self.threads = self.waves * WAVE
        self.tiles_m, self.tiles_n = tile.tokens // tile.waves_m // TOKENS, tile.rows // tile.waves_n // ROWS
        self.groups = -(-k // (GROUP * BLOCK))
        if (
            self.tiles_m * tile.waves_m * TOKENS != tile.tokens
            or self.tiles_n * tile.waves_n * ROWS != tile.rows
            or k % BLOCK
        ):
            raise ValueError(f"{tile} does not divide into {ROWS} x {TOKENS} matrices of {k} columns")
        if self.weights * self.tiles_n * self.tiles_m * (ROWS * TOKENS // WAVE) > SUMS:
            raise ValueError(f"{tile} has more than {SUMS} sums of a lane")
        # as many of the sums at once as there is room for, of all weights; preferably all rows of a token
        parts = [(rows, tokens) for tokens in (8, 4, 2, 1) for rows in range(self.tiles_n, 0, -1)]
        parts = [part for part in parts if self._holds(*part)]
        if not parts or self.threads > arch.lane_threads:
            raise ValueError(f"{tile} takes more shared memory or threads than {arch.name} has")
        self.rows_at_once, self.at_once = max(parts, key=lambda part: part[0] * part[1])
        self.quads = self.rows_at_once * (ROWS // QUAD)  # of a token of a subgroup
        self.ld = self.quads + PAD
        self.units = self._units(self.rows_at_once, self.at_once)

    def _holds(self, row_tiles, token_tiles) -> bool:
        size, factors = self._units(row_tiles, token_tiles) * UNIT_BYTES, 4 * self.tile.tokens  # of `deferred_norm.py`
        whole = self.tiles_m % token_tiles == 0 and self.tiles_n % row_tiles == 0
        return whole and size + factors <= self.arch.lds and (row_tiles == 1 or size <= SHARED * self.threads)

    def allocate(self, thread):
        """Declares shared memory and matrices inside the launch; `thread`: threadIdx.x."""
        tile, self.thread = self.tile, thread
        wave = uniform(self.arch, thread // WAVE)
        self.lane = T.Bind(thread % WAVE)
        self.wave_m, self.wave_n = T.Bind(wave % tile.waves_m), T.Bind(wave // tile.waves_m % tile.waves_n)
        self.wave_k = T.Bind(wave // (tile.waves_m * tile.waves_n))
        self.wave = wave
        self.lds = T.alloc_buffer((self.units,), "uint32x4", scope=self.scope)
        self.a = Fragments("a", self.weights * self.tiles_n, SHAPE)
        self.b = Fragments("b", self.tiles_m, SHAPE)
        self.sums = Fragments("sum", self.weights * self.tiles_n * self.tiles_m, SHAPE)

    def emit(
        self,
        acts,
        weights,
        token0,
        row0,
        epilogue,
        first=None,
        meanwhile=None,
        zero=None,
        early=None,
        each_step=None,
        runs=False,
    ):
        """One tile: tokens token0.. of the activations (H,) in the layout "lanes"; the rest is as in
        `CoopGemm.emit`. meanwhile(): emitted behind the products, a barrier before the epilogue. zero: an int32 that
        is 0, which the compiler does not know; None: there is none, and `hidden` has no effect. early(token, row): what
        the epilogue loads besides, which it gets behind the values; called as early as that can be. each_step(step):
        emitted in each step of the loop, where `columns` is not 0. runs: whether the epilogue gets runs (`pairs.py`),
        which `has_runs` allows: a float32x8 of rows row.. and row + 16.., four each."""
        weights = [(fmt, coop_load.views(fmt, bufs, 1), padded) for fmt, bufs, padded in weights]
        for fragments in (self.a, self.b, self.sums):
            for i in range(fragments.count):
                fragments.fill(i, 0)
        self.exponents = coop_load.hidden(zero) if self.tile.hidden and zero is not None else coop_load.EXPONENTS
        self.each_step = each_step or (lambda step: None)
        self._sum_up(acts[0], weights, token0, row0, first)
        if meanwhile is not None:
            meanwhile()
        if runs:
            self._finish_runs(token0, row0, epilogue, early)
        else:
            self._results(weights[0][2], token0, row0, epilogue, early)

    def _sum_up(self, X, weights, token0, row0, first):
        """The products of all columns."""
        tile = self.tile
        row, block = T.Bind(self.lane // GROUP), T.Bind(self.lane % GROUP)
        rows = self._rows(weights, row0, row, first)
        tokens = [self._token_tile(token0, i) for i in range(self.tiles_m)]
        formats = [fmt for fmt, _, _ in weights]

        def fetch(step):
            unit, live = self._unit(step, block)
            return unit, live, self._fetch(weights, rows, unit)

        steps = T.Bind((self.groups - self.wave_k + (tile.waves_k - 1)) // tile.waves_k)
        if self._ahead(formats) and tile.ahead > 1:
            self._sum_up_ahead(X, formats, tokens, steps, fetch, block)
        elif self._ahead(formats):
            held = Held(fetch(T.int32(0))[2])
            with T.serial(steps) as step:
                fetched, (unit, live) = held.values(), self._unit(step, block)
                following = fetch(T.Bind(T.min(step + 1, steps - 1)))[2]
                self._multiply(X, formats, fetched, tokens, unit, live)
                held.keep(following)
        else:
            with T.serial(steps) as step:
                unit, live, fetched = fetch(step)
                self._multiply(X, formats, fetched, tokens, unit, live)

    def _sum_up_ahead(self, X, formats, tokens, steps, fetch, block):
        """The loop over the columns of `ahead` 2. fetch(step): its unit, whether that counts, its weights. A body has
        two steps if it can: what one loads for the next one then stays in the same registers; to be copied, it would
        have to be there."""
        start, _, first = fetch(T.int32(0))
        weights, runs = Held(first), Held(self._load_run(X, tokens, start, 0))
        own, rest = divmod(self.groups, self.tile.waves_k)
        size = 1 if rest or own % 2 else 2
        with kept(steps if size == 1 else own // size) as body:
            fetched, words = weights.values(), runs.values()
            for i in range(size):
                step = T.Bind(body * size + i)
                unit, live = self._unit(step, block)
                next_unit, _, following = fetch(T.Bind(T.min(step + 1, steps - 1)))
                decoders = self._decoders(formats, fetched)
                for j in range(RUNS):
                    last = j == RUNS - 1
                    next_words = self._load_run(X, tokens, next_unit if last else unit, 0 if last else j + 1)
                    x = [T.Bind(T.reinterpret(f"float16x{RUN}", vector(of))) for of in words]
                    self._add_products([[run(j) for run in each] for each in decoders], self._counted(x, live))
                    words = next_words
                fetched = following
            weights.keep(fetched)
            runs.keep(words)

    def _load_run(self, X, tokens, unit, j):
        """The loads of run j of the activations of a group of columns, as words."""
        found = [T.Bind(T.reinterpret("uint32x4", x)) for x in self._run_of(X, tokens, unit, j)]
        return [[T.Bind(lane_of(x, word)) for word in range(UNIT_WORDS)] for x in found]

    def _run_of(self, X, tokens, unit, j):
        """Run j of the activations of a group of columns, of each of the token tiles."""
        group = T.Bind(unit // GROUP)
        return [T.Bind(X[tile, group, at(j * RUN_UNIT + self.lane * RUN, RUN)]) for tile in tokens]

    @staticmethod
    def _counted(x, live):
        """Activations that are 0 where a lane has no block."""
        if live is None:
            return x
        zero = T.broadcast(T.float16(0), RUN)
        return [T.Bind(T.Select(T.broadcast(live, RUN), of, zero)) for of in x]

    def _rows(self, weights, row0, row, first):
        """Of each weight the rows that a lane reads: two of each matrix. row: its first one in a matrix."""
        return [
            [self._row(row0, i * ROWS + half * (ROWS // 2) + row, padded, first) for i in range(self.tiles_n)
             for half in (0, 1)]
            for _, _, padded in weights
        ]  # fmt: skip

    @staticmethod
    def _fetch(weights, rows, unit):
        """The loads of a block of these rows."""
        return [
            [coop_load.fetch(fmt, planes, r, unit, 1) for r in own]
            for (fmt, planes, _), own in zip(weights, rows, strict=True)
        ]

    def _ahead(self, formats) -> bool:
        """Whether weights are loaded ahead: registers hold scalars only, as which float weights are not loaded."""
        return bool(self.tile.ahead) and all(fmt.kind != "float" for fmt in formats)

    def _row(self, row0, row, padded, first):
        """The row that a lane reads: those beyond the weight's read its last one."""
        row = row0 + self.wave_n * (self.tiles_n * ROWS) + row
        row = T.min(row, padded - 1) if padded % self.tile.rows else row
        return T.Bind(row if first is None else first + row)

    def _unit(self, step, block):
        """(block of a row that a lane takes in that step, whether it counts or None: it does). A lane without a block
        reads the last one."""
        unit = (step * self.tile.waves_k + self.wave_k) * GROUP + block
        whole, last = self.k % (GROUP * BLOCK) == 0, self.k // BLOCK - 1
        if whole and self.groups % self.tile.waves_k == 0:
            return T.Bind(unit), None
        # a subgroup without any group loads one ahead, too
        return T.Bind(T.min(unit, T.int32(last))), None if whole else T.Bind(unit <= last)

    def _token_tile(self, token0, i):
        """The eight tokens of number i of the subgroup's matrices; beyond the last tile of the activations, that."""
        tile = token0 // TOKENS + (self.wave_m * self.tiles_m + i)
        last = lanes_shape(self.m, self.k)[0] - 1
        return T.Bind(T.min(tile, T.int32(last)) if self.m % self.tile.tokens else tile)

    def _multiply(self, X, formats, fetched, tokens, unit, live):
        """Adds the products of a group of columns to the sums."""
        decoders = self._decoders(formats, fetched)
        for j in _each_run(formats):
            x = self._run_of(X, tokens, unit, j)
            runs = [[run(j) for run in each] for each in decoders]
            self._add_products(runs, self._counted(x, live))

    def _add_products(self, runs, x):
        """Those of a run. runs: of the rows of each weight; x: of the tokens of each matrix."""
        for half in range(2):  # of a run: two pairs of columns
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

    def _decoders(self, formats, fetched):
        return [[self._decoder(fmt, raw) for raw in each] for fmt, each in zip(formats, fetched, strict=True)]

    def _decoder(self, fmt, raw):
        """run(j) of what was fetched of a block."""
        if fmt.kind == "float":
            return coop_load.runs(self.arch, fmt, raw, 1).__getitem__
        return coop_load.decoder(self.arch, fmt, raw, exponents=self.exponents)
