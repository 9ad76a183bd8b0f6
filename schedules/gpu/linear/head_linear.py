"""Linear layers with a matrix for each head on the GPU: y[m, h, n] = sum over k of w[h, n, k] * x[m, h, k].

In: `state` int32[4], activations of all heads in a layout of `quantize.py`, the planes of a stack of matrices. Out: Y
float32 [m, heads * n]. The launches are those of `gemv.py` for up to FEW tokens, else those of `gemm.py`, with as many
rows of activations as there are tokens and heads.
"""

from typing import Any, NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.schedules.formats import lookup
from mlc_amd.schedules.gpu.base.device import launch
from mlc_amd.schedules.gpu.base.planes import BLOCK, plane_args
from mlc_amd.schedules.gpu.base.quantize import FIELDS, act_args
from mlc_amd.schedules.gpu.base.step import FEW, kernel, live_rows, once, state_arg
from mlc_amd.schedules.gpu.experts.experts import check_rows
from mlc_amd.schedules.gpu.linear import gemv, load
from mlc_amd.schedules.gpu.linear.gemm import engine, span
from mlc_amd.schedules.gpu.linear.gemm_tile import Product, TileWork, Weight
from mlc_amd.schedules.gpu.linear.gemv_rows import emit_acts, span_of
from mlc_amd.schedules.gpu.linear.linear_args import Segment
from mlc_amd.schedules.gpu.linear.load import QUADS


def head_linear(fmt, heads, n, k, m, layout, arch, name):
    """PrimFunc (state, A, S | H | X of [m, heads * k], planes of the [heads * n, k] stack, Y float32 [m, heads * n]).

    layout: as for `gemv.linear` with m up to FEW tokens, else for `gemm.linear`. UserError unless n is a multiple of 16
    or for weights too large, ValueError for what has no tiles.
    """
    fmt = lookup(fmt)
    check_rows(n)
    with kernel(name) as ir:
        state, acts = state_arg(), act_args(m, heads * k, layout)
        planes = plane_args(fmt, heads * n, k, "W_")
        Y = T.arg("Y", T.buffer((m, heads * n), "float32"))
        emit = _emit_gemv if m <= FEW and layout in gemv.VECTORS else _emit_gemm
        emit(state, acts, fmt, planes, Y, heads, n, k, m, layout, arch)
    return ir.get()


def _emit_gemv(state, acts, fmt, planes, Y, heads, n, k, m, layout, arch):
    gemv.check([fmt], m, layout, "head_linear")
    (plan,), (split,) = gemv.linear_plans([(fmt, heads * n)], k, arch, m=m)
    acts = [T.decl_buffer((m * heads, k), "float32", data=acts[0].data)] if layout == "" else acts
    with launch((split.groups,), (arch.wave, plan.waves)) as (workgroup, lane, wave):
        found, views = emit_acts(acts, k, m * heads), load.views(fmt, planes, span_of([fmt], k))

        def tokens(row):
            """A group's rows are of one head: at most 16, which divides n. The limit, which no row reaches, keeps TVM's
            bounds of what is made of it within int32."""
            head = T.Bind(T.min(row // n, T.int32(heads - 1)))
            return [found.of(T.Bind(token * heads + head)) for token in range(m)]

        segment = Segment(fmt, heads * n, planes, None, Y)
        gemv.emit_segment(segment, None, views, tokens, split, workgroup, lane, wave, plan, arch)


class _HeadRows(NamedTuple):
    """A head's rows of a buffer [m * heads, ..] of activations: row `token` is that of the head."""

    buffer: Any
    heads: int
    head: Any

    @property
    def dtype(self):
        return self.buffer.dtype

    def __getitem__(self, index):  # type: ignore[override]
        token, *rest = index
        return self.buffer[(token * self.heads + self.head, *rest)]


def _emit_gemm(state, acts, fmt, planes, Y, heads, n, k, m, layout, arch):
    gemm = engine(Product(arch, layout, (fmt,), m, k, heads * n))
    tiles, rows = -(-n // gemm.tile.rows), m * heads
    shapes = {
        "rows": [((rows, k // BLOCK, QUADS), "int32"), ((rows, k // BLOCK, FIELDS), "float32")],
        "": [((rows, k), "float32")],
    }.get(layout, [((rows, k), "float16")])
    views = [T.decl_buffer(*shape, data=x.data) for shape, x in zip(shapes, acts, strict=True)]
    with launch((m // gemm.tile.tokens, heads * tiles), (gemm.threads,)) as (token_tile, row_tile, thread):
        gemm.allocate(thread)
        token0, live = T.Bind(token_tile * gemm.tile.tokens), live_rows(state, m)
        head, row0 = T.Bind(row_tile // tiles), T.Bind(row_tile % tiles * gemm.tile.rows)

        def store(token, row, values):
            (x,) = values
            T.buffer_store(Y, x, [token, span(T.Bind(head * n + row), x)])

        with once(token0 < live):
            mine = [_HeadRows(view, heads, head) for view in views]
            gemm.emit(TileWork(mine, [Weight(fmt, planes, n)], token0, row0, store, T.Bind(head * n)))
