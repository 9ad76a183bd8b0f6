"""A copy in device memory: what other kernels' rates are measured against. In: X uint32 [words]. Out: Y, the same."""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.device import launch
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.step import kernel

WIDTH = 4  # words of a load: 128 bits
LOADS = 4  # in flight per thread


def copy(words: int, arch: Device, name: str) -> tirx.PrimFunc:
    """Kernel (X uint32 [words], Y uint32 [words]). ValueError unless the words divide among whole workgroups."""
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
