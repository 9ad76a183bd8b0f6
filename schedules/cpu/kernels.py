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
from mlc_amd.schedules.cpu.experts.route import route
from mlc_amd.schedules.cpu.linear.embed import embed
from mlc_amd.schedules.cpu.linear.norm import layer_norm, quantize, rms_norm
from mlc_amd.schedules.cpu.sampling.sample import sample


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


@registry.builds(operators.Combine)
def _combine(op, arch, name, plan):
    return combine(op.n, op.m, op.of, op.weighted, op.residual, name)


@registry.builds(operators.Sample)
def _sample(op, arch, name, plan):
    return sample(op.m, op.vocab, op.columns, name)
