"""The parameters of the kernels of linear layers, GEMVs and GEMMs alike: this module declares them, in this order.

    linear    (state, activations, planes of segment 0, [bias f32 [n]], planes of segment 1, .., [R f32 [m, npad]],
              [inputs of PreparedNorm], Y0 f32 [m, npad], .., [outputs of PreparedNorm], [NewScale])
    gate_up   (state, activations, [Groups], planes of gate, planes of up, [GB, UB], then A_out, S_out | Y of [m, n],
              [NewScale])

Activations are A and S, or H, or X, in a layout of `quantize.py`; or X and G of a norm that the kernel computes itself
(`gemv_rows.py`). If the kernel completes a norm (`deferred_norm.py`), Squares and [Scale] follow. A segment is one of
the weights that share the activations and the launch (q, k and v of a layer). npad is n rounded up to a multiple of 16.
Groups, and biases of gate and up, exist only for experts.
"""

from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.schedules.formats import Format
from mlc_amd.schedules.gpu.base.planes import BLOCK, Planes, padded, plane_args
from mlc_amd.schedules.gpu.base.quantize import act_args
from mlc_amd.schedules.gpu.experts.experts import bias_args, ids_arg
from mlc_amd.schedules.gpu.linear.deferred_norm import CompletedNorm, PreparedNorm
from mlc_amd.schedules.operators import ExpertGateUp, GateUp, Linear
from mlc_amd.schedules.tir import Buffer, declared


class Segment(NamedTuple):
    """A segment: n rows of a weight, with its planes, its bias (or None), and the buffer for its results."""

    fmt: Format
    n: int
    planes: Planes
    bias: Buffer | None
    Y: Buffer


class LinearBuffers(NamedTuple):
    """The buffers of a linear layer."""

    acts: list[Buffer]
    segments: list[Segment]
    residual: Buffer | None  # added to the result, or None
    prepared: PreparedNorm | None  # the norm of its result that it prepares
    completed: CompletedNorm | None  # the norm of its input that it completes


class GateUpBuffers(NamedTuple):
    """The buffers of the first half of a feed-forward layer."""

    acts: list[Buffer]
    ids: Buffer | None  # Groups: the experts of slots
    planes: list[Planes]  # of gate and up
    biases: list[Buffer]  # of gate and up, or []
    out: list[Buffer]
    completed: CompletedNorm | None  # see LinearBuffers


def _acts(m: int, k: int, layout: str, eps: float | None) -> list[Buffer]:
    """Declares activations. eps: of a norm that the kernel computes itself, or None."""
    if eps is None:
        return act_args(m, k, layout)
    return declared(X=(m, k), G=(k,))


def declare_linear(op: Linear) -> LinearBuffers:
    """Declares the parameters of a kernel after `state`. Raises ValueError for segments that cannot share a launch."""
    m, k = op.m, op.k
    if len(op.biases) != len(op.segments) or (op.residual and len(op.segments) > 1):
        raise ValueError(f"segments {op.segments}, biases {op.biases}, residual {op.residual} do not make one launch")
    acts = _acts(m, k, op.layout, op.eps)
    completed = None if op.norm_in is None else CompletedNorm(op.norm_in, m, k, op.layout)
    weights = [
        (fmt, n, plane_args(fmt, n, k, f"W{i}_"), T.arg(f"bias{i}", T.buffer((n,), "float32")) if biased else None)
        for i, ((fmt, n), biased) in enumerate(zip(op.weights, op.biases, strict=True))
    ]
    n = op.weights[0][1]
    residual = T.arg("R", T.buffer((m, padded(n)), "float32")) if op.residual else None
    prepared = PreparedNorm(m, n, op.norm_out) if op.norm_out else None
    outputs = [T.arg(f"Y{i}", T.buffer((m, padded(n)), "float32")) for i, (_, n) in enumerate(op.weights)]
    for norm in filter(None, (prepared, completed)):
        norm.declare_outputs()
    segments = [Segment(*weight, Y) for weight, Y in zip(weights, outputs, strict=True)]
    return LinearBuffers(acts, segments, residual, prepared, completed)


def check_blocks(n: int) -> None:
    """Raises ValueError unless n is a multiple of 32."""
    if n % BLOCK:
        raise ValueError(f"a feed-forward layer of {n} columns does not make whole blocks of {BLOCK}")


def declare_gate_up(op: GateUp | ExpertGateUp) -> GateUpBuffers:
    """Declares the parameters of a kernel after `state`. The weights of experts are stacked."""
    if isinstance(op, ExpertGateUp):
        x_rows, rows, count, eps, norm_in = op.x_rows, op.of.slots(op.m), op.experts, None, None
    else:
        x_rows, rows, count, eps, norm_in = op.m, op.m, 1, op.eps, op.norm_in
    acts = _acts(x_rows, op.k, op.layout_in, eps)
    completed = None if norm_in is None else CompletedNorm(norm_in, op.m, op.k, op.layout_in)
    ids = ids_arg(op.of, op.m) if isinstance(op, ExpertGateUp) else None
    planes: list[Planes] = [
        plane_args(fmt, count * n, op.k, which) for (fmt, n), which in zip(op.weights, ("G_", "U_"), strict=True)
    ]
    biases = bias_args(count * op.n, "GB", "UB") if isinstance(op, ExpertGateUp) and op.biases else []
    out = act_args(rows, op.n, op.layout, ["A_out", "S_out"] if op.layout == "rows" else ["Y"])
    if completed:
        completed.declare_outputs()
    return GateUpBuffers(acts, ids, planes, biases, out, completed)
