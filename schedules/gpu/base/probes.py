"""Kernels that tell what a device does: its memory's rate, and which lane has which components of matrices."""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.coop_fragments import Fragments, Shape
from mlc_amd.schedules.gpu.base.device import launch
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.step import kernel

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


def fragment_probe(shape: Shape, lanes: int, name: str) -> tirx.PrimFunc:
    """PrimFunc (Index float16 [m * k], A float32 [lanes, m * k / lanes], B float32 [lanes, k * n / lanes]) for matrices
    of shape (m, n, k) and one subgroup. Index[i] = i. A and B, operands of products, get the components of the matrices
    A[r, c] = r * k + c and B[r, c] = r * n + c that a lane has, in order."""
    m, n, k = shape
    with kernel(name) as ir:
        index = T.arg("Index", T.buffer((m * k,), "float16"))
        outs = [T.arg(x, T.buffer((lanes, size // lanes), "float32")) for x, size in (("A", m * k), ("B", k * n))]
        with launch((1,), (lanes,)) as (_, lane):
            for kind, columns, out in (("a", k, outs[0]), ("b", n, outs[1])):
                fragment = Fragments(kind, 1, shape)
                fragment.load(0, index[0], columns, "row_major")
                for i in range(int(out.shape[1])):
                    T.buffer_store(out, T.cast(fragment.get(0, i), "float32"), [lane, i])
    return ir.get()
