"""Selective state spaces (Mamba-2): the matrix of each head over the rows of a sequence.

    dt = softplus(t + bias);  S *= exp(a * dt);  S += dt * x B^T;  y = (S C + D * x) * silu(z)

In: `state`, rows and cells (`schedules/runs.py`), X float32 [m, x of all heads, B and C of all groups], Z float32
[m, heads * d, padded], Dt float32 [m, heads, padded], A, D and Bias float32 [heads, padded], States float32 [cells,
heads, d * size]. Out: Y float32 [m, heads * d], and States in place.

A few neighbouring lanes have a row of a matrix, which is a column of x, in their registers and go through the rows of a
sequence; they meet in one sum over their lanes, so waves never wait for one another.
"""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.base.activations import ACTIVATIONS
from mlc_amd.schedules.gpu.base.device import fma, launch, wave_sum
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import local, put
from mlc_amd.schedules.gpu.base.step import kernel, live_rows, state_arg
from mlc_amd.schedules.gpu.recurrent import scan_blocks, ssm_scan_blocks
from mlc_amd.schedules.gpu.recurrent.lane_rows import LANES, load_row, store_row, waves_of
from mlc_amd.schedules.gpu.recurrent.scan_blocks import ScanPlan
from mlc_amd.schedules.operators import SsmScan
from mlc_amd.schedules.operators.attention import padded_columns
from mlc_amd.schedules.runs import CELLS, RunCells, begins, run_args, run_length, runs, softplus
from mlc_amd.schedules.space import Space
from mlc_amd.schedules.tir import Buffer, Expr


@registry.builds(SsmScan)
def ssm_scan(op: SsmScan, arch: Device, name: str, plan: ScanPlan | None) -> tirx.PrimFunc:
    """By blocks of rows where these are for the step, else row by row."""
    if scan_blocks.suits(op, op.d, op.size, arch):
        return ssm_scan_blocks.ssm_scan(op, arch, name, plan)
    return scan_rows(op, arch, name)


@registry.plans(SsmScan)
def plans(op: SsmScan, arch: Device) -> Space | None:
    return scan_blocks.plans(op, op.heads, op.d, op.size, arch)


def scan_rows(op: SsmScan, arch: Device, name: str) -> tirx.PrimFunc:
    """Kernel (state int32[4], rows, cells, X, Z, Dt, A, D, Bias, States, Y). A workgroup
    has a part of one matrix and one sequence. ValueError for heads whose columns do not fill waves."""
    heads, d, size, groups, single, m = op.heads, op.d, op.size, op.groups, op.single, op.m
    inner, padded = heads * d, padded_columns(heads)
    columns, waves = waves_of(d, size, arch)
    count = size // LANES
    with kernel(name) as ir:
        state = state_arg()
        rows, cells = run_args(m)
        X = T.arg("X", T.buffer((m, inner + 2 * groups * size), "float32"))
        Z = T.arg("Z", T.buffer((m, padded_columns(inner)), "float32"))
        Dt = T.arg("Dt", T.buffer((m, padded), "float32"))
        A, D, Bias = (T.arg(which, T.buffer((padded,), "float32")) for which in ("A", "D", "Bias"))
        States = T.arg("States", T.buffer((CELLS, heads, d * size), "float32"))
        Y = T.arg("Y", T.buffer((m, inner), "float32"))
        grid = d // (columns * waves), heads, runs(m, single)
        with launch(grid, (arch.wave, waves)) as (part, head, first, lane, wave):
            live = live_rows(state, m)
            with T.If(first < live), T.Then(), T.If(begins(rows, first)), T.Then():
                places, length = RunCells(rows, cells, first, single), run_length(op, state, rows, first, live)
                column = T.Bind((part * waves + wave) * columns + lane // LANES)
                begin, x_at = T.Bind(lane % LANES * count), T.Bind(head * d + column)
                b_at = T.Bind(inner + head // (heads // groups) * size + begin)
                own = T.Bind(column * size + begin)
                matrix = [local(1) for _ in range(count)]
                for cell, x in zip(matrix, load_row(States, (places.source, head), own, count), strict=True):
                    put(cell, T.Select(rows[first, 0] > 0, x, T.float32(0)), 0)

                def keep(target: Expr, head: Expr = head, own: Expr = own, matrix: list[Buffer] = matrix) -> None:
                    store_row(States, (target, head), own, [T.Bind(cell[0]) for cell in matrix])

                with T.serial(length) as step:
                    row = T.Bind(first + step)
                    b, c = (load_row(X, (row,), base, count) for base in (b_at, b_at + groups * size))
                    dt, x = softplus(Dt[row, head] + Bias[head]), T.Bind(X[row, x_at])
                    decay, change, total = T.Bind(T.exp(A[head] * dt)), T.Bind(x * dt), T.float32(0)
                    for cell, from_b, to_y in zip(matrix, b, c, strict=True):
                        put(cell, fma(change, from_b, T.Bind(cell[0] * decay)), 0)
                        total = fma(cell[0], to_y, total)
                    y = fma(x, D[head], wave_sum(arch, total, LANES))
                    with T.If(lane % LANES == 0), T.Then():
                        T.buffer_store(Y, y * ACTIVATIONS["silu"](T.Bind(Z[row, x_at])), [row, x_at])
                    places.keep(step, keep)
                keep(places.after(length - 1))
    return ir.get()
