"""Linear layers of a mixture of experts for several tokens on the GPU: y[s, n] = sum over k of w[e, n, k] * x[s, k] for
each slot s, e being the expert of its tile.

In: `state` int32[4], activations with a row for each slot, Groups (schedules/operators/experts.py), the planes of a
stack of matrices, biases of its rows. Out: Y float32 [slots, n]; slots of tiles without an expert are left as they are.

The launch is that of `gemm.py`, with slots in the place of tokens. A workgroup's slots are part of one expert's tile.
"""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.base.device import launch
from mlc_amd.schedules.gpu.base.planes import plane_args
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import act_args
from mlc_amd.schedules.gpu.base.step import kernel, once, state_arg
from mlc_amd.schedules.gpu.experts.experts import bias_args, check_rows, expert_at, ids_arg
from mlc_amd.schedules.gpu.linear import gemm_coop, gemm_matrix, lane_tiles
from mlc_amd.schedules.gpu.linear.gemm import engine, extras, span, views, zero_of
from mlc_amd.schedules.operators import ExpertGateUp, ExpertLinear
from mlc_amd.schedules.operators.experts import Experts


def expert_engine(op: ExpertLinear | ExpertGateUp, arch: Device, tile=None):
    """`gemm.engine` for slots. ValueError also for a tile that an expert's tiles do not consist of."""
    formats, layout, k, n, together = [fmt for fmt, _ in op.weights], op.layout_read, op.k, op.n, len(op.weights)
    slots = op.of.slots(op.m)
    if tile is None and layout == "lanes":
        tile = lane_tiles.choose_expert(arch, op.tile, slots, k, n, together)
    elif tile is None and arch.matrix and layout not in ("", "rows"):
        family = gemm_coop if arch.matrix == "coop" else gemm_matrix
        tile = family.choose_expert(arch, formats, op.tile, k, together)
    # tokens of few-token tiles are those of all activations, else of a tile of one expert
    gemm = engine(layout, formats, slots if layout == "lanes" else op.tile, k, arch, n, tile, together)
    if op.tile % gemm.tile.tokens:
        raise ValueError(f"experts' tiles of {op.tile} slots do not divide into {gemm.tile}")
    return gemm


def tile_expert(groups, slot0, n, experts: Experts):
    """(the row of the stack that is row 0 of the expert of slot0's tile, whether the tile has one)."""
    index = T.Bind(slot0 // experts.tile)
    return T.Bind(expert_at(groups, [index], experts) * n), T.Bind(groups[index]) >= 0


@registry.builds(ExpertLinear)
def expert_linear(op: ExpertLinear, arch: Device, name: str, plan=None) -> tirx.PrimFunc:
    """Kernel (state, A, S | H | X of [slots, k], Groups, planes of the [count * n, k] stack, [WB float32 [count *
    n]], Y float32 [slots, n]). plan: a tile, see `gemm.engine`. UserError unless n is a multiple of 16 or for weights
    too large, ValueError for what has no tiles."""
    ((fmt, n),), k, experts = op.weights, op.k, op.of
    slots = experts.slots(op.m)
    check_rows(n)
    gemm = expert_engine(op, arch, plan)
    with kernel(name) as ir:
        state = state_arg()
        params, groups = act_args(slots, k, op.layout), ids_arg(experts, op.m)
        bufs = plane_args(fmt, experts.count * n, k, "W_")
        biases = bias_args(experts.count * n, "WB") if op.bias else []
        Y = T.arg("Y", T.buffer((slots, n), "float32"))
        acts = views(params, op.layout, slots, k)
        with launch((slots // gemm.tile.tokens, -(-n // gemm.tile.rows)), (gemm.threads,)) as (slot_tile, row_tile, t):
            gemm.allocate(t)
            slot0, row0 = T.Bind(slot_tile * gemm.tile.tokens), T.Bind(row_tile * gemm.tile.rows)
            first, mine = tile_expert(groups, slot0, n, experts)

            def store(slot, row, values):
                (x,) = values
                for bias in biases:
                    x = x + bias[span(T.Bind(first + row), x)]
                T.buffer_store(Y, x, [slot, span(row, values[0])])

            with once(mine):
                gemm.emit(acts, [(fmt, bufs, n)], slot0, row0, store, first, **extras(None, zero_of(gemm, state)))
    return ir.get()
