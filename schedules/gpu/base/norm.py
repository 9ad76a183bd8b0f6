"""Normalization and conversion of token vectors on the GPU.

    rms_norm    y = x * G / sqrt(mean(x*x) + eps)
    layer_norm  y = z * G / sqrt(mean(z*z) + eps) + B, z = x - mean(x)
    quantize    y = x

In: X float32 [m, k], one row a token; `state` of `step.py`. Out: y in a layout of `quantize.py`, and of an rms_norm
the factor 1 / sqrt(..) of each row, if it is asked for. Rows beyond the live
tokens are left as they were. A lane holds four columns of each step,
eight lanes a block of 32.
"""

from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.base.device import barrier, fma, launch, rsqrt, wave_sum
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.quantize import RUNS_OF, WIDTH, act_args, columns, emit_store
from mlc_amd.schedules.gpu.base.registers import lane_of
from mlc_amd.schedules.gpu.base.step import if_live, kernel, live_rows, state_arg
from mlc_amd.schedules.operators.rows import output_rows

MAX_STEPS = 8  # whose columns stay in registers; on Vulkan, where workgroups may be small, longer rows are read twice


@dataclass(frozen=True)
class Plan:
    """threads: of a workgroup; whole waves."""

    threads: int


def load_columns(buf, *index):
    """Four float32 registers of consecutive columns."""
    x = T.Bind(buf[(*index[:-1], columns(index[-1]))])
    return [T.Bind(lane_of(x, i)) for i in range(WIDTH)]


def threads_of(arch, plan=None) -> int:
    """Threads of a workgroup: the plan's, by default as many as the arch allows. ValueError for what the arch cannot
    have."""
    threads = plan.threads if plan else arch.threads
    if threads > arch.threads or threads % arch.wave:
        raise ValueError(
            f"{arch.name} has workgroups of up to {arch.threads} threads in waves of {arch.wave}, not of {threads}"
        )
    return threads


def _column(threads, k, thread, step):
    """(first column, live) of this thread in that step; live is None where all threads have columns. Others get the
    last ones."""
    width = threads * WIDTH
    column = step * width + thread * WIDTH
    if k % width == 0 or (isinstance(step, int) and (step + 1) * width <= k):
        return T.Bind(column), None
    return T.Bind(T.min(column, T.int32(k - WIDTH))), column < k


def square(values, live):
    """The sum of the squares of a step's columns; 0 if the step has none for this thread."""
    squares = T.float32(0)
    for v in values:
        squares = fma(v, v, squares)
    return squares if live is None else T.Select(live, squares, T.float32(0))


def _total(values, live):
    """The sum of a step's columns; 0 if the step has none for this thread."""
    total = T.Bind(values[0] + values[1] + values[2] + values[3])
    return total if live is None else T.Select(live, total, T.float32(0))


def _minus(values, mean):
    """values - mean; the values if that is None."""
    return values if mean is None else [T.Bind(v - mean) for v in values]


def workgroup_sum(arch, waves, total, part, wave, lane):
    """The sum of `total` over the workgroup."""
    total = wave_sum(arch, T.Bind(total))
    with T.If(lane == 0), T.Then():
        T.buffer_store(part, total, [wave])
    barrier()
    total = part[0]
    for i in range(1, waves):
        total = total + part[i]
    return T.Bind(total)


def row_scale(total, k, eps):
    """What a row is multiplied by, whose squares add up to `total`."""
    return rsqrt(fma(total, T.float32(1 / k), T.float32(eps)))


def scaled(values, scale, factors):
    return [T.Bind(v * scale * f) for v, f in zip(values, factors, strict=True)]


def declare_scale(m):
    """Declares the output with the factors 1 / sqrt(..) of m rows."""
    return T.arg("NewScale", T.buffer((m,), "float32"))


def rms_norm(k, m, eps, layout, rows, arch, name, plan=None, both=False, scale_out=False) -> tirx.PrimFunc:
    """Kernel (state int32[4], X float32 [m, k], G float32 [k], then A, S | H | Y of [m, k], as `layout` says). A
    workgroup a token.

    rows: of the outputs, of `schedules.operators.rows`. both: Y behind the outputs of another layout. scale_out: at the
    end the output of `declare_scale`. UserError unless 32 divides k.
    """
    return _norm(k, m, eps, layout, rows, arch, name, plan, both, scale_out=scale_out)


def layer_norm(k, m, eps, bias, layout, rows, arch, name, plan=None, both=False) -> tirx.PrimFunc:
    """As `rms_norm`, of x minus its mean. bias: behind G there is B float32 [k], which is added."""
    return _norm(k, m, eps, layout, rows, arch, name, plan, both, True, bias)


def _source(state, m, rows, token):
    """(the row of X that becomes row `token` of the outputs, `with` that: what is around the work on it)."""
    if rows == "all":
        return token, if_live(state, m, token)
    last = T.Bind(live_rows(state, m) - 1)
    if rows == "last":
        return last, if_live(state, 1, token)
    exists = token < T.min(state[0] + 1, live_rows(state, m, minimum=0))
    # a loop of 0 or 1 iterations: TVM refuses barriers in an `if`
    return T.Bind(T.Select(token < state[0], token, last)), T.serial(T.cast(exists, "int32"))


def _norm(
    k, m, eps, layout, rows, arch, name, plan, both, centered=False, bias=False, scale_out=False
) -> tirx.PrimFunc:
    """Either; centered: the mean is subtracted."""
    if k % BLOCK:
        raise UserError(f"the hidden size must be a multiple of {BLOCK}, not {k}")
    out_m, threads = output_rows(rows, m), threads_of(arch, plan)
    waves = threads // arch.wave
    with kernel(name) as ir:
        state = state_arg()
        X, G = T.arg("X", T.buffer((m, k), "float32")), T.arg("G", T.buffer((k,), "float32"))
        B = T.arg("B", T.buffer((k,), "float32")) if bias else None
        layouts = [layout, ""] if both else [layout]
        outs = [act_args(out_m, k, each, None if each else ["Y"]) for each in layouts]
        scales = declare_scale(out_m) if scale_out else None
        with launch((out_m,), (arch.wave, waves)) as (token, lane, wave):
            part = T.alloc_buffer((waves,), "float32", scope="shared")
            means = T.alloc_buffer((waves,), "float32", scope="shared") if centered else None
            source, where = _source(state, m, rows, token)
            with where:
                thread, count = wave * arch.wave + lane, -(-k // (threads * WIDTH))

                def mean_of(total):
                    return T.Bind(workgroup_sum(arch, waves, total, means, wave, lane) * T.float32(1 / k))

                def scale_of(total):
                    scale = row_scale(workgroup_sum(arch, waves, total, part, wave, lane), k, eps)
                    if scales is not None:
                        with T.If(thread == 0), T.Then():
                            T.buffer_store(scales, scale, [token])
                    return scale

                def store(values, scale, factors, offsets, column, live):
                    y = scaled(values, scale, factors)
                    if offsets is not None:
                        y = [T.Bind(v + o) for v, o in zip(y, offsets, strict=True)]
                    for each, out in zip(layouts, outs, strict=True):
                        emit_store(arch, each, out, y, token, column, live)

                if arch.api == "rocm" or count <= MAX_STEPS:
                    steps = [_column(threads, k, thread, i) for i in range(count)]
                    x = [load_columns(X, source, column) for column, _ in steps]
                    g = [load_columns(G, column) for column, _ in steps]
                    b = [load_columns(B, column) if bias else None for column, _ in steps]
                    if centered:
                        mean = mean_of(_sum_of(_total, x, steps))
                        x = [_minus(values, mean) for values in x]
                    scale = scale_of(_sum_of(square, x, steps))
                    for values, factors, offsets, (column, live) in zip(x, g, b, steps, strict=True):
                        store(values, scale, factors, offsets, column, live)
                else:
                    mean = None

                    def total_of(what):
                        total = T.alloc_buffer((1,), "float32", scope="local")
                        T.buffer_store(total, T.float32(0), [0])
                        with T.serial(count) as i:
                            column, live = _column(threads, k, thread, i)
                            values = _minus(load_columns(X, source, column), mean)
                            T.buffer_store(total, total[0] + what(values, live), [0])
                        return total[0]

                    if centered:
                        mean = mean_of(total_of(_total))
                    scale = scale_of(total_of(square))
                    with T.serial(count) as i:
                        column, live = _column(threads, k, thread, i)
                        values, offsets = _minus(load_columns(X, source, column), mean), None
                        factors = load_columns(G, column)
                        if bias:
                            offsets = load_columns(B, column)
                        store(values, scale, factors, offsets, column, live)
    return ir.get()


def _sum_of(what, x, steps):
    """The sum of `what` of all steps' values."""
    total = T.float32(0)
    for values, (_, live) in zip(x, steps, strict=True):
        total = total + what(values, live)
    return total


def quantize(k, m, layout, arch, name, plan=None) -> tirx.PrimFunc:
    """Kernel (state int32[4], X float32 [m, k], then A, S or H of [m, k]): the live tokens' rows in the layout "rows",
    "half", "pairs" or "lanes".

    UserError unless 32 divides k, ValueError for another layout.
    """
    if layout not in ("rows", "half", *RUNS_OF):
        raise ValueError(f"nothing to convert to the layout {layout!r}")
    if k % BLOCK:
        raise UserError(
            f"activations need a multiple of {BLOCK} columns, not {k}; use a float weight format for this layer"
        )
    threads = threads_of(arch, plan)
    step = threads * WIDTH
    with kernel(name) as ir:
        state, X = state_arg(), T.arg("X", T.buffer((m, k), "float32"))
        out = act_args(m, k, layout)
        with launch((-(-k // step), m), (threads,)) as (chunk, token, thread), if_live(state, m, token):
            column = T.Bind(chunk * step + thread * WIDTH)
            inside = T.Bind(T.min(column, T.int32(k - WIDTH)))
            emit_store(
                arch, layout, out, load_columns(X, token, inside), token, inside, None if k % step == 0 else column < k
            )
    return ir.get()
