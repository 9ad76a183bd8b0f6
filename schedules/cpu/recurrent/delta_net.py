"""Gated delta nets: the matrix of each value head over the rows of a sequence.

    decay = exp(a * softplus(alpha + dt)), k and q divided by sqrt(their squares' sum + eps), q by sqrt(d) too
    M *= decay;  M += k t^T,  t = sigmoid(beta) * (v - M^T k);  y = M^T q

by_channel: each channel of k, a row of M, has a decay of its own, which is given.

In: `state`, rows and cells (`schedules/runs.py`), X float32 [m, q, k and v of all heads], Beta and Alpha float32
[m, value heads, padded], A and Dt float32 [value heads, padded] or, by channel, Decay float32 [m, value heads * d],
States float32 [cells, value heads, d of k, d of v].
Out: Y float32 [m, value heads * d], and States in place. A thread has 16 columns of a matrix at a time, which fit the
cache, and goes through all rows: it reads them to multiply k and q by M, and once more to change it, so that
y = decay * M^T q + (q . k) t takes no third time.
"""

from math import sqrt

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.base.arch import Arch
from mlc_amd.schedules.cpu.base.kernel import kernel, live_rows
from mlc_amd.schedules.cpu.base.vector import LANES, at, f32, registers, splat, store, tree_add
from mlc_amd.schedules.operators import DeltaNet
from mlc_amd.schedules.operators.attention import padded_columns
from mlc_amd.schedules.runs import CELLS, Decays, RunCells, begins, key_head, run_args, run_length, runs
from mlc_amd.schedules.tir import Expr

STEP = 8  # rows of a matrix that are loaded together
SUMS = 2  # independent sums of each product


@registry.builds(DeltaNet)
def delta_net(op: DeltaNet, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], rows, cells, X, Beta, Alpha, A, Dt or Decay, States, Y). ValueError unless 16 divides
    d."""
    key_heads, value_heads, d, m = op.key_heads, op.value_heads, op.d, op.m
    if d % LANES:
        raise ValueError(f"heads of {d} columns: they must be a multiple of {LANES}")
    keys, values, padded = key_heads * d, value_heads * d, padded_columns(value_heads)
    with kernel(name) as (builder, state):
        rows, cells = run_args(m)
        X = T.arg("X", T.buffer((m, 2 * keys + values), "float32"))
        Beta = T.arg("Beta", T.buffer((m, padded), "float32"))
        decays = Decays(op)
        States = T.arg("States", T.buffer((CELLS, value_heads, d, d), "float32"))
        Y = T.arg("Y", T.buffer((m, values), "float32"))
        live, blocks = live_rows(state, m), d // LANES
        with T.parallel(value_heads * blocks) as unit:
            head, column = T.Bind(unit // blocks), T.Bind(unit % blocks * LANES)
            q_at = T.Bind(key_head(head, op) * d)
            k_at, v_at = q_at + keys, T.Bind(head * d + 2 * keys + column)
            with T.serial(T.min(live, T.int32(runs(m, op.single)))) as first, T.If(begins(rows, first)), T.Then():
                places = RunCells(rows, cells, first, op.single)
                before = T.alloc_buffer((1,), "int32", scope="local")  # the cell of the state before a row
                T.buffer_store(before, places.source, [0])
                with T.If(rows[first, 0] <= 0), T.Then():
                    T.buffer_store(before, places.after(T.int32(0)), [0])
                    with T.serial(d) as i:
                        store(States, f32(0.0), before[0], head, i, at(column))
                with T.serial(run_length(op, state, rows, first, live)) as step:
                    row, source, target = T.Bind(first + step), T.Bind(before[0]), places.after(step)
                    T.buffer_store(before, target, [0])

                    def dot(a: Expr, b: Expr, row: Expr = row) -> Expr:
                        """Of the q or the k of the row, which begin at a and b."""
                        total = registers(LANES)
                        store(total, f32(0.0), at(0))
                        with T.serial(blocks) as block:
                            product = X[row, at(a + block * LANES)] * X[row, at(b + block * LANES)]
                            store(total, total[at(0)] + product, at(0))
                        return T.Bind(tree_add(T.Bind(total[at(0)])))

                    k_scale = T.Bind(T.float32(1) / T.sqrt(dot(k_at, k_at) + T.float32(op.eps)))
                    q_scale = T.Bind(T.float32(1 / sqrt(d)) / T.sqrt(dot(q_at, q_at) + T.float32(op.eps)))
                    both = T.Bind(dot(q_at, k_at) * k_scale)
                    decay = decays.of_head(row, head)
                    beta = T.Bind(T.float32(1) / (T.float32(1) + T.exp(-Beta[row, head])))
                    sums = [[registers(LANES) for _ in range(SUMS)] for _ in "kq"]
                    for total in (total for pair in sums for total in pair):
                        store(total, f32(0.0), at(0))
                    with T.serial(d // STEP) as block:
                        for i in range(STEP):
                            matrix = States[source, head, block * STEP + i, at(column)]
                            if op.by_channel:
                                matrix = matrix * splat(decays.channels[row, head * d + block * STEP + i])
                            matrix = T.Bind(matrix)
                            for base, totals in zip((k_at, q_at), sums, strict=True):
                                total = totals[i % SUMS]
                                factor = splat(X[row, base + block * STEP + i])
                                store(total, total[at(0)] + matrix * factor, at(0))
                    by_k, by_q = (T.Bind(totals[0][at(0)] + totals[1][at(0)]) for totals in sums)
                    change = T.Bind((X[row, at(v_at)] - by_k * splat(decay * k_scale)) * splat(beta))
                    y = (by_q * splat(decay) + change * splat(both)) * splat(q_scale)
                    store(Y, y, row, at(head * d + column))
                    change = T.Bind(change * splat(k_scale))
                    with T.serial(d // STEP) as block:
                        places_of = [(head, block * STEP + i, at(column)) for i in range(STEP)]
                        old = [T.Bind(States[(source, *place)]) for place in places_of]
                        for i, place in enumerate(places_of):
                            own = decays.channels[row, head * d + block * STEP + i] if op.by_channel else decay
                            new = old[i] * splat(own) + change * splat(X[row, k_at + block * STEP + i])
                            store(States, new, target, *place)
    return builder.get()
