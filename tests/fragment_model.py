"""Cooperative matrices without a device that has them: the operations of `coop_fragments.Fragments` for 16x8x16 in
shared memory, distributed over 32 lanes as NVIDIA's driver does it (PTX: mma.m16n8k16).

    monkeypatch.setattr(gemm_few, "Fragments", FragmentModel); FragmentModel.thread = threadIdx.x

All subgroups of a workgroup must multiply equally often.
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
                left = a.shared[(wave + row % 8 * 4 + k % 8 // 2) * a.own + k % 2 + row // 8 * 2 + k // 8 * 4]
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
