"""The CPU's layout "tiles" of activations, int8 blocks of 32 columns, which the linear kernels of all int8 formats
read. And the kernels of norms and of `Quantize`, which produce it.

    A int8    [MT, KB, P, 32]   q = rint(x * (127 / amax)), amax = largest |x| of the 32 columns of one token
    S float32 [MT, KB, 8, P]    eight numbers ("rows") for each block; "int32" means the bits of an int32, from which
                                integer dot products can start:
        0  d = amax / 127                   1  d * sum(q)               2  int32: -sum(q)
        3  d * sum(q[:16])                  4  d * sum(q[16:])
        5  int32: -sum(q[:16])              6  int32: -sum(q[16:])      7  not used

Token m is at [m // P, :, m % P]; KB = columns / 32, MT = ceil(M / P). Weight formats with a minimum need row 1, formats
with a zero point row 2, and formats with scales for 16 columns rows 3 to 6. So the same activations serve all formats.

    rms_norm    y = x * G / sqrt(mean(x*x) + eps), as int8 blocks, float32 or both
    layer_norm  y = z * G / sqrt(mean(z*z) + eps) + B, z = x - mean(x), in the same forms
    quantize    y = x, or x times Hadamard matrices, as int8 blocks or float32

Outputs of rows that are not live are not written. Work is divided by rows only, because a single row takes less time
than waking other threads.
"""

import functools
import math
import operator
from collections.abc import Callable

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.base.arch import Arch, tile_rows
from mlc_amd.schedules.cpu.base.hadamard import hadamard
from mlc_amd.schedules.cpu.base.kernel import kernel, live_rows, row_loop
from mlc_amd.schedules.cpu.base.vector import (
    LANES,
    at,
    dtype,
    f32,
    i32,
    join_lanes,
    reduce,
    registers,
    splat,
    store,
    tree_add,
)
from mlc_amd.schedules.operators import LayerNorm, Quantize, RmsNorm
from mlc_amd.schedules.operators.layouts import output_rows
from mlc_amd.schedules.tir import Buffer, Expr, declared

Load = Callable[[Expr, Expr], Expr]  # loads a float32 vector; arguments: see `Output`
BLOCK = 32  # columns of a block
FIELDS = 8  # rows of S
TINY = 1e-30  # a block with a smaller amax becomes zeros, because 127 / amax could overflow
GROUP = 4  # tokens whose rows of S are computed together, as vectors


def act_args(m: int, k: int, p: int, suffix: str = "") -> tuple[Buffer, Buffer]:
    """Declares the parameters A and S for `m` tokens of `k` columns in tiles of `p` tokens. Raises UserError unless k
    is a multiple of 32."""
    if k % BLOCK:
        raise UserError(
            f"int8 activations need a multiple of {BLOCK} columns, not {k}; use a float weight format for this layer"
        )
    tiles, blocks = -(-m // p), k // BLOCK
    A = T.arg("A" + suffix, T.buffer((tiles, blocks, p, BLOCK), "int8"))
    return A, T.arg("S" + suffix, T.buffer((tiles, blocks, FIELDS, p), "float32"))


class Output:
    """The result [m, k] of a kernel: int8 blocks in tiles of p rows if `quantized`, else float32. Declares its
    parameters: A and S with the suffix in their names, or `name`."""

    def __init__(self, m: int, k: int, p: int, quantized: bool, name: str, suffix: str = ""):
        self.p, self.quantized = p, quantized
        self.buffers: tuple[Buffer, ...] = (
            act_args(m, k, p, suffix) if quantized else (T.arg(name, T.buffer((m, k), "float32")),)
        )

    def store_block(self, x0: Expr, x1: Expr, row: Expr, block: Expr) -> None:
        """Stores a block of 32 columns of a row. x0, x1: float32x16, columns 0..15 and 16..31 of the block."""
        if not self.quantized:
            for half, x in enumerate((x0, x1)):
                store(self.buffers[0], x, row, at(block * BLOCK + half * LANES))
            return
        A, S = self.buffers
        tile, place, x = row // self.p, row % self.p, [T.Bind(x0), T.Bind(x1)]
        top = T.Bind(T.reinterpret("float32", reduce("smax", magnitudes(x))))
        inverse = _inverse(top, 1)
        low, high = (
            reduce("add", _emit_steps(v, inverse, A, tile, block, place, at(half * LANES))) for half, v in enumerate(x)
        )
        for field, value in enumerate(_fields(top, low, high, 1)):
            store(S, value, tile, block, field, place)

    def store_head(self, load: Load, row: Expr, head: Expr, d: int) -> None:
        """Stores the d columns of a head of a row. load(c, n): returns columns c .. c+n-1 of the head, a float32
        vector. d: a multiple of 8, and of 32 if quantized."""
        if d % BLOCK:
            for c in range(0, d, LANES):
                n = min(LANES, d - c)
                store(self.buffers[0], load(c, n), row, at(head * d + c, n))
            return
        with T.serial(d // BLOCK) as block:
            low, high = (load(block * BLOCK + half, LANES) for half in (0, LANES))
            self.store_block(low, high, row, head * (d // BLOCK) + block)

    def store_tile(self, load: Load, tile: Expr, block: Expr, rows: Expr) -> None:
        """Stores a block of 32 columns of the first `rows` of the p rows of a tile; the other rows have no meaning
        afterwards. load(row, c): returns columns c .. c+15 of the block in row `row` of the tile, float32x16. The bits
        are those of `store_block`, but rows of S are computed as vectors, for several tokens together."""
        if not self.quantized:
            with T.serial(rows) as row:
                for c in range(0, BLOCK, LANES):
                    store(self.buffers[0], load(row, c), tile * self.p + row, at(block * BLOCK + c))
            return
        A, S = self.buffers
        n = math.gcd(self.p, GROUP)
        inverses = registers(n)
        with T.serial((rows + (n - 1)) // n) as i:
            first = T.Bind(i * n)
            large = join_lanes(
                T.max, [magnitudes([T.Bind(load(first + j, c)) for c in range(0, BLOCK, LANES)]) for j in range(n)]
            )
            top = T.Bind(T.reinterpret(dtype("float32", n), large))
            store(inverses, _inverse(top, n), at(0, n))
            sums = [
                join_lanes(
                    operator.add,
                    [_emit_steps(load(first + j, c), inverses[j], A, tile, block, first + j, at(c)) for j in range(n)],
                )
                for c in range(0, BLOCK, LANES)
            ]
            for field, value in enumerate(_fields(top, sums[0], sums[1], n)):
                store(S, value, tile, block, field, at(first, n))


def magnitudes(x: list[Expr]) -> Expr:
    """The larger magnitude in each lane of a block's two vectors, as its bits, int32. The bits of magnitudes have the
    same order as the magnitudes, and LLVM's fmax would take more instructions, to handle NaNs."""
    return T.Bind(T.max(*(T.reinterpret(dtype("int32", LANES), v) & i32(0x7FFFFFFF) for v in x)))


def _inverse(top: Expr, n: int) -> Expr:
    """127 / top of `n` lanes; 0 where top is at most TINY."""
    return T.Bind(T.Select(top > f32(TINY, n), f32(127, n) / top, f32(0, n)))


def _emit_steps(x: Expr, inverse: Expr, A: Buffer, *place: Expr) -> Expr:
    """Stores the int8 values q = rint(x * inverse), and returns them as int32."""
    q = T.Bind(T.cast(T.nearbyint(x * splat(inverse)), dtype("int32", LANES)))
    store(A, T.cast(q, dtype("int8", LANES)), *place)
    return q


def _fields(top: Expr, low: Expr, high: Expr, n: int) -> tuple[Expr, ...]:
    """Rows 0 to 6 of S for `n` tokens, one in each lane. top: amax; low, high: the sums of q of the block's halves."""
    d = T.Bind(top / f32(127, n))
    sums = (T.Bind(low + high), low, high)
    scaled = [d * T.cast(s, dtype("float32", n)) for s in sums]
    negative = [T.reinterpret(dtype("float32", n), i32(0, n) - s) for s in sums]
    return d, scaled[0], negative[0], scaled[1], scaled[2], negative[1], negative[2]


Columns = Callable[[Expr], Expr]  # a function of a vector of column numbers that returns their values, float32x16


def _mean(k: int, term: Columns) -> Expr:
    """The mean of term(columns) over the k columns, a scalar. It uses independent sums, which hide the latency of
    additions."""
    sums = next(n for n in (4, 2) if k % (n * LANES) == 0)
    acc = T.alloc_buffer((sums * LANES,), "float32", scope="local")
    for i in range(sums):
        store(acc, f32(0.0), at(i * LANES))
    with T.serial(k // (sums * LANES)) as step:
        for i in range(sums):
            x = term(at((step * sums + i) * LANES))
            store(acc, acc[at(i * LANES)] + x, at(i * LANES))
    total = functools.reduce(operator.add, [acc[at(i * LANES)] for i in range(sums)])
    return tree_add(T.Bind(total)) * T.float32(1 / k)


def _inverse_deviation(k: int, eps: float, value: Columns) -> Expr:
    """1 / sqrt(mean of value(columns)**2 + eps), a scalar in a register."""

    def square(columns: Expr) -> Expr:
        x = T.Bind(value(columns))
        return x * x

    return T.Bind(T.float32(1) / T.sqrt(_mean(k, square) + T.float32(eps)))


def _answer_count(state: Buffer, m: int, most: int) -> Expr:
    """The number of rows that a norm of a step of m rows returns with rows = "answers:most": one for each single row,
    and one for the chunk if there is one, but at most `most`."""
    live = live_rows(state, m)
    single = T.Bind(T.max(T.min(state[0], live), T.int32(0)))
    return T.Bind(T.min(single + T.Select(single < live, T.int32(1), T.int32(0)), T.int32(most)))


@registry.builds(RmsNorm, LayerNorm)
def norm(op: RmsNorm | LayerNorm, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], X float32 [m, k], G float32 [k], [B float32 [k] if a LayerNorm has a bias], then A, S of
    [n, k] in tiles if `layout`, else Y float32 [n, k]).

    both: Y also follows A and S. rows: which n rows are normalized, see `layouts.output_rows`. Raises UserError unless
    k is a multiple of 32.
    """
    k, m, out_m, quantized = op.k, op.m, output_rows(op.rows, op.m), bool(op.layout)
    if k % BLOCK:
        raise UserError(f"the hidden size must be a multiple of {BLOCK}, not {k}")
    with kernel(name) as (builder, state):
        X, G, B = declared(X=(m, k), G=(k,), B=(k,) if isinstance(op, LayerNorm) and op.bias else None)
        kinds, p = [quantized, False] if op.both else [quantized], tile_rows(out_m, arch)
        outputs = [Output(out_m, k, p, kind, "Y") for kind in kinds]
        loop = row_loop(state, out_m) if op.rows == "all" or out_m == 1 else T.parallel(_answer_count(state, m, out_m))
        with loop as i:
            # the row of X for output row i: with "answers" the i-th single row, then the last row of the chunk
            source = i if op.rows == "all" else T.Bind(T.Select(i < state[0], i, live_rows(state, m) - 1))
            mean = None
            if isinstance(op, LayerNorm):
                mean = T.Bind(_mean(k, lambda columns: X[source, columns]))

            def value(columns: Expr) -> Expr:
                return X[source, columns] if mean is None else X[source, columns] - splat(mean)

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
    """Kernel (state int32[4], X float32 [m, k], A, S, or with layout "" Y float32 [m, k]): stores the live rows, with
    op.rotation multiplied by Hadamard matrices. Raises UserError unless k is a multiple of 32 (for A and S)."""
    with kernel(name) as (builder, state):
        X = T.arg("X", T.buffer((op.m, op.k), "float32"))
        output, size = Output(op.m, op.k, tile_rows(op.m, arch), bool(op.layout), "Y"), op.rotation or BLOCK
        with row_loop(state, op.m) as row, T.serial(op.k // size) as part:
            turned = T.alloc_buffer((size,), "float32", scope="local") if op.rotation else None
            if turned is not None:
                with T.serial(size // LANES) as i:
                    store(turned, X[row, at(part * size + i * LANES)], at(i * LANES))
                hadamard(turned, size, size)
            with T.serial(size // BLOCK) as i:
                block = part * (size // BLOCK) + i
                low, high = (
                    X[row, at(block * BLOCK + half)] if turned is None else turned[at(i * BLOCK + half)]
                    for half in (0, LANES)
                )
                output.store_block(low, high, row, block)
    return builder.get()
