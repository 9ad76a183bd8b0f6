"""GPU kernels by operator: from an operator's declaration and an arch to a TensorIR kernel.

schedules/registry.py says what a builder takes.
"""

from mlc_amd.schedules import operators
from mlc_amd.schedules.formats import lookup
from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.attention.attention import attention
from mlc_amd.schedules.gpu.attention.attention_decode import attention_decode
from mlc_amd.schedules.gpu.attention.rope_kv_write import rope_kv_write
from mlc_amd.schedules.gpu.base.planes import BLOCK, padded
from mlc_amd.schedules.gpu.base.step import FEW
from mlc_amd.schedules.gpu.experts.expert_gemm import expert_linear
from mlc_amd.schedules.gpu.experts.expert_gemv import expert_down
from mlc_amd.schedules.gpu.experts.expert_order import expert_order
from mlc_amd.schedules.gpu.experts.expert_rows import combine, gather
from mlc_amd.schedules.gpu.experts.experts import Slots, check_rows
from mlc_amd.schedules.gpu.experts.norm_route import norm_route
from mlc_amd.schedules.gpu.experts.route import route
from mlc_amd.schedules.gpu.latent.latent_kv_write import latent_kv_write
from mlc_amd.schedules.gpu.linear import gemv_matrix
from mlc_amd.schedules.gpu.linear.gate_up_gemm import gate_up_swiglu as gate_up_gemm
from mlc_amd.schedules.gpu.linear.gemm import linear as gemm
from mlc_amd.schedules.gpu.linear.gemv import VECTORS, suits
from mlc_amd.schedules.gpu.linear.gemv import gate_up_swiglu as gate_up_gemv
from mlc_amd.schedules.gpu.linear.gemv import linear as gemv
from mlc_amd.schedules.gpu.linear.head_linear import head_linear


@registry.builds(operators.Linear)
def _linear(op, arch, name, plan):
    segments, k, m, layout, biases, residual = op.segments, op.k, op.m, op.layout, op.biases, op.residual
    if op.norm_in is not None or op.norm_out:
        return gemm(segments, k, m, layout, biases, residual, arch, name, plan, op.norm_in, op.norm_out)
    if op.eps is not None:
        return gemv(segments, k, m, layout, biases, residual, arch, name, plan, op.eps)
    formats, rows = [lookup(fmt) for fmt, _ in segments], sum(padded(n) for _, n in segments)
    build = gemv if suits(formats, rows, m, layout, arch) else gemm
    if gemv_matrix.suits([fmt for fmt, _ in segments], m, layout, arch):
        build = gemv_matrix.linear
    return build(segments, k, m, layout, biases, residual, arch, name, plan)


@registry.builds(operators.HeadLinear)
def _head_linear(op, arch, name, plan):
    return head_linear(op.fmt, op.heads, op.n, op.k, op.m, op.layout, arch, name)


@registry.builds(operators.GateUp)
def _gate_up(op, arch, name, plan):
    gate, up, n, k, m, layout_in, layout, act = op.gate, op.up, op.n, op.k, op.m, op.layout_in, op.layout, op.act
    if op.norm_in is not None:
        return gate_up_gemm(gate, up, n, k, m, layout_in, layout, arch, name, plan, act, norm_in=op.norm_in)
    if op.eps is not None:
        return gate_up_gemv(gate, up, n, k, m, layout_in, layout, arch, name, plan, act, eps=op.eps)
    build = gate_up_gemv if m <= FEW and layout_in in VECTORS else gate_up_gemm
    if gemv_matrix.suits([gate, up], m, layout_in, arch):
        build = gemv_matrix.gate_up_swiglu
    return build(gate, up, n, k, m, layout_in, layout, arch, name, plan, act)


@registry.builds(operators.RopeKvWrite)
def _rope_kv_write(op, arch, name, plan):
    return rope_kv_write(op.layer, op.m, op.rope, arch, name, plan)


@registry.builds(operators.LatentKvWrite)
def _latent_kv_write(op, arch, name, plan):
    return latent_kv_write(op.layer, op.m, op.rope, arch, name, plan)


@registry.builds(operators.CausalAttention)
def _attention(op, arch, name, plan):
    return attention(op.layer, op.m, op.layout, arch, name, plan, op.single)


@registry.builds(operators.RopeAttention)
def _rope_attention(op, arch, name, plan):
    return attention_decode(op.layer, op.layout, arch, name, op.rope, plan, op.m)


@registry.builds(operators.Route)
def _route(op, arch, name, plan):
    return route(op.n, op.m, op.of, op, arch, name)


@registry.builds(operators.NormRoute)
def _norm_route(op, arch, name, plan):
    return norm_route(op.fmt, op.k, op.eps, op.layout, op.both, op.router_bias, op.of, op, arch, name)


@registry.builds(operators.ExpertOrder)
def _expert_order(op, arch, name, plan):
    return expert_order(op.m, op.of, arch, name)


@registry.builds(operators.Gather)
def _gather(op, arch, name, plan):
    return gather(op.k, op.m, op.of, op.weighted, op.layout, arch, name, plan)


@registry.builds(operators.ExpertGateUp)
def _expert_gate_up(op, arch, name, plan):
    of = Slots(op.of, op.m, op.shared, op.biases)
    check_rows(op.n, BLOCK)
    sizes = op.gate, op.up, op.n, op.k
    if op.tile == 1:
        return gate_up_gemv(*sizes, 1, op.layout_in, op.layout, arch, name, plan, op.act, of)
    return gate_up_gemm(*sizes, of.x_rows, op.layout_in, op.layout, arch, name, plan, op.act, of)


@registry.builds(operators.ExpertLinear)
def _expert_linear(op, arch, name, plan):
    return expert_linear(op.fmt, op.n, op.k, Slots(op.of, op.m, False, op.bias), op.layout, arch, name, plan)


@registry.builds(operators.ExpertDown)
def _expert_down(op, arch, name, plan):
    of = Slots(op.of, op.m, False, op.bias)
    return expert_down(op.fmt, op.n, op.k, of, op.weighted, op.residual, op.layout, arch, name, plan)


@registry.builds(operators.Combine)
def _combine(op, arch, name, plan):
    return combine(op.n, op.m, op.of, op.weighted, op.residual, arch, name, plan)
