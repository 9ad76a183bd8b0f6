"""GPU kernels by operator: from a workload's arguments and an arch to a TensorIR kernel.

`BUILDERS[operator](**workload.args, arch=.., name=.., plan=..)`: arch is a GpuArch or a Profile, plan of the kernel's
module or None for the default one. The kernel's parameters are the operator's inputs, tuples flattened, then its
outputs (`schedules/operators.py`).
"""

from mlc_amd.schedules.attention import Attention, Rope, described
from mlc_amd.schedules.experts import Experts
from mlc_amd.schedules.formats import lookup
from mlc_amd.schedules.gpu.attention.attention import attention
from mlc_amd.schedules.gpu.attention.attention_decode import attention_decode
from mlc_amd.schedules.gpu.attention.rope_kv_write import rope_kv_write
from mlc_amd.schedules.gpu.base.embed import embed
from mlc_amd.schedules.gpu.base.norm import layer_norm, quantize, rms_norm
from mlc_amd.schedules.gpu.base.planes import BLOCK, padded
from mlc_amd.schedules.gpu.base.step import FEW
from mlc_amd.schedules.gpu.experts.expert_gemm import expert_linear
from mlc_amd.schedules.gpu.experts.expert_gemv import expert_down
from mlc_amd.schedules.gpu.experts.expert_order import expert_order
from mlc_amd.schedules.gpu.experts.expert_rows import combine, gather
from mlc_amd.schedules.gpu.experts.experts import Slots, check_rows
from mlc_amd.schedules.gpu.experts.norm_route import norm_route
from mlc_amd.schedules.gpu.experts.route import Routing, route
from mlc_amd.schedules.gpu.latent.latent_kv_write import latent_kv_write
from mlc_amd.schedules.gpu.linear import gemv_matrix
from mlc_amd.schedules.gpu.linear.gate_up_gemm import gate_up_swiglu as gate_up_gemm
from mlc_amd.schedules.gpu.linear.gemm import linear as gemm
from mlc_amd.schedules.gpu.linear.gemv import VECTORS, suits
from mlc_amd.schedules.gpu.linear.gemv import gate_up_swiglu as gate_up_gemv
from mlc_amd.schedules.gpu.linear.gemv import linear as gemv
from mlc_amd.schedules.gpu.linear.head_linear import head_linear
from mlc_amd.schedules.gpu.recurrent import scan_blocks
from mlc_amd.schedules.gpu.recurrent.causal_conv import causal_conv
from mlc_amd.schedules.gpu.recurrent.channel_decay import channel_decay
from mlc_amd.schedules.gpu.recurrent.delta_net import delta_net
from mlc_amd.schedules.gpu.recurrent.delta_net_blocks import delta_net as delta_net_blocks
from mlc_amd.schedules.gpu.recurrent.gate import gate
from mlc_amd.schedules.gpu.recurrent.ssm_scan import ssm_scan
from mlc_amd.schedules.gpu.recurrent.ssm_scan_blocks import ssm_scan as ssm_scan_blocks
from mlc_amd.schedules.gpu.sampling.sample import sample


def _embed(fmt, vocab, k, m, arch, name, plan, scale=1.0):
    return embed(fmt, vocab, k, m, arch, name, plan, scale)


def _rms_norm(k, m, eps, layout, rows, arch, name, plan, both=False, scale_out=False):
    return rms_norm(k, m, eps, layout, rows, arch, name, plan, both, scale_out)


def _layer_norm(k, m, eps, bias, layout, rows, arch, name, plan, both=False):
    return layer_norm(k, m, eps, bias, layout, rows, arch, name, plan, both)


def _quantize(k, m, layout, arch, name, plan):
    return quantize(k, m, layout, arch, name, plan)


def _linear(
    segments, k, m, layout, biases, residual, arch, name, plan, eps=None, norm_in=None, norm_out=False
):  # fmt: skip
    if norm_in is not None or norm_out:
        return gemm(segments, k, m, layout, biases, residual, arch, name, plan, norm_in, norm_out)
    if eps is not None:
        return gemv(segments, k, m, layout, biases, residual, arch, name, plan, eps)
    formats, rows = [lookup(fmt) for fmt, _ in segments], sum(padded(n) for _, n in segments)
    build = gemv if suits(formats, rows, m, layout, arch) else gemm
    if gemv_matrix.suits([fmt for fmt, _ in segments], m, layout, arch):
        build = gemv_matrix.linear
    return build(segments, k, m, layout, biases, residual, arch, name, plan)


def _head_linear(fmt, heads, n, k, m, layout, arch, name, plan):
    return head_linear(fmt, heads, n, k, m, layout, arch, name)


def _gate_up(gate, up, n, k, m, layout_in, layout, arch, name, plan, act="silu", eps=None, norm_in=None):
    if norm_in is not None:
        return gate_up_gemm(gate, up, n, k, m, layout_in, layout, arch, name, plan, act, norm_in=norm_in)
    if eps is not None:
        return gate_up_gemv(gate, up, n, k, m, layout_in, layout, arch, name, plan, act, eps=eps)
    build = gate_up_gemv if m <= FEW and layout_in in VECTORS else gate_up_gemm
    if gemv_matrix.suits([gate, up], m, layout_in, arch):
        build = gemv_matrix.gate_up_swiglu
    return build(gate, up, n, k, m, layout_in, layout, arch, name, plan, act)


def _rope_kv_write(m, arch, name, plan, **layer):
    return rope_kv_write(described(Attention, layer), m, described(Rope, layer), arch, name, plan)


def _latent_kv_write(m, arch, name, plan, **layer):
    return latent_kv_write(described(Attention, layer), m, described(Rope, layer), arch, name, plan)


def _attention(m, layout, arch, name, plan, single=0, **layer):
    return attention(described(Attention, layer), m, layout, arch, name, plan, single)


def _rope_attention(layout, arch, name, plan, m=1, **layer):
    return attention_decode(described(Attention, layer), layout, arch, name, described(Rope, layer), plan, m)


def _route(n, m, experts, used, tile, arch, name, plan, **routing):
    return route(n, m, Experts(experts, used, tile), Routing(**routing), arch, name)


def _norm_route(fmt, k, eps, layout, both, router_bias, experts, used, tile, arch, name, plan, **routing):
    of = Experts(experts, used, tile)
    return norm_route(fmt, k, eps, layout, both, router_bias, of, Routing(**routing), arch, name)


def _expert_order(m, experts, used, tile, arch, name, plan):
    return expert_order(m, Experts(experts, used, tile), arch, name)


def _gather(k, m, experts, used, tile, weighted, layout, arch, name, plan):
    return gather(k, m, Experts(experts, used, tile), weighted, layout, arch, name, plan)


def _expert_gate_up(
    gate, up, n, k, m, experts, used, tile, biases, act, layout_in, layout, shared, arch, name, plan
):  # fmt: skip
    of = Slots(Experts(experts, used, tile), m, shared, biases)
    check_rows(n, BLOCK)
    if tile == 1:
        return gate_up_gemv(gate, up, n, k, 1, layout_in, layout, arch, name, plan, act, of)
    return gate_up_gemm(gate, up, n, k, of.x_rows, layout_in, layout, arch, name, plan, act, of)


def _expert_linear(fmt, n, k, m, experts, used, tile, bias, layout, arch, name, plan):
    of = Slots(Experts(experts, used, tile), m, False, bias)
    return expert_linear(fmt, n, k, of, layout, arch, name, plan)


def _expert_down(fmt, n, k, m, experts, used, tile, bias, weighted, residual, layout, arch, name, plan):
    of = Slots(Experts(experts, used, tile), m, False, bias)
    return expert_down(fmt, n, k, of, weighted, residual, layout, arch, name, plan)


def _combine(n, m, experts, used, tile, weighted, residual, arch, name, plan):
    return combine(n, m, Experts(experts, used, tile), weighted, residual, arch, name, plan)


def _causal_conv(channels, taps, single, m, gated, act, bias, arch, name, plan, parts=1):
    return causal_conv(channels, taps, single, m, gated, act, bias, parts, arch, name)


def _channel_decay(heads, d, m, arch, name, plan):
    return channel_decay(heads, d, m, arch, name)


def _delta_net(key_heads, value_heads, d, single, m, grouped, eps, arch, name, plan, by_channel=False):
    if not by_channel and scan_blocks.suits(m, single, d, d, arch):
        return delta_net_blocks(key_heads, value_heads, d, single, m, grouped, eps, arch, name, plan)
    return delta_net(key_heads, value_heads, d, single, m, grouped, eps, by_channel, arch, name)


def _ssm_scan(heads, d, size, groups, single, m, arch, name, plan):
    if scan_blocks.suits(m, single, d, size, arch):
        return ssm_scan_blocks(heads, d, size, groups, single, m, arch, name, plan)
    return ssm_scan(heads, d, size, groups, single, m, arch, name)


def _gate(k, m, size, eps, silu, layout, arch, name, plan):
    return gate(k, m, size, eps, silu, layout, arch, name)


def _sample(m, vocab, columns, arch, name, plan):
    return sample(m, vocab, columns, arch, name)


BUILDERS = {
    "embed": _embed,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "quantize": _quantize,
    "linear": _linear,
    "head_linear": _head_linear,
    "gate_up": _gate_up,
    "rope_kv_write": _rope_kv_write,
    "latent_kv_write": _latent_kv_write,
    "attention": _attention,
    "rope_attention": _rope_attention,
    "route": _route,
    "norm_route": _norm_route,
    "expert_order": _expert_order,
    "gather": _gather,
    "expert_gate_up": _expert_gate_up,
    "expert_linear": _expert_linear,
    "expert_down": _expert_down,
    "combine": _combine,
    "causal_conv": _causal_conv,
    "channel_decay": _channel_decay,
    "delta_net": _delta_net,
    "gate": _gate,
    "sample": _sample,
    "ssm_scan": _ssm_scan,
}
