"""How much the state of a delta net keeps of each channel: Y = exp(a * softplus(X + dt)), where the `d`
columns of a head share an a.

In: `state`, X float32 [m, heads * d], A float32 [heads, padded], Dt float32 [heads * d, padded]. Out: Y float32 [m,
heads * d]. A thread has a column of a row.
"""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.base.device import launch
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.step import if_live, kernel, state_arg, when
from mlc_amd.schedules.operators import ChannelDecay
from mlc_amd.schedules.operators.attention import padded_columns
from mlc_amd.schedules.runs import softplus

THREADS = 128  # of a workgroup, at most: columns


@registry.builds(ChannelDecay)
def channel_decay(op: ChannelDecay, arch: Device, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], X, A, Dt, Y)."""
    heads, d, m = op.heads, op.d, op.m
    columns, threads = heads * d, min(THREADS, arch.threads)
    with kernel(name) as ir:
        state = state_arg()
        X = T.arg("X", T.buffer((m, padded_columns(columns)), "float32"))
        A, Dt = (
            T.arg(which, T.buffer((padded_columns(n),), "float32")) for which, n in (("A", heads), ("Dt", columns))
        )
        Y = T.arg("Y", T.buffer((m, columns), "float32"))
        with launch((-(-columns // threads), m), (threads,)) as (part, row, thread), if_live(state, m, row):
            column = T.Bind(part * threads + thread)
            with when(column < columns if columns % threads else None):
                x = softplus(X[row, column] + Dt[column])
                T.buffer_store(Y, T.exp(A[T.Bind(column // d)] * x), [row, column])
    return ir.get()
