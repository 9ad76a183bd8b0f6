"""The kernels of linear layers on the CPU: y[m, n] = sum over k of w[n, k] * x[m, k]. Decode (m = 1) and prefill use
the same packed weights.

In: `state`; activations (int8 formats: A and S of quantize.py; float formats: X float32 [m, k]); weights as planes of
16-row tiles (planes.py). Out: Y float32 [m, n padded to 16], with bias and residual added.

Decode is bound by memory: it reads the weight once, with prefetches. In prefill a task has several tiles of 16 rows of
the weight, which stay in the L2 cache while the task goes through all activation tiles. Steps of a few rows are bound
by memory too. So for the last activation tile only a part is computed: the smallest one of `linear_plan.parts` that
holds its live rows. The bits of a row's results do not depend on the part.

`gate_up` computes the first half of a feed-forward layer in one launch: y = act(gate(x)) * up(x). y is stored as A and
S of quantize.py, or as float32. A task computes 32 columns of y, one block of A: two tiles of gate and two of up.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.base.activation import activation as activation_of
from mlc_amd.schedules.cpu.base.arch import Arch
from mlc_amd.schedules.cpu.base.kernel import kernel
from mlc_amd.schedules.cpu.base.vector import LANES, at, f32, local, opaque, registers, splat, store
from mlc_amd.schedules.cpu.linear.linear_plan import AnyPlan, default_plan, row_tiles, token_tile
from mlc_amd.schedules.cpu.linear.linear_tile import (
    Matrix,
    Parts,
    Products,
    Source,
    Tile,
    TokenTiles,
    act_params,
    emit_products,
    token_tiles,
    weight_args,
)
from mlc_amd.schedules.cpu.linear.planes import BLOCK, ROWS
from mlc_amd.schedules.cpu.linear.quantize import Output
from mlc_amd.schedules.formats import lookup
from mlc_amd.schedules.operators import GateUp, HeadLinear, Linear
from mlc_amd.schedules.operators.layouts import padded
from mlc_amd.schedules.tir import Buffer, Expr


class Results(NamedTuple):
    """Where a task stores its results."""

    Y: Buffer  # float32 [m, columns]
    column: Expr  # first column, as a number of tiles of 16
    bias: Callable[[Expr], Expr] | None = None  # bias(c): a vector that is added to the columns from c on
    residual: Buffer = None  # added to Y; has its shape


def emit_rows(products: Products, matrix: Matrix, first: Expr, held: int, tiles: TokenTiles, results: Results) -> None:
    """Emits a task: the products of `held` tiles of rows of a matrix, from its tile `first` on."""

    def emit(sources: Sequence[Source], parts: Parts) -> None:
        def body(token_tile: Expr, live: Expr) -> None:
            def part(tokens: Expr) -> None:
                with T.serial(held) as t:
                    column = T.Bind(results.column + t)
                    _emit_results(products, sources[0](t), (token_tile, tokens), column, results)

            parts.emit(live, part)

        tiles.each(body)

    products.emit_task([matrix], first, held, tiles, emit)


def _emit_results(products: Products, weights: Tile, place: tuple[Expr, Expr], tile: Expr, results: Results) -> None:
    """Emits the products of a tile of rows of a weight. They go to the columns from 16*tile on of Y. place: (tile of
    tokens, how many of its first tokens)."""
    (token_tile, tokens), p, lanes = place, products.acts.p, products.isa.lanes

    def epilogue(i: Expr, row: Expr, x: Expr) -> None:
        token, column = token_tile * p + i, tile * ROWS + row
        if results.bias is not None:
            x = x + results.bias(column)
        if results.residual is not None:
            x = results.residual[token, at(column, lanes)] + x
        store(results.Y, x, token, at(column, lanes))

    if p == 1:
        products.emit_tile(weights, token_tile, tokens, epilogue)
        return
    # The epilogue is in a loop of its own. Otherwise LLVM would load the rows of the residual, which are in no cache,
    # before the products, and spill them to the stack.
    found = registers(p, ROWS)
    products.emit_tile(weights, token_tile, tokens, lambda i, row, x: store(found, x, i, at(row, lanes)))
    with T.serial(opaque(T.cast(tokens, "int32"))) as i:
        for row in range(0, ROWS, lanes):
            epilogue(i, row, found[i, at(row, lanes)])


def _bias_of(bias: Buffer, n: int, lanes: int) -> Callable[[Expr], Expr] | None:
    """`Results.bias` for n biases: for the padding after the last row of a weight it repeats the last bias."""

    def load(first: Expr) -> Expr:
        index = at(first, lanes)
        return bias[index if n % ROWS == 0 else T.min(index, splat(T.int32(n - 1), lanes))]

    return None if bias is None else load


@registry.builds(Linear)
def linear(op: Linear, arch: Arch, name: str, plan: AnyPlan | None = None) -> tirx.PrimFunc:
    """PrimFunc (state, A, S | X, planes of segment 0, [bias f32 [n]], planes of segment 1, ..., [R f32 [m, npad]], Y_0
    f32 [m, npad], ...).

    A segment is a matrix; all segments have the same activations (q, k and v of a layer), and formats of the same kind,
    int8 or float. residual: Y = R + result; only for one segment. npad is n rounded up to a multiple of 16; the columns
    from n on have no meaning, as rows that are not live. Raises ValueError for segments that cannot share a launch.
    """
    if op.residual and len(op.segments) > 1:
        raise ValueError(f"a launch with a residual has one segment, not {op.segments}")
    m, k, plan = op.m, op.k, plan or default_plan(op, arch)
    with kernel(name) as (builder, state):
        params, weights = act_params(op, arch, m, k), []
        for i, ((fmt, n), has_bias) in enumerate(zip(op.weights, op.biases, strict=True)):
            matrix = weight_args(fmt, n, k, f"W{i}_")
            weights.append((matrix, T.arg(f"bias{i}", T.buffer((n,), "float32")) if has_bias else None))
        R = T.arg("R", T.buffer((m, padded(op.weights[0][1])), "float32")) if op.residual else None
        outputs = [T.arg(f"Y{i}", T.buffer((m, padded(n)), "float32")) for i, (_, n) in enumerate(op.segments)]
        products = emit_products(op, arch, plan, params)
        helds = [row_tiles(fmt, n, k, plan) for fmt, n in op.weights]
        counts = [-(-n // ROWS) // held for (_, n), held in zip(op.weights, helds, strict=True)]
        # Several parallel loops in one launch of the thread pool. Not if a loop has one step: TVM would remove such a
        # loop, and every thread would run its body.
        one_launch = len(op.segments) > 1 and min(counts) > 1
        with T.attr(T.int32(0), "pragma_parallel_launch_point", 1) if one_launch else nullcontext():
            for (_, n), (matrix, bias), Y, held, tasks in zip(op.weights, weights, outputs, helds, counts, strict=True):
                with T.parallel(tasks) as task:
                    tiles, first = token_tiles(state, m, products.acts.p), T.Bind(task * held)
                    results = Results(Y, first, _bias_of(bias, n, arch.isa.lanes), R)
                    emit_rows(products, matrix, first, held, tiles, results)
    return builder.get()


@registry.builds(HeadLinear)
def head_linear(op: HeadLinear, arch: Arch, name: str, plan: AnyPlan | None = None) -> tirx.PrimFunc:
    """PrimFunc (state, A, S | X of [m, heads * k], planes of a stack of `heads` matrices [n, k], Y f32 [m, heads * n]):
    for each head, the product of its k columns of the activations and its matrix. Raises UserError unless n is a
    multiple of 16."""
    heads, n, k, m = op.heads, op.n, op.k, op.m
    if n % ROWS:
        raise UserError(f"heads need matrices of a multiple of {ROWS} rows, this model has {n}; use another model")
    fmt, plan = lookup(op.fmt), plan or default_plan(op, arch)
    held = row_tiles(fmt, n, k, plan)
    tasks = n // ROWS // held  # tasks of a head
    with kernel(name) as (builder, state):
        params = act_params(op, arch, m, heads * k)
        matrix = weight_args(fmt, heads * n, k, "W_")
        Y = T.arg("Y", T.buffer((m, heads * n), "float32"))
        products = emit_products(op, arch, plan, params)
        with T.parallel(heads * tasks) as task:
            tiles, first = token_tiles(state, m, products.acts.p), T.Bind(task * held)
            acts = products.acts.columns(T.Bind(task // tasks * k), k)
            emit_rows(replace(products, acts=acts), matrix, first, held, tiles, Results(Y, first))
    return builder.get()


TILES = BLOCK // ROWS  # tiles of a weight for a block of the output


class Gated(NamedTuple):
    """How the results of gate and up are combined and stored.

    output  where the result is stored
    act     name of an activation of base/activation.py
    bias    bias(c, i): a vector that is added to columns c .. c+15 of the block of gate (i = 0) or up (i = 1)
    """

    output: Output
    act: str
    bias: Callable[[int, int], Expr] | None = None


def emit_block(
    products: Products, weights: list[Matrix], first: Expr, block: Expr, tiles: TokenTiles, gated: Gated
) -> None:
    """Emits a task: block number `block` of 32 columns of the output, for the live tokens of the tiles of tokens.
    weights: gate and up, of which the task uses the rows from tile `first` on."""
    isa, activation = products.isa, activation_of(gated.act)

    def emit(sources: Sequence[Source], parts: Parts) -> None:
        def body(tile: Expr, live: Expr) -> None:
            found = local(2, products.acts.p, BLOCK)  # gate and up of the block
            # First both tiles of gate, then those of up: the two tiles of a weight are adjacent, so the prefetches of
            # the first tile serve the second one.
            for i, source in enumerate(sources):

                def part(tokens: Expr, i: int = i, source: Source = source) -> None:
                    with T.serial(TILES) as half:

                        def keep(token: Expr, row: Expr, x: Expr) -> None:
                            store(found, x, i, token, at(half * ROWS + row, isa.lanes))

                        products.emit_tile(source(half), tile, tokens, keep)

                parts.emit(live, part)
            if parts.rest is None:  # for the other tokens `found` is uninitialized
                with T.serial(products.acts.p - live) as i:
                    for c in range(0, BLOCK, LANES):
                        store(found, f32(0.0), 0, live + i, at(c))
            # The loop's body is short, so that the CPU executes several rows out of order.
            with T.serial(live) as token:
                for c in range(0, BLOCK, LANES):
                    gate, up = (
                        found[i, token, at(c)] + gated.bias(c, i) if gated.bias else found[i, token, at(c)]
                        for i in range(2)
                    )
                    store(found, activation(gate, up, isa), 0, token, at(c))
            gated.output.store_tile(lambda token, c: found[0, token, at(c)], tile, block, live)

        tiles.each(body)

    products.emit_task(weights, first, TILES, tiles, emit)


@registry.builds(GateUp)
def gate_up(op: GateUp, arch: Arch, name: str, plan: AnyPlan | None = None) -> tirx.PrimFunc:
    """PrimFunc (state, A, S | X, planes of gate, planes of up, then A, S of [m, f] if `layout`, else Y f32 [m, f]).

    The weights are f x k, both of int8 formats or both of float formats. Results of rows that are not live have no
    meaning. Raises ValueError for weights of both kinds, and unless f is a multiple of 32.
    """
    m, f, k, p = op.m, op.n, op.k, token_tile(op, arch)
    if f % BLOCK:
        raise ValueError(f"gate and up need rows in multiples of {BLOCK}, not {f}")
    with kernel(name) as (builder, state):
        params = act_params(op, arch, m, k)
        weights = [weight_args(fmt, f, k, prefix) for (fmt, _), prefix in zip(op.weights, ("G_", "U_"), strict=True)]
        gated = Gated(Output(m, f, p, bool(op.layout), "Y", "_out"), op.act)
        products = emit_products(op, arch, plan, params)
        with T.parallel(f // BLOCK) as block:
            tiles = token_tiles(state, m, p)
            emit_block(products, weights, T.Bind(block * TILES), block, tiles, gated)
    return builder.get()
