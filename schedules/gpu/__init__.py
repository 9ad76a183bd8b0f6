"""TensorIR kernels for AMD GPUs: one builder function per kernel, each returns a `tirx.PrimFunc` with its threads
bound."""

from mlc_amd.schedules.registry import Registry

registry = Registry(__name__)
