"""`attention_rows_matrix.py` for units whose distribution of sums over lanes is unknown (NVIDIA's). Scores go through
shared memory to the lanes that compute weights, and so do outputs at the end. All rows attend to the same keys."""

import operator
from itertools import product

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention.attention_rows_matrix import MatrixRows
from mlc_amd.schedules.gpu.attention.attention_rows_size import out_units, wave_units
from mlc_amd.schedules.gpu.attention.attention_step import LOWEST, Sees, soft_cap
from mlc_amd.schedules.gpu.attention.cache import UNIT, KeyBlock
from mlc_amd.schedules.gpu.base.device import WAVE_SHARED, barrier, wave_barrier
from mlc_amd.schedules.gpu.base.matrices import SIDE, Fragments, Matrices, known_unit
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.gpu.base.registers import elements, put
from mlc_amd.schedules.operators.attention import Attention
from mlc_amd.schedules.tir import Buffer, Expr

# The next keys are only loaded ahead, while values are multiplied, if they have at most so many units. Heads of 128
# have 16, with which an H100 takes 3 to 5 % longer, after 512 tokens and after 16384.
MOST_AHEAD = 8


class SharedRows(MatrixRows):
    """See the module. ahead: whether to load the keys of the next block while this one is multiplied, if there are
    enough registers."""

    scores: Matrices
    out: Matrices

    def __init__(
        self, arch: Device, attention: Attention, count: int, lane: Expr, wave: Expr, waves: int, keys: int, ahead: bool
    ):
        super().__init__(arch, attention, count, lane, wave, waves, keys)
        self.prefetches = ahead and self._loaded["key"] * self.pieces <= MOST_AHEAD
        self.row_units, self.wave_units = out_units(keys), wave_units(arch, count, self.d, keys)
        self.factor, factors = Fragments("sum", 1, (SIDE, self.unit.side, SIDE)), self.tiles * arch.wave
        self.shared = T.alloc_buffer((waves * self.wave_units,), f"float32x{WIDTH}", scope=WAVE_SHARED)
        self.factors = T.alloc_buffer((waves * factors,), f"float32x{WIDTH}", scope=WAVE_SHARED)
        self.base, self.factor_base = T.Bind(wave * self.wave_units), T.Bind(wave * factors)

    def _at_once(self, keys: int) -> int:
        return keys

    @property
    def _loaded(self) -> dict[str, int]:
        """See `MatrixRows`: all keys of a block, and the values of a group of keys."""
        return {"key": self.chunks * self.groups * self.blocks, "value": self.columns}

    def start(self) -> None:
        super().start()
        self.factor.clear()

    def load_keys(self, block: KeyBlock) -> None:
        for n, operand in enumerate(self._keys(block)):
            operand.load(n)

    def step(self, block: KeyBlock, sees: Sees, whole: Expr, zero: Expr, following: KeyBlock | None = None) -> None:
        if following is None:
            self.load_keys(block)
        self.scores.clear_sums()
        for n, key in enumerate(self._keys(block)):
            key.multiply(n)
        self._store(self.scores.fragments["sum"], self.groups * self.blocks, self.row_units)
        wave_barrier()
        weights: list = []
        values = list(self._values(block, weights))
        for group in range(self.groups):
            own = list(enumerate(values[group * self.columns : (group + 1) * self.columns]))
            for n, value in own:
                value.load(n)
            if group == 0:
                if following is not None:
                    self.load_keys(following)
                weights += self._weigh_block(block, sees, whole)
            for n, value in own:
                value.multiply(n)
        wave_barrier()

    def _store(self, sums: Fragments, count: int, row_units: int) -> None:
        """Stores `count` matrices of sums of each tile to shared memory, side by side: a row of shared memory for each
        row."""
        for n, t in product(range(count), range(self.tiles)):
            place = self.shared[self.base + (t * self.unit.side * row_units + n * (SIDE // WIDTH))]
            sums.store(n * self.tiles + t, place, row_units * WIDTH, "col_major")

    def _own_scores(self, block: KeyBlock, sees: Sees, whole: Expr) -> list[list[Expr]]:
        columns = self.unit.columns
        keys = [block.key0 + (g * columns + i) + self.part * UNIT for g in range(self.groups) for i in range(UNIT)]
        seen, found = [T.Bind(sees(0, key)) for key in keys], []
        for t in range(self.tiles):
            place = T.Bind(self.base + (t * self.unit.side + self.row) * self.row_units + self.part * (UNIT // WIDTH))
            units = [g * (columns // WIDTH) + v for g in range(self.groups) for v in range(UNIT // WIDTH)]
            scores = [x for unit in units for x in elements(T.Bind(self.shared[place + unit]))]
            scores = [soft_cap(self.attention, T.Bind(x)) for x in scores]
            found.append([T.Bind(T.Select(own, x, T.float32(LOWEST))) for own, x in zip(seen, scores, strict=True)])
        return found

    def _rescale(self, factors: list[Expr]) -> None:
        out, wave = self.out.fragments["sum"], self.arch.wave
        for t, factor in enumerate(factors):
            put(self.factors, T.broadcast(factor, WIDTH), self.factor_base + (t * wave + self.lane))
        wave_barrier()
        for t in range(self.tiles):
            # By columns, each of which is m times the same factor. A load by rows with a stride of 0 would do, too, but
            # NVIDIA's driver 580 then reads wrong memory in this kernel (not in small ones).
            self.factor.load(0, self.factors[self.factor_base + t * wave], SIDE, "col_major")
            with out.elements(0) as e:
                factor = self.factor.get(0, e)
                for x in range(t, out.count, self.tiles):
                    out.set(x, e, out.get(x, e) * factor)
        wave_barrier()

    def _product(self, t: int, keys: Buffer, begin: Expr) -> Expr:
        total, query, half = T.float32(0), self.scores.fragments["b"], UNIT // self.unit.steps
        for c, i in product(range(self.chunks), range(UNIT)):
            x = T.Bind(T.cast(keys[begin + (c * (self.unit.columns // UNIT) + self.part) * UNIT + i], "float32"))
            place = (t * self.chunks + c) * self.unit.steps + i // half
            total = total + x * T.cast(query.get(place, i % half), "float32")
        return self.across(T.Bind(total), operator.add)

    def _store_outputs(self) -> tuple[Buffer, int, int]:
        self._store(self.out.fragments["sum"], self.columns, out_units(self.d))
        barrier()
        return self.shared, self.wave_units, out_units(self.d)


def rows_on_matrices(
    arch: Device, attention: Attention, count: int, lane: Expr, wave: Expr, waves: int, keys: int, ahead: bool = False
) -> MatrixRows:
    """The state of `count` rows in a wave, on the arch's matrix unit. ahead: see `SharedRows`; ignored for units whose
    distribution of sums is known."""
    if known_unit(arch).knows_sums:
        return MatrixRows(arch, attention, count, lane, wave, waves, keys)
    return SharedRows(arch, attention, count, lane, wave, waves, keys, ahead)
