"""CPU kernels by operator: from an operator's declaration and an arch to a TensorIR kernel.

schedules/registry.py says what a builder takes.
"""

from functools import partial

from mlc_amd.schedules import operators
from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.attention.attention import attention
from mlc_amd.schedules.cpu.attention.latent_kv_write import latent_kv_write
from mlc_amd.schedules.cpu.attention.rope_kv_write import rope_kv_write
from mlc_amd.schedules.cpu.base.arch import tile_rows
from mlc_amd.schedules.cpu.experts.expert_rows import combine, expert_order, gather
from mlc_amd.schedules.cpu.experts.experts import expert_down, expert_gate_up, expert_linear
from mlc_amd.schedules.cpu.experts.route import route
from mlc_amd.schedules.cpu.linear.embed import embed
from mlc_amd.schedules.cpu.linear.gate_up import gate_up_swiglu
from mlc_amd.schedules.cpu.linear.linear import head_linear, linear
from mlc_amd.schedules.cpu.linear.norm import layer_norm, quantize, rms_norm


@registry.builds(operators.Embed)
def _embed(op, arch, name, plan):
    return embed(op.fmt, op.vocab, op.k, op.m, name, op.scale)


@registry.builds(operators.RmsNorm)
def _rms_norm(op, arch, name, plan):
    tile = partial(tile_rows, arch=arch)
    return rms_norm(op.k, op.m, op.eps, tile, bool(op.layout), op.rows, arch.isa, name, op.both)


@registry.builds(operators.LayerNorm)
def _layer_norm(op, arch, name, plan):
    tile = partial(tile_rows, arch=arch)
    return layer_norm(op.k, op.m, op.eps, tile, bool(op.layout), op.rows, op.bias, arch.isa, name, op.both)


@registry.builds(operators.Quantize)
def _quantize(op, arch, name, plan):
    return quantize(op.k, op.m, tile_rows(op.m, arch), arch.isa, name)


@registry.builds(operators.Linear)
def _linear(op, arch, name, plan):
    tile = tile_rows(op.m, arch)
    return linear(op.segments, op.k, op.m, tile, op.biases, op.residual, arch.isa, name, plan)


@registry.builds(operators.HeadLinear)
def _head_linear(op, arch, name, plan):
    return head_linear(op.fmt, op.heads, op.n, op.k, op.m, tile_rows(op.m, arch), arch.isa, name, plan)


@registry.builds(operators.GateUp)
def _gate_up(op, arch, name, plan):
    tile, sizes = tile_rows(op.m, arch), (op.gate, op.up, op.n, op.k, op.m)
    return gate_up_swiglu(*sizes, tile, bool(op.layout), arch.isa, name, plan, op.act)


@registry.builds(operators.RopeKvWrite)
def _rope_kv_write(op, arch, name, plan):
    return rope_kv_write(op.layer, op.rope, op.m, arch.isa, name)


@registry.builds(operators.LatentKvWrite)
def _latent_kv_write(op, arch, name, plan):
    return latent_kv_write(op.layer, op.rope, op.m, arch.isa, name)


@registry.builds(operators.CausalAttention)
def _attention(op, arch, name, plan):
    return attention(op.layer, op.m, op.single, tile_rows(op.m, arch), bool(op.layout), arch.isa, name, plan)


@registry.builds(operators.Route)
def _route(op, arch, name, plan):
    routing = {
        key: getattr(op, key) for key in ("gating", "normalize", "scale", "bias", "factors", "groups", "groups_used")
    }
    return route(op.n, op.m, op.experts, op.used, isa=arch.isa, name=name, **routing)


@registry.builds(operators.ExpertOrder)
def _expert_order(op, arch, name, plan):
    return expert_order(op.m, op.of, name)


@registry.builds(operators.Gather)
def _gather(op, arch, name, plan):
    return gather(op.k, op.m, op.of, op.weighted, bool(op.layout), name)


@registry.builds(operators.ExpertGateUp)
def _expert_gate_up(op, arch, name, plan):
    sizes = op.gate, op.up, op.n, op.k, op.m, op.of
    return expert_gate_up(*sizes, op.biases, op.act, bool(op.layout), op.shared, arch.isa, name, plan)


@registry.builds(operators.ExpertLinear)
def _expert_linear(op, arch, name, plan):
    return expert_linear(op.fmt, op.n, op.k, op.m, op.of, op.bias, arch.isa, name, plan)


@registry.builds(operators.ExpertDown)
def _expert_down(op, arch, name, plan):
    return expert_down(op.fmt, op.n, op.k, op.of, op.bias, op.weighted, op.residual, arch.isa, name, plan)


@registry.builds(operators.Combine)
def _combine(op, arch, name, plan):
    return combine(op.n, op.m, op.of, op.weighted, op.residual, name)
