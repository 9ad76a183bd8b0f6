"""Linear layers of several tokens on the GPU: y[m, n] = sum over k of w[n, k] * x[m, k].

In: `state` int32[4] (position, live tokens, 0, 0), activations in a layout of `quantize.py`, weights in planes of the
layout "rows" (`planes.py`). Out: Y float32 [m, n padded to 16], bias and residual added.

This file lays out the launch: a grid of token tiles (first axis: those that share a weight tile run side by side) by
the row tiles of all segments. What a workgroup does to its tile is up to `gemm_matrix.py` (AMD's matrix units),
`gemm_coop.py` (Vulkan's cooperative matrices) or `gemm_dot.py` (int8 dot products), which share the interface of
`MatrixGemm`; `gate_up_gemm.py` shares it, too. Workgroups whose tokens are all beyond the live ones leave at once.
"""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.device import launch
from mlc_amd.schedules.gpu.base.planes import BLOCK, padded
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import at, elements, vector
from mlc_amd.schedules.gpu.base.step import kernel, live_rows, live_rows_and_zero, once, unknown_zero, where
from mlc_amd.schedules.gpu.linear import gemm_coop, gemm_dot, gemm_matrix, lane_tiles
from mlc_amd.schedules.gpu.linear.deferred_norm import CompletedNorm, RowFactors
from mlc_amd.schedules.gpu.linear.gemm_coop import CoopGemm
from mlc_amd.schedules.gpu.linear.gemm_dot import DotGemm, ExactGemm, FloatGemm
from mlc_amd.schedules.gpu.linear.gemm_lanes import LaneGemm, LaneTile
from mlc_amd.schedules.gpu.linear.gemm_matrix import MatrixGemm
from mlc_amd.schedules.gpu.linear.gemm_staged import adds_up
from mlc_amd.schedules.gpu.linear.lane_results import QUAD
from mlc_amd.schedules.gpu.linear.linear_args import LinearBuffers, Segment, declare_linear
from mlc_amd.schedules.gpu.linear.load import QUADS
from mlc_amd.schedules.operators import Linear

RESIDENT = 4  # workgroups of a `LaneGemm` that a compute unit holds at once


def engine(layout, formats, m, k, arch, rows, tile=None, together=1):
    """The tile routine for activations in that `layout` and weights of these formats, `together` of which share a tile;
    `rows`: of all segments. `tile`: MatrixTile, CoopTile or DotTile, by default the one for the arch and shape.
    Float32 activations and float weights stay float32. ValueError for what does not fit."""
    if tile is None and layout == "lanes":
        tile = lane_tiles.choose(arch, formats, m, k, rows, together)
    if isinstance(tile, LaneTile) and layout == "lanes":
        return lane_tiles.routine(arch, tile, m, k, together)
    exact = layout == "" and all(fmt.kind == "float" for fmt in formats)
    matrix = arch.matrix and layout != "rows" and not exact
    kind = {"rows": "int8", "": "float"}.get(layout)
    known = {"": (), "coop": ("", "pairs")}.get(arch.matrix, ("", "half"))
    if layout not in known if matrix else {fmt.kind for fmt in formats} != {kind}:
        raise ValueError(
            f"{arch.name} cannot multiply weights of {sorted(fmt.name for fmt in formats)} with activations in layout "
            f"{layout!r}"
        )
    if matrix and arch.matrix == "coop":
        return CoopGemm(arch, tile or gemm_coop.choose(arch, formats, m, k, rows, together), k, together)
    if matrix:
        return MatrixGemm(arch, tile or gemm_matrix.choose(arch, m, k, rows, together), k, together)
    if exact and arch.matrix:
        return ExactGemm(arch, tile or gemm_dot.choose_exact(arch, m, rows), k, together)
    return (DotGemm if layout == "rows" else FloatGemm)(arch, tile or gemm_dot.choose(arch, m, together), k, together)


def views(acts, layout, m, k):
    """The activations' buffers as the tile routine reads them, from the parameters of `act_args`. To be called after
    the last parameter: it may declare a view."""
    if layout == "rows":
        A, S = acts
        return T.decl_buffer((m, k // BLOCK, QUADS), "int32", data=A.data), S
    return acts


def span(row, value):
    """The index of `value`: of a vector, as many consecutive elements."""
    return at(row, value.ty.dtype.lanes)


def _bias(bias, index, n):
    """bias[index]; the last rows' index stays inside the n biases."""
    if n % 16 == 0:
        return bias[index]
    lanes = index.ty.dtype.lanes
    if lanes == 1:
        return bias[T.min(index, T.int32(n - 1))]
    return vector([bias[T.min(index.base + i, T.int32(n - 1))] for i in range(lanes)])


def token_tiles(gemm, m) -> int:
    """Tiles of m tokens. Only `LaneGemm` computes a part of one."""
    return -(-m // gemm.tile.tokens) if isinstance(gemm, LaneGemm) else m // gemm.tile.tokens


def is_quick(gemm, workgroups) -> bool:
    """Whether what a workgroup waits for decides how long the kernel takes: all of them are resident at once. Only
    `LaneGemm` has such kernels; of gate and up, which have no registers to spare, those of staged tiles."""
    resident = isinstance(gemm, LaneGemm) and workgroups <= RESIDENT * gemm.arch.units
    return resident and (gemm.weights == 1 or bool(gemm.tile.staged))


def factors_of(gemm, formats, norm: CompletedNorm | None, token0, thread, first, quick) -> RowFactors | None:
    """The factors of a tile's tokens, of a norm that the kernel completes; None without one. Only `LaneGemm` does.
    quick: what they are made of is loaded along with the columns or before them, not behind the products."""
    if norm is None:
        return None
    factors = RowFactors(gemm.arch, norm, gemm.tile.tokens, token0, thread, gemm.threads, first)
    if quick and not (adds_up(gemm.tile, formats) and factors.begin(gemm.columns)):
        factors.load()
    return factors


def rows_of(gemm, state, m, token0, quick) -> tuple:
    """(whether a tile has live tokens, an int32 that is 0, which the compiler does not know, or None)."""
    if not quick:
        return token0 < live_rows(state, m), zero_of(gemm, state)
    live, zero = live_rows_and_zero(state, m)
    # of all tokens some are always live
    return T.bool(True) if token_tiles(gemm, m) == 1 else token0 < live, zero


def zero_of(gemm, state):
    """An int32 that is 0, which the compiler does not know; None where the tile has no use for it."""
    return unknown_zero(state) if isinstance(gemm, LaneGemm) and gemm.tile.hidden else None


def extras(factors, zero) -> dict:
    """What only the `emit` of some tile routines takes."""
    more = {} if factors is None else {"meanwhile": factors.compute}
    if factors is not None and factors.total is not None:
        more["each_step"] = factors.add
    return more if zero is None else more | {"zero": zero}


def check_deferred(gemm, norm_in, made) -> None:
    """ValueError where a norm is deferred, into the kernel or, of `made` rows, out of it, and it cannot be."""
    if (norm_in is not None or made) and not isinstance(gemm, LaneGemm):
        raise ValueError("only kernels of the layout 'lanes' complete or prepare norms")
    if made % BLOCK:
        raise ValueError(f"a norm of {made} columns, which are not whole blocks, cannot be prepared")


def linear(op: Linear, arch: Device, name: str, plan=None) -> tirx.PrimFunc:
    """Kernel with the parameters of `linear_args`.

    The operator's k is a multiple of 32, m of 16. layout: of the activations, "half" or "" on matrix units, "pairs" or
    "" on cooperative matrices, "lanes" on those that `gemm_lanes.py` knows (weights and activations become float16),
    else "rows" for int8 formats and "" for float formats. Float formats with "" are multiplied in float32
    everywhere. norm_in and norm_out: in the layout "lanes". plan: a tile, see `engine`. Token tiles without live tokens
    (state[1]) are left as they are. The columns of Y from n on are undefined. ValueError for what cannot share a launch
    or has no tiles, UserError for weights too large.
    """
    k, m, layout = op.k, op.m, op.layout
    formats, rows = [fmt for fmt, _ in op.weights], [padded(n) for _, n in op.segments]
    gemm = engine(layout, formats, m, k, arch, sum(rows), plan)
    check_deferred(gemm, op.norm_in, op.segments[0][1] if op.norm_out else 0)
    counts = [-(-n // gemm.tile.rows) for n in rows]
    quick = is_quick(gemm, token_tiles(gemm, m) * sum(counts))
    with kernel(name) as ir:
        args = declare_linear(op)
        acts = views(args.acts, layout, m, k)
        with launch((token_tiles(gemm, m), sum(counts)), (gemm.threads,)) as (token_tile, row_tile, thread):
            gemm.allocate(thread)
            token0, first = T.Bind(token_tile * gemm.tile.tokens), 0
            factors = factors_of(gemm, formats, args.completed, token0, thread, row_tile == 0, quick)
            live, zero = rows_of(gemm, args.state, m, token0, quick)
            more = extras(factors, zero)
            for segment, count in zip(args.segments, counts, strict=True):
                runs = op.norm_out and gemm.has_runs(padded(segment.n))
                epilogue = _Epilogue(arch, args, segment, factors, runs)
                mine = live & (row_tile >= first) & (row_tile < first + count)
                if quick:
                    more["early"] = epilogue.early
                if runs:
                    more["runs"] = True
                with where(mine) if quick else once(mine):
                    row0 = T.Bind((row_tile - first) * gemm.tile.rows)
                    weight = segment.fmt, segment.planes, padded(segment.n)
                    gemm.emit(acts, [weight], token0, row0, epilogue.store, **more)
                first += count
    return ir.get()


class _Epilogue:
    """What becomes of the products of a segment's rows. runs: they come as runs (see `LaneGemm.emit`)."""

    def __init__(
        self, arch: Device, args: LinearBuffers, segment: Segment, factors: RowFactors | None, runs: bool = False
    ):
        self.arch, self.args, self.segment, self.factors, self.runs = arch, args, segment, factors, runs

    def load(self, token, row, lanes):
        """What `store` reads from memory for `lanes` rows of a token, of each part of a run: bias, residual, what a
        norm is prepared with."""
        segment, args = self.segment, self.args
        firsts = self._firsts(row)
        indices = [at(first, lanes) for first in firsts]
        return (
            None if segment.bias is None else [_bias(segment.bias, index, segment.n) for index in indices],
            None if args.residual is None else [args.residual[token, index] for index in indices],
            None if args.prepared is None else args.prepared.load(token, firsts),
        )

    def _firsts(self, row):
        return [row, T.Bind(row + BLOCK // 2)] if self.runs else [row]

    def early(self, token, row):
        """The same in registers."""
        bias, residual, norm = self.load(token, row, QUAD)
        return *(None if x is None else [T.Bind(part) for part in x] for x in (bias, residual)), norm

    def store(self, token, row, values, loaded=None):
        """loaded: of `early`; None: nothing is yet."""
        (x,) = values
        if self.factors is not None:
            x = self.factors.scaled(token, x)
        parts = [vector(elements(x)[i : i + QUAD]) for i in (0, QUAD)] if self.runs else [x]
        bias, residual, norm = loaded or self.load(token, row, parts[0].ty.dtype.lanes)
        if bias is not None:
            parts = [x + of for x, of in zip(parts, bias, strict=True)]
        if residual is not None:
            parts = [of + x for x, of in zip(parts, residual, strict=True)]
        parts = [T.Bind(x) for x in parts]
        for first, x in zip(self._firsts(row), parts, strict=True):
            T.buffer_store(self.segment.Y, x, [token, span(first, x)])
        if norm is not None:
            self.args.prepared.store(self.arch, token, row, parts, norm)
