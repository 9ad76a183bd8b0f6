"""The kernel of `SsmScan` on GPUs, for Mamba-2, Mamba-1 and linear attention (schedules/operators/recurrent.py).

A group of adjacent lanes holds a row of a head's matrix S, which belongs to a column of x, in registers. It processes
the rows of a sequence, one by one or in blocks of rows (scan_blocks.py). Row by row, it needs only a sum over the lanes
of a group, so waves do not wait for each other.
"""

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.base.activations import ACTIVATIONS
from mlc_amd.schedules.gpu.base.device import fma, launch, wave_sum
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import put
from mlc_amd.schedules.gpu.base.step import builds
from mlc_amd.schedules.gpu.recurrent import scan_blocks
from mlc_amd.schedules.gpu.recurrent.lane_rows import LANES, each_row, load_row, store_row, waves_of
from mlc_amd.schedules.gpu.recurrent.scan_blocks import Pairs, Scan, ScanPlan, block_rows, blocks_of, fitted, weighed
from mlc_amd.schedules.operators import SsmScan
from mlc_amd.schedules.runs import runs, softplus, ssm_args
from mlc_amd.schedules.space import Space
from mlc_amd.schedules.tir import Buffer, Expr

BY_SLOT = 2  # factors of a row i for each row j of the block: (B[j] . C[i]) G(j, i); G(j, last)
ALONE = 3  # other factors of a row: the factor of S C; dt; G(-1, last)
FACTORS = scan_blocks.factor_count(BY_SLOT, ALONE)


@builds(SsmScan)
def ssm_scan(op: SsmScan, arch: Device, state: Buffer, plan: ScanPlan | None) -> None:
    """Kernel (state int32[4], the parameters of `ssm_args`). It uses blocks of rows if `_by_blocks` and
    `scan_blocks.suits`, otherwise it processes row by row."""
    if _by_blocks(op) and scan_blocks.suits(op, op.d, op.size, arch):
        _scan_blocks(op, arch, state, plan)
    else:
        _scan_rows(op, arch, state)


@registry.plans(SsmScan)
def plans(op: SsmScan, arch: Device) -> Space | None:
    return scan_blocks.plans(op, op.heads, op.d, op.size, arch) if _by_blocks(op) else None


def _by_blocks(op: SsmScan) -> bool:
    return op.gated and not op.given


def _scan_rows(op: SsmScan, arch: Device, state: Buffer) -> None:
    """Row by row. A workgroup has some rows of a matrix of one sequence. Raises ValueError for heads whose columns do
    not fill waves."""
    heads, d, size, groups, single, m = op.heads, op.d, op.size, op.groups, op.single, op.m
    columns, waves = waves_of(d, size, arch)
    count = size // LANES
    rows, cells, X, Z, Dt, A, D, Bias, States, Y = ssm_args(op)
    grid = d // (columns * waves), heads, runs(m, single)
    with launch(grid, (arch.wave, waves)) as (part, head, first, lane, wave):
        column = T.Bind((part * waves + wave) * columns + lane // LANES)
        begin, x_at = T.Bind(lane % LANES * count), T.Bind(head * d + column)
        b_at = T.Bind(heads * d + head // (heads // groups) * size + begin)
        own = T.Bind(column * size + begin)
        for row, matrix in each_row(op, (state, rows, cells), first, States, (head,), own, count):
            b, c = (load_row(X, (row,), base, count) for base in (b_at, b_at + groups * size))
            own_step = column if op.by_state else head
            dt = T.Bind(Dt[row, own_step]) if op.given else softplus(Dt[row, own_step] + Bias[own_step])
            x, factors = T.Bind(X[row, x_at]), load_row(A, (), own, count) if op.by_state else [A[head]]
            decays, change, total = [T.Bind(T.exp(a * dt)) for a in factors], T.Bind(x * dt), T.float32(0)
            for i, (cell, from_b, to_y) in enumerate(zip(matrix, b, c, strict=True)):
                put(cell, fma(change, from_b, T.Bind(cell[0] * decays[i % len(decays)])), 0)
                total = fma(cell[0], to_y, total)
            y = wave_sum(arch, total, LANES)
            if op.gated:
                y = fma(x, D[own_step], y) * ACTIVATIONS["silu"](T.Bind(Z[row, x_at]))
            with T.If(lane % LANES == 0), T.Then():
                T.buffer_store(Y, y, [row, x_at])


def _scan_blocks(op: SsmScan, arch: Device, state: Buffer, plan: ScanPlan | None) -> None:
    """By blocks of rows. B and C are k and q of scan_blocks.py, and t[i] = dt[i] * x[i]."""
    heads, d, size, groups, single, m = op.heads, op.d, op.size, op.groups, op.single, op.m
    plan = fitted(plan or ScanPlan(), d, size, arch)
    columns = plan.columns * plan.waves * (arch.wave // LANES)
    rows, cells, X, Z, Dt, A, D, Bias, States, Y = ssm_args(op)
    Factors = T.alloc_buffer((blocks_of(m, single), heads, LANES, FACTORS), "float32")
    with launch((blocks_of(m, single), heads), (arch.wave,)) as (number, head, lane):
        first, count = block_rows(state, rows, number, m, single)
        with T.If(count > 0), T.Then():
            b_at = T.Bind(heads * d + head // (heads // groups) * size)
            pairs = Pairs(arch, X, (first, count), (b_at + groups * size, b_at), size, lane, norms=False)
            dt = softplus(Dt[pairs.row, head] + Bias[head])
            before, upto, keep, to_last = pairs.decays(T.exp(A[head] * dt))
            to_y = [T.Bind(x * product) for x, product in zip(upto, pairs.qk, strict=True)]
            dt = T.Bind(T.Select(pairs.valid, dt, T.float32(0)))
            pairs.store(Factors, (number, head), (to_y, to_last), (before, dt, keep))
    grid = d // columns, heads, runs(m, single)
    with launch(grid, (arch.wave, plan.waves)) as (part, head, first, lane, wave):
        scan = Scan(op, arch, plan, (state, rows, cells), first, size, (part, lane, wave), FACTORS)
        scan.load(States, lambda column: ((head,), T.Bind(column * size)))
        b_at = T.Bind(heads * d + head // (heads // groups) * size)
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
        scan.store()
