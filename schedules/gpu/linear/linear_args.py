"""The parameters that the kernels of linear layers share, whatever multiplies: declared here in one order.

    linear    (state, activations, planes of segment 0, [bias f32 [n]], planes of segment 1, .., [R f32 [m, npad]],
              [inputs of Made], Y0 f32 [m, npad], .., [outputs of Made], [NewScale])
    gate_up   (state, activations, [Groups], planes of gate, planes of up, [GB, UB], then A_out, S_out | Y of [m, f],
              [NewScale])

Activations are A, S | H | X in a layout of `quantize.py`, or X, G of a norm that the kernel computes itself
(`gemv_norm.py`), or H, Squares, Scale of a norm that it completes (`deferred_norm.py`, which has Made, too). npad is n
rounded up to a multiple of 16, a segment one of the weights that share the activations and the launch (q, k and v of a
layer), Groups and biases are of experts.
"""

from typing import Any, NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.schedules.formats import Format, lookup
from mlc_amd.schedules.gpu.base.norm import declare_scale
from mlc_amd.schedules.gpu.base.planes import BLOCK, padded, plane_args
from mlc_amd.schedules.gpu.base.quantize import act_args
from mlc_amd.schedules.gpu.base.step import state_arg
from mlc_amd.schedules.gpu.experts.experts import bias_args, ids_arg
from mlc_amd.schedules.gpu.linear.deferred_norm import (
    Made,
    Read,
    declare_made,
    declare_made_inputs,
    declare_read_inputs,
)


class Segment(NamedTuple):
    """n rows of a weight: its planes, its bias (None: it has none), and where its results go."""

    fmt: Format
    n: int
    planes: dict
    bias: Any
    Y: Any


class Linear(NamedTuple):
    """The buffers of a linear layer. residual: None if nothing is added; made, read: None without a deferred norm."""

    state: Any
    acts: list
    segments: list[Segment]
    residual: Any
    made: Made | None
    read: Read | None


class GateUp(NamedTuple):
    """The buffers of the first half of a feed-forward layer. planes, biases: of gate and up; `ids`: of experts, or
    None."""

    state: Any
    acts: list
    ids: Any
    planes: list[dict]
    biases: list
    out: list
    read: Read | None


def segments_of(segments, biases, residual) -> list[tuple[Format, int]]:
    """The segments with Formats. biases: one flag for each. ValueError if they do not make one launch."""
    found = [(lookup(fmt), n) for fmt, n in segments]
    if len(biases) != len(found) or (residual and len(found) > 1):
        raise ValueError(
            f"segments {[(f.name, n) for f, n in found]}, biases {biases}, residual {residual} do not make one launch"
        )
    return found


def _acts(m, k, layout, eps) -> list:
    """eps: None, or that of a norm of m rows."""
    if eps is None:
        return act_args(m, k, layout)
    return [T.arg("X", T.buffer((m, k), "float32")), T.arg("G", T.buffer((k,), "float32"))]


def declare_linear(segments, k, m, layout, biases, residual, eps=None, norm_in=None, norm_out=False) -> Linear:
    """Declares the parameters of a kernel. segments: of `segments_of`. eps: of the norm of its input, if it has one.
    norm_in, norm_out: as of `gemm.linear`."""
    state, acts, weights = state_arg(), _acts(m, k, layout, eps), []
    norm = None if norm_in is None else declare_read_inputs(k, m)
    for i, ((fmt, n), has_bias) in enumerate(zip(segments, biases, strict=True)):
        planes = plane_args(fmt, n, k, f"W{i}_")
        weights.append((planes, T.arg(f"bias{i}", T.buffer((n,), "float32")) if has_bias else None))
    R = T.arg("R", T.buffer((m, padded(segments[0][1])), "float32")) if residual else None
    n = segments[0][1]
    inputs = declare_made_inputs(n, m) if norm_out else None
    outputs = [T.arg(f"Y{i}", T.buffer((m, padded(n)), "float32")) for i, (_, n) in enumerate(segments)]
    next_norm = declare_made(n, m, inputs) if norm_out else None
    made = [Segment(*own, *held, Y) for own, held, Y in zip(segments, weights, outputs, strict=True)]
    return Linear(state, acts, made, R, next_norm, _read(norm_in, m, k, norm))


def _read(eps, m, k, inputs) -> Read | None:
    """inputs: of the norm of m rows of k columns that a kernel completes, if it does; declares its output."""
    return None if inputs is None else Read(eps, m, k, *inputs, declare_scale(m))


def check_blocks(f) -> None:
    """ValueError unless f results make whole blocks."""
    if f % BLOCK:
        raise ValueError(f"a feed-forward layer of {f} columns does not make whole blocks of {BLOCK}")


def declare_gate_up(fmts, f, k, rows, layout_in, layout, of=None, eps=None, norm_in=None) -> GateUp:
    """Declares the parameters of a kernel. rows: (of the activations, of the results). of: a `Slots` of experts.py, of
    which the weights are stacks. eps, norm_in: as of `declare_linear`."""
    state, acts, count = state_arg(), _acts(rows[0], k, layout_in, eps), of.experts.count if of else 1
    norm = None if norm_in is None else declare_read_inputs(k, rows[0])
    ids = ids_arg(of.experts, of.m) if of else None
    planes = [plane_args(fmt, count * f, k, prefix) for fmt, prefix in zip(fmts, ("G_", "U_"), strict=True)]
    biases = bias_args(of, f, ("GB", "UB"))
    out = act_args(rows[1], f, layout, ["A_out", "S_out"] if layout == "rows" else ["Y"])
    return GateUp(state, acts, ids, planes, biases, out, _read(norm_in, rows[0], k, norm))
