"""Linear layers on the CPU: y[m, n] = sum over k of w[n, k] * x[m, k], decode (m = 1) and prefill from one packed
weight.

In: `state`, activations (int8 formats: the planes A and S of `quantize.py`; float formats: X float32 [m, k]), weights
in planes of 16-row tiles (`planes.py`). Out: Y float32 [m, n padded to 16], bias and residual added.

Decode is bound by memory: one pass over the weight with prefetches. In prefill a task holds several tiles of 16 rows,
whose weights stay in the L2 cache while the activation tiles pass by. Of the last activation tile only a part is
computed, the smallest of those in `linear_plan.parts` that holds its live rows: steps of a few rows are bound by memory
too. A row's results are the same bits in any part.
"""

from contextlib import nullcontext

from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu.base.kernel import kernel
from mlc_amd.schedules.cpu.base.vector import at, opaque, registers, splat, store
from mlc_amd.schedules.cpu.linear.linear_plan import default_plan, few_plan, row_tiles
from mlc_amd.schedules.cpu.linear.linear_tile import (
    act_params,
    check_rows,
    check_tiles,
    emit_acts,
    emit_part,
    emit_tile,
    emit_weights,
    token_tiles,
    weight_args,
)
from mlc_amd.schedules.cpu.linear.planes import ROWS
from mlc_amd.schedules.formats import lookup


def _bias(bias, first, n, lanes):
    """bias[first], ...: the last tile's index stays inside the n biases."""
    index = at(first, lanes)
    return bias[index if n % ROWS == 0 else T.min(index, splat(T.int32(n - 1), lanes))]


def _tasks(fmt, n, k, plan):
    """Steps of a segment's parallel loop."""
    return -(-n // ROWS) // row_tiles(fmt, n, k, plan)


def _emit_segment(fmt, n, bufs, bias, residual, Y, acts, state, m, plan, few, isa, heads=1):
    """heads: of matrices of n rows, each of which has its columns of the activations."""
    k = acts.k // heads
    held, tasks = row_tiles(fmt, n, k, plan), _tasks(fmt, n, k, plan)
    with T.parallel(heads * tasks) as task:
        (tiles, live), first = token_tiles(state, m, acts.p), T.Bind(task * held)
        mine = acts if heads == 1 else acts.columns(T.Bind(task // tasks * k), k)
        bias_at = None if bias is None else lambda column: _bias(bias, column, n, isa.lanes)

        def emit(weights, sizes):
            with T.serial(tiles) as token_tile:

                def part(tokens):
                    with T.serial(held) as t:
                        tile = T.Bind(first + t)
                        emit_results(
                            fmt, weights[0](t), bias_at, residual, Y, mine, tile, token_tile, tokens, plan, few, isa
                        )

                emit_part(live(token_tile), sizes, part)

        emit_weights([(fmt, bufs)], first, held, mine, plan, isa, tiles, emit)


def emit_results(fmt, weights, bias, residual, Y, acts, tile, token_tile, tokens, plan, ahead, isa):
    """A tile of rows, for the first `tokens` of a tile of tokens: columns 16*tile.. of Y. bias(column): of a register's
    rows from there on, or None. ahead: as of `emit_tile`."""

    def epilogue(i, row, x):
        token, column = token_tile * acts.p + i, tile * ROWS + row
        if bias is not None:
            x = x + bias(column)
        if residual is not None:
            x = residual[token, at(column, isa.lanes)] + x
        store(Y, x, token, at(column, isa.lanes))

    if acts.p == 1:
        emit_tile(fmt, weights, acts, token_tile, tokens, plan, ahead, isa, epilogue)
        return
    # A loop of its own: LLVM would load the residual's rows, which are in no cache, before the products, and spill them
    # to the stack.
    made = registers(tokens, ROWS)

    def keep(i, row, x):
        store(made, x, i, at(row, isa.lanes))

    emit_tile(fmt, weights, acts, token_tile, tokens, plan, ahead, isa, keep)
    with T.serial(opaque(T.int32(tokens))) as i:
        for row in range(0, ROWS, isa.lanes):
            epilogue(i, row, made[i, at(row, isa.lanes)])


def linear(segments, k, m, p, biases, residual, isa, name, plan=None):
    """PrimFunc (state, A, S | X, planes of segment 0, [bias f32 [n]], planes of segment 1, ..., [R f32 [m, npad]], Y_0
    f32 [m, npad], ...).

    segments: list of (format name or Format, n), all int8 or all float; they share the activations (q, k and v of a
    layer) and the launch. p: tokens of an activation tile, a divisor of m (1 in decode). biases: one flag per segment.
    residual: Y = R + result, for one segment. With m > 1, only the parts of tiles that hold live rows are computed.
    npad = n rounded up to a multiple of 16; the columns from n on have no meaning. plan: of `default_plan`'s type;
    None: that one. ValueError for segments that cannot share a launch.
    """
    segments = [(lookup(fmt), n) for fmt, n in segments]
    kinds = {fmt.kind for fmt, _ in segments}
    check_tiles(m, p)
    if len(kinds) != 1 or len(biases) != len(segments) or (residual and len(segments) > 1):
        raise ValueError(
            f"segments {[(f.name, n) for f, n in segments]}, biases {biases}, residual {residual} do not make one "
            "launch"
        )
    plan = plan or default_plan(isa, m, p, segments, k)
    few = plan if m == 1 else few_plan(isa, segments, k)
    padded = [-(-n // ROWS) * ROWS for _, n in segments]
    with kernel(name) as (builder, state):
        params = act_params(m, k, p, kinds.pop())
        weights = []
        for i, ((fmt, n), has_bias) in enumerate(zip(segments, biases, strict=True)):
            bufs = weight_args(fmt, n, k, f"W{i}_")
            weights.append((bufs, T.arg(f"bias{i}", T.buffer((n,), "float32")) if has_bias else None))
        R = T.arg("R", T.buffer((m, padded[0]), "float32")) if residual else None
        outputs = [T.arg(f"Y{i}", T.buffer((m, n), "float32")) for i, n in enumerate(padded)]
        acts = emit_acts(params, p, k)
        # loops of one launch of the thread pool; a loop of one step is none to TVM, and would run in every thread
        one_launch = len(segments) > 1 and all(_tasks(fmt, n, k, plan) > 1 for fmt, n in segments)
        with T.attr(T.int32(0), "pragma_parallel_launch_point", 1) if one_launch else nullcontext():
            for (fmt, n), (bufs, bias), Y in zip(segments, weights, outputs, strict=True):
                _emit_segment(fmt, n, bufs, bias, R, Y, acts, state, m, plan, few, isa)
    return builder.get()


def head_linear(fmt, heads, n, k, m, p, isa, name, plan=None):
    """PrimFunc (state, A, S | X of [m, heads * k], planes of the stack of `heads` matrices of n rows, Y f32 [m, heads *
    n]): Y's columns of a head are the product of its columns of the activations and its matrix.

    p and plan as in `linear`. UserError unless 16 divides n.
    """
    fmt = lookup(fmt)
    check_tiles(m, p)
    check_rows(n)
    plan = plan or default_plan(isa, m, p, [(fmt, n)], k)
    few = plan if m == 1 else few_plan(isa, [(fmt, heads * n)], k)
    with kernel(name) as (builder, state):
        params = act_params(m, heads * k, p, fmt.kind)
        bufs = weight_args(fmt, heads * n, k, "W_")
        Y = T.arg("Y", T.buffer((m, heads * n), "float32"))
        acts = emit_acts(params, p, heads * k)
        _emit_segment(fmt, n, bufs, None, None, Y, acts, state, m, plan, few, isa, heads)
    return builder.get()
