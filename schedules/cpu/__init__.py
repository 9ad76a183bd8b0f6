"""TensorIR kernels for x86 CPUs, with explicit vectors. In matrix products a vector lane is a row of a weight."""

from mlc_amd.schedules.registry import Registry

registry = Registry(__name__)
