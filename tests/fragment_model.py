"""Cooperative matrices without a device that has them.

`FragmentModel` has the operations of `coop_fragments.Fragments` for 16x8x16 in shared memory, distributed over 32 lanes
as NVIDIA's driver does it (seen on an H200, driver 580). All subgroups of a workgroup must multiply equally often.

    monkeypatch.setattr(gemm_few, "Fragments", FragmentModel); FragmentModel.thread = threadIdx.x

`PlainFragments` has them for any shape and wave, with a distribution of its own.
"""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.device import barrier
from mlc_amd.schedules.gpu.registers import at

SHAPE = M, N, K = 16, 8, 16
WAVE, THREADS = 32, 256
OWN = {"a": 8, "b": 4, "sum": 4}  # components of a lane


class FragmentModel:
    thread = None

    def __init__(self, kind, count, shape):
        assert shape == SHAPE
        self.own, self.count = OWN[kind], count
        self.values = T.alloc_buffer((count * self.own,), "float32", scope="local")
        self.shared = T.alloc_buffer((THREADS * self.own,), "float32", scope="shared")

    def fill(self, i, value):
        for e in range(self.own):
            T.buffer_store(self.values, tirx.const(value, "float32"), [i * self.own + e])

    def set(self, i, e, value):
        T.buffer_store(self.values, T.cast(value, "float32"), [i * self.own + e])

    def _share(self, i):
        for e in range(self.own):
            T.buffer_store(self.shared, self.values[i * self.own + e], [self.thread * self.own + e])

    def add_product(self, i, a, ai, b, bi):
        a._share(ai)
        b._share(bi)
        barrier()
        wave, lane = T.Bind(self.thread // WAVE * WAVE), T.Bind(self.thread % WAVE)
        for e in range(self.own):
            row, column = lane // 4 + e // 2 * 8, lane % 4 * 2 + e % 2
            with T.serial(K) as k:
                left = a.shared[(wave + row % 8 * 4 + k % 8 // 2) * a.own + k % 2 + k // 8 * 2 + row // 8 * 4]
                right = b.shared[(wave + column * 4 + k % 8 // 2) * b.own + k % 2 + k // 8 * 2]
                T.buffer_store(self.values, self.values[i * self.own + e] + left * right, [i * self.own + e])
        barrier()

    def store(self, i, place, stride, layout):
        """Into units of four float32."""
        assert layout == "col_major"
        (unit,), lane = place.indices, T.Bind(self.thread % WAVE)
        wave = T.Bind(self.thread // WAVE * (M * N))
        for e in range(self.own):
            row, column = lane // 4 + e // 2 * 8, lane % 4 * 2 + e % 2
            T.buffer_store(self.shared, self.values[i * self.own + e], [wave + column * M + row])
        barrier()
        four = T.Bind(self.shared[at(wave + lane * 4, 4)])
        T.buffer_store(place.source, T.reinterpret("uint32x4", four), [unit + lane // 4 * (stride // 4) + lane % 4])
        barrier()


class PlainFragments:
    """Plain loads and products: operands are read where they are multiplied, sums are distributed over the lanes in
    groups of consecutive columns of a row.

    monkeypatch.setattr(module, "Fragments", PlainFragments); PlainFragments.lane, .wave = threadIdx.x, its extent
    """

    lane, wave, GROUP = None, 0, 4

    def __init__(self, kind, count, shape):
        self.kind, self.count, self.shape = kind, count, shape
        self.places, self.m, self.n = {}, *shape[:2]
        self.own = self.m * self.n // self.wave
        if kind == "sum":
            self.values = T.alloc_buffer((count * self.own,), "float32", scope="local")

    def _position(self, e):
        """Row and column of a lane's component."""
        group = e // self.GROUP * self.wave + self.lane
        return T.Bind(group // (self.n // self.GROUP)), T.Bind(
            group % (self.n // self.GROUP) * self.GROUP + e % self.GROUP
        )

    @staticmethod
    def _element(place, offset):
        """That many elements behind a place in memory, as float32."""
        buffer = place.source
        lanes = int(buffer.dtype.lanes) if hasattr(buffer.dtype, "lanes") else 1
        index, shape = T.int32(0), buffer.shape
        for i, extent in zip(place.indices, shape, strict=True):
            index = index * extent + i
        index = T.Bind(index + offset // lanes)
        indices = []
        for extent in reversed(shape[1:]):
            indices.append(T.Bind(index % extent))
            index = T.Bind(index // extent)
        unit = T.Bind(buffer[(index, *reversed(indices))])
        if lanes == 1:
            return T.Bind(T.cast(unit, "float32"))
        found = T.cast(T.Shuffle([unit], [T.int32(0)]), "float32")
        for i in range(1, lanes):
            found = T.Select(offset % lanes == i, T.cast(T.Shuffle([unit], [T.int32(i)]), "float32"), found)
        return T.Bind(found)

    def _load(self, i, row, column):
        place, stride, layout = self.places[i]
        return self._element(place, T.Bind(row * stride + column if layout == "row_major" else column * stride + row))

    def fill(self, i, value):
        for e in range(self.own):
            T.buffer_store(self.values, tirx.const(value, "float32"), [i * self.own + e])

    def load(self, i, place, stride, layout):
        self.places[i] = place, stride, layout
        if self.kind == "sum":
            with T.serial(self.own) as e:
                T.buffer_store(self.values, self._load(i, *self._position(e)), [i * self.own + e])

    def store(self, i, place, stride, layout):
        """Into float32 or vectors of them, which divide a group."""
        assert layout == "row_major" and self.kind == "sum"
        lanes = int(place.source.dtype.lanes)
        with T.serial(self.own // lanes) as v:
            row, column = self._position(v * lanes)
            values = [self.values[i * self.own + v * lanes + e] for e in range(lanes)]
            value = T.Shuffle(values, [T.int32(e) for e in range(lanes)]) if lanes > 1 else values[0]
            (index,) = place.indices
            T.buffer_store(place.source, value, [index + (row * stride + column) // lanes])

    def add_product(self, i, a, ai, b, bi):
        with T.serial(self.own) as e:
            row, column = self._position(e)
            with T.serial(self.shape[2]) as k:
                product = a._load(ai, row, T.Bind(k + 0)) * b._load(bi, T.Bind(k + 0), column)
                T.buffer_store(self.values, self.values[i * self.own + e] + product, [i * self.own + e])

    def elements(self, i):
        return T.serial(self.own)

    def get(self, i, e):
        return T.Bind(self.values[i * self.own + e])

    def set(self, i, e, value):
        T.buffer_store(self.values, value, [i * self.own + e])
