"""TensorIR kernels for GPUs: one function per kernel, whose builder (`base/step.py`) returns a `tirx.PrimFunc` with its
threads bound."""

from mlc_amd.schedules.registry import Registry

registry = Registry(__name__)
