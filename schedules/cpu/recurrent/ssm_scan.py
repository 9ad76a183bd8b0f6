"""Selective state spaces (Mamba-2): the matrix of each head over the rows of a sequence.

    dt = softplus(t + bias);  S *= exp(a * dt);  S += dt * x B^T;  y = (S C + D * x) * silu(z)

In: `state`, rows and cells (`schedules/runs.py`), X float32 [m, x of all heads, B and C of all groups], Z float32
[m, heads * d, padded], Dt float32 [m, heads, padded], A, D and Bias float32 [heads, padded], States float32 [cells,
heads, size * d]: S transposed, a row for each column of B. Out: Y float32 [m, heads * d], and States in place. A thread
has 16 columns of a head at a time, whose part of S fits the cache, and goes through all rows.
"""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.base.activation import silu
from mlc_amd.schedules.cpu.base.arch import Arch
from mlc_amd.schedules.cpu.base.kernel import kernel, live_rows
from mlc_amd.schedules.cpu.base.vector import LANES, at, f32, registers, splat, store
from mlc_amd.schedules.operators import SsmScan
from mlc_amd.schedules.operators.attention import padded_columns
from mlc_amd.schedules.runs import CELLS, RunCells, begins, run_args, run_length, runs, softplus

STEP = 4  # rows of a matrix whose loads come together


@registry.builds(SsmScan)
def ssm_scan(op: SsmScan, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], rows, cells, X, Z, Dt, A, D, Bias, States, Y). ValueError
    unless 16 divides d and 4 divides size."""
    heads, d, size, groups, m = op.heads, op.d, op.size, op.groups, op.m
    if d % LANES or size % STEP:
        raise ValueError(f"heads of {d} by {size} columns: these must be multiples of {LANES} and {STEP}")
    inner, padded = heads * d, padded_columns(heads)
    with kernel(name) as (builder, state):
        rows, cells = run_args(m)
        X = T.arg("X", T.buffer((m, inner + 2 * groups * size), "float32"))
        Z = T.arg("Z", T.buffer((m, padded_columns(inner)), "float32"))
        Dt = T.arg("Dt", T.buffer((m, padded), "float32"))
        A, D, Bias = (T.arg(which, T.buffer((padded,), "float32")) for which in ("A", "D", "Bias"))
        States = T.arg("States", T.buffer((CELLS, heads, size * d), "float32"))
        Y = T.arg("Y", T.buffer((m, inner), "float32"))
        live, blocks = live_rows(state, m), d // LANES
        with T.parallel(heads * blocks) as unit:
            head, column = T.Bind(unit // blocks), T.Bind(unit % blocks * LANES)
            b_at = T.Bind(inner + head // (heads // groups) * size)
            c_at, x_at = b_at + groups * size, T.Bind(head * d + column)
            with T.serial(T.min(live, T.int32(runs(m, op.single)))) as first, T.If(begins(rows, first)), T.Then():
                places = RunCells(rows, cells, first, op.single)
                before = T.alloc_buffer((1,), "int32", scope="local")  # the cell of the state before a row
                T.buffer_store(before, places.source, [0])
                with T.If(rows[first, 0] <= 0), T.Then():
                    T.buffer_store(before, places.after(T.int32(0)), [0])
                    with T.serial(size) as i:
                        store(States, f32(0.0), before[0], head, at(i * d + column))
                with T.serial(run_length(op, state, rows, first, live)) as step:
                    row, source, target = T.Bind(first + step), T.Bind(before[0]), places.after(step)
                    T.buffer_store(before, target, [0])
                    dt = softplus(Dt[row, head] + Bias[head])
                    decay, x = T.Bind(T.exp(A[head] * dt)), T.Bind(X[row, at(x_at)])
                    change, total = T.Bind(x * splat(dt)), registers(LANES)
                    store(total, x * splat(D[head]), at(0))
                    with T.serial(size // STEP) as block:
                        numbers = [T.Bind(block * STEP + i) for i in range(STEP)]
                        old = [T.Bind(States[source, head, at(n * d + column)]) for n in numbers]
                        for i, n in enumerate(numbers):
                            new = T.Bind(old[i] * splat(decay) + change * splat(X[row, b_at + n]))
                            store(States, new, target, head, at(n * d + column))
                            store(total, total[at(0)] + new * splat(X[row, c_at + n]), at(0))
                    store(Y, silu(T.Bind(Z[row, at(x_at)]), total[at(0)], arch.isa), row, at(x_at))
    return builder.get()
