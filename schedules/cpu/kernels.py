"""CPU kernels by operator: from a workload's arguments and an arch to a TensorIR kernel.

`BUILDERS[operator](**workload.args, arch=.., name=.., plan=..)`: arch is of `arch.py`, plan of the kernel's module or
None for the default one. The kernel's parameters are the operator's inputs, tuples flattened, then its outputs
(`schedules/operators.py`).
"""

from mlc_amd.schedules.attention import Attention, Rope, described
from mlc_amd.schedules.cpu.attention.attention import attention
from mlc_amd.schedules.cpu.attention.latent_kv_write import latent_kv_write
from mlc_amd.schedules.cpu.attention.rope_kv_write import rope_kv_write
from mlc_amd.schedules.cpu.experts.expert_rows import combine, expert_order, gather
from mlc_amd.schedules.cpu.experts.experts import expert_down, expert_gate_up, expert_linear
from mlc_amd.schedules.cpu.experts.route import route
from mlc_amd.schedules.cpu.linear.embed import embed
from mlc_amd.schedules.cpu.linear.gate_up import gate_up_swiglu
from mlc_amd.schedules.cpu.linear.linear import head_linear, linear
from mlc_amd.schedules.cpu.linear.norm import layer_norm, quantize, rms_norm
from mlc_amd.schedules.cpu.recurrent.causal_conv import causal_conv
from mlc_amd.schedules.cpu.recurrent.channel_decay import channel_decay
from mlc_amd.schedules.cpu.recurrent.delta_net import delta_net
from mlc_amd.schedules.cpu.recurrent.gate import gate
from mlc_amd.schedules.cpu.recurrent.ssm_scan import ssm_scan
from mlc_amd.schedules.cpu.sampling.sample import sample
from mlc_amd.schedules.experts import Experts


def tile_rows(m: int, arch) -> int:
    """Rows of an activation tile, also of kernels whose activations are not laid out in tiles."""
    return min(m, arch.isa.tokens)


def _embed(fmt, vocab, k, m, arch, name, plan, scale=1.0):
    return embed(fmt, vocab, k, m, name, scale)


def _rms_norm(k, m, eps, layout, rows, arch, name, plan, both=False):
    return rms_norm(k, m, eps, lambda rows: tile_rows(rows, arch), bool(layout), rows, arch.isa, name, both)


def _layer_norm(k, m, eps, bias, layout, rows, arch, name, plan, both=False):
    return layer_norm(k, m, eps, lambda rows: tile_rows(rows, arch), bool(layout), rows, bias, arch.isa, name, both)


def _quantize(k, m, layout, arch, name, plan):
    return quantize(k, m, tile_rows(m, arch), arch.isa, name)


def _linear(segments, k, m, layout, biases, residual, arch, name, plan):
    return linear(segments, k, m, tile_rows(m, arch), biases, residual, arch.isa, name, plan)


def _head_linear(fmt, heads, n, k, m, layout, arch, name, plan):
    return head_linear(fmt, heads, n, k, m, tile_rows(m, arch), arch.isa, name, plan)


def _gate_up(gate, up, n, k, m, layout_in, layout, arch, name, plan, act="silu"):
    return gate_up_swiglu(gate, up, n, k, m, tile_rows(m, arch), bool(layout), arch.isa, name, plan, act)


def _rope_kv_write(m, arch, name, plan, **layer):
    return rope_kv_write(described(Attention, layer), described(Rope, layer), m, arch.isa, name)


def _latent_kv_write(m, arch, name, plan, **layer):
    return latent_kv_write(described(Attention, layer), described(Rope, layer), m, arch.isa, name)


def _attention(m, single, layout, arch, name, plan, **layer):
    return attention(described(Attention, layer), m, single, tile_rows(m, arch), bool(layout), arch.isa, name, plan)


def _route(n, m, experts, used, tile, arch, name, plan, **attributes):
    return route(n, m, experts, used, isa=arch.isa, name=name, **attributes)


def _expert_order(m, experts, used, tile, arch, name, plan):
    return expert_order(m, Experts(experts, used, tile), name)


def _gather(k, m, experts, used, tile, weighted, layout, arch, name, plan):
    return gather(k, m, Experts(experts, used, tile), weighted, bool(layout), name)


def _expert_gate_up(gate, up, n, k, m, experts, used, tile, biases, act, layout_in, layout, shared, arch, name, plan):
    of = Experts(experts, used, tile)
    return expert_gate_up(gate, up, n, k, m, of, biases, act, bool(layout), shared, arch.isa, name, plan)


def _expert_linear(fmt, n, k, m, experts, used, tile, bias, layout, arch, name, plan):
    return expert_linear(fmt, n, k, m, Experts(experts, used, tile), bias, arch.isa, name, plan)


def _expert_down(fmt, n, k, m, experts, used, tile, bias, weighted, residual, layout, arch, name, plan):
    return expert_down(fmt, n, k, Experts(experts, used, tile), bias, weighted, residual, arch.isa, name, plan)


def _combine(n, m, experts, used, tile, weighted, residual, arch, name, plan):
    return combine(n, m, Experts(experts, used, tile), weighted, residual, name)


def _causal_conv(channels, taps, single, m, gated, act, bias, arch, name, plan, parts=1):
    return causal_conv(channels, taps, single, m, gated, act, bias, parts, arch.isa, name)


def _channel_decay(heads, d, m, arch, name, plan):
    return channel_decay(heads, d, m, name)


def _delta_net(key_heads, value_heads, d, single, m, grouped, eps, arch, name, plan, by_channel=False):
    return delta_net(key_heads, value_heads, d, single, m, grouped, eps, by_channel, name)


def _ssm_scan(m, arch, name, plan, **sizes):
    return ssm_scan(m=m, isa=arch.isa, name=name, **sizes)


def _gate(k, m, size, eps, silu, layout, arch, name, plan):
    return gate(k, m, size, eps, silu, tile_rows(m, arch), bool(layout), arch.isa, name)


def _sample(m, vocab, columns, arch, name, plan):
    return sample(m, vocab, columns, name)


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
    "route": _route,
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
