"""The GEMM tile on cooperative matrices (KHR_cooperative_matrix of Vulkan): float16 operands, float32 sums.

A workgroup computes `tokens` tokens by `rows` rows of each of its weights. Per step it stages `columns` columns of both
in shared memory as float16, the weights dequantized on the way (`coop_load.py`) and columns in the order of `pairs.py`;
each of its subgroups then multiplies its share of the tile. The next step's global loads are issued before this step's
multiplications.

Which lane holds which element of a matrix is implementation-defined: sums go through shared memory to the lanes that
store them, four consecutive rows of a token each, in the memory that staging no longer needs. Everything in shared
memory is a unit of 16 bytes.
"""

from dataclasses import dataclass, replace

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.device import barrier, uniform
from mlc_amd.schedules.gpu.base.pairs import RUN, RUNS
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.registers import at
from mlc_amd.schedules.gpu.linear import coop_load

PAD = 1  # units added to each row in shared memory: eight consecutive rows are then in different banks
UNIT_BYTES = 16
ROWS = 4  # float32 of a unit: rows of a token that a lane finishes at once
HELD, HELD_FLOAT = 64, 32  # weights of a step that a thread holds in registers, in blocks of codes or as they are
CHUNKS = 8  # matrices along the columns of a step: they are unrolled


@dataclass(frozen=True)
class CoopTile:
    """A workgroup's tile: tokens and rows (of one weight), columns of a step, subgroups along tokens and rows. waves_k:
    subgroups that share out a step's columns; their sums are added last. span: blocks of a row that a thread takes at a
    time."""

    tokens: int
    rows: int
    columns: int
    waves_m: int
    waves_n: int
    waves_k: int = 1
    span: int = 1


# By tokens: tiles, and how fast a compute unit works on them if all have equal work, in percent of the fastest, for one
# weight and for two. Few tokens: many columns, so that enough bytes of weights are in flight.
TILES = {
    128: (
        (CoopTile(128, 128, 64, 2, 2), (100, 100)),
        (CoopTile(128, 64, 64, 2, 2), (90, 90)),
        (CoopTile(64, 64, 64, 2, 2), (70, 70)),
    ),
    64: (
        (CoopTile(64, 32, 128, 2, 2), (100, 42)),
        (CoopTile(64, 128, 64, 2, 2), (56, 100)),
        (CoopTile(64, 64, 64, 2, 2), (50, 53)),
    ),
    32: ((CoopTile(32, 32, 256, 1, 2, 2), (100, 100)),),
    16: (
        (CoopTile(16, 16, 512, 1, 1, 4), (100, 44)),
        (CoopTile(16, 64, 128, 1, 2, 2), (67, 100)),
        (CoopTile(16, 16, 256, 1, 1, 4), (80, 81)),
    ),
}


def choose(arch, formats, m, k, rows, weights=1):
    """The default CoopTile for m tokens, k columns and `rows` rows altogether of weights in these formats, `weights` of
    which share the accumulators (gate and up: 2): the one with the minimum load of the busiest compute unit.
    ValueError unless m is a multiple of 16 and k of 32."""
    tokens = next((t for t in (128, 64, 32, 16) if m % t == 0), None)
    if tokens is None or k % BLOCK:
        raise ValueError(f"{m} tokens of {k} columns are no tiles of 16 x {BLOCK}")
    times = {}
    for tile, speeds in TILES[tokens]:
        found = _fit(tile, arch, formats, k, weights) if m % tile.tokens == 0 else None
        if found:
            workgroups = m // found.tokens * -(-rows // found.rows)
            times.setdefault(found, -(-workgroups // arch.units) * found.tokens * found.rows / speeds[weights - 1])
    if not times:
        raise ValueError(
            f"{arch.name} has no tile for {m} tokens: matrices of {arch.fragment}, {arch.lds} bytes of shared memory"
        )
    return min(times, key=times.get)


EXPERT_HELD = 2  # times HELD: such tiles have fewer sums


def choose_expert(arch, formats, slots, k, weights=1):
    """The default CoopTile for `slots` slots of one expert, see `choose`; None if that has to find one. There are
    workgroups enough: many rows share the activations, of two weights fewer where these are few."""
    if slots not in (16, 32, 64):
        return None
    tile = CoopTile(slots, 128 if slots == 64 else 128 // weights, 64, 1, 4)
    held = EXPERT_HELD * (HELD_FLOAT if any(f.kind == "float" for f in formats) else HELD)
    for columns in (tile.columns, BLOCK):
        found = replace(tile, columns=columns)
        try:
            gemm = CoopGemm(arch, found, k, weights)
        except ValueError:
            continue
        if weights * tile.rows * columns <= held * gemm.threads:
            return found
    return None


def _fit(tile, arch, formats, k, weights):
    """The tile for `weights` weights with as many columns as k, shared memory and registers allow; None if there is
    none."""
    rows = max(tile.rows // weights, arch.fragment[1] * tile.waves_n)
    threads = tile.waves_m * tile.waves_n * tile.waves_k * arch.wave
    held = HELD_FLOAT if any(fmt.kind == "float" for fmt in formats) else HELD
    for columns in (512, 256, 128, 64, 32):
        found = replace(tile, rows=rows, columns=columns)
        limit = min(
            tile.columns, max(held * threads // (weights * rows), BLOCK), CHUNKS * arch.fragment[2] * tile.waves_k
        )
        try:
            if columns <= limit:
                CoopGemm(arch, found, k, weights)
                return found
        except ValueError:
            continue
    return None


class CoopGemm:
    """The tile routine of one kernel: use as `gemm_matrix.MatrixGemm`. ValueError for a tile that does not fit."""

    rows_side_by_side = 1

    def __init__(self, arch, tile, k, weights=1):
        (fm, fn, fk), self.arch, self.tile, self.k, self.weights = arch.fragment, arch, tile, k, weights
        waves = tile.waves_m * tile.waves_n * tile.waves_k
        self.threads = waves * arch.wave
        self.ld, self.steps, self.share = tile.columns // RUN + PAD, k // tile.columns, tile.columns // tile.waves_k
        self.tiles_m, self.tiles_n = tile.tokens // tile.waves_m // fm, tile.rows // tile.waves_n // fn
        if (
            self.tiles_m * tile.waves_m * fm != tile.tokens
            or self.tiles_n * tile.waves_n * fn != tile.rows
            or k % tile.columns
        ):
            raise ValueError(f"{tile} does not divide into {fm} x {fn} matrices of {k} columns")
        if self.share * tile.waves_k != tile.columns or self.share % max(fk, RUN):
            raise ValueError(f"the {tile.columns} columns of {tile} do not divide among its subgroups")
        if tile.columns % (tile.span * BLOCK):
            raise ValueError(f"{tile}: {tile.columns} columns are no multiple of {tile.span} blocks")
        self.sums_ld = self.tiles_n * fn // ROWS + PAD
        self.units = max((tile.tokens + weights * tile.rows) * self.ld, waves * weights * fm * self.sums_ld)
        if self.units * UNIT_BYTES > arch.lds or self.threads > arch.threads:
            raise ValueError(
                f"{tile} takes {self.units * UNIT_BYTES} bytes of shared memory and {self.threads} threads"
            )

    def allocate(self, thread):
        """Declares shared memory and matrices inside the launch; `thread`: threadIdx.x."""
        (fm, fn, fk), tile, self.thread = self.arch.fragment, self.tile, thread
        wave = uniform(self.arch, thread // self.arch.wave)
        self.lane = T.Bind(thread % self.arch.wave)
        self.wave_m, self.wave_n = T.Bind(wave % tile.waves_m), T.Bind(wave // tile.waves_m % tile.waves_n)
        self.wave_k = T.Bind(wave // (tile.waves_m * tile.waves_n))
        self.lds = T.alloc_buffer((self.units,), "uint32x4", scope="shared")
        self.a = T.alloc_buffer((self.tiles_m * fm * fk,), "float16", scope="wmma.matrix_a")
        self.b = T.alloc_buffer((self.weights * self.tiles_n * fk * fn,), "float16", scope="wmma.matrix_b")
        self.sums = T.alloc_buffer(
            (self.tiles_m * self.weights * self.tiles_n * fm * fn,), "float32", scope="wmma.accumulator"
        )

    def emit(self, acts, weights, token0, row0, epilogue, first=None):
        """One tile: tokens token0.. of the activations, (H [m, k],) in the layout "pairs" or (X [m, k],) float32; rows
        row0.. of the weights, a list of (fmt, bufs, padded rows). first: the row of a stack of weights that is row 0
        of these.

        Calls epilogue(token, row, values): per weight a float32x4 of results of the token for the rows from `row` on,
        all of them below the padded number of rows.
        """
        (X,), self.first = acts, first
        weights = [(fmt, coop_load.views(fmt, bufs, self.tile.span), padded) for fmt, bufs, padded in weights]
        for i in range(self.tiles_m * self.weights * self.tiles_n):
            T.evaluate(T.tvm_fill_fragment(self.sums.data, *self.arch.fragment, i, T.float32(0)))
        self._stage(self._fetch(X, weights, token0, row0, T.int32(0)))
        barrier()
        with T.serial(self.steps) as step:
            following = self._fetch(X, weights, token0, row0, T.Bind(T.min(step + 1, self.steps - 1)))
            self._multiply()
            barrier()
            self._stage(following)
            barrier()
        for i in range(self.tiles_m):
            self._hand_over(i)
            barrier()
            self._finish(i, weights[0][2], token0, row0, epilogue)
            barrier()

    def _weight_unit(self, weight):
        """First unit of a weight in shared memory; the activations come before them."""
        return (self.tile.tokens + weight * self.tile.rows) * self.ld

    # ---- staging

    def _pieces(self, rows, per_row):
        """(row, number in the row) of each piece that this thread stages; what is left over several threads stage, the
        same."""
        total, threads = rows * per_row, self.threads
        for i in range(-(-total // threads)):
            c = self.thread + i * threads
            c = T.Bind(c if (i + 1) * threads <= total else c % total)
            yield T.Bind(c // per_row), T.Bind(c % per_row)

    def _x_pieces(self, X):
        """Pieces of the activations: runs, or blocks where they are float32."""
        return list(self._pieces(self.tile.tokens, self.tile.columns // (BLOCK if str(X.dtype) == "float32" else RUN)))

    def _fetch(self, X, weights, token0, row0, step):
        """The global loads of a step, in registers: [(unit in shared memory, values)] of the activations and [(unit,
        format, what `coop_load.fetch` gave)] of the weights."""
        x, w, columns = [], [], self.tile.columns
        for row, i in self._x_pieces(X):
            if str(X.dtype) == "float32":
                x.append(
                    (row * self.ld + i * RUNS, coop_load.activations(X, token0 + row, step * (columns // BLOCK) + i))
                )
            else:
                x.append((row * self.ld + i, [T.Bind(X[token0 + row, at(step * columns + i * RUN, RUN)])]))
        per_row = columns // (self.tile.span * BLOCK)
        for n, (fmt, planes, padded) in enumerate(weights):
            for row, i in self._pieces(self.tile.rows, per_row):
                held = T.min(row0 + row, padded - 1) if padded % self.tile.rows else row0 + row
                held = T.Bind(held if self.first is None else self.first + held)
                unit = self._weight_unit(n) + row * self.ld + i * (self.tile.span * RUNS)
                w.append((unit, fmt, coop_load.fetch(fmt, planes, held, step * per_row + i, self.tile.span)))
        return x, w

    def _stage(self, loaded):
        """Registers to shared memory, as float16."""
        for unit, values in [
            *loaded[0],
            *((unit, coop_load.runs(self.arch, fmt, raw, self.tile.span)) for unit, fmt, raw in loaded[1]),
        ]:
            for j, run in enumerate(values):
                T.buffer_store(self.lds, T.reinterpret("uint32x4", run), [unit + j])

    # ---- matrices

    def _load(self, buffer, index, unit, layout):
        address = T.address_of(self.lds[unit])
        T.evaluate(T.tvm_load_matrix_sync(buffer.data, *self.arch.fragment, index, address, self.ld * 4, layout))

    def _multiply(self):
        """What is in shared memory into the sums."""
        fm, fn, fk = self.arch.fragment
        columns = self.weights * self.tiles_n
        for k in range(0, self.share, fk):
            first = self.wave_k * (self.share // RUN) + k // RUN
            for i in range(self.tiles_m):
                self._load(self.a, i, (self.wave_m * (self.tiles_m * fm) + i * fm) * self.ld + first, "row_major")
            for w in range(self.weights):
                for j in range(self.tiles_n):
                    row = self.wave_n * (self.tiles_n * fn) + j * fn
                    self._load(self.b, w * self.tiles_n + j, self._weight_unit(w) + row * self.ld + first, "col_major")
            for i in range(self.tiles_m):
                for j in range(columns):
                    total = (self.sums.data, i * columns + j)
                    T.evaluate(T.tvm_mma_sync(*total, self.a.data, i, self.b.data, j, *total))

    # ---- results

    def _sums_unit(self, wave_k, weight):
        """First unit of this subgroup's sums of a weight, or those of the subgroup that has other columns of the same
        tile."""
        tile, fm = self.tile, self.arch.fragment[0]
        wave = (wave_k * tile.waves_m + self.wave_m) * tile.waves_n + self.wave_n
        return (wave * self.weights + weight) * (fm * self.sums_ld)

    def _hand_over(self, i):
        """Row i of the subgroup's matrices of sums to shared memory."""
        fn = self.arch.fragment[1]
        for w in range(self.weights):
            for j in range(self.tiles_n):
                index = (i * self.weights + w) * self.tiles_n + j
                address = T.address_of(self.lds[self._sums_unit(self.wave_k, w) + j * (fn // ROWS)])
                T.evaluate(
                    T.tvm_store_matrix_sync(
                        self.sums.data, *self.arch.fragment, index, address, self.sums_ld * 4, "row_major"
                    )
                )

    def _finish(self, i, padded, token0, row0, epilogue):
        """Hands row i of the matrices of sums to the epilogue; rows beyond the weight's are left out."""
        (fm, fn, _), tile = self.arch.fragment, self.tile
        units, lanes = self.tiles_n * fn // ROWS, self.arch.wave * tile.waves_k
        with T.serial(-(-fm * units // lanes)) as step:
            c = T.Bind(step * lanes + (self.wave_k * self.arch.wave + self.lane))
            token, unit = T.Bind(c // units), T.Bind(c % units)
            row = T.Bind(row0 + self.wave_n * (self.tiles_n * fn) + unit * ROWS)

            def store():
                values = []
                for w in range(self.weights):
                    parts = [
                        self.lds[self._sums_unit(part, w) + token * self.sums_ld + unit] for part in range(tile.waves_k)
                    ]
                    parts = [T.reinterpret("float32x4", T.Bind(part)) for part in parts]
                    values.append(T.Bind(sum(parts[1:], parts[0])))
                epilogue(T.Bind(token0 + (self.wave_m * self.tiles_m + i) * fm + token), row, values)

            conditions = [row < padded] if padded % tile.rows else []
            conditions += [c < fm * units] if fm * units % lanes else []
            if not conditions:
                store()
                return
            with T.If(conditions[0] if len(conditions) == 1 else conditions[0] & conditions[1]), T.Then():
                store()
