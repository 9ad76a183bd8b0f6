"""Normalization and activation quantization of token vectors.

    rms_norm    y = x * G / sqrt(mean(x*x) + eps), as float32 or straight to int8 blocks, or both
    layer_norm  y = z * G / sqrt(mean(z*z) + eps) + B, z = x - mean(x), likewise
    quantize    x to int8 blocks

In: `state`, X float32 [m, k]. Out: Y float32 [m, k], or the planes A and S of `quantize.py`. Rows that are not live are
left as they were. A single row takes less time than waking the other threads, so work is split by rows, never by
columns.
"""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.cpu.base.kernel import kernel, live_rows, row_loop
from mlc_amd.schedules.cpu.base.vector import LANES, at, f32, splat, store, tree_add
from mlc_amd.schedules.cpu.linear.quantize import BLOCK, Output
from mlc_amd.schedules.operators.rows import output_rows


def _mean(k, term):
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


def _inverse_deviation(k, eps, value):
    """1 / sqrt(mean of the squares of value(columns) + eps), a scalar in a register."""

    def square(columns):
        x = T.Bind(value(columns))
        return x * x

    return T.Bind(T.float32(1) / T.sqrt(_mean(k, square) + T.float32(eps)))


def answer_source(state, m, i):
    """The row of a step of m that answer i comes from: of the single rows the i-th, then the chunk's last one."""
    return T.Bind(T.Select(i < state[0], i, live_rows(state, m) - 1))


def answer_count(state, m, most):
    """Answers of a step of m, at most `most`: one for each single row, and one for the chunk if there is one."""
    live = live_rows(state, m)
    single = T.Bind(T.max(T.min(state[0], live), T.int32(0)))
    return T.Bind(T.min(single + T.Select(single < live, T.int32(1), T.int32(0)), T.int32(most)))


def _norm(k, m, tile, quantize, rows, name, bias, both, emit):
    """The kernel of a norm. tile(n): rows of a tile of n rows. emit(columns -> X of the row) gives (columns -> what is
    scaled, the row's scale)."""
    if k % BLOCK:
        raise UserError(f"the hidden size must be a multiple of {BLOCK}, not {k}")
    out_m = output_rows(rows, m)
    out_p = tile(out_m)
    with kernel(name) as (builder, state):
        X, G = T.arg("X", T.buffer((m, k), "float32")), T.arg("G", T.buffer((k,), "float32"))
        B = T.arg("B", T.buffer((k,), "float32")) if bias else None
        outputs = [Output(out_m, k, out_p, kind, "Y") for kind in ([quantize, False] if both else [quantize])]
        loop = row_loop(state, out_m) if rows == "all" or out_m == 1 else T.parallel(answer_count(state, m, out_m))
        with loop as i:
            source = i if rows == "all" else answer_source(state, m, i)
            value, scale = emit(lambda columns: X[source, columns])

            def result(columns):
                y = value(columns) * splat(scale) * G[columns]
                return y + B[columns] if bias else y

            with T.serial(k // BLOCK) as block:
                y = [result(at(block * BLOCK + half * LANES)) for half in range(2)]
                y = [T.Bind(values) for values in y] if both else y
                for output in outputs:
                    output.store_block(*y, i, block)
    return builder.get()


def rms_norm(k, m, eps, tile, quantize, rows, isa, name, both=False) -> tirx.PrimFunc:
    """Kernel (state int32[4], X float32 [m, k], G float32 [k], then A, S of [n, k] in tiles of tile(n) rows if
    `quantize`, else Y float32 [n, k]).

    both: Y after A, S as well. rows: which rows are given, and so n: see `schedules.operators.rows`. UserError unless
    32 divides k. `isa` is not used: vectors have 16 lanes and LLVM splits them.
    """
    return _norm(k, m, tile, quantize, rows, name, False, both, lambda x: (x, _inverse_deviation(k, eps, x)))


def layer_norm(k, m, eps, tile, quantize, rows, bias, isa, name, both=False) -> tirx.PrimFunc:
    """As `rms_norm`; B float32 [k] after G if `bias`."""

    def emit(x):
        mean = T.Bind(_mean(k, x))

        def centered(columns):
            return x(columns) - splat(mean)

        return centered, _inverse_deviation(k, eps, centered)

    return _norm(k, m, tile, quantize, rows, name, bias, both, emit)


def quantize(k, m, p, isa, name) -> tirx.PrimFunc:
    """Kernel (state int32[4], X float32 [m, k], A, S): the live rows to int8 blocks in tiles of p rows.

    UserError unless 32 divides k.
    """
    with kernel(name) as (builder, state):
        X = T.arg("X", T.buffer((m, k), "float32"))
        output = Output(m, k, p, True, "")
        with row_loop(state, m) as row, T.serial(k // BLOCK) as block:
            output.store_block(*(X[row, at(block * BLOCK + half)] for half in (0, LANES)), row, block)
    return builder.get()
