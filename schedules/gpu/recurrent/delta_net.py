"""The kernels of `DeltaNet` and `ChannelDecay` on GPUs (schedules/operators/recurrent.py).

A group of adjacent lanes holds a column of a head's matrix M in registers, and processes the rows of a sequence, one by
one or in blocks of rows (scan_blocks.py). Row by row, it needs only sums over the lanes of a group, so waves do not
wait for each other. As y = decay * M^T q + (q . k) t, the sums for a row are independent of each other.
"""

from math import sqrt

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.base.device import fma, launch, rsqrt, shuffle, wave_sum
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import filled, put
from mlc_amd.schedules.gpu.base.step import builds, if_live, when
from mlc_amd.schedules.gpu.recurrent import scan_blocks
from mlc_amd.schedules.gpu.recurrent.lane_rows import LANES, each_row, load_row, store_row, waves_of
from mlc_amd.schedules.gpu.recurrent.scan_blocks import Pairs, Scan, ScanPlan, block_rows, blocks_of, fitted, weighed
from mlc_amd.schedules.operators import ChannelDecay, DeltaNet
from mlc_amd.schedules.runs import decay_args, delta_args, key_head, runs, softplus
from mlc_amd.schedules.space import Space
from mlc_amd.schedules.tir import Buffer, Expr

BY_SLOT = 3  # factors of a row i for each row j of the block: (k[j] . q[i]) G(j, i); G(j, last); T[i, j]
ALONE = 3  # other factors of a row: the factors of S q and of S k; G(-1, last)
FACTORS = scan_blocks.factor_count(BY_SLOT, ALONE)
THREADS = 128  # largest number of threads of a workgroup of `channel_decay`


@builds(DeltaNet)
def delta_net(op: DeltaNet, arch: Device, state: Buffer, plan: ScanPlan | None) -> None:
    """Kernel (state int32[4], the parameters of `delta_args`). It uses blocks of rows if `scan_blocks.suits` the step
    and decays are not op.by_channel, otherwise it processes row by row."""
    if not op.by_channel and scan_blocks.suits(op, op.d, op.d, arch):
        _delta_blocks(op, arch, state, plan)
    else:
        _delta_rows(op, arch, state)


@registry.plans(DeltaNet)
def plans(op: DeltaNet, arch: Device) -> Space | None:
    return scan_blocks.plans(op, op.value_heads, op.d, op.d, arch)


def _delta_rows(op: DeltaNet, arch: Device, state: Buffer) -> None:
    """Row by row. A workgroup has some columns of a matrix of one sequence. Raises ValueError for heads whose columns
    do not fill waves."""
    key_heads, value_heads, d, single, m = op.key_heads, op.value_heads, op.d, op.single, op.m
    keys = key_heads * d
    columns, waves = waves_of(d, d, arch)
    count = d // LANES
    rows, cells, X, Beta, decays, States, Y = delta_args(op)
    grid = d // (columns * waves), value_heads, runs(m, single)
    with launch(grid, (arch.wave, waves)) as (part, head, first, lane, wave):
        column = T.Bind((part * waves + wave) * columns + lane // LANES)
        begin = T.Bind(lane % LANES * count)
        q_at = T.Bind(key_head(head, op) * d + begin)
        v_at = T.Bind(2 * keys + head * d + column)
        for row, matrix in each_row(op, (state, rows, cells), first, States, (head, column), begin, count):
            q, k = (load_row(X, (row,), base, count) for base in (q_at, q_at + keys))
            old = [T.Bind(cell[0]) for cell in matrix]
            if op.by_channel:
                own = load_row(decays.channels, (row,), T.Bind(head * d + begin), count)
                old = [T.Bind(x * factor) for x, factor in zip(old, own, strict=True)]
            pairs = (k, k), (q, q), (q, k), (k, old), (q, old)
            kk, qq, qk, by_k, by_q = (wave_sum(arch, weighed(*pair, T.float32(0)), LANES) for pair in pairs)
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


def _delta_blocks(op: DeltaNet, arch: Device, state: Buffer, plan: ScanPlan | None) -> None:
    """By blocks of rows. Let b = sigmoid(beta), S the matrix before the block, and k, q scaled as in `DeltaNet`. The
    changes t of a block solve the triangular system

        t[i] = b[i] (v[i] - G(-1, i) S k[i] - sum over j < i of G(j, i) (k[j] . k[i]) t[j])

    So t = T r, where r[i] = v[i] - G(-1, i) S k[i] and T = (1 + A)^-1 diag(b). A is strictly lower triangular, with
    A[i, j] = b[i] G(j, i) (k[j] . k[i]). The first launch computes T. The scales of k and q are in the factors."""
    key_heads, value_heads, d, single, m = op.key_heads, op.value_heads, op.d, op.single, op.m
    keys = key_heads * d
    plan = fitted(plan or ScanPlan(), d, d, arch)
    columns = plan.columns * plan.waves * (arch.wave // LANES)
    rows, cells, X, Beta, decays, States, Y = delta_args(op)
    Factors = T.alloc_buffer((blocks_of(m, single), value_heads, LANES, FACTORS), "float32")
    with launch((blocks_of(m, single), value_heads), (arch.wave,)) as (number, head, lane):
        first, count = block_rows(state, rows, number, m, single)
        with T.If(count > 0), T.Then():
            q_at = T.Bind(key_head(head, op) * d)
            pairs = Pairs(arch, X, (first, count), (q_at, q_at + keys), d, lane, norms=True)
            decay = T.exp(decays.A[head] * softplus(decays.Alpha[pairs.row, head] + decays.Dt[head]))
            beta = T.float32(1) / (T.float32(1) + T.exp(T.float32(0) - Beta[pairs.row, head]))
            factors = _factors(arch, pairs, decay, beta, op.eps, d)
            pairs.store(Factors, (number, head), *factors)
    grid = d // columns, value_heads, runs(m, single)
    with launch(grid, (arch.wave, plan.waves)) as (part, head, first, lane, wave):
        scan = Scan(op, arch, plan, (state, rows, cells), first, d, (part, lane, wave), FACTORS)
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
        scan.store()


def _factors(arch: Device, pairs: Pairs, decay: Expr, beta: Expr, eps: float, d: int) -> tuple[Expr, Expr]:
    """(lists of a row's factors for each row j, its other factors): the arguments of `Pairs.store`."""
    own_norm = filled(T.float32(0))
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
    # forward substitution: a row of T is complete after the rows above it have been subtracted
    solved = [T.Bind(T.Select(pairs.i == j, beta, T.float32(0))) for j in range(LANES)]
    for j in range(LANES - 1):
        source = T.Bind(pairs.base + j)
        for c in range(j + 1):
            above = shuffle(arch, solved[c], source)
            solved[c] = fma(T.Bind(T.float32(0) - lower[j]), above, solved[c])
    to_y = [T.Bind(q_scale * (x * qk)) for x, qk in zip(upto, pairs.qk, strict=True)]
    to_state = [T.Bind(x * scale) for x, scale in zip(to_last, scales, strict=True)]
    return (to_y, to_state, solved), (T.Bind(before * q_scale), T.Bind(before * k_scale), keep)


@builds(ChannelDecay)
def channel_decay(op: ChannelDecay, arch: Device, state: Buffer, plan: None) -> None:
    """Kernel (state int32[4], X, A, Dt, Y, see `decay_args`). A thread computes a column of a row."""
    d, m, columns, threads = op.d, op.m, op.heads * op.d, min(THREADS, arch.threads)
    X, A, Dt, Y = decay_args(op)
    with launch((-(-columns // threads), m), (threads,)) as (part, row, thread), if_live(state, m, row):
        column = T.Bind(part * threads + thread)
        with when(column < columns if columns % threads else None):
            x = softplus(X[row, column] + Dt[column])
            T.buffer_store(Y, T.exp(A[T.Bind(column // d)] * x), [row, column])
