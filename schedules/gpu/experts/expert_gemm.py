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
from mlc_amd.schedules.gpu.linear.gemm import engine, plans, span, views
from mlc_amd.schedules.gpu.linear.gemm_tile import Tile, TileWork, Weight, product_of
from mlc_amd.schedules.operators.experts import ExpertLinear, Experts
from mlc_amd.schedules.tir import Buffer, Expr

registry.plans(ExpertLinear)(plans)


def tile_expert(groups: Buffer, slot0: Expr, n: int, experts: Experts) -> tuple[Expr, Expr]:
    """(the row of the stack that is row 0 of the expert of slot0's tile, whether the tile has one)."""
    index = T.Bind(slot0 // experts.tile)
    return T.Bind(expert_at(groups, [index], experts) * n), T.Bind(groups[index]) >= 0


@registry.builds(ExpertLinear)
def expert_linear(op: ExpertLinear, arch: Device, name: str, plan: Tile | None = None) -> tirx.PrimFunc:
    """Kernel (state, A, S | H | X of [slots, k], Groups, planes of the [count * n, k] stack, [WB float32 [count * n]],
    Y float32 [slots, n]). UserError unless n is a multiple of 16 or for weights too large, ValueError for what has no
    tiles."""
    n, experts, product = op.n, op.of, product_of(op, arch)
    (fmt,) = product.formats
    check_rows(n)
    gemm = engine(product, plan)
    with kernel(name) as ir:
        state = state_arg()
        params, groups = act_args(product.m, op.k, op.layout), ids_arg(experts, op.m)
        weight = Weight(fmt, plane_args(fmt, experts.count * n, op.k, "W_"), n)
        biases = bias_args(experts.count * n, "WB") if op.bias else []
        Y = T.arg("Y", T.buffer((product.m, n), "float32"))
        acts = views(params, product)
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
    return ir.get()
