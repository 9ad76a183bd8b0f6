"""A copy in device memory: what other kernels' rates are measured against. In: X uint32 [words]. Out: Y, the same."""

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.device import launch

WIDTH = 4  # words of a load: 128 bits
LOADS = 4  # in flight per thread


def copy(words, arch, name) -> tirx.PrimFunc:
    """Kernel (X uint32 [words], Y uint32 [words]). ValueError unless the words divide among whole workgroups."""
    threads = arch.threads
    if words % (threads * WIDTH * LOADS):
        raise ValueError(f"{words} words do not divide among workgroups of {threads} threads")
    with IRBuilder() as ir, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"tirx.noalias": True, "global_symbol": name})
        X, Y = (T.arg(n, T.buffer((words,), "uint32")) for n in "XY")
        with launch((words // (threads * WIDTH * LOADS),), (threads,)) as (group, thread):
            places = [T.ramp(((group * LOADS + i) * threads + thread) * WIDTH, 1, WIDTH) for i in range(LOADS)]
            for place, value in [(place, T.Bind(X[place])) for place in places]:
                T.buffer_store(Y, value, [place])
    return ir.get()
