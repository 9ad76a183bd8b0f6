"""The kernel of `CausalConv` on GPUs (schedules/operators/recurrent.py).

A thread computes one column of one sequence: for ROWS rows of a chunk, or for all single rows of the sequence.
"""

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.activations import ACTIVATIONS
from mlc_amd.schedules.gpu.base.device import fma, launch
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.step import builds, live_rows, when
from mlc_amd.schedules.operators import CausalConv
from mlc_amd.schedules.runs import RunCells, begins, conv_args, run_length, runs
from mlc_amd.schedules.tir import Buffer, Expr

THREADS = 64  # threads of a workgroup, each with a column; few, so that narrow models use several compute units
ROWS = 16  # rows of a chunk that a thread computes; at least the number of taps


@builds(CausalConv)
def causal_conv(op: CausalConv, arch: Device, state: Buffer, plan: None) -> None:
    """Kernel (state int32[4], the parameters of `conv_args`). Raises ValueError for more taps than ROWS."""
    channels, taps, m, gated, parts, bias = op.channels, op.taps, op.m, op.gated, op.parts, op.bias
    if taps > ROWS:
        raise ValueError(f"a convolution over {taps} positions: at most {ROWS} are possible")
    threads, firsts = min(THREADS, arch.threads), runs(m, op.single)
    blocks = -(-m // ROWS) if op.single < m else 1  # blocks of the chunk; a run of single rows is one block
    rows, cells, inputs, weight, B, States, Y = conv_args(op)
    own = channels // parts

    def convolve(
        X: Buffer, W: Buffer, before: Expr, column: Expr, block: int, first: Expr, begin: Expr, live: Expr
    ) -> None:
        """Emits a block of rows of a column of a part. before: columns of the parts before it. first: first row of the
        run; begin: first row of the block, which is number `block` of the run."""

        def taken(row: Expr, column: Expr) -> Expr:
            """The convolution's input in a row and column: X, or if gated B * X."""
            x = X[row, column]
            return x * X[row, column + 2 * channels] if gated else x

        with T.If((column < own) & (begin < live)), T.Then(), T.If(begins(rows, first)), T.Then():
            places, position = RunCells(rows, cells, first, op.single), rows[first, 0]
            length = run_length(op, state, rows, first, live)
            weights = [T.Bind(W[column * taps + t]) for t in range(taps)]
            last = [T.alloc_buffer((1,), "float32", scope="local") for _ in range(taps - 1)]
            for t, cell in enumerate(last):
                kept = T.Select(position > 0, States[places.source, t, before + column], T.float32(0))
                earlier = taken(T.max(begin - (taps - 1) + t, T.int32(0)), column)
                T.buffer_store(cell, kept if blocks == 1 else T.Select(block == 0, kept, earlier), [0])
            count = length
            if blocks > 1:  # a run of single rows is one block of any length
                some = T.min(length - block * ROWS, T.int32(ROWS))
                count = T.Bind(T.Select(first < T.min(state[0], T.int32(op.single)), length, some))

            def keep(target: Expr) -> None:
                for t, cell in enumerate(last):
                    T.buffer_store(States, cell[0], [target, t, before + column])

            with T.serial(count) as step:
                row = T.Bind(begin + step)
                values = [*(T.Bind(cell[0]) for cell in last), T.Bind(taken(row, column))]
                total = B[column] if bias else T.float32(0)
                for value, weight in zip(values, weights, strict=True):
                    total = fma(value, weight, total)
                if op.act:
                    total = T.Bind(ACTIVATIONS[op.act](total))
                T.buffer_store(Y, total * X[row, column + channels] if gated else total, [row, before + column])
                for cell, value in zip(last, values[1:], strict=True):
                    T.buffer_store(cell, value, [0])
                places.keep(begin - first + step, keep)
            with T.If(block == 0), T.Then():
                target = places.after(length - 1)
                for t in range(taps - 1):
                    # for a run with fewer rows than taps - 1, older inputs come from the state before the run
                    row = T.Bind(length - (taps - 1) + t)
                    older = States[places.source, T.min(length + t, T.int32(taps - 2)), before + column]
                    kept = T.Select(position > 0, older, T.float32(0))
                    value = T.Select(row < 0, kept, taken(first + T.max(row, T.int32(0)), column))
                    T.buffer_store(States, value, [target, t, before + column])

    # The first block of each run is found by the row that begins the run. Only a chunk has more blocks.
    groups = -(-own // threads)
    with launch((groups * parts, firsts + blocks - 1), (threads,)) as (chunk, part, thread):
        column, live = T.Bind((chunk if parts == 1 else chunk % groups) * threads + thread), live_rows(state, m)
        block = T.Bind(T.max(part - T.int32(firsts - 1), T.int32(0)))
        first = T.Bind(T.Select(block == 0, part, state[0]))
        begin = T.Bind(first + block * ROWS)
        for i, (X, W) in enumerate(zip(inputs, weight, strict=True)):
            with when(chunk // groups == i if parts > 1 else None):
                convolve(X, W, i * own, column, block, first, begin, live)
