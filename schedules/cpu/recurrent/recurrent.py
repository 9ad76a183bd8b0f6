"""The kernels of schedules/operators/recurrent.py on the CPU: mixers whose state is a matrix for each head, the decay
of channels, the causal convolution, and the gate.

A task of a mixer is 16 columns of a matrix or of a convolution, for all rows of the step. These columns of a state stay
in the cache meanwhile.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import sqrt

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.base.activation import ACTIVATIONS, silu, times_sigmoid
from mlc_amd.schedules.cpu.base.arch import Arch, tile_rows
from mlc_amd.schedules.cpu.base.kernel import kernel, live_rows, row_loop
from mlc_amd.schedules.cpu.base.vector import LANES, at, f32, local, registers, splat, store, tree_add
from mlc_amd.schedules.cpu.linear.quantize import BLOCK, Output
from mlc_amd.schedules.operators import CausalConv, ChannelDecay, DeltaNet, Gate, SsmScan
from mlc_amd.schedules.operators.attention import LOG2E
from mlc_amd.schedules.runs import (
    RunCells,
    begins,
    conv_args,
    decay_args,
    delta_args,
    key_head,
    run_length,
    runs,
    softplus,
    ssm_args,
)
from mlc_amd.schedules.tir import Buffer, Expr, declared

STEP = 8  # rows of a delta net's matrix in a step of the loop
SSM_STEP = 4  # rows of an SSM's matrix in a step of the loop
SUMS = 2  # independent sums of each product, which hide the latency of additions


@contextmanager
def _each_row(
    op: DeltaNet | SsmScan, state: Buffer, rows: Buffer, cells: Buffer, live: Expr, clear: Callable[[Expr], None]
) -> Iterator[tuple[Expr, Expr, Expr]]:
    """The loop over the rows of all runs: (row, cell of the state before the row, cell of the state after the row).
    clear(cell): emits code that sets a state to zeros, for runs that begin at position 0."""
    with T.serial(T.min(live, T.int32(runs(op.m, op.single)))) as first, T.If(begins(rows, first)), T.Then():
        places = RunCells(rows, cells, first, op.single)
        before = T.alloc_buffer((1,), "int32", scope="local")
        T.buffer_store(before, places.source, [0])
        with T.If(rows[first, 0] <= 0), T.Then():
            T.buffer_store(before, places.after(T.int32(0)), [0])
            clear(before[0])
        with T.serial(run_length(op, state, rows, first, live)) as step:
            row, source, target = T.Bind(first + step), T.Bind(before[0]), places.after(step)
            T.buffer_store(before, target, [0])
            yield row, source, target


@registry.builds(DeltaNet)
def delta_net(op: DeltaNet, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], the parameters of `delta_args`). For each token a thread reads its columns of M twice:
    for M^T k and M^T q, and to update M. As y = decay * M^T q + (q . k) t, y does not need the updated M. Raises
    ValueError unless d is a multiple of 16."""
    key_heads, value_heads, d, m = op.key_heads, op.value_heads, op.d, op.m
    if d % LANES:
        raise ValueError(f"heads of {d} columns: they must be a multiple of {LANES}")
    keys = key_heads * d
    with kernel(name) as (builder, state):
        rows, cells, X, Beta, decays, States, Y = delta_args(op)
        live, blocks = live_rows(state, m), d // LANES
        with T.parallel(value_heads * blocks) as unit:
            head, column = T.Bind(unit // blocks), T.Bind(unit % blocks * LANES)
            q_at = T.Bind(key_head(head, op) * d)
            k_at, v_at = q_at + keys, T.Bind(head * d + 2 * keys + column)

            def clear(cell: Expr) -> None:
                with T.serial(d) as i:
                    store(States, f32(0.0), cell, head, i, at(column))

            with _each_row(op, state, rows, cells, live, clear) as (row, source, target):

                def dot(a: Expr, b: Expr) -> Expr:
                    """The dot product of d columns of the row's q or k: those from a on, and those from b on."""
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


@registry.builds(SsmScan)
def ssm_scan(op: SsmScan, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], the parameters of `ssm_args`). A state is stored as [size, d]. Raises ValueError unless d
    is a multiple of 16, and size a multiple of 4."""
    heads, d, size, groups, m = op.heads, op.d, op.size, op.groups, op.m
    if d % LANES or size % SSM_STEP:
        raise ValueError(f"heads of {d} by {size} columns: these must be multiples of {LANES} and {SSM_STEP}")
    with kernel(name) as (builder, state):
        rows, cells, X, Z, Dt, A, D, Bias, States, Y = ssm_args(op)
        live, blocks = live_rows(state, m), d // LANES
        with T.parallel(heads * blocks) as unit:
            head, column = T.Bind(unit // blocks), T.Bind(unit % blocks * LANES)
            b_at = T.Bind(heads * d + head // (heads // groups) * size)
            c_at, x_at = b_at + groups * size, T.Bind(head * d + column)

            def clear(cell: Expr) -> None:
                with T.serial(size) as i:
                    store(States, f32(0.0), cell, head, at(i * d + column))

            with _each_row(op, state, rows, cells, live, clear) as (row, source, target):
                x, total = T.Bind(X[row, at(x_at)]), registers(LANES)
                if op.by_state:
                    dt, skip = T.Bind(Dt[row, at(column)]), D[at(column)]
                else:
                    one = T.Bind(Dt[row, head]) if op.given else softplus(Dt[row, head] + Bias[head])
                    dt, decay = T.Bind(splat(one)), T.Bind(splat(T.Bind(T.exp(A[head] * one))))
                    skip = splat(D[head]) if op.gated else None
                change = T.Bind(x * dt)
                store(total, x * skip if op.gated else f32(0.0), at(0))
                with T.serial(size // SSM_STEP) as block:
                    numbers = [T.Bind(block * SSM_STEP + i) for i in range(SSM_STEP)]
                    old = [T.Bind(States[source, head, at(n * d + column)]) for n in numbers]
                    for i, n in enumerate(numbers):
                        if op.by_state:
                            own = T.Bind(A[T.ramp(column * size + n, size, LANES)] * dt)
                            decay = arch.isa.exp2(T.Bind(own * f32(LOG2E)), LANES)
                        new = T.Bind(old[i] * decay + change * splat(X[row, b_at + n]))
                        store(States, new, target, head, at(n * d + column))
                        store(total, total[at(0)] + new * splat(X[row, c_at + n]), at(0))
                y = silu(T.Bind(Z[row, at(x_at)]), total[at(0)], arch.isa) if op.gated else total[at(0)]
                store(Y, y, row, at(x_at))
    return builder.get()


@registry.builds(ChannelDecay)
def channel_decay(op: ChannelDecay, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], X, A, Dt, Y, see `decay_args`). A task is a head. exp and log are those of
    compiler/codegen/functions.py."""
    with kernel(name) as (builder, state):
        X, A, Dt, Y = decay_args(op)
        live = live_rows(state, op.m)
        with T.parallel(op.heads) as head, T.serial(live) as row, T.serial(op.d) as i:
            column = T.Bind(head * op.d + i)
            store(Y, T.exp(A[head] * softplus(X[row, column] + Dt[column])), row, column)
    return builder.get()


@registry.builds(CausalConv)
def causal_conv(op: CausalConv, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], the parameters of `conv_args`). Raises ValueError unless the channels of each part are a
    multiple of 16."""
    channels, taps, m, gated, act = op.channels, op.taps, op.m, op.gated, op.act
    bias, parts, isa = op.bias, op.parts, arch.isa
    if channels % (LANES * parts):
        raise ValueError(f"a convolution of {channels} columns: they must be a multiple of {LANES * parts}")
    with kernel(name) as (builder, state):
        rows, cells, inputs, weight, B, States, Y = conv_args(op)
        own = channels // parts
        live = live_rows(state, m)

        def convolve(X: Buffer, W: Buffer, before: Expr, column: Expr) -> None:
            """Emits 16 columns of a part, from its column `column` on. before: channels of the parts before it."""
            weights = [T.Bind(W[T.ramp(column * taps + t, taps, LANES)]) for t in range(taps)]
            last = [registers(LANES) for _ in range(taps - 1)]
            with T.serial(T.min(live, T.int32(runs(m, op.single)))) as first, T.If(begins(rows, first)), T.Then():
                places = RunCells(rows, cells, first, op.single)
                length = run_length(op, state, rows, first, live)

                def keep(target: Expr) -> None:
                    for t, cell in enumerate(last):
                        store(States, cell[at(0)], target, t, at(before + column))

                for t, cell in enumerate(last):
                    with T.If(rows[first, 0] > 0):
                        with T.Then():
                            store(cell, States[places.source, t, at(before + column)], at(0))
                        with T.Else():
                            store(cell, f32(0.0), at(0))
                with T.serial(length) as step:
                    row = T.Bind(first + step)
                    x = X[row, at(column)]
                    if gated:
                        x = x * X[row, at(column + 2 * channels)]
                    values = [*(T.Bind(cell[at(0)]) for cell in last), T.Bind(x)]
                    total = values[0] * weights[0]
                    for value, weight in zip(values[1:], weights[1:], strict=True):
                        total = total + value * weight
                    y = T.Bind(total + B[at(column)] if bias else total)
                    if act:
                        y = ACTIVATIONS[act](y, f32(1.0), isa, LANES)
                    store(Y, y * X[row, at(column + channels)] if gated else y, row, at(before + column))
                    for cell, value in zip(last, values[1:], strict=True):
                        store(cell, value, at(0))
                    places.keep(step, keep)
                keep(places.after(length - 1))

        blocks = own // LANES
        for part, (X, W) in enumerate(zip(inputs, weight, strict=True)):
            with T.serial(blocks) if m == 1 else T.parallel(blocks) as block:
                convolve(X, W, part * own, T.Bind(block * LANES))
    return builder.get()


@registry.builds(Gate)
def gate(op: Gate, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], X float32 [m, k], Z float32 [m, k], [G float32 [size], with eps], then A, S in tiles if
    `layout`, else Y float32 [m, k]). Raises ValueError unless k is a multiple of 32 and, with eps, size of 16."""
    k, m, size, eps = op.k, op.m, op.size, op.eps
    if k % BLOCK or (eps is not None and size % LANES):
        raise ValueError(f"a gate needs columns in multiples of {BLOCK}, heads of {LANES}; this has {k} and {size}")
    with kernel(name) as (builder, state):
        X, Z, G = declared(X=(m, k), Z=(m, k), G=(size,) if eps is not None else None)
        output = Output(m, k, tile_rows(m, arch), bool(op.layout), "Y")
        with row_loop(state, m) as row:
            scales: Buffer = local(k // size) if eps is not None else None
            if eps is not None:
                with T.serial(k // size) as head:
                    total = registers(LANES)
                    store(total, f32(0.0), at(0))
                    with T.serial(size // LANES) as part:
                        x = T.Bind(X[row, at(head * size + part * LANES)])
                        store(total, total[at(0)] + x * x, at(0))
                    mean = T.Bind(tree_add(T.Bind(total[at(0)]))) * T.float32(1 / size)
                    store(scales, T.float32(1) / T.sqrt(mean + T.float32(eps)), head)
            with T.serial(k // BLOCK) as block:
                values = []
                for half in (0, LANES):
                    column = T.Bind(block * BLOCK + half)
                    x, z = X[row, at(column)], T.Bind(Z[row, at(column)])
                    if eps is not None:
                        x = x * splat(scales[column // size]) * G[at(column % size)]
                    values.append(times_sigmoid(x * z if op.silu else x, z, arch.isa, LANES))
                low, high = values
                output.store_block(low, high, row, block)
    return builder.get()
