"""The sampling kernel by its operator.

schedules/registry.py says what a builder takes.
"""

from mlc_amd.schedules import operators
from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.attention.attention import attention
from mlc_amd.schedules.cpu.base.arch import tile_rows
from mlc_amd.schedules.cpu.sampling.sample import sample


@registry.builds(operators.CausalAttention)
def _attention(op, arch, name, plan):
    return attention(op.layer, op.m, op.single, tile_rows(op.m, arch), bool(op.layout), arch.isa, name, plan)


@registry.builds(operators.Sample)
def _sample(op, arch, name, plan):
    return sample(op.m, op.vocab, op.columns, name)
