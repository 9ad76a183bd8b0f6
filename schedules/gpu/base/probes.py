"""Kernels that tell what a device does: its memory's rate, and which lane has which components of matrices."""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.runtime.matrix_lanes import DISTRIBUTIONS, LANES
from mlc_amd.schedules.gpu.base.device import launch
from mlc_amd.schedules.gpu.base.matrices import Fragments
from mlc_amd.schedules.gpu.base.profiles import Device, Profile
from mlc_amd.schedules.gpu.base.step import kernel, when

WIDTH = 4  # words of a load: 128 bits
LOADS = 4  # in flight per thread


def copy(words: int, arch: Device, name: str) -> tirx.PrimFunc:
    """Kernel (X uint32 [words], Y uint32 [words]), Y = X: what other kernels' rates are measured against. ValueError
    unless the words divide among whole workgroups."""
    threads = arch.threads
    if words % (threads * WIDTH * LOADS):
        raise ValueError(f"{words} words do not divide among workgroups of {threads} threads")
    with kernel(name) as ir:
        X, Y = (T.arg(n, T.buffer((words,), "uint32")) for n in "XY")
        with launch((words // (threads * WIDTH * LOADS),), (threads,)) as (group, thread):
            places = [T.ramp(((group * LOADS + i) * threads + thread) * WIDTH, 1, WIDTH) for i in range(LOADS)]
            for place, value in [(place, T.Bind(X[place])) for place in places]:
                T.buffer_store(Y, value, [place])
    return ir.get()


def fragment_probe(arch: Profile, name: str) -> tirx.PrimFunc:
    """PrimFunc (Index float16 [m * k], A and B float32 [lanes, 1 + components], Sums float32 [m * n]) for the arch's
    `lane_matrix` (m, n, k) and one subgroup. Index[i] = i. A and B, operands of products, get how many components a
    lane has of the matrices A[r, c] = r * k + c and B[r, c] = r * n + c, and as many of these as are expected, in
    order. Sums, a result in memory, row by row, gets lane * components + component."""
    (m, n, k), expected = arch.lane_matrix, DISTRIBUTIONS[arch.lane_unit]
    counts = {"a": expected.a_row.shape[1], "b": expected.b_column.shape[1]}
    with kernel(name) as ir:
        index = T.arg("Index", T.buffer((m * k,), "float16"))
        outs = [T.arg(kind.upper(), T.buffer((LANES, 1 + count), "float32")) for kind, count in counts.items()]
        result = T.arg("Sums", T.buffer((m * n,), "float32"))
        with launch((1,), (LANES,)) as (_, lane):
            for (kind, count), columns, out in zip(counts.items(), (k, n), outs, strict=True):
                fragment = Fragments(kind, 1, (m, n, k))
                fragment.load(0, index[0], columns, "row_major")
                with fragment.elements(0) as i:
                    T.buffer_store(out, T.cast(i + 1, "float32"), [lane, 0])
                    with when(i < count):
                        T.buffer_store(out, T.cast(fragment.get(0, i), "float32"), [lane, i + 1])
            sums, count = Fragments("sum", 1, (m, n, k)), m * n // LANES
            sums.fill(0, 0)
            for i in range(count):
                sums.set(0, i, T.cast(lane * count + i, "float32"))
            sums.store(0, result[0], n, "row_major")
    return ir.get()
