"""TensorIR kernels for GPUs, for target rocm and vulkan: one function for each kernel. The decorator `builds`
(base/step.py) makes it a builder, which returns a `tirx.PrimFunc` with loops bound to workgroups and threads."""

from mlc_amd.schedules.registry import Registry

registry = Registry(__name__)
