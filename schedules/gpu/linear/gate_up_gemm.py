"""The first half of a feed-forward layer for several tokens on the GPU, in one launch: y = f(gate(x)) * up(x).

In and out as in `gemm.py`: `state`, activations, the planes of two weights of f rows; y leaves in a layout of
`quantize.py`, as the down projection reads it. A workgroup computes the same tile of both weights, so that gate and up
of an element meet in one thread.
"""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules import operators
from mlc_amd.schedules.gpu.base.activations import gated
from mlc_amd.schedules.gpu.base.device import barrier, each, launch, rcp, rint, shuffle_xor, wave_max, wave_sum
from mlc_amd.schedules.gpu.base.pairs import store_run
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import FIELDS, RUNS_OF, TINY, WIDTH, clamped, emit_store
from mlc_amd.schedules.gpu.base.registers import at, elements, lane_of, vector
from mlc_amd.schedules.gpu.base.step import kernel, once
from mlc_amd.schedules.gpu.experts.expert_gemm import tile_expert
from mlc_amd.schedules.gpu.linear.gemm import check_deferred, engine, span, views
from mlc_amd.schedules.gpu.linear.gemm_staged import StagedPair
from mlc_amd.schedules.gpu.linear.gemm_tile import Gemm, Tile, TileWork, Weight, product_of
from mlc_amd.schedules.gpu.linear.linear_args import declare_gate_up
from mlc_amd.schedules.tir import Buffer, Expr


def _store_floats(layout: str, out: Buffer, token: Expr, row: Expr, y: list[Expr]) -> None:
    """y, float32 elements of consecutive rows, in the layout "", "half" or, four of them, "pairs" or "lanes"."""
    if layout:
        y = [T.cast(clamped(x), "float16") for x in y]
    if layout in RUNS_OF:
        RUNS_OF[layout](out, token, row, y)
        return
    value = vector(y) if len(y) > 1 else y[0]
    T.buffer_store(out, value, [token, span(row, value)])


def _store_block(arch: Device, out: list[Buffer], token: Expr, row: Expr, y: Expr) -> None:
    """y, one float32 of each of 32 neighbouring lanes, as a block in the layout "rows": see `quantize.py`."""
    A, S = out
    half, column = BLOCK // 2, T.Bind(row % BLOCK)
    top = wave_max(arch, T.Bind(T.fabs(y)), BLOCK)
    q = T.Bind(T.cast(rint(y * T.Select(top > T.float32(TINY), T.float32(127) * rcp(top), T.float32(0))), "int32"))
    low = wave_sum(arch, q, half)
    high = shuffle_xor(arch, low, half)
    d = T.Bind(top * T.float32(1 / 127))
    T.buffer_store(A, T.cast(q, "int8"), [token, row // BLOCK, column])
    with T.If(column == 0), T.Then():  # the lane in whose half `low` is the first
        fields = [d, *(d * T.cast(total, "float32") for total in (low + high, low, high))]
        T.buffer_store(S, vector(fields), [token, row // BLOCK, T.ramp(0, 1, FIELDS)])


class _Staged:
    """The way of a tile into the layout "rows" where a wave has fewer than 32 lanes: through LDS, from which eight
    lanes take a block."""

    def __init__(self, gemm: Gemm, token0: Expr, row0: Expr):
        self.gemm, self.tile, self.token0, self.row0 = gemm, gemm.tile, token0, row0
        self.results = T.alloc_buffer((self.tile.tokens * self.tile.rows,), "float32", scope="shared")

    def keep(self, token: Expr, row: Expr, y: Expr) -> None:
        """One element."""
        T.buffer_store(self.results, y, [(token - self.token0) * self.tile.rows + (row - self.row0)])

    def store(self, out: list[Buffer], f: int, thread: Expr) -> None:
        """Stores the tile, when all threads have kept theirs."""
        arch, quads, threads = self.gemm.arch, self.tile.rows // WIDTH, self.gemm.threads
        barrier()
        for i in each(arch, self.tile.tokens * quads // threads):
            place = T.Bind(i * threads + thread)
            four = T.Bind(self.results[at(place * WIDTH, WIDTH)])
            row = T.Bind(self.row0 + place % quads * WIDTH)
            y = [T.Bind(lane_of(four, e)) for e in range(WIDTH)]
            emit_store(arch, "rows", out, y, self.token0 + place // quads, row, row < f)


def gate_up_swiglu(
    op: operators.GateUp | operators.ExpertGateUp, arch: Device, name: str, plan: Tile | None = None
) -> tirx.PrimFunc:
    """Kernel with the parameters of `linear_args`: weights of f x k, f a multiple of 32. op.layout: "half", "pairs",
    "lanes" (after cooperative matrices), "" or, where layout_in does not mean matrix units, "rows". Token tiles without
    live tokens, or without an expert, are left as they are. ValueError for what cannot share a launch."""
    of, f, layout = product_of(op, arch), op.n, op.layout
    experts = isinstance(op, operators.ExpertGateUp)
    gemm = engine(of, plan)
    if f % BLOCK or gemm.rows_side_by_side != {"rows": BLOCK, "pairs": 1, "lanes": 1}.get(
        layout, gemm.rows_side_by_side
    ):
        raise ValueError(
            f"{f} rows in layout {layout!r} from activations in layout {of.layout!r} do not make one launch"
        )
    norm_in = None if experts else op.norm_in
    check_deferred(gemm, norm_in)
    by_run, row_tiles = isinstance(gemm, StagedPair), gemm.row_tiles(f)
    quick = gemm.is_quick(gemm.token_tiles * row_tiles)
    if experts and by_run:
        raise ValueError(f"{gemm.tile} is none for experts")
    with kernel(name) as ir:
        state, params, groups, planes, biases, out, completed = declare_gate_up(op)
        weights = [Weight(fmt, bufs, f) for fmt, bufs in zip(of.formats, planes, strict=True)]
        acts = views(params, of)
        with launch((gemm.token_tiles, row_tiles), (gemm.threads,)) as (token_tile, row_tile, thread):
            gemm.allocate(thread)
            token0, row0 = T.Bind(token_tile * gemm.tile.tokens), T.Bind(row_tile * gemm.tile.rows)
            first, mine = tile_expert(groups, token0, f, op.of) if experts else (None, None)
            factors = gemm.factors(completed, token0, row_tile == 0, quick)
            through_lds = layout == "rows" and (arch.wave < BLOCK or not arch.subgroups)
            staged = _Staged(gemm, token0, row0) if through_lds else None

            def store(token: Expr, row: Expr, values: list[Expr]) -> None:
                if factors is not None:
                    values = [factors.scaled(token, x) for x in values]
                if biases:
                    index = span(T.Bind(first + row), values[0])
                    values = [T.Bind(x + bias[index]) for x, bias in zip(values, biases, strict=True)]
                y = [gated(op.act, g, u) for g, u in zip(*map(elements, values), strict=True)]
                if staged:
                    staged.keep(token, row, *y)
                elif layout == "rows":
                    _store_block(arch, out, token, row, *y)
                elif by_run and layout == "lanes":
                    store_run(out[0], token, row, [T.cast(clamped(x), "float16") for x in y])
                elif by_run:
                    for half in range(2):
                        _store_floats(layout, out[0], token, row + half * (BLOCK // 2), y[4 * half : 4 * half + 4])
                else:
                    _store_floats(layout, out[0], token, row, y)

            mine, zero = (mine, gemm.zero(state)) if experts else gemm.live_and_zero(state, token0, quick)
            with once(mine):
                gemm.emit(TileWork(acts, weights, token0, row0, store, first, factors, zero))
                if staged:
                    staged.store(out, f, thread)
    return ir.get()
