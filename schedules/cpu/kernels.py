"""The sampling kernel by its operator.

schedules/registry.py says what a builder takes.
"""

from mlc_amd.schedules import operators
from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.sampling.sample import sample


@registry.builds(operators.Sample)
def _sample(op, arch, name, plan):
    return sample(op.m, op.vocab, op.columns, name)
