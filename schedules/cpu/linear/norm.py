"""Normalization and activation quantization of token vectors.

    rms_norm    y = x * G / sqrt(mean(x*x) + eps), as float32 or straight to int8 blocks, or both
    layer_norm  y = z * G / sqrt(mean(z*z) + eps) + B, z = x - mean(x), likewise
    quantize    x to int8 blocks

In: `state`, X float32 [m, k]. Out: Y float32 [m, k], or the planes A and S of `quantize.py`. Rows that are not live are
left as they were. A single row takes less time than waking the other threads, so work is split by rows, never by
columns.
"""

from collections.abc import Callable

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.base.arch import Arch, tile_rows
from mlc_amd.schedules.cpu.base.kernel import kernel, live_rows, row_loop
from mlc_amd.schedules.cpu.base.vector import LANES, at, f32, splat, store, tree_add
from mlc_amd.schedules.cpu.linear.quantize import BLOCK, Output
from mlc_amd.schedules.operators import LayerNorm, Quantize, RmsNorm
from mlc_amd.schedules.operators.layouts import output_rows
from mlc_amd.schedules.tir import Buffer, Expr, declared

Columns = Callable[[Expr], Expr]  # from a vector of columns to their values, float32x16


def _mean(k: int, term: Columns) -> Expr:
    """The mean of term(columns), float32x16, over the k columns, and what is to be added: a scalar. Independent sums
    hide the latency of additions."""
    sums = next(n for n in (4, 2) if k % (n * LANES) == 0)
    acc = T.alloc_buffer((sums * LANES,), "float32", scope="local")
    for i in range(sums):
        store(acc, f32(0.0), at(i * LANES))
    with T.serial(k // (sums * LANES)) as step:
        for i in range(sums):
            x = term(at((step * sums + i) * LANES))
            store(acc, acc[at(i * LANES)] + x, at(i * LANES))
    total = acc[at(0)]
    for i in range(1, sums):
        total = total + acc[at(i * LANES)]
    return tree_add(T.Bind(total)) * T.float32(1 / k)


def _inverse_deviation(k: int, eps: float, value: Columns) -> Expr:
    """1 / sqrt(mean of the squares of value(columns) + eps), a scalar in a register."""

    def square(columns: Expr) -> Expr:
        x = T.Bind(value(columns))
        return x * x

    return T.Bind(T.float32(1) / T.sqrt(_mean(k, square) + T.float32(eps)))


def answer_source(state: Buffer, m: int, i: Expr) -> Expr:
    """The row of a step of m that answer i comes from: of the single rows the i-th, then the chunk's last one."""
    return T.Bind(T.Select(i < state[0], i, live_rows(state, m) - 1))


def answer_count(state: Buffer, m: int, most: int) -> Expr:
    """Answers of a step of m, at most `most`: one for each single row, and one for the chunk if there is one."""
    live = live_rows(state, m)
    single = T.Bind(T.max(T.min(state[0], live), T.int32(0)))
    return T.Bind(T.min(single + T.Select(single < live, T.int32(1), T.int32(0)), T.int32(most)))


def _centered(k: int, x: Columns) -> Columns:
    mean = T.Bind(_mean(k, x))
    return lambda columns: x(columns) - splat(mean)


@registry.builds(RmsNorm, LayerNorm)
def norm(op: RmsNorm | LayerNorm, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], X float32 [m, k], G float32 [k], [B float32 [k] if a LayerNorm has a bias], then A, S of
    [n, k] in tiles if `layout`, else Y float32 [n, k]).

    both: Y after A, S as well. rows: which rows are normalized, and so n: see `layouts.output_rows`. UserError
    unless 32 divides k.
    """
    k, m, out_m, quantized = op.k, op.m, output_rows(op.rows, op.m), bool(op.layout)
    if k % BLOCK:
        raise UserError(f"the hidden size must be a multiple of {BLOCK}, not {k}")
    with kernel(name) as (builder, state):
        X, G, B = declared(X=(m, k), G=(k,), B=(k,) if isinstance(op, LayerNorm) and op.bias else None)
        kinds, p = [quantized, False] if op.both else [quantized], tile_rows(out_m, arch)
        outputs = [Output(out_m, k, p, kind, "Y") for kind in kinds]
        loop = row_loop(state, out_m) if op.rows == "all" or out_m == 1 else T.parallel(answer_count(state, m, out_m))
        with loop as i:
            source = i if op.rows == "all" else answer_source(state, m, i)

            def row(columns: Expr) -> Expr:
                return X[source, columns]

            value = _centered(k, row) if isinstance(op, LayerNorm) else row
            scale = _inverse_deviation(k, op.eps, value)

            def result(columns: Expr) -> Expr:
                y = value(columns) * splat(scale) * G[columns]
                return y if B is None else y + B[columns]

            with T.serial(k // BLOCK) as block:
                y = [result(at(block * BLOCK + half * LANES)) for half in range(2)]
                y = [T.Bind(values) for values in y] if op.both else y
                for output in outputs:
                    output.store_block(y[0], y[1], i, block)
    return builder.get()


@registry.builds(Quantize)
def quantize(op: Quantize, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], X float32 [m, k], A, S): the live rows to int8 blocks in tiles.

    UserError unless 32 divides k.
    """
    with kernel(name) as (builder, state):
        X = T.arg("X", T.buffer((op.m, op.k), "float32"))
        output = Output(op.m, op.k, tile_rows(op.m, arch), True, "")
        with row_loop(state, op.m) as row, T.serial(op.k // BLOCK) as block:
            low, high = (X[row, at(block * BLOCK + half)] for half in (0, LANES))
            output.store_block(low, high, row, block)
    return builder.get()
