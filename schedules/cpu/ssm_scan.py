"""Selective state spaces (Mamba-2): the matrix of each head over the rows of a sequence.

    dt = softplus(t + bias);  S *= exp(a * dt);  S += dt * x B^T;  y = (S C + D * x) * silu(z)

In: `state`, rows and cells (`schedules/recurrent.py`), X float32 [m, x of all heads, B and C of all groups], Z float32
[m, heads * d, padded], Dt float32 [m, heads, padded], A, D and Bias float32 [heads, padded], States float32 [cells,
heads, size * d]: S transposed, a row for each column of B. Out: Y float32 [m, heads * d], and States in place. A thread
has 16 columns of a head at a time, whose part of S fits the cache, and goes through all rows.
"""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.attention import padded_columns
from mlc_amd.schedules.cpu.activation import silu
from mlc_amd.schedules.cpu.kernel import kernel, live_rows
from mlc_amd.schedules.cpu.vector import LANES, at, f32, registers, splat, store
from mlc_amd.schedules.recurrent import CELLS, begins, cells_of, run_args, run_length, runs, softplus

STEP = 4  # rows of a matrix whose loads come together


def ssm_scan(heads, d, size, groups, single, m, isa, name) -> tirx.PrimFunc:
    """Kernel (state int32[4], rows int32 [m, 2], cells int32 [SLOTS, 2], X, Z, Dt, A, D, Bias, States, Y). ValueError
    unless 16 divides d and 4 divides size."""
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
            with T.serial(T.min(live, T.int32(runs(m, single)))) as first, T.If(begins(rows, first)), T.Then():
                source, target = cells_of(rows, cells, first)
                with T.If(rows[first, 0] <= 0):
                    with T.Then(), T.serial(size) as i:
                        store(States, f32(0.0), target, head, at(i * d + column))
                    with T.Else(), T.If(source != target), T.Then(), T.serial(size) as i:
                        place = at(i * d + column)
                        store(States, States[source, head, place], target, head, place)
                with T.serial(run_length(state, rows, first, m, single, live)) as step:
                    row = T.Bind(first + step)
                    dt = softplus(Dt[row, head] + Bias[head])
                    decay, x = T.Bind(T.exp(A[head] * dt)), T.Bind(X[row, at(x_at)])
                    change, total = T.Bind(x * splat(dt)), registers(LANES)
                    store(total, x * splat(D[head]), at(0))
                    with T.serial(size // STEP) as block:
                        for i in range(STEP):
                            n = T.Bind(block * STEP + i)
                            place = target, head, at(n * d + column)
                            new = T.Bind(States[place] * splat(decay) + change * splat(X[row, b_at + n]))
                            store(States, new, *place)
                            store(total, total[at(0)] + new * splat(X[row, c_at + n]), at(0))
                    store(Y, silu(T.Bind(Z[row, at(x_at)]), total[at(0)], isa), row, at(x_at))
    return builder.get()
