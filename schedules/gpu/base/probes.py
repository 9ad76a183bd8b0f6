"""Kernels that measure a device: `copy` for the bandwidth of its memory, `fragment_probe` for the distribution of
cooperative matrices over lanes."""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.runtime.matrix_lanes import DISTRIBUTIONS, LANES
from mlc_amd.schedules.gpu.base.device import launch
from mlc_amd.schedules.gpu.base.matrices import Fragments
from mlc_amd.schedules.gpu.base.profiles import Device, Profile
from mlc_amd.schedules.gpu.base.step import kernel, when

WIDTH = 4  # words of a load: 128 bits
LOADS = 4  # loads in flight per thread


def copy(words: int, arch: Device, name: str) -> tirx.PrimFunc:
    """Kernel (X uint32 [words], Y uint32 [words]): Y = X. Its rate is the bandwidth with which other kernels are
    compared. Raises ValueError unless `words` is a multiple of what a workgroup copies."""
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
    """Kernel (Index float16 [m * k], A and B float32 [lanes, 1 + components], Sums float32 [m * n]) for one subgroup
    and the arch's `lane_matrix` (m, n, k). Index must have Index[i] = i.

    It loads operands with the values A[r, c] = r * k + c and B[r, c] = r * n + c, and stores for each lane its number
    of components, then the values of as many components as are expected, in order. It stores a result, row by row,
    whose component i of a lane is lane * components + i."""
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
