"""Chooses the kernels of linear layers, and of the first half of a feed-forward layer: GEMVs for few tokens, otherwise
GEMMs. It also has the kernel of linear layers with a matrix for each head, y[m, h, n] = sum over k of w[h, n, k] *
x[m, h, k]: launches of `gemv.py` for up to FEW tokens, otherwise of `gemm.py`, with a row of activations for each token
and head."""

from collections.abc import Sequence
from types import ModuleType

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.base.device import launch
from mlc_amd.schedules.gpu.base.planes import BLOCK, plane_args
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import FIELDS, act_args
from mlc_amd.schedules.gpu.base.step import FEW, builds, live_rows, once
from mlc_amd.schedules.gpu.experts.experts import check_rows
from mlc_amd.schedules.gpu.linear import gemm, gemv, load
from mlc_amd.schedules.gpu.linear.gemm_tile import Product, TileWork, Weight
from mlc_amd.schedules.gpu.linear.gemv_plan import linear_splits
from mlc_amd.schedules.gpu.linear.gemv_rows import Acts, emit_acts, span_of
from mlc_amd.schedules.gpu.linear.linear_args import Segment
from mlc_amd.schedules.gpu.linear.load import QUADS
from mlc_amd.schedules.operators import ExpertGateUp, GateUp, HeadLinear, Linear
from mlc_amd.schedules.operators.layouts import kind_of
from mlc_amd.schedules.space import Space
from mlc_amd.schedules.tir import Buffer, Expr


def module_of(op: Linear | GateUp | ExpertGateUp, arch: Device) -> ModuleType:
    """The module whose kernel computes the operator."""
    return gemv if gemv.suits(op, arch) else gemm


@registry.builds(Linear)
def linear(op: Linear, arch: Device, name: str, plan=None) -> tirx.PrimFunc:
    return module_of(op, arch).linear(op, arch, name, plan)


@registry.builds(GateUp, ExpertGateUp)
def gate_up(op: GateUp | ExpertGateUp, arch: Device, name: str, plan=None) -> tirx.PrimFunc:
    if isinstance(op, ExpertGateUp):
        check_rows(op.n, BLOCK)
    return module_of(op, arch).gate_up_swiglu(op, arch, name, plan)


@registry.plans(Linear, GateUp, ExpertGateUp)
def plans(op: Linear | GateUp | ExpertGateUp, arch: Device) -> Space:
    return module_of(op, arch).plans(op, arch)


@builds(HeadLinear)
def head_linear(op: HeadLinear, arch: Device, state: Buffer, plan: None) -> None:
    """Kernel (state, A and S, or H, or X of [m, heads * k], planes of the [heads * n, k] stack, Y float32 [m, heads *
    n]). Raises UserError unless n is a multiple of 16, and for weights that are too large; ValueError if there is no
    tile."""
    rows, ((fmt, _),) = op.heads * op.n, op.weights
    check_rows(op.n)
    acts = act_args(op.m, op.heads * op.k, op.layout)
    planes = plane_args(fmt, rows, op.k, "W_")
    segment = Segment(fmt, rows, planes, None, T.arg("Y", T.buffer((op.m, rows), "float32")))
    if op.m <= FEW and op.layout in gemv.VECTORS:
        _emit_gemv(op, arch, acts, segment)
    else:
        _emit_gemm(op, arch, state, acts, segment)


def _emit_gemv(op: HeadLinear, arch: Device, acts: list[Buffer], segment: Segment) -> None:
    gemv.check(op)
    n, k, heads = op.n, op.k, op.heads
    stack = Linear(segments=((op.fmt, segment.n),), k=k, m=op.m, layout=op.layout, biases=(False,))
    (split,) = linear_splits(stack, arch)
    acts = [T.decl_buffer((op.m * heads, k), "float32", data=acts[0].data)] if op.layout == "" else acts
    with launch((split.groups,), (arch.wave, split.plan.waves)) as place:
        found = emit_acts(acts, k, op.m * heads)
        views = load.views(segment.fmt, segment.planes, span_of([segment.fmt], k))

        def tokens(row: Expr) -> list[Acts]:
            """The activations for a group of rows, which are all of one head: a group has at most 16 rows, and 16
            divides n. The upper limit, which no row reaches, keeps TVM's bounds of indices within int32."""
            head = T.Bind(T.min(row // n, T.int32(heads - 1)))
            return [found.of(T.Bind(token * heads + head)) for token in range(op.m)]

        gemv.emit_segment(arch, split, segment, views, tokens, place)


class _OfHead:
    """A head's part of a buffer of activations, with an index of tokens as first index. In the layout "lanes", the part
    is groups of columns; otherwise rows of [m * heads, ..]."""

    def __init__(self, buffer: Buffer, heads: int, head: Expr, in_lanes: bool):
        self.buffer, self.heads, self.head, self.in_lanes = buffer, heads, head, in_lanes
        self.dtype, self.shape = buffer.dtype, list(buffer.shape)

    def __getitem__(self, index: tuple[Expr, ...]) -> Expr:
        first, second, *rest = index
        if self.in_lanes:
            return self.buffer[(first, self.head * (int(self.shape[1]) // self.heads) + second, *rest)]
        return self.buffer[(first * self.heads + self.head, second, *rest)]


def _emit_gemm(op: HeadLinear, arch: Device, state: Buffer, acts: list[Buffer], segment: Segment) -> None:
    n, k, m, heads = op.n, op.k, op.m, op.heads
    routine = gemm.engine(Product(arch, op.layout, (segment.fmt,), m, k, segment.n))
    tiles, rows = routine.row_tiles(n), m * heads
    shapes = {
        "rows": [((rows, k // BLOCK, QUADS), "int32"), ((rows, k // BLOCK, FIELDS), "float32")],
        "": [((rows, k), "float32")],
        "pairs": [((rows, k), "float16")],
    }
    in_lanes = kind_of(op.layout) == "lanes"
    views = (
        acts if in_lanes else [T.decl_buffer(*of, data=x.data) for of, x in zip(shapes[op.layout], acts, strict=True)]
    )
    with launch((routine.token_tiles, heads * tiles), (routine.threads,)) as (token_tile, row_tile, thread):
        routine.allocate(thread)
        token0, live = T.Bind(token_tile * routine.tile.tokens), live_rows(state, m)
        head, row0 = T.Bind(row_tile // tiles), T.Bind(row_tile % tiles * routine.tile.rows)

        def store(token: Expr, row: Expr, values: Sequence[Expr]) -> None:
            (x,) = values
            T.buffer_store(segment.Y, x, [token, gemm.span(T.Bind(head * n + row), x)])

        with once(token0 < live):
            weight = Weight(segment.fmt, segment.planes, n)
            mine = [_OfHead(x, heads, head, in_lanes) for x in views]
            routine.emit(TileWork(mine, [weight], token0, row0, store, T.Bind(head * n)))
