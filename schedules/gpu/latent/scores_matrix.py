"""The scores of an indexer on matrix units whose lane layout is known (base/matrices.py), for target rocm and vulkan.

Operand A is the queries of 16 heads. Operand B is keys, which are loaded from the cache to registers. A query is
represented by two float16 numbers for each element, whose sum is nearly exact, so that products are as precise as with
float32. Before this it is scaled by a power of two; its head's weight is divided by the same power. If the lane layout
of the sums is not known, the weighted sums over heads are computed as a matrix too; its columns, one for each key, are
added up in LDS.
"""

from itertools import product

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention.cache import UNIT
from mlc_amd.schedules.gpu.base.device import WAVE_SHARED, barrier, fma, maximum, shuffle_xor, uniform, wave_max
from mlc_amd.schedules.gpu.base.matrices import SIDE, Fragments, Matrices, known_unit, wave_matrices
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.gpu.base.registers import at, each_owned, elements, filled, opaque, put, vector
from mlc_amd.schedules.gpu.base.step import when
from mlc_amd.schedules.operators.attention import PAGE
from mlc_amd.schedules.operators.indexer import SelectKeys
from mlc_amd.schedules.tir import Buffer, Expr

KEYS, WAVES = 32, 8  # keys of a wave, a divisor of PAGE; largest number of waves of a workgroup
SUMS, LOADED = 64, 64  # largest numbers of registers of a lane for sums and for keys
SCALE = 10 << 23  # as float32 exponent bits: a query's largest element is scaled to about 2**10
HIGH = -(1 << 13)  # mask of the bits of a float32 that fit into a float16
SHARED = SIDE // WIDTH + 1  # vectors of a key's sums in LDS, with padding, so that keys begin in different banks


class Queries:
    """The queries of a step as operands, float16 [m, 2, heads * d], and the heads' weights, float32 [m, heads / 16,
    copies, 16]. copies: 1 if the lane layout of sums is known; otherwise a copy for each column of a matrix of sums."""

    def __init__(self, op: SelectKeys, arch: Device):
        self.op, self.arch, unit = op, arch, known_unit(arch)
        self.copies = 1 if unit.knows_sums else unit.side
        self.halves = T.alloc_buffer((op.m, 2, op.heads * op.d), "float16")
        self.weights = T.alloc_buffer((op.m, op.heads // SIDE, self.copies, SIDE), "float32")

    @staticmethod
    def fit(op: SelectKeys, arch: Device) -> bool:
        """Whether the arch has such matrix units, and heads and d are multiples of their sizes."""
        return bool(arch.lane_blocks) and op.heads % SIDE == 0 and op.d % known_unit(arch).columns == 0

    def store(self, Q: Buffer, W: Buffer, row: Expr, head: Expr, lane: Expr) -> None:
        """A wave scales and stores the query of a head of a row, and stores the head's weight."""
        d, largest = self.op.d, filled(T.float32(0))
        own = [(T.Bind(head * d + i * WIDTH), valid) for i, valid in each_owned(lane, self.arch.wave, d // WIDTH)]
        loaded = [elements(T.Bind(Q[row, at(column, WIDTH)])) for column, _ in own]
        for x in (x for each in loaded for x in each):
            put(largest, maximum(largest[0], maximum(x, T.float32(0) - x)), 0)
        bits = T.reinterpret("int32", wave_max(self.arch, T.Bind(largest[0])))
        exponent = opaque(T.max(bits & 0x7F800000, T.int32(SCALE + (1 << 23))) - SCALE)
        factor = T.Bind(T.reinterpret("float32", T.int32(254 << 23) - exponent))
        for (column, valid), each in zip(own, loaded, strict=True):
            scaled = [T.Bind(x * factor) for x in each]
            # by a mask, as NVIDIA's driver removes a conversion to float16 and back
            high = [T.Bind(T.reinterpret("float32", T.reinterpret("int32", x) & HIGH)) for x in scaled]
            low = [x - h for x, h in zip(scaled, high, strict=True)]
            with when(valid):
                for i, parts in enumerate((high, low)):
                    put(self.halves, vector([T.cast(x, "float16") for x in parts]), row, i, at(column, WIDTH))
        with T.If(lane < self.copies), T.Then():
            weight = W[row, head] * T.reinterpret("float32", exponent)
            put(self.weights, weight, row, head // SIDE, lane, head % SIDE)


class MatrixScores:
    """The scores that a workgroup computes, for one group of keys of the cache Ik at a time. pages: (page table, slot
    of the row). place: (row, wave, lane)."""

    @staticmethod
    def shape(op: SelectKeys, arch: Device) -> tuple[int, int]:
        """(waves of a workgroup, keys of a group)."""
        waves = min(WAVES, arch.threads // arch.wave)
        return waves, waves * KEYS

    def __init__(self, op: SelectKeys, arch: Device, queries: Queries, Ik: Buffer, pages, place):
        self.arch, self.queries, self.Ik, (self.pages, self.slot) = arch, queries, Ik, pages
        (self.row, self.wave, self.lane), unit = place, known_unit(arch)
        self.unit, self.d, self.tiles = unit, op.d, KEYS // unit.side
        self.r, self.part = (T.Bind(x) for x in unit.place(self.lane, arch.wave))
        heads = op.heads // SIDE
        together = max(n for n in range(1, heads + 1) if heads % n == 0 and n * self.tiles * unit.acc <= SUMS)
        self.heads = [range(first, first + together) for first in range(0, heads, together)]
        chunks, words = op.d // unit.columns, self.tiles * unit.units * UNIT // 2
        batch = max(n for n in range(1, chunks + 1) if chunks % n == 0 and (n == 1 or n * words <= LOADED))
        self.chunks = [range(first, first + batch) for first in range(0, chunks, batch)]
        self.matrices = wave_matrices(arch, 1, self.tiles, together * self.tiles)
        count = self.shape(op, arch)[1]
        if unit.knows_sums:
            self.shared = T.alloc_buffer((count,), "float32", scope="shared")
        else:
            self.shared = T.alloc_buffer((count * SHARED,), f"float32x{WIDTH}", scope=WAVE_SHARED)
            self.weight, self.totals = (Fragments("sum", n, (SIDE, unit.side, SIDE)) for n in (1, self.tiles))
            self.weight.clear()

    def compute(self, first: Expr, last: Expr) -> None:
        """Computes the scores of the group of keys from `first` on. last: the last key that the row attends to."""
        own = T.Bind(first + self.wave * KEYS)
        page = uniform(self.arch, T.Bind(self.pages[self.slot, T.min(own, last) // PAGE]))
        places = [T.Bind(own % PAGE + t * self.unit.side + self.r) for t in range(self.tiles)]
        self.matrices.clear()
        if self.unit.knows_sums:
            totals = filled(T.float32(0), self.tiles)
        else:
            self.totals.clear()
        for heads in self.heads:
            self.matrices.clear_sums()
            for chunks in self.chunks:
                keys = {
                    (c, t): [T.Bind(self.Ik[page, place, self._columns(c, i)]) for i in range(self.unit.units)]
                    for c, (t, place) in product(chunks, enumerate(places))
                }
                for c in chunks:
                    self._multiply(heads, c, [keys[c, t] for t in range(self.tiles)])
            for n, head in enumerate(heads):
                if self.unit.knows_sums:
                    self._add_known(totals, n, head)
                else:
                    self._add(n, head)
        barrier()  # other waves may still read the sums of the previous group
        number = T.Bind(self.wave * KEYS)
        for t in range(self.tiles):
            if self.unit.knows_sums:
                total = T.Bind(totals[t])
                for distance in self.unit.sharing(self.arch.wave):
                    total = T.Bind(total + shuffle_xor(self.arch, total, distance))
                with T.If(self.part == 0), T.Then():
                    put(self.shared, total, number + t * SIDE + self.r)
            else:
                place = self.shared[(number + t * self.unit.side) * SHARED]
                self.totals.store(t, place, SHARED * WIDTH, "col_major")
        barrier()

    def total(self, number: Expr) -> Expr:
        """The score of key `number` of the group."""
        if self.unit.knows_sums:
            return self.shared[number]
        units = [T.Bind(self.shared[number * SHARED + i]) for i in range(SIDE // WIDTH)]
        return sum((x for unit in units for x in elements(unit)), T.float32(0))

    def _columns(self, chunk: int, i: int) -> Expr:
        return at(self.unit.unit(chunk, i, self.part) * UNIT, UNIT)

    def _multiply(self, heads: range, chunk: int, keys: list) -> None:
        """Adds the products of some tiles of heads with all tiles of keys, for a chunk of columns, to the sums."""
        operands = [list(self.matrices.operands("b", t, runs)) for t, runs in enumerate(keys)]
        for (n, head), half in product(enumerate(heads), range(2)):
            rows = [T.Bind((head * SIDE + r) * self.d) for r in self.unit.rows(self.r)]
            runs = [
                T.Bind(self.queries.halves[self.row, half, row + self._columns(chunk, i)])
                for row, i in product(rows, range(self.unit.units))
            ]
            for step, query in enumerate(self.matrices.each("a", 0, runs)):
                for t, key in enumerate(operands):
                    self.matrices.add_product(n * self.tiles + t, query, key[step])

    def _add_known(self, totals: Buffer, n: int, head: int) -> None:
        acc = self.unit.acc
        weights = elements(T.Bind(self.queries.weights[self.row, head, 0, at(self.part * acc, acc)]))
        for t in range(self.tiles):
            for x, weight in zip(elements(self.matrices.result(n * self.tiles + t)), weights, strict=True):
                put(totals, fma(maximum(x, T.float32(0)), weight, totals[t]), t)

    def _add(self, n: int, head: int) -> None:
        assert isinstance(self.matrices, Matrices), "sums that are not known are fragments"
        sums = self.matrices.fragments["sum"]
        self.weight.load(0, self.queries.weights[self.row, head, 0, 0], SIDE, "col_major")
        with sums.elements(0) as e:
            weight = self.weight.get(0, e)
            for t in range(self.tiles):
                positive = maximum(sums.get(n * self.tiles + t, e), T.float32(0))
                self.totals.set(t, e, fma(positive, weight, self.totals.get(t, e)))
