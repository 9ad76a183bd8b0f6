"""The embedding lookup: rows of the embedding table, decoded to float32.

In: `state` int32[4] (state[1]: live tokens), tokens int32[m], the table's planes in the "rows" layout. Out: X float32
[m, k]. A thread makes one column: a token is a few thousand, and its row's planes stay in the cache.
"""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.base.device import launch
from mlc_amd.schedules.gpu.base.planes import decode, plane_args
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.step import kernel, live_rows, state_arg
from mlc_amd.schedules.gpu.base.threads import ThreadsPlan, columns_space, threads_of
from mlc_amd.schedules.operators import Embed
from mlc_amd.schedules.space import Space


@registry.builds(Embed)
def embed(op: Embed, arch: Device, name: str, plan: ThreadsPlan | None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], tokens int32[m], planes of the [vocab, k] table, X float32 [m, k]): X[i] =
    table[tokens[i]] * scale for live i.

    Token numbers outside the vocabulary read its first or last row (nothing out of bounds). UserError when the format
    does not allow k.
    """
    k, m, threads = op.k, op.m, threads_of(arch, plan)
    with kernel(name) as ir:
        state, tokens = state_arg(), T.arg("tokens", T.buffer((m,), "int32"))
        table = plane_args(op.fmt, op.vocab, k)
        X = T.arg("X", T.buffer((m, k), "float32"))
        with launch((-(-k // threads), m), (threads,)) as (chunk, token, thread):
            column = T.Bind(chunk * threads + thread)
            with T.If((column < k) & (token < live_rows(state, m))), T.Then():
                row = T.Bind(T.max(T.min(tokens[token], T.int32(op.vocab - 1)), T.int32(0)))
                x = decode(op.fmt, table, row, column)
                T.buffer_store(X, x if op.scale == 1.0 else x * T.float32(op.scale), [token, column])
    return ir.get()


@registry.plans(Embed)
def plans(op: Embed, arch: Device) -> Space:
    return columns_space(op.k, op.m, 1, arch)
