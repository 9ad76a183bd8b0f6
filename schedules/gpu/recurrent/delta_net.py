"""Gated delta nets: the matrix of each value head over the rows of a sequence.

    decay = exp(a * softplus(alpha + dt)), k and q divided by sqrt(their squares' sum + eps), q by sqrt(d) too
    M *= decay;  M += k t^T,  t = sigmoid(beta) * (v - M^T k);  y = M^T q

by_channel: each channel of k, a row of M, has a decay of its own, which is given.

In: `state`, rows and cells (`schedules/runs.py`), X float32 [m, q, k and v of all heads], Beta and Alpha float32
[m, value heads, padded], A and Dt float32 [value heads, padded] or, by channel, Decay float32 [m, value heads * d],
States float32 [cells, value heads, d of v, d of k].
Out: Y float32 [m, value heads * d], and States in place.

A few neighbouring lanes have a column of a matrix in their registers and go through the rows of a sequence; they meet
in sums over their lanes, so waves never wait for one another. y = decay * M^T q + (q . k) t, so the sums of a row are
independent.
"""

from collections.abc import Sequence
from math import sqrt

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.base.device import fma, launch, rsqrt, wave_sum
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import local, put
from mlc_amd.schedules.gpu.base.step import kernel, live_rows, state_arg
from mlc_amd.schedules.gpu.recurrent import delta_net_blocks, scan_blocks
from mlc_amd.schedules.gpu.recurrent.lane_rows import LANES, load_row, store_row, waves_of
from mlc_amd.schedules.gpu.recurrent.scan_blocks import ScanPlan
from mlc_amd.schedules.operators import DeltaNet
from mlc_amd.schedules.operators.attention import padded_columns
from mlc_amd.schedules.runs import CELLS, Decays, RunCells, begins, key_head, run_args, run_length, runs
from mlc_amd.schedules.space import Space
from mlc_amd.schedules.tir import Buffer, Expr


def _dot(a: Sequence[Expr], b: Sequence[Expr]) -> Expr:
    total = T.float32(0)
    for x, y in zip(a, b, strict=True):
        total = fma(x, y, total)
    return total


@registry.builds(DeltaNet)
def delta_net(op: DeltaNet, arch: Device, name: str, plan: ScanPlan | None) -> tirx.PrimFunc:
    """By blocks of rows where these are for the step, else row by row."""
    if not op.by_channel and scan_blocks.suits(op, op.d, op.d, arch):
        return delta_net_blocks.delta_net(op, arch, name, plan)
    return delta_rows(op, arch, name)


@registry.plans(DeltaNet)
def plans(op: DeltaNet, arch: Device) -> Space | None:
    return scan_blocks.plans(op, op.value_heads, op.d, op.d, arch)


def delta_rows(op: DeltaNet, arch: Device, name: str) -> tirx.PrimFunc:
    """Kernel (state int32[4], rows, cells, X, Beta, Alpha, A, Dt or Decay, States, Y). A workgroup has a part of one
    matrix and one sequence. ValueError for heads whose columns do not fill waves."""
    key_heads, value_heads, d, single, m = op.key_heads, op.value_heads, op.d, op.single, op.m
    keys, values, padded = key_heads * d, value_heads * d, padded_columns(value_heads)
    columns, waves = waves_of(d, d, arch)
    count = d // LANES
    with kernel(name) as ir:
        state = state_arg()
        rows, cells = run_args(m)
        X = T.arg("X", T.buffer((m, 2 * keys + values), "float32"))
        Beta = T.arg("Beta", T.buffer((m, padded), "float32"))
        decays = Decays(op)
        States = T.arg("States", T.buffer((CELLS, value_heads, d, d), "float32"))
        Y = T.arg("Y", T.buffer((m, values), "float32"))
        grid = d // (columns * waves), value_heads, runs(m, single)
        with launch(grid, (arch.wave, waves)) as (part, head, first, lane, wave):
            live = live_rows(state, m)
            with T.If(first < live), T.Then(), T.If(begins(rows, first)), T.Then():
                places, length = RunCells(rows, cells, first, single), run_length(op, state, rows, first, live)
                column = T.Bind((part * waves + wave) * columns + lane // LANES)
                begin = T.Bind(lane % LANES * count)
                q_at = T.Bind(key_head(head, op) * d + begin)
                v_at = T.Bind(2 * keys + head * d + column)
                matrix = [local(1) for _ in range(count)]
                for cell, x in zip(matrix, load_row(States, (places.source, head, column), begin, count), strict=True):
                    put(cell, T.Select(rows[first, 0] > 0, x, T.float32(0)), 0)

                def keep(
                    target: Expr,
                    head: Expr = head,
                    column: Expr = column,
                    begin: Expr = begin,
                    matrix: list[Buffer] = matrix,
                ) -> None:
                    store_row(States, (target, head, column), begin, [T.Bind(cell[0]) for cell in matrix])

                with T.serial(length) as step:
                    row = T.Bind(first + step)
                    q, k = (load_row(X, (row,), base, count) for base in (q_at, q_at + keys))
                    old = [T.Bind(cell[0]) for cell in matrix]
                    if op.by_channel:
                        own = load_row(decays.channels, (row,), T.Bind(head * d + begin), count)
                        old = [T.Bind(x * factor) for x, factor in zip(old, own, strict=True)]
                    pairs = (k, k), (q, q), (q, k), (k, old), (q, old)
                    kk, qq, qk, by_k, by_q = (wave_sum(arch, _dot(*pair), LANES) for pair in pairs)
                    k_scale = rsqrt(kk + T.float32(op.eps))
                    q_scale = T.Bind(rsqrt(qq + T.float32(op.eps)) * T.float32(1 / sqrt(d)))
                    decay = decays.of_head(row, head)
                    beta = T.Bind(T.float32(1) / (T.float32(1) + T.exp(T.float32(0) - Beta[row, head])))
                    change = T.Bind((X[row, v_at] - by_k * (decay * k_scale)) * beta)
                    with T.If(lane % LANES == 0), T.Then():
                        y = fma(by_q, decay, T.Bind(change * (qk * k_scale)))
                        T.buffer_store(Y, y * q_scale, [row, head * d + column])
                    factor = T.Bind(change * k_scale)
                    for cell, before, x in zip(matrix, old, k, strict=True):
                        put(cell, fma(x, factor, T.Bind(before * decay)), 0)
                    places.keep(step, keep)
                keep(places.after(length - 1))
    return ir.get()
