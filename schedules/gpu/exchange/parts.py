"""Kernels that combine the parts of all GPUs with --split tensor: `all_reduce` adds them, `all_gather` concatenates
them (schedules/operators/exchange.py). The parameter P must have the parts of all GPUs when the kernel is launched.
Each thread computes four columns of a row."""

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.device import launch
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH, column_threads, emit_store, load_columns, own_columns
from mlc_amd.schedules.gpu.base.registers import vector
from mlc_amd.schedules.gpu.base.step import builds, if_live
from mlc_amd.schedules.gpu.linear.deferred_norm import PreparedNorm
from mlc_amd.schedules.operators.exchange import AllGather, AllReduce
from mlc_amd.schedules.tir import Buffer, declared


@builds(AllReduce)
def all_reduce(op: AllReduce, arch: Device, state: Buffer, plan: None) -> None:
    """Kernel (state, X float32 or float16 [m, n], [R float32 [m, n]], [NG, [NS]], Y float32 [m, n], P [parts, m, n]
    with the dtype of X, outputs of a prepared norm): Y = R + the sum of P over parts, in their order. n: a multiple of
    4; of 32 if the kernel prepares a norm."""
    n, m, threads = op.n, op.m, column_threads(op.n, arch)
    declared(op.dtype, X=(m, n))
    (R,) = declared(R=(m, n) if op.residual else None)
    norm = PreparedNorm(m, n, op.norm_out) if op.norm_out else None
    (Y,) = declared(Y=(m, n))
    (P,) = declared(op.dtype, P=(op.parts, m, n))
    if norm:
        norm.declare_outputs()
    with launch((-(-n // (threads * WIDTH)), m), (threads,)) as (chunk, row, thread), if_live(state, m, row):
        column, live = own_columns(chunk, thread, threads, n)
        parts = [[T.cast(x, "float32") for x in load_columns(P, part, row, column)] for part in range(op.parts)]
        total = parts[0] if R is None else load_columns(R, row, column)
        for x in parts[R is None :]:
            total = [T.Bind(t + v) for v, t in zip(x, total, strict=True)]
        emit_store(arch, "", [Y], total, row, column, live)
        if norm:
            norm.store(arch, row, column, vector(total), norm.load(row, column), live)


@builds(AllGather)
def all_gather(op: AllGather, arch: Device, state: Buffer, plan: None) -> None:
    """Kernel (state, X float32 [m, n], Y float32 [m, parts * n], P float32 [parts, m, n]): a row of Y is the
    concatenation of the rows of all parts. n: a multiple of 4."""
    n, m, threads = op.n, op.m, column_threads(op.n, arch)
    _, Y, P = declared(X=(m, n), Y=(m, op.parts * n), P=(op.parts, m, n))
    grid = -(-n // (threads * WIDTH)), m, op.parts
    with launch(grid, (threads,)) as (chunk, row, part, thread), if_live(state, m, row):
        column, live = own_columns(chunk, thread, threads, n)
        emit_store(arch, "", [Y], load_columns(P, part, row, column), row, T.Bind(part * n + column), live)
