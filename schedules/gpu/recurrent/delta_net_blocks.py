"""Gated delta nets over the rows of a chunk, a block of rows at a time (`scan_blocks.py`): what `delta_net.py`
computes, from the same parameters.

With b = sigmoid(beta), S before a block and k, q as they are in the formulas there, the changes of a block solve

    t[i] = b[i] (v[i] - G(-1, i) S k[i] - sum over j < i of G(j, i) (k[j] . k[i]) t[j])

so t = T r with r[i] = v[i] - G(-1, i) S k[i] and T = (1 + A)^-1 diag(b), A the strictly lower triangle with
b[i] G(j, i) (k[j] . k[i]). The first launch inverts it. The scales of k and q are in the factors.
"""

from math import sqrt

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.device import fma, launch, rsqrt, shuffle
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import local, put
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
from mlc_amd.schedules.operators import DeltaNet
from mlc_amd.schedules.operators.attention import padded_columns
from mlc_amd.schedules.runs import CELLS, key_head, run_args, runs, softplus
from mlc_amd.schedules.tir import Expr

BY_SLOT = 3  # (k[j] . q[i]) G(j, i); G(j, last); T[i, j]: of j, the row that the slot stands for
ALONE = 3  # what S q and S k are multiplied with, G(-1, last)
FACTORS = factor_count(BY_SLOT, ALONE)


def delta_net(op: DeltaNet, arch: Device, name: str, plan: ScanPlan | None = None) -> tirx.PrimFunc:
    """The kernel, see `delta_net.delta_rows`. ValueError for what `scan_blocks.suits` excludes."""
    key_heads, value_heads, d, single, m = op.key_heads, op.value_heads, op.d, op.single, op.m
    keys, values, padded = key_heads * d, value_heads * d, padded_columns(value_heads)
    plan = fitted(plan or ScanPlan(), d, d, arch)
    columns = plan.columns * plan.waves * (arch.wave // LANES)
    with kernel(name) as ir:
        state = state_arg()
        rows, cells = run_args(m)
        X = T.arg("X", T.buffer((m, 2 * keys + values), "float32"))
        Beta, Alpha = (T.arg(which, T.buffer((m, padded), "float32")) for which in ("Beta", "Alpha"))
        A, Dt = (T.arg(which, T.buffer((padded,), "float32")) for which in ("A", "Dt"))
        States = T.arg("States", T.buffer((CELLS, value_heads, d, d), "float32"))
        Y = T.arg("Y", T.buffer((m, values), "float32"))
        Factors = T.alloc_buffer((blocks_of(m, single), value_heads, LANES, FACTORS), "float32")
        with launch((blocks_of(m, single), value_heads), (arch.wave,)) as (number, head, lane):
            first, count = block_rows(state, rows, number, m, single)
            with T.If(count > 0), T.Then():
                q_at = T.Bind(key_head(head, op) * d)
                pairs = Pairs(arch, X, (first, count), (q_at, q_at + keys), d, lane, norms=True)
                decay = T.exp(A[head] * softplus(Alpha[pairs.row, head] + Dt[head]))
                beta = T.float32(1) / (T.float32(1) + T.exp(T.float32(0) - Beta[pairs.row, head]))
                factors = _factors(arch, pairs, decay, beta, op.eps, d)
                with T.If(lane < LANES), T.Then():
                    pairs.store(Factors, (number, head), *factors)
        grid = d // columns, value_heads, runs(m, single)
        with launch(grid, (arch.wave, plan.waves)) as (part, head, first, lane, wave):
            index = part, lane, wave
            scan = Scan(op, arch, plan, (state, rows, cells), first, d, index, FACTORS)
            scan.load(States, lambda column: ((head, column), 0))
            q_at = T.Bind(key_head(head, op) * d)
            place = T.Bind(head * d + scan.column)

            def body(row: Expr, valid: Expr, own: list[Expr]) -> None:
                from_qs, from_ks = scan.products(key=False), scan.products(key=True)
                (to_y, to_state, solved), (by_q, by_k, keep) = scan.factor_lists(BY_SLOT, ALONE)
                changes, results = [], []
                for from_q, from_k, v in zip(from_qs, from_ks, own, strict=True):
                    rest = T.Bind(v - by_k * from_k)
                    change = scan.by_slot(weighed(solved, scan.by_slot(rest), T.float32(0)))
                    results.append(weighed(to_y, change, T.Bind(by_q * from_q)))
                    changes.append([T.Bind(factor * x) for factor, x in zip(to_state, change, strict=True)])
                with T.If(valid), T.Then():
                    store_row(Y, (row,), place, results)
                scan.update(keep, changes)

            def fetch(row: Expr) -> list[Expr]:
                return load_row(X, (row,), 2 * keys + place, plan.columns)

            scan.blocks(X, Factors, head, q_at, q_at + keys, fetch, body)
            scan.store(States, lambda column: ((head, column), 0))
    return ir.get()


def _factors(arch: Device, pairs: Pairs, decay: Expr, beta: Expr, eps: float, d: int) -> tuple[Expr, Expr]:
    """(lists of a row's factors by row j, those of the row alone), for `Pairs.store`."""
    own_norm = local(1)
    put(own_norm, T.float32(0), 0)
    for j, x in enumerate(pairs.kk):
        with T.If(pairs.i == j), T.Then():
            put(own_norm, x, 0)
    k_scale = rsqrt(T.Bind(own_norm[0] + T.float32(eps)))
    q_scale = T.Bind(rsqrt(T.Bind(pairs.qq + T.float32(eps))) * T.float32(1 / sqrt(d)))
    beta = T.Bind(T.Select(pairs.valid, beta, T.float32(0)))
    before, upto, keep, to_last = pairs.decays(decay)
    scales = pairs.of_rows(k_scale)
    upto = [T.Bind(x * scale) for x, scale in zip(upto, scales, strict=True)]
    row_scale = T.Bind(beta * k_scale)
    lower = [
        T.Bind(T.Select(pairs.i > j, row_scale * (x * kk), T.float32(0)))
        for j, (x, kk) in enumerate(zip(upto, pairs.kk, strict=True))
    ]
    # a row is done when the rows above it have been taken off
    solved = [T.Bind(T.Select(pairs.i == j, beta, T.float32(0))) for j in range(LANES)]
    for j in range(LANES - 1):
        source = T.Bind(pairs.base + j)
        for c in range(j + 1):
            above = shuffle(arch, solved[c], source)
            solved[c] = fma(T.Bind(T.float32(0) - lower[j]), above, solved[c])
    to_y = [T.Bind(q_scale * (x * qk)) for x, qk in zip(upto, pairs.qk, strict=True)]
    to_state = [T.Bind(x * scale) for x, scale in zip(to_last, scales, strict=True)]
    return (to_y, to_state, solved), (T.Bind(before * q_scale), T.Bind(before * k_scale), keep)
