"""The first half of a feed-forward layer for several tokens on the GPU, in one launch: y = f(gate(x)) * up(x).

In and out as in `gemm.py`: `state`, activations, the planes of two weights of f rows; y leaves in a layout of
`quantize.py`, as the down projection reads it. A workgroup computes the same tile of both weights, so that gate and up
of an element meet in one thread.
"""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.activations import gated
from mlc_amd.schedules.gpu.base.device import barrier, each, launch, rcp, rint, shuffle_xor, wave_max, wave_sum
from mlc_amd.schedules.gpu.base.pairs import store_run
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import FIELDS, RUNS_OF, TINY, WIDTH, clamped, emit_store
from mlc_amd.schedules.gpu.base.registers import at, elements, lane_of, vector
from mlc_amd.schedules.gpu.base.step import kernel, once
from mlc_amd.schedules.gpu.experts.expert_gemm import expert_engine, tile_expert
from mlc_amd.schedules.gpu.linear.gemm import (
    check_deferred,
    engine,
    extras,
    factors_of,
    is_quick,
    rows_of,
    span,
    token_tiles,
    views,
    zero_of,
)
from mlc_amd.schedules.gpu.linear.gemm_staged import StagedPair
from mlc_amd.schedules.gpu.linear.linear_args import declare_gate_up
from mlc_amd.schedules.operators import ExpertGateUp, GateUp


def _store_floats(layout, out, token, row, y):
    """y, float32 elements of consecutive rows, in the layout "", "half" or, four of them, "pairs" or "lanes"."""
    if layout:
        y = [T.cast(clamped(x), "float16") for x in y]
    if layout in RUNS_OF:
        RUNS_OF[layout](out, token, row, y)
        return
    value = vector(y) if len(y) > 1 else y[0]
    T.buffer_store(out, value, [token, span(row, value)])


def _store_block(arch, out, token, row, y):
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

    def __init__(self, tile):
        self.tile, self.made = tile, T.alloc_buffer((tile.tokens * tile.rows,), "float32", scope="shared")

    def keep(self, token, row, y):
        """One element; token and row within the tile."""
        T.buffer_store(self.made, y, [token * self.tile.rows + row])

    def store(self, arch, out, token0, row0, f, thread, threads):
        """Stores the tile, when all threads have kept theirs."""
        quads = self.tile.rows // WIDTH
        barrier()
        for i in each(arch, self.tile.tokens * quads // threads):
            place = T.Bind(i * threads + thread)
            four = T.Bind(self.made[at(place * WIDTH, WIDTH)])
            row = T.Bind(row0 + place % quads * WIDTH)
            emit_store(
                arch,
                "rows",
                out,
                [T.Bind(lane_of(four, e)) for e in range(WIDTH)],
                token0 + place // quads,
                row,
                row < f,
            )


def gate_up_swiglu(op: GateUp | ExpertGateUp, arch: Device, name: str, plan=None) -> tirx.PrimFunc:
    """Kernel with the parameters of `linear_args`.

    The operator's n is a multiple of 32; layout_in, k, m and plan: as for `gemm.linear`. layout: "half", "pairs",
    "lanes" (after cooperative matrices), "" or, where layout_in does not mean matrix units, "rows". Token tiles without
    live tokens are left as they are, of experts those without an expert: slots stand in the place of tokens. ValueError
    for what cannot share a launch.
    """
    experts = op.of if isinstance(op, ExpertGateUp) else None
    formats, f, k, layout_in, layout = [fmt for fmt, _ in op.weights], op.n, op.k, op.layout_in, op.layout
    if isinstance(op, ExpertGateUp):
        m, norm_in, gemm = op.of.slots(op.m), None, expert_engine(op, arch, plan)
    else:
        m, norm_in, gemm = op.m, op.norm_in, engine(layout_in, formats, op.m, k, arch, f, plan, 2)
    if f % BLOCK or gemm.rows_side_by_side != {"rows": BLOCK, "pairs": 1, "lanes": 1}.get(
        layout, gemm.rows_side_by_side
    ):
        raise ValueError(
            f"{f} rows in layout {layout!r} from activations in layout {layout_in!r} do not make one launch"
        )
    check_deferred(gemm, norm_in, 0)
    by_run, row_tiles = isinstance(gemm, StagedPair), -(-f // gemm.tile.rows)
    quick = is_quick(gemm, token_tiles(gemm, m) * row_tiles)
    if experts and by_run:
        raise ValueError(f"{gemm.tile} is none for experts")
    with kernel(name) as ir:
        state, params, groups, planes, biases, out, norm = declare_gate_up(op)
        weights = [(fmt, bufs, f) for fmt, bufs in zip(formats, planes, strict=True)]
        acts = views(params, layout_in, m, k)
        with launch((token_tiles(gemm, m), row_tiles), (gemm.threads,)) as (
            token_tile,
            row_tile,
            thread,
        ):
            gemm.allocate(thread)
            token0, row0 = T.Bind(token_tile * gemm.tile.tokens), T.Bind(row_tile * gemm.tile.rows)
            first, mine = tile_expert(groups, token0, f, experts) if experts else (None, None)
            factors = factors_of(gemm, formats, norm, token0, thread, row_tile == 0, quick)
            staged = _Staged(gemm.tile) if layout == "rows" and (arch.wave < BLOCK or not arch.subgroups) else None

            def store(token, row, values):
                if factors is not None:
                    values = [factors.scaled(token, x) for x in values]
                if biases:
                    index = span(T.Bind(first + row), values[0])
                    values = [T.Bind(x + bias[index]) for x, bias in zip(values, biases, strict=True)]
                y = [gated(op.act, g, u) for g, u in zip(*map(elements, values), strict=True)]
                if staged:
                    staged.keep(token - token0, row - row0, *y)
                elif layout == "rows":
                    _store_block(arch, out, token, row, *y)
                elif by_run and layout == "lanes":
                    store_run(out[0], token, row, [T.cast(clamped(x), "float16") for x in y])
                elif by_run:
                    for half in range(2):
                        _store_floats(layout, out[0], token, row + half * (BLOCK // 2), y[4 * half : 4 * half + 4])
                else:
                    _store_floats(layout, out[0], token, row, y)

            mine, zero = (mine, zero_of(gemm, state)) if experts else rows_of(gemm, state, m, token0, quick)
            with once(mine):
                gemm.emit(acts, weights, token0, row0, store, first, **extras(factors, zero))
                if staged:
                    staged.store(arch, out, token0, row0, f, thread, gemm.threads)
    return ir.get()
