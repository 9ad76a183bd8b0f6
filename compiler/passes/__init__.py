"""Graph fusion, one pass per file. `fuse` runs them in the order that lets each see what it matches."""

from tvm import relax

from mlc_amd.compiler.passes.defer_norms import defer_norms
from mlc_amd.compiler.passes.fuse_gate_up import fuse_gate_up
from mlc_amd.compiler.passes.fuse_norm_linear import fuse_norm_linear
from mlc_amd.compiler.passes.fuse_norms import fuse_norms
from mlc_amd.compiler.passes.fuse_quantize import fuse_quantize
from mlc_amd.compiler.passes.fuse_residual import fuse_residual
from mlc_amd.compiler.passes.fuse_rope import fuse_rope
from mlc_amd.compiler.passes.fuse_route import fuse_route
from mlc_amd.compiler.passes.fuse_siblings import fuse_siblings
from mlc_amd.compiler.passes.quantize_activations import quantize_activations


def fuse(mod, target):
    """The decoder as emitted by the models to the decoder in fused operators (see compiler/ops.py)."""
    mod = quantize_activations(mod, target)
    mod = relax.transform.EliminateCommonSubexpr()(mod)  # one quantization for all linears of an input
    mod = fuse_gate_up(mod)
    mod = fuse_siblings(mod)
    mod = fuse_residual(mod)
    mod = fuse_quantize(mod)
    mod = fuse_norms(mod)
    mod = fuse_route(mod, target)
    mod = fuse_norm_linear(mod, target)
    mod = fuse_rope(mod, target)
    return defer_norms(mod, target)
