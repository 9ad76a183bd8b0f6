"""The causal convolution of each column, over the rows of a sequence.

    Y[p] = act(sum over t < taps of W[t] * X[p - taps + 1 + t] + B)
    gated: X holds [B, C, X], columns side by side, and Y[p] = C[p] * (the same of B * X)

In: `state`, rows and cells (`schedules/recurrent.py`), X float32 [m, channels or 3 * channels], W float32 [channels,
taps] flat, States float32 [cells, taps - 1, channels]: the last inputs, the oldest first. Out: Y float32 [m, channels],
and States in place. A thread has one column of one sequence, and goes through its rows.
"""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.attention import SLOTS
from mlc_amd.schedules.gpu.activations import ACTIVATIONS
from mlc_amd.schedules.gpu.device import fma, launch
from mlc_amd.schedules.gpu.planes import padded
from mlc_amd.schedules.gpu.step import kernel, live_rows, state_arg
from mlc_amd.schedules.recurrent import CELLS, begins, run_length, runs, slot_of

THREADS = 64  # of a workgroup: columns; few, so that narrow models use several compute units


def causal_conv(channels, taps, single, m, gated, act, bias, arch, name) -> tirx.PrimFunc:
    """Kernel (state int32[4], rows int32 [m, 2], cells int32 [SLOTS, 2], X, W, B float32 [channels] if `bias`, States,
    Y)."""
    threads = min(THREADS, arch.threads)
    with kernel(name) as ir:
        state = state_arg()
        rows, cells = T.arg("rows", T.buffer((m, 2), "int32")), T.arg("cells", T.buffer((SLOTS, 2), "int32"))
        X = T.arg("X", T.buffer((m, channels * (3 if gated else 1)), "float32"))
        W = T.arg("W", T.buffer((padded(channels * taps),), "float32"))
        B = T.arg("B", T.buffer((channels,), "float32")) if bias else None
        States = T.arg("States", T.buffer((CELLS, taps - 1, channels), "float32"))
        Y = T.arg("Y", T.buffer((m, channels), "float32"))
        with launch((-(-channels // threads), runs(m, single)), (threads,)) as (chunk, first, thread):
            column = T.Bind(chunk * threads + thread)
            live = live_rows(state, m)
            with T.If((column < channels) & (first < live)), T.Then(), T.If(begins(rows, first)), T.Then():
                slot = slot_of(rows, first)
                source, target = T.Bind(cells[slot, 0]), T.Bind(cells[slot, 1])
                weights = [T.Bind(W[column * taps + t]) for t in range(taps)]
                last = [T.alloc_buffer((1,), "float32", scope="local") for _ in range(taps - 1)]
                for t, cell in enumerate(last):
                    before = States[source, t, column]
                    T.buffer_store(cell, T.Select(rows[first, 0] > 0, before, T.float32(0)), [0])
                with T.serial(run_length(state, rows, first, m, single, live)) as step:
                    row = T.Bind(first + step)
                    x = X[row, column]
                    if gated:
                        x = x * X[row, column + 2 * channels]
                    values = [*(T.Bind(cell[0]) for cell in last), T.Bind(x)]
                    total = B[column] if bias else T.float32(0)
                    for value, weight in zip(values, weights, strict=True):
                        total = fma(value, weight, total)
                    if act:
                        total = T.Bind(ACTIVATIONS[act](total))
                    T.buffer_store(Y, total * X[row, column + channels] if gated else total, [row, column])
                    for cell, value in zip(last, values[1:], strict=True):
                        T.buffer_store(cell, value, [0])
                for t, cell in enumerate(last):
                    T.buffer_store(States, cell[0], [target, t, column])
    return ir.get()
