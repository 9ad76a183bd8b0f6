"""Kernels that combine the parts of all ranks on the CPU: `all_reduce` adds them, `all_gather` concatenates them
(schedules/operators/exchange.py). The parameter P must have all parts when a kernel is called. n: a multiple of
LANES."""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.base.arch import Arch
from mlc_amd.schedules.cpu.base.kernel import kernel, row_loop
from mlc_amd.schedules.cpu.base.vector import LANES, at, store
from mlc_amd.schedules.operators.exchange import AllGather, AllReduce
from mlc_amd.schedules.tir import declared


@registry.builds(AllReduce)
def all_reduce(op: AllReduce, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], X float32 or float16 [m, n], [R float32 [m, n]], Y float32 [m, n], P [parts, m, n] with
    the dtype of X): Y = R + the sum of P over parts, in their order."""
    n, m, shape = op.n, op.m, (op.m, op.n)
    with kernel(name) as (builder, state):
        declared(op.dtype, X=shape)
        R, Y = declared(R=shape if op.residual else None, Y=shape)
        (P,) = declared(op.dtype, P=(op.parts, *shape))
        with row_loop(state, m) as row, T.serial(n // LANES) as step:
            columns = at(step * LANES)
            total = None if R is None else R[row, columns]
            for part in range(op.parts):
                own = T.cast(P[part, row, columns], f"float32x{LANES}")
                total = own if total is None else T.Bind(total + own)
            store(Y, total, row, columns)
    return builder.get()


@registry.builds(AllGather)
def all_gather(op: AllGather, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], X float32 [m, n], Y float32 [m, parts * n], P float32 [parts, m, n]): a row of Y is the
    concatenation of the rows of all parts."""
    n, m = op.n, op.m
    with kernel(name) as (builder, state):
        _, Y, P = declared(X=(m, n), Y=(m, op.parts * n), P=(op.parts, m, n))
        with row_loop(state, m) as row:
            for part in range(op.parts):
                with T.serial(n // LANES) as step:
                    store(Y, P[part, row, at(step * LANES)], row, at(part * n + step * LANES))
    return builder.get()
