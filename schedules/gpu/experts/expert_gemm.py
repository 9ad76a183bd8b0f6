"""Linear layers of a mixture of experts for several tokens on the GPU: y[s, n] = sum over k of w[e, n, k] * x[s, k] for
each slot s, e being the expert of its tile.

In: `state` int32[4], activations with a row for each slot, Groups (schedules/operators/experts.py), the planes of a
stack of matrices, biases of its rows. Out: Y float32 [slots, n]; slots of tiles without an expert are left as they are.

The launch is that of `gemm.py`, with slots in the place of tokens. A workgroup's slots are part of one expert's tile.
"""

from tvm.tirx.script import builder as T

from mlc_amd.schedules.formats import lookup
from mlc_amd.schedules.gpu.base.device import launch
from mlc_amd.schedules.gpu.base.planes import plane_args
from mlc_amd.schedules.gpu.base.quantize import act_args
from mlc_amd.schedules.gpu.base.step import kernel, once, state_arg
from mlc_amd.schedules.gpu.experts.experts import Slots, bias_args, check_rows, expert_at, ids_arg
from mlc_amd.schedules.gpu.linear import gemm_coop, gemm_matrix, lane_tiles
from mlc_amd.schedules.gpu.linear.gemm import engine, extras, span, views, zero_of
from mlc_amd.schedules.operators.experts import Experts


def expert_engine(of: Slots, layout, formats, k, arch, rows, tile=None, together=1):
    """`gemm.engine` for slots. ValueError also for a tile that an expert's tiles do not consist of."""
    slots = of.experts.slots(of.m)
    if tile is None and layout == "lanes":
        tile = lane_tiles.choose_expert(arch, of.experts.tile, slots, k, rows, together)
    elif tile is None and arch.matrix and layout not in ("", "rows"):
        family = gemm_coop if arch.matrix == "coop" else gemm_matrix
        tile = family.choose_expert(arch, formats, of.experts.tile, k, together)
    # tokens of few-token tiles are those of all activations, else of a tile of one expert
    gemm = engine(layout, formats, slots if layout == "lanes" else of.experts.tile, k, arch, rows, tile, together)
    if of.experts.tile % gemm.tile.tokens:
        raise ValueError(f"experts' tiles of {of.experts.tile} slots do not divide into {gemm.tile}")
    return gemm


def tile_expert(groups, slot0, n, experts: Experts):
    """(the row of the stack that is row 0 of the expert of slot0's tile, whether the tile has one)."""
    index = T.Bind(slot0 // experts.tile)
    return T.Bind(expert_at(groups, [index], experts) * n), T.Bind(groups[index]) >= 0


def expert_linear(fmt, n, k, of: Slots, layout, arch, name, tile=None):
    """PrimFunc (state, A, S | H | X of [slots, k], Groups, planes of the [count * n, k] stack, [WB float32 [count *
    n]], Y float32 [slots, n]). tile: see `gemm.engine`. UserError unless n is a multiple of 16 or for weights too
    large, ValueError for what has no tiles."""
    fmt, slots = lookup(fmt), of.experts.slots(of.m)
    check_rows(n)
    gemm = expert_engine(of, layout, [fmt], k, arch, n, tile)
    with kernel(name) as ir:
        state = state_arg()
        params, groups = act_args(slots, k, layout), ids_arg(of.experts, of.m)
        bufs = plane_args(fmt, of.experts.count * n, k, "W_")
        biases = bias_args(of, n, ("WB",))
        Y = T.arg("Y", T.buffer((slots, n), "float32"))
        acts = views(params, layout, slots, k)
        with launch((slots // gemm.tile.tokens, -(-n // gemm.tile.rows)), (gemm.threads,)) as (slot_tile, row_tile, t):
            gemm.allocate(t)
            slot0, row0 = T.Bind(slot_tile * gemm.tile.tokens), T.Bind(row_tile * gemm.tile.rows)
            first, mine = tile_expert(groups, slot0, n, of.experts)

            def store(slot, row, values):
                (x,) = values
                for bias in biases:
                    x = x + bias[span(T.Bind(first + row), x)]
                T.buffer_store(Y, x, [slot, span(row, values[0])])

            with once(mine):
                gemm.emit(acts, [(fmt, bufs, n)], slot0, row0, store, first, **extras(None, zero_of(gemm, state)))
    return ir.get()
