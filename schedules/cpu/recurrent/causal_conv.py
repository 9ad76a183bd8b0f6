"""The causal convolution of each column, over the rows of a sequence (schedules/operators/recurrent.py).

A thread has 16 columns at a time, and goes through all rows.
"""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.base.arch import Arch
from mlc_amd.schedules.cpu.base.kernel import kernel, live_rows
from mlc_amd.schedules.cpu.base.vector import ACTIVATIONS, LANES, at, f32, registers, store
from mlc_amd.schedules.operators import CausalConv
from mlc_amd.schedules.runs import RunCells, begins, conv_args, run_length, runs
from mlc_amd.schedules.tir import Buffer, Expr


@registry.builds(CausalConv)
def causal_conv(op: CausalConv, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], those of `conv_args`). ValueError unless 16 divides the channels of each part."""
    channels, taps, m, gated, act = op.channels, op.taps, op.m, op.gated, op.act
    bias, parts, isa = op.bias, op.parts, arch.isa
    if channels % (LANES * parts):
        raise ValueError(f"a convolution of {channels} columns: they must be a multiple of {LANES * parts}")
    with kernel(name) as (builder, state):
        rows, cells, inputs, weight, B, States, Y = conv_args(op)
        own = channels // parts
        live = live_rows(state, m)

        def convolve(X: Buffer, W: Buffer, before: Expr, column: Expr) -> None:
            """16 columns of a part, which `before` columns of others precede."""
            weights = [T.Bind(W[T.ramp(column * taps + t, taps, LANES)]) for t in range(taps)]
            last = [registers(LANES) for _ in range(taps - 1)]
            with T.serial(T.min(live, T.int32(runs(m, op.single)))) as first, T.If(begins(rows, first)), T.Then():
                places = RunCells(rows, cells, first, op.single)
                length = run_length(op, state, rows, first, live)

                def keep(target: Expr) -> None:
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
