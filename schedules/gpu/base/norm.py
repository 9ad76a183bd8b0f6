"""Norms of token vectors on the GPU.

    rms_norm    y = x * G / sqrt(mean(x*x) + eps)
    layer_norm  y = z * G / sqrt(mean(z*z) + eps) + B, z = x - mean(x)

In: X float32 [m, k], one row for each token; `state` (`step.py`). Out: y in a layout of `quantize.py`; with `scale_out`
also the factor 1 / sqrt(..) of each row of an rms_norm. Rows of tokens that are not live are not written. A workgroup
computes a row in steps; in each step a lane has four columns, so that eight lanes have a block of 32.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.base.device import barrier, fma, launch, rsqrt, wave_sum
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH, emit_store, load_columns, result_args
from mlc_amd.schedules.gpu.base.registers import filled, put
from mlc_amd.schedules.gpu.base.step import ThreadsPlan, builds, if_live, live_rows, planned_threads, threads_of
from mlc_amd.schedules.operators import LayerNorm, RmsNorm
from mlc_amd.schedules.operators.layouts import output_rows
from mlc_amd.schedules.space import Kernel
from mlc_amd.schedules.tir import Buffer, Expr, Frame, declared

MAX_STEPS = 8  # whose columns stay in registers; on Vulkan, where workgroups may be small, longer rows are read twice
MOST_STEPS = 16  # the same of a plan of tuning


def workgroup_sum(arch: Device, waves: int, total: Expr, part: Buffer, wave: Expr, lane: Expr) -> Expr:
    """The sum of `total` over the workgroup, whose waves meet in `part`."""
    total = wave_sum(arch, T.Bind(total))
    with T.If(lane == 0), T.Then():
        T.buffer_store(part, total, [wave])
    barrier()
    return T.Bind(sum((part[i] for i in range(1, waves)), part[0]))


def row_scale(total: Expr, k: int, eps: float) -> Expr:
    """The factor 1 / sqrt(mean of squares + eps) of a row. total: the sum of its squares. k: its columns."""
    return rsqrt(fma(total, T.float32(1 / k), T.float32(eps)))


def scaled(values: Iterable[Expr], scale: Expr, factors: Iterable[Expr]) -> list[Expr]:
    return [T.Bind(v * scale * f) for v, f in zip(values, factors, strict=True)]


def square(values: list[Expr], live: Expr | None) -> Expr:
    """The sum of the squares of a step's columns; 0 if the step has none for this thread."""
    squares = T.float32(0)
    for v in values:
        squares = fma(v, v, squares)
    return squares if live is None else T.Select(live, squares, T.float32(0))


def _total(values: list[Expr], live: Expr | None) -> Expr:
    """The sum of a step's columns; 0 if the step has none for this thread."""
    total = T.Bind(values[0] + values[1] + values[2] + values[3])
    return total if live is None else T.Select(live, total, T.float32(0))


class Columns(NamedTuple):
    """The columns of a row that a thread has in a step: WIDTH of x (values), G (factors) and B (offsets)."""

    column: Expr  # the first column
    live: Expr | None  # a condition, whether the thread has columns in this step; None if it always does
    values: list[Expr]
    factors: list[Expr]
    offsets: list[Expr]


@builds(RmsNorm, LayerNorm)
def norm(op: RmsNorm | LayerNorm, arch: Device, state: Buffer, plan: ThreadsPlan | None) -> None:
    """Kernel (state, X float32 [m, k], G float32 [k], [B float32 [k]], then A and S, or H, or Y of [m, k], for
    op.layout, [Y with op.both], [NewScale float32 [m] with op.scale_out]). A workgroup computes a token. Raises
    UserError unless k is a multiple of 32."""
    if op.k % BLOCK:
        raise UserError(f"the hidden size must be a multiple of {BLOCK}, not {op.k}")
    k, threads = op.k, threads_of(arch, plan)
    rows, waves, width = output_rows(op.rows, op.m), threads // arch.wave, threads * WIDTH  # width: columns of a step
    steps, centered = -(-k // width), isinstance(op, LayerNorm)
    X, G, B = declared(X=(op.m, k), G=(k,), B=(k,) if isinstance(op, LayerNorm) and op.bias else None)
    outs = result_args(rows, k, op)
    (scales,) = declared(NewScale=(rows,) if isinstance(op, RmsNorm) and op.scale_out else None)
    with launch((rows,), (arch.wave, waves)) as (token, lane, wave):
        thread, mean = wave * arch.wave + lane, None
        part, *means = (T.alloc_buffer((waves,), "float32", scope="shared") for _ in range(1 + centered))
        source, live_row = _source(state, op, token)

        def load(step: Expr) -> Columns:
            column, live = step * width + thread * WIDTH, None
            if k % width and not (isinstance(step, int) and (step + 1) * width <= k):  # others repeat the last columns
                column, live = T.min(column, T.int32(k - WIDTH)), column < k
            column = T.Bind(column)
            offsets = [T.float32(0)] * WIDTH if B is None else load_columns(B, column)
            return Columns(column, live, load_columns(X, source, column), load_columns(G, column), offsets)

        def loop() -> Iterator[Columns]:
            with T.serial(steps) as i:
                yield load(i)

        def each_step() -> Iterator[Columns]:
            for step in loaded or loop():
                yield step if mean is None else step._replace(values=[T.Bind(v - mean) for v in step.values])

        def total_of(what: Callable[..., Expr], part: Buffer) -> Expr:
            """The sum of what(values, live) over the row; the waves exchange their sums through `part`."""
            total = filled(T.float32(0))
            for step in each_step():
                put(total, total[0] + what(step.values, step.live), 0)
            return workgroup_sum(arch, waves, total[0], part, wave, lane)

        with live_row:
            # Columns stay in registers; if there are too many, they are loaded again for each sum and for the store.
            loaded = [load(i) for i in range(steps)] if arch.api == "rocm" or steps <= MAX_STEPS else []
            if centered:
                mean = T.Bind(total_of(_total, means[0]) * T.float32(1 / k))
            scale = row_scale(total_of(square, part), k, op.eps)
            if scales is not None:
                with T.If(thread == 0), T.Then():
                    T.buffer_store(scales, scale, [token])
            for column, live, values, factors, offsets in each_step():
                y = scaled(values, scale, factors)
                if B is not None:
                    y = [T.Bind(v + offset) for v, offset in zip(y, offsets, strict=True)]
                for layout, out in outs:
                    emit_store(arch, layout, out, y, token, column, live)


@registry.plans(RmsNorm, LayerNorm)
@planned_threads
def plans(op: RmsNorm | LayerNorm, arch: Device, plan: ThreadsPlan) -> Kernel:
    steps = -(-op.k // (threads_of(arch, plan) * WIDTH))
    if steps > MOST_STEPS and plan.threads < arch.threads:
        raise ValueError(f"{plan.threads} threads hold {steps} steps each")
    return Kernel(plan, output_rows(op.rows, op.m), plan.threads, steps * WIDTH * 8)


def _source(state: Buffer, op: RmsNorm | LayerNorm, token: Expr) -> tuple[Expr, Frame]:
    """(row of X for row `token` of the outputs, a frame in which the work on it must be emitted)."""
    m = op.m
    if op.rows == "all":
        return token, if_live(state, m, token)
    last = T.Bind(live_rows(state, m) - 1)
    if op.rows == "last":
        return last, if_live(state, 1, token)
    exists = token < T.min(state[0] + 1, live_rows(state, m, minimum=0))
    # a loop of 0 or 1 iterations, because TVM does not allow barriers in an `if`
    return T.Bind(T.Select(token < state[0], token, last)), T.serial(T.cast(exists, "int32"))
