"""Linear layers of several tokens on the GPU: y[m, n] = sum over k of w[n, k] * x[m, k].

In: `state` int32[4] (position, live tokens, 0, 0), activations in a layout of `quantize.py`, weights in planes of the
layout "rows" (`planes.py`). Out: Y float32 [m, n padded to 16], bias and residual added.

This file lays out the launch: a grid of token tiles (first axis: those that share a weight tile run side by side) by
the row tiles of all segments. What a workgroup does to its tile is up to a `Gemm` (`gemm_tile.py`). Workgroups whose
tokens are all beyond the live ones leave at once.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules import operators
from mlc_amd.schedules.gpu.base.device import launch
from mlc_amd.schedules.gpu.base.pairs import TOKENS
from mlc_amd.schedules.gpu.base.planes import BLOCK, padded
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import at, elements, vector
from mlc_amd.schedules.gpu.base.step import kernel, once, where
from mlc_amd.schedules.gpu.linear import gemm_coop, gemm_dot, gemm_matrix, lane_tiles
from mlc_amd.schedules.gpu.linear.deferred_norm import RowFactors
from mlc_amd.schedules.gpu.linear.gemm_tile import Gemm, Multiplied, Product, Tile, TileWork, Weight, product_of
from mlc_amd.schedules.gpu.linear.lane_results import QUAD
from mlc_amd.schedules.gpu.linear.linear_args import LinearBuffers, Segment, declare_linear
from mlc_amd.schedules.gpu.linear.load import QUADS
from mlc_amd.schedules.space import Kernel, Space
from mlc_amd.schedules.tir import Buffer, Expr


def engine(of: Product, tile: Tile | None = None) -> Gemm:
    """The tile routine with that tile, by default the one for the arch and shape. Layout of the activations: "half" or
    "" on matrix units, "pairs" or "" on cooperative matrices, "lanes" on those that `gemm_lanes.py` knows (weights and
    activations become float16), else "rows" for int8 formats and "" for float formats. Float formats with "" are
    multiplied in float32 everywhere. ValueError for what does not fit."""
    routine, choose = _family(of)
    gemm = routine(of, tile or choose(of))
    if of.m % gemm.tile.tokens and of.layout != "lanes":  # no others compute a part of a tile
        raise ValueError(f"{gemm.tile} does not divide {of.m} tokens")
    if of.expert_slots % gemm.tile.tokens:
        raise ValueError(f"experts' tiles of {of.expert_slots} slots do not divide into {gemm.tile}")
    return gemm


def _family(of: Product) -> tuple[Callable[[Product, Any], Gemm], Callable[[Product], Tile]]:
    """(what makes the tile routine of a tile, what chooses that)."""
    layout, matrix, kinds = of.layout, of.arch.matrix, {fmt.kind for fmt in of.formats}
    exact = layout == "" and kinds == {"float"}
    if layout == "lanes" and of.arch.lane_matrix:
        return lane_tiles.routine, lane_tiles.choose
    if matrix == "coop" and layout in ("", "pairs") and not exact:
        return gemm_coop.CoopGemm, gemm_coop.choose
    if matrix and matrix != "coop" and layout in ("", "half") and not exact:
        return gemm_matrix.MatrixGemm, gemm_matrix.choose
    if exact:
        return (gemm_dot.ExactGemm, gemm_dot.choose_exact) if matrix else (gemm_dot.FloatGemm, gemm_dot.choose)
    if layout == "rows" and kinds == {"int8"}:
        return gemm_dot.DotGemm, gemm_dot.choose
    raise ValueError(
        f"{of.arch.name} cannot multiply weights of {sorted(fmt.name for fmt in of.formats)} with activations in "
        f"layout {layout!r}"
    )


def plans(op: Multiplied, arch: Device) -> Space:
    """The tiles worth measuring. For workloads with experts, slots stand in the place of tokens."""
    of = product_of(op, arch)
    default, rows = engine(of), [padded(n) for _, n in op.weights[:: of.weights]]

    def kernel(tile: Tile) -> Kernel:
        if of.m % tile.tokens and of.m > TOKENS:
            raise ValueError(f"{tile} does not divide {of.m} tokens")
        gemm = engine(of, tile)
        loads = gemm.loads()
        return Kernel(tile, gemm.token_tiles * sum(map(gemm.row_tiles, rows)), gemm.threads, loads)

    return Space(type(default.tile), default.choices, default.tile, kernel)


def views(acts: Sequence[Buffer], of: Product) -> list[Buffer]:
    """The activations' buffers as the tile routine reads them, from the parameters of `act_args`. To be called after
    the last parameter: it may declare a view."""
    if of.layout == "rows":
        A, S = acts
        return [T.decl_buffer((of.m, of.k // BLOCK, QUADS), "int32", data=A.data), S]
    return list(acts)


def span(row: Expr, value: Expr) -> Expr:
    """The index of `value`: of a vector, as many consecutive elements."""
    return at(row, value.ty.dtype.lanes)


def check_deferred(gemm: Gemm, norm_in: float | None, prepared: int = 0) -> None:
    """ValueError where a norm is deferred, into the kernel or, of `prepared` columns, out of it, and it cannot be."""
    if (norm_in is not None or prepared) and not gemm.completes_norms:
        raise ValueError("only kernels of the layout 'lanes' complete or prepare norms")
    if prepared % BLOCK:
        raise ValueError(f"a norm of {prepared} columns, which are not whole blocks, cannot be prepared")


def linear(op: operators.Linear, arch: Device, name: str, plan: Tile | None = None) -> tirx.PrimFunc:
    """Kernel with the parameters of `linear_args`. Token tiles without live tokens (state[1]) are left as they are. The
    columns of Y from n on are undefined. ValueError for what cannot share a launch or has no tiles, UserError for
    weights too large."""
    of = product_of(op, arch)
    gemm = engine(of, plan)
    check_deferred(gemm, op.norm_in, op.segments[0][1] if op.norm_out else 0)
    counts = [gemm.row_tiles(padded(n)) for _, n in op.segments]
    quick = gemm.is_quick(gemm.token_tiles * sum(counts))
    with kernel(name) as ir:
        args = declare_linear(op)
        acts = views(args.acts, of)
        with launch((gemm.token_tiles, sum(counts)), (gemm.threads,)) as (token_tile, row_tile, thread):
            gemm.allocate(thread)
            token0, first = T.Bind(token_tile * gemm.tile.tokens), 0
            factors = gemm.factors(args.completed, token0, row_tile == 0, quick)
            live, zero = gemm.live_and_zero(args.state, token0, quick)
            for segment, count in zip(args.segments, counts, strict=True):
                weight = Weight(segment.fmt, segment.planes, padded(segment.n))
                runs = op.norm_out and gemm.has_runs(weight.rows)
                epilogue = _Epilogue(arch, args, segment, factors, runs)
                mine = live & (row_tile >= first) & (row_tile < first + count)
                with where(mine) if quick else once(mine):
                    row0 = T.Bind((row_tile - first) * gemm.tile.rows)
                    early = epilogue.early if quick else None
                    gemm.emit(
                        TileWork(
                            acts, [weight], token0, row0, epilogue.store,
                            factors=factors, zero=zero, early=early, runs=runs,
                        )
                    )  # fmt: skip
                first += count
    return ir.get()


Loaded = tuple[list[Expr] | None, list[Expr] | None, Any]


class _Epilogue:
    """What becomes of the products of a segment's rows. runs: as of `TileWork`."""

    def __init__(self, arch: Device, args: LinearBuffers, segment: Segment, factors: RowFactors | None, runs: bool):
        self.arch, self.args, self.segment, self.factors, self.runs = arch, args, segment, factors, runs

    def load(self, token: Expr, row: Expr, lanes: int) -> Loaded:
        """What `store` reads from memory for `lanes` rows of a token, of each part of a run: bias, residual, what a
        norm is prepared with."""
        segment, args = self.segment, self.args
        firsts = self._firsts(row)
        indices = [at(first, lanes) for first in firsts]
        return (
            None if segment.bias is None else [self._bias(index) for index in indices],
            None if args.residual is None else [args.residual[token, index] for index in indices],
            None if args.prepared is None else args.prepared.load(token, firsts),
        )

    def _bias(self, index: Expr) -> Expr:
        """bias[index]; the last rows' index stays inside the n biases."""
        bias: Buffer = self.segment.bias
        n = self.segment.n
        if n % 16 == 0:
            return bias[index]
        if index.ty.dtype.lanes == 1:
            return bias[T.min(index, T.int32(n - 1))]
        return vector([bias[T.min(index.base + i, T.int32(n - 1))] for i in range(index.ty.dtype.lanes)])

    def _firsts(self, row: Expr) -> list[Expr]:
        return [row, T.Bind(row + BLOCK // 2)] if self.runs else [row]

    def early(self, token: Expr, row: Expr) -> Loaded:
        """The same in registers."""
        bias, residual, norm = self.load(token, row, QUAD)
        bias, residual = (None if x is None else [T.Bind(part) for part in x] for x in (bias, residual))
        return bias, residual, norm

    def store(self, token: Expr, row: Expr, values: list[Expr], loaded: Loaded | None = None) -> None:
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
        if norm is not None and self.args.prepared is not None:
            self.args.prepared.store(self.arch, token, row, parts, norm)
