"""Linear layers of several tokens on the GPU (GEMM): y[m, n] = sum over k of w[n, k] * x[m, k].

Parameters are those of `linear_args.py`. For the first half of a feed-forward layer, y = f(gate(x)) * up(x), a
workgroup computes the same tile of both weights, so that one thread has gate and up of an element. A mixture of experts
has slots instead of tokens; all slots of a workgroup are of one expert (schedules/operators/experts.py).

This module emits the launch: a grid of token tiles (first axis, so that workgroups with the same weights run at the
same time) by the row tiles of all segments. A `Gemm` (`gemm_tile.py`) emits the code of a workgroup's tile. Workgroups
without live tokens end at once.
"""

from collections.abc import Callable
from typing import Any

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.base.activations import gated
from mlc_amd.schedules.gpu.base.device import barrier, each, launch
from mlc_amd.schedules.gpu.base.matrices import UNITS
from mlc_amd.schedules.gpu.base.planes import BLOCK, padded, plane_args
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import TOKENS, WIDTH, act_args, emit_store
from mlc_amd.schedules.gpu.base.registers import at, elements, lane_of, vector
from mlc_amd.schedules.gpu.base.step import builder, builds, once, where
from mlc_amd.schedules.gpu.experts.experts import bias_args, check_rows, expert_at, ids_arg
from mlc_amd.schedules.gpu.linear import gemm_coop, gemm_dot, gemm_matrix, gemm_matrix_int8, lane_tiles
from mlc_amd.schedules.gpu.linear.deferred_norm import RowFactors
from mlc_amd.schedules.gpu.linear.gemm_tile import Gemm, Multiplied, Product, Tile, TileWork, Weight, product_of
from mlc_amd.schedules.gpu.linear.lane_results import QUAD
from mlc_amd.schedules.gpu.linear.linear_args import LinearBuffers, Segment, declare_gate_up, declare_linear
from mlc_amd.schedules.operators import ExpertGateUp, ExpertLinear, GateUp, Linear
from mlc_amd.schedules.operators.experts import Experts
from mlc_amd.schedules.operators.layouts import kind_of
from mlc_amd.schedules.space import Kernel, Space
from mlc_amd.schedules.tir import Buffer, Expr


def engine(of: Product, tile: Tile | None = None) -> Gemm:
    """The tile routine of a product. tile: by default the one of the rule. The layout of activations selects the
    routine: "lanes" for matrix units whose lanes are known, "pairs" for other matrix units (both multiply float16);
    without matrix units "rows" for int8 formats, and "" for float formats, which are multiplied in float32. Raises
    ValueError for a tile that does not fit."""
    routine, choose = _family(of)
    gemm = routine(of, tile or choose(of))
    if of.m % gemm.tile.tokens and not gemm.cuts_tiles:
        raise ValueError(f"{gemm.tile} does not divide {of.m} tokens")
    if of.expert_slots % gemm.tile.tokens:
        raise ValueError(f"experts' tiles of {of.expert_slots} slots do not divide into {gemm.tile}")
    return gemm


def _family(of: Product) -> tuple[Callable[[Product, Any], Gemm], Callable[[Product], Tile]]:
    """(function that makes the tile routine for a tile, function that chooses the tile)."""
    layout, matrix, kinds = kind_of(of.layout), of.arch.matrix, {fmt.kind for fmt in of.formats}
    if layout == "lanes" and of.arch.lane_blocks:
        own = of.arch.lane_unit in UNITS
        return (gemm_matrix_int8.routine, gemm_matrix.choose) if own else (lane_tiles.routine, lane_tiles.choose)
    if matrix == "coop" and layout == "pairs":
        return gemm_coop.CoopGemm, gemm_coop.choose
    if layout == "" and kinds == {"float"}:
        return gemm_dot.FloatGemm, gemm_dot.choose_exact if matrix else gemm_dot.choose
    if layout == "rows" and kinds == {"int8"}:
        return gemm_dot.DotGemm, gemm_dot.choose
    raise ValueError(
        f"{of.arch.name} cannot multiply weights of {sorted(fmt.name for fmt in of.formats)} with activations in "
        f"layout {layout!r}"
    )


@registry.plans(ExpertLinear)
def plans(op: Multiplied, arch: Device) -> Space:
    """The space of tiles for tuning. For experts, slots take the place of tokens."""
    of = product_of(op, arch)
    default, rows = engine(of), [padded(n) for _, n in op.weights[:: of.weights]]

    def kernel(tile: Tile) -> Kernel:
        if of.m % tile.tokens and of.m > TOKENS:
            raise ValueError(f"{tile} does not divide {of.m} tokens")
        gemm = engine(of, tile)
        prepared = op.segments[0][1] if isinstance(op, Linear) and op.norm_out else 0
        check_deferred(gemm, op.norm_in if isinstance(op, (Linear, GateUp)) else None, prepared)
        loads = gemm.loads()
        return Kernel(tile, gemm.token_tiles * sum(map(gemm.row_tiles, rows)), gemm.threads, loads)

    return Space(type(default.tile), default.choices, default.tile, kernel)


def span(row: Expr, value: Expr) -> Expr:
    """The index at which `value` is stored: row, or for a vector the consecutive elements from `row` on."""
    return at(row, value.ty.dtype.lanes)


def check_deferred(gemm: Gemm, norm_in: float | None, prepared: int = 0) -> None:
    """Raises ValueError if the routine cannot complete a norm (norm_in: its eps) or prepare one (prepared: its
    columns)."""
    if (norm_in is not None or prepared) and not gemm.completes_norms:
        raise ValueError("only kernels of the layout 'lanes' complete or prepare norms")
    if prepared % BLOCK:
        raise ValueError(f"a norm of {prepared} columns, which are not whole blocks, cannot be prepared")


@builder
def linear(op: Linear, arch: Device, state: Buffer, plan: Tile | None) -> None:
    """Kernel with the parameters of `linear_args`. Token tiles without live tokens (state[1]) are not written. Columns
    of Y from n on are undefined. Raises ValueError for segments that cannot share a launch or have no tile, UserError
    for weights that are too large."""
    of = product_of(op, arch)
    gemm = engine(of, plan)
    check_deferred(gemm, op.norm_in, op.segments[0][1] if op.norm_out else 0)
    counts = [gemm.row_tiles(padded(n)) for _, n in op.segments]
    quick = gemm.is_quick(gemm.token_tiles * sum(counts))
    args = declare_linear(op)
    acts = gemm.prepared(state, args.acts)
    with launch((gemm.token_tiles, sum(counts)), (gemm.threads,)) as (token_tile, row_tile, thread):
        gemm.allocate(thread)
        token0, first = T.Bind(token_tile * gemm.tile.tokens), 0
        factors = gemm.factors(args.completed, token0, row_tile == 0, quick)
        live, zero = gemm.live_and_zero(state, token0, quick)
        for segment, count in zip(args.segments, counts, strict=True):
            weight = Weight(segment.fmt, segment.planes, padded(segment.n))
            epilogue = _Epilogue(gemm, args, segment, factors)
            mine = live & (row_tile >= first) & (row_tile < first + count)
            with where(mine) if quick else once(mine):
                row0 = T.Bind((row_tile - first) * gemm.tile.rows)
                early = epilogue.early if quick else None
                gemm.emit(TileWork(acts, [weight], token0, row0, epilogue.store, None, factors, zero, early))
            first += count


Loaded = tuple[Any, ...]  # of `_Epilogue.load`


class _Epilogue:
    """The epilogue of a segment: from products to stored results (bias, residual, prepared norm)."""

    def __init__(self, gemm: Gemm, args: LinearBuffers, segment: Segment, factors: RowFactors | None):
        self.gemm, self.args, self.segment, self.factors = gemm, args, segment, factors

    def load(self, token: Expr, row: Expr, lanes: int) -> Loaded:
        """The inputs of `store` for `lanes` rows of a token: bias, residual, inputs of a prepared norm."""
        args, index = self.args, at(row, lanes)
        bias = None if self.segment.bias is None else self._bias(index)
        residual = None if args.residual is None else args.residual[token, index]
        return bias, residual, None if args.prepared is None else args.prepared.load(token, row, lanes)

    def _bias(self, index: Expr) -> Expr:
        """bias[index]; an index beyond the n biases becomes the last one."""
        bias: Buffer = self.segment.bias
        n = self.segment.n
        if n % 16 == 0:
            return bias[index]
        if index.ty.dtype.lanes == 1:
            return bias[T.min(index, T.int32(n - 1))]
        return vector([bias[T.min(index.base + i, T.int32(n - 1))] for i in range(index.ty.dtype.lanes)])

    def early(self, token: Expr, row: Expr) -> Loaded:
        """`load` into registers, before the sums are complete."""
        *loaded, norm = self.load(token, row, QUAD)
        return *(None if x is None else T.Bind(x) for x in loaded), norm

    def store(self, token: Expr, row: Expr, values: list[Expr], loaded: Loaded | None = None) -> None:
        """Stores results of a token. loaded: from `early`; None if it was not called."""
        (x,) = values
        if self.factors is not None:
            x = self.factors.scaled(token, x)
        bias, residual, norm = loaded or self.load(token, row, x.ty.dtype.lanes)
        x = x if bias is None else x + bias
        x = T.Bind(x if residual is None else residual + x)
        T.buffer_store(self.segment.Y, x, [token, span(row, x)])
        if norm is not None and self.args.prepared is not None:
            self.args.prepared.store(self.gemm.arch, token, row, x, norm, stride=self.gemm.row_stride)


def _store_staged(
    gemm: Gemm, results: Buffer, out: list[Buffer], token0: Expr, row0: Expr, f: int, thread: Expr
) -> None:
    """Stores a tile in the layout "rows" if a wave has fewer than 32 lanes, or if lanes cannot exchange values: all
    threads store their results to shared memory, from where eight lanes take a block."""
    quads = gemm.tile.rows // WIDTH
    barrier()
    for i in each(gemm.arch, gemm.tile.tokens * quads // gemm.threads):
        place = T.Bind(i * gemm.threads + thread)
        four = T.Bind(results[at(place * WIDTH, WIDTH)])
        row = T.Bind(row0 + place % quads * WIDTH)
        y = [T.Bind(lane_of(four, e)) for e in range(WIDTH)]
        emit_store(gemm.arch, "rows", out, y, token0 + place // quads, row, row < f)


@builder
def gate_up_swiglu(op: GateUp | ExpertGateUp, arch: Device, state: Buffer, plan: Tile | None) -> None:
    """Kernel with the parameters of `linear_args`: weights of f x k, f a multiple of 32. op.layout: "pairs", "lanes"
    (after cooperative matrices), "", or "rows" if layout_in is not a layout of matrix units. Token tiles without live
    tokens, or without an expert, are not written. Raises ValueError for weights that cannot share a launch."""
    of, f, layout = product_of(op, arch), op.n, op.layout
    experts = isinstance(op, ExpertGateUp)
    gemm = engine(of, plan)
    side_by_side = gemm.rows_side_by_side
    if f % BLOCK or side_by_side != {"rows": BLOCK, "pairs": 1, "lanes": 1}.get(kind_of(layout), side_by_side):
        raise ValueError(
            f"{f} rows in layout {layout!r} from activations in layout {of.layout!r} do not make one launch"
        )
    norm_in = None if experts else op.norm_in
    check_deferred(gemm, norm_in)
    row_tiles = gemm.row_tiles(f)
    quick = gemm.is_quick(gemm.token_tiles * row_tiles)
    params, groups, planes, biases, out, completed = declare_gate_up(op)
    weights = [Weight(fmt, bufs, f) for fmt, bufs in zip(of.formats, planes, strict=True)]
    acts = gemm.prepared(state, params)
    with launch((gemm.token_tiles, row_tiles), (gemm.threads,)) as (token_tile, row_tile, thread):
        gemm.allocate(thread)
        token0, row0 = T.Bind(token_tile * gemm.tile.tokens), T.Bind(row_tile * gemm.tile.rows)
        first, mine = tile_expert(groups, token0, f, op.of) if experts else (None, None)
        factors = gemm.factors(completed, token0, row_tile == 0, quick)
        through_lds = layout == "rows" and (arch.wave < BLOCK or not arch.subgroups)
        tile = gemm.tile
        staged = T.alloc_buffer((tile.tokens * tile.rows,), "float32", scope="shared") if through_lds else None

        def store(token: Expr, row: Expr, values: list[Expr]) -> None:
            if factors is not None:
                values = [factors.scaled(token, x) for x in values]
            if biases:
                index = span(T.Bind(first + row), values[0])
                values = [T.Bind(x + bias[index]) for x, bias in zip(values, biases, strict=True)]
            y = [gated(op.act, g, u) for g, u in zip(*map(elements, values), strict=True)]
            if staged is not None:
                T.buffer_store(staged, y[0], [(token - token0) * tile.rows + (row - row0)])
            else:
                emit_store(arch, layout, out, y, token, row)

        mine, zero = (mine, gemm.zero(state)) if experts else gemm.live_and_zero(state, token0, quick)
        with once(mine):
            gemm.emit(TileWork(acts, weights, token0, row0, store, first, factors, zero))
            if staged is not None:
                _store_staged(gemm, staged, out, token0, row0, f, thread)


def tile_expert(groups: Buffer, slot0: Expr, n: int, experts: Experts) -> tuple[Expr, Expr]:
    """(row of the stack that is row 0 of the expert of slot0's tile, whether the tile has an expert)."""
    index = T.Bind(slot0 // experts.tile)
    return T.Bind(expert_at(groups, [index], experts) * n), T.Bind(groups[index]) >= 0


@builds(ExpertLinear)
def expert_linear(op: ExpertLinear, arch: Device, state: Buffer, plan: Tile | None) -> None:
    """Kernel (state, A and S, or H, or X of [slots, k], Groups, planes of the [count * n, k] stack, [WB float32 [count
    * n]], Y float32 [slots, n]). Raises UserError unless n is a multiple of 16, and for weights that are too large;
    ValueError if there is no tile."""
    n, experts, of = op.n, op.of, product_of(op, arch)
    (fmt,) = of.formats
    check_rows(n)
    gemm = engine(of, plan)
    params, groups = act_args(of.m, op.k, op.layout), ids_arg(experts, op.m)
    weight = Weight(fmt, plane_args(fmt, experts.count * n, op.k, "W_"), n)
    biases = bias_args(experts.count * n, "WB") if op.bias else []
    Y = T.arg("Y", T.buffer((of.m, n), "float32"))
    acts = gemm.prepared(state, params)
    with launch((gemm.token_tiles, gemm.row_tiles(n)), (gemm.threads,)) as (slot_tile, row_tile, thread):
        gemm.allocate(thread)
        slot0, row0 = T.Bind(slot_tile * gemm.tile.tokens), T.Bind(row_tile * gemm.tile.rows)
        first, mine = tile_expert(groups, slot0, n, experts)

        def store(slot: Expr, row: Expr, values: list[Expr]) -> None:
            (x,) = values
            for bias in biases:
                x = x + bias[span(T.Bind(first + row), x)]
            T.buffer_store(Y, x, [slot, span(row, values[0])])

        with once(mine):
            gemm.emit(TileWork(acts, [weight], slot0, row0, store, first, zero=gemm.zero(state)))
