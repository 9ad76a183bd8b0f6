"""Selective state spaces over the rows of a chunk, a block of rows at a time (`scan_blocks.py`): what `ssm_scan.py`
computes, from the same parameters. B is k there and C is q; what is added along B[i] is t[i] = dt[i] * x[i].
"""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.activations import ACTIVATIONS
from mlc_amd.schedules.gpu.base.device import fma, launch
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.step import kernel, state_arg
from mlc_amd.schedules.gpu.recurrent.lane_rows import LANES, load_row, store_row
from mlc_amd.schedules.gpu.recurrent.scan_blocks import (
    Pairs,
    Scan,
    ScanPlan,
    block_rows,
    blocks_of,
    factor_count,
    fitted,
    weighed,
)
from mlc_amd.schedules.operators import SsmScan
from mlc_amd.schedules.operators.attention import padded_columns
from mlc_amd.schedules.runs import CELLS, run_args, runs, softplus
from mlc_amd.schedules.tir import Expr

BY_SLOT = 2  # (B[j] . C[i]) G(j, i); G(j, last): of j, the row that the slot stands for
ALONE = 3  # what S C is multiplied with, dt, G(-1, last)
FACTORS = factor_count(BY_SLOT, ALONE)


def ssm_scan(op: SsmScan, arch: Device, name: str, plan: ScanPlan | None = None) -> tirx.PrimFunc:
    """The kernel, see `ssm_scan.scan_rows`. ValueError for what `scan_blocks.suits` excludes."""
    heads, d, size, groups, single, m = op.heads, op.d, op.size, op.groups, op.single, op.m
    inner, padded = heads * d, padded_columns(heads)
    plan = fitted(plan or ScanPlan(), d, size, arch)
    columns = plan.columns * plan.waves * (arch.wave // LANES)
    with kernel(name) as ir:
        state = state_arg()
        rows, cells = run_args(m)
        X = T.arg("X", T.buffer((m, inner + 2 * groups * size), "float32"))
        Z = T.arg("Z", T.buffer((m, padded_columns(inner)), "float32"))
        Dt = T.arg("Dt", T.buffer((m, padded), "float32"))
        A, D, Bias = (T.arg(which, T.buffer((padded,), "float32")) for which in ("A", "D", "Bias"))
        States = T.arg("States", T.buffer((CELLS, heads, d * size), "float32"))
        Y = T.arg("Y", T.buffer((m, inner), "float32"))
        Factors = T.alloc_buffer((blocks_of(m, single), heads, LANES, FACTORS), "float32")
        with launch((blocks_of(m, single), heads), (arch.wave,)) as (number, head, lane):
            first, count = block_rows(state, rows, number, m, single)
            with T.If(count > 0), T.Then():
                b_at = T.Bind(inner + head // (heads // groups) * size)
                pairs = Pairs(arch, X, (first, count), (b_at + groups * size, b_at), size, lane, norms=False)
                dt = softplus(Dt[pairs.row, head] + Bias[head])
                before, upto, keep, to_last = pairs.decays(T.exp(A[head] * dt))
                to_y = [T.Bind(x * product) for x, product in zip(upto, pairs.qk, strict=True)]
                dt = T.Bind(T.Select(pairs.valid, dt, T.float32(0)))
                with T.If(lane < LANES), T.Then():
                    pairs.store(Factors, (number, head), (to_y, to_last), (before, dt, keep))
        grid = d // columns, heads, runs(m, single)
        with launch(grid, (arch.wave, plan.waves)) as (part, head, first, lane, wave):
            index = part, lane, wave
            scan = Scan(op, arch, plan, (state, rows, cells), first, size, index, FACTORS)
            scan.load(States, lambda column: ((head,), T.Bind(column * size)))
            b_at = T.Bind(inner + head // (heads // groups) * size)
            place = T.Bind(head * d + scan.column)

            def body(row: Expr, valid: Expr, own: list[Expr]) -> None:
                products = scan.products(key=False)
                (to_y, to_state), (by_c, dt, keep) = scan.factor_lists(BY_SLOT, ALONE)
                xs, gates = own[: plan.columns], own[plan.columns :]
                changes, results = [], []
                for from_c, x, gate in zip(products, xs, gates, strict=True):
                    change = scan.by_slot(T.Bind(x * dt))
                    y = fma(x, D[head], weighed(to_y, change, T.Bind(by_c * from_c)))
                    results.append(T.Bind(y * ACTIVATIONS["silu"](gate)))
                    changes.append([T.Bind(factor * c) for factor, c in zip(to_state, change, strict=True)])
                with T.If(valid), T.Then():
                    store_row(Y, (row,), place, results)
                scan.update(keep, changes)

            def fetch(row: Expr) -> list[Expr]:
                return [x for buffer in (X, Z) for x in load_row(buffer, (row,), place, plan.columns)]

            scan.blocks(X, Factors, head, b_at + groups * size, b_at, fetch, body)
            scan.store(States, lambda column: ((head,), T.Bind(column * size)))
    return ir.get()
