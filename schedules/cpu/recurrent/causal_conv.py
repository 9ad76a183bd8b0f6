"""The causal convolution of each column, over the rows of a sequence.

    Y[p] = act(sum over t < taps of W[t] * X[p - taps + 1 + t] + B)
    gated: X holds [B, C, X], columns side by side, and Y[p] = C[p] * (the same of B * X)
    parts: the columns come from so many tensors of as many columns, each with weights of its own

In: `state`, rows and cells (`schedules/runs.py`), X float32 [m, channels or 3 * channels], W float32 [channels,
taps] flat, States float32 [cells, taps - 1, channels]: the last inputs, the oldest first. Out: Y float32 [m, channels],
and States in place. A thread has 16 columns at a time, and goes through all rows.
"""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.base.activation import ACTIVATIONS
from mlc_amd.schedules.cpu.base.arch import Arch
from mlc_amd.schedules.cpu.base.kernel import kernel, live_rows
from mlc_amd.schedules.cpu.base.vector import LANES, at, f32, registers, store
from mlc_amd.schedules.operators import CausalConv
from mlc_amd.schedules.runs import CELLS, RunCells, begins, check_parts, part_args, run_args, run_length, runs
from mlc_amd.schedules.tir import Buffer, Expr


@registry.builds(CausalConv)
def causal_conv(op: CausalConv, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], rows, cells, X, W, B float32 [channels] if `bias`, States, Y). Several parts are X0, X1
    .., W0, W1 .. ValueError unless 16 divides the channels of each, and for parts that are no such."""
    channels, taps, m, gated, act = op.channels, op.taps, op.m, op.gated, op.act
    bias, parts, isa = op.bias, op.parts, arch.isa
    if channels % (LANES * parts):
        raise ValueError(f"a convolution of {channels} columns: they must be a multiple of {LANES * parts}")
    check_parts(op)
    with kernel(name) as (builder, state):
        rows, cells = run_args(m)
        own = channels // parts
        inputs = part_args("X", parts, (m, own * (3 if gated else 1)))
        weight = part_args("W", parts, (-(-own * taps // LANES) * LANES,))
        B: Buffer = T.arg("B", T.buffer((channels,), "float32")) if bias else None
        States = T.arg("States", T.buffer((CELLS, taps - 1, channels), "float32"))
        Y = T.arg("Y", T.buffer((m, channels), "float32"))
        live = live_rows(state, m)

        def convolve(X: Buffer, W: Buffer, before: Expr, column: Expr) -> None:
            """16 columns of a part, which `before` columns of others precede."""
            weights = [T.Bind(W[T.ramp(column * taps + t, taps, LANES)]) for t in range(taps)]
            last = [registers(LANES) for _ in range(taps - 1)]
            with T.serial(T.min(live, T.int32(runs(m, op.single)))) as first, T.If(begins(rows, first)), T.Then():
                places = RunCells(rows, cells, first, op.single)
                length = run_length(op, state, rows, first, live)

                def keep(target: Expr, column: Expr = column, last: Expr = last) -> None:
                    for t, cell in enumerate(last):
                        store(States, cell[at(0)], target, t, at(before + column))

                for t, cell in enumerate(last):
                    with T.If(rows[first, 0] > 0):
                        with T.Then():
                            store(cell, States[places.source, t, at(before + column)], at(0))
                        with T.Else():
                            store(cell, f32(0.0), at(0))
                with T.serial(length) as step:
                    row = T.Bind(first + step)
                    x = X[row, at(column)]
                    if gated:
                        x = x * X[row, at(column + 2 * channels)]
                    values = [*(T.Bind(cell[at(0)]) for cell in last), T.Bind(x)]
                    total = values[0] * weights[0]
                    for value, weight in zip(values[1:], weights[1:], strict=True):
                        total = total + value * weight
                    y = T.Bind(total + B[at(column)] if bias else total)
                    if act:
                        y = ACTIVATIONS[act](y, f32(1.0), isa, LANES)
                    store(Y, y * X[row, at(column + channels)] if gated else y, row, at(before + column))
                    for cell, value in zip(last, values[1:], strict=True):
                        store(cell, value, at(0))
                    places.keep(step, keep)
                keep(places.after(length - 1))

        blocks = own // LANES
        for part, (X, W) in enumerate(zip(inputs, weight, strict=True)):
            with T.serial(blocks) if m == 1 else T.parallel(blocks) as block:
                convolve(X, W, part * own, T.Bind(block * LANES))
    return builder.get()
