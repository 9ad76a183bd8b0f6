"""How much the state of a delta net keeps of each channel: Y = exp(a * softplus(X + dt)), where the `d`
columns of a head share an a.

In: `state`, X float32 [m, heads * d], A float32 [heads, padded], Dt float32 [heads * d, padded]. Out: Y float32 [m,
heads * d]. Exponentials and logarithms are the C library's, which round best: states multiply their errors.
"""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.base.arch import Arch
from mlc_amd.schedules.cpu.base.kernel import kernel, live_rows
from mlc_amd.schedules.cpu.base.vector import store
from mlc_amd.schedules.operators import ChannelDecay
from mlc_amd.schedules.operators.attention import padded_columns
from mlc_amd.schedules.runs import softplus


@registry.builds(ChannelDecay)
def channel_decay(op: ChannelDecay, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], X, A, Dt, Y). A thread has a head."""
    heads, d, m = op.heads, op.d, op.m
    columns = heads * d
    with kernel(name) as (builder, state):
        X = T.arg("X", T.buffer((m, padded_columns(columns)), "float32"))
        A, Dt = (
            T.arg(which, T.buffer((padded_columns(n),), "float32")) for which, n in (("A", heads), ("Dt", columns))
        )
        Y = T.arg("Y", T.buffer((m, columns), "float32"))
        live = live_rows(state, m)
        with T.parallel(heads) as head, T.serial(live) as row, T.serial(d) as i:
            column = T.Bind(head * d + i)
            store(Y, T.exp(A[head] * softplus(X[row, column] + Dt[column])), row, column)
    return builder.get()
