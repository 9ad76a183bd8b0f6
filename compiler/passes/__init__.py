"""Graph fusion. `fuse` runs them in the order that lets each see what it matches."""

from tvm import relax

from mlc_amd.compiler.passes.fuse_norms import defer_norms, fuse_norm_linear
from mlc_amd.compiler.passes.fuse_producers import (
    fuse_gate_up,
    fuse_quantize,
    fuse_residual,
    fuse_rope,
    fuse_rotation,
    quantize_activations,
)
from mlc_amd.compiler.passes.fuse_siblings import fuse_route, fuse_sibling_norms, fuse_siblings


def fuse(mod, target):
    """The decoder as emitted by the models to the decoder in fused operators (see compiler/ops.py)."""
    used = relax.transform.DeadCodeElimination()  # passes that count what reads a value, or find pairs, see no more
    mod = quantize_activations(mod, target)
    mod = relax.transform.EliminateCommonSubexpr()(mod)  # one quantization for all linears of an input
    mod = used(fuse_gate_up(mod))
    mod = fuse_siblings(mod)
    mod = fuse_residual(mod)
    mod = used(fuse_quantize(mod, target))
    mod = fuse_sibling_norms(mod)
    mod = used(fuse_route(mod, target))
    mod = fuse_norm_linear(mod, target)
    mod = used(fuse_rotation(mod, target))
    mod = used(fuse_rope(mod, target))
    return used(defer_norms(mod, target))
