"""TensorIR kernels for x86 CPUs: explicit vectors, lanes are rows of weights."""

from mlc_amd.schedules.registry import Registry

registry = Registry(__name__)
