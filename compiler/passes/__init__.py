"""Graph fusion. `fuse` runs the passes in an order in which each pass sees the patterns that it matches."""

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
    """Fuses a module of operators (compiler/ops.py) as the models emit them. In: a Relax module, a Target. Out: a Relax
    module of fewer, fused operators."""
    used = relax.transform.DeadCodeElimination()  # passes that count readers or find pairs must not see dead values
    mod = quantize_activations(mod, target)
    mod = relax.transform.EliminateCommonSubexpr()(mod)  # linears of the same input share its quantization
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
