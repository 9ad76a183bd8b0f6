"""GPU kernels by operator: from an operator's declaration and an arch to a TensorIR kernel.

schedules/registry.py says what a builder takes.
"""

from mlc_amd.schedules import operators
from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.attention.attention import attention
from mlc_amd.schedules.gpu.attention.attention_decode import attention_decode
from mlc_amd.schedules.gpu.attention.rope_kv_write import rope_kv_write
from mlc_amd.schedules.gpu.latent.latent_kv_write import latent_kv_write
from mlc_amd.schedules.gpu.sampling.sample import sample


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


@registry.builds(operators.Sample)
def _sample(op, arch, name, plan):
    return sample(op.m, op.vocab, op.columns, arch, name)
