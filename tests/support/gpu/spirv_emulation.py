"""Runs kernels of any profile in the SPIR-V emulator (tests/dev/spirv), as `vulkan_harness.run` does on a device:

results = emulated(prim_func, [a, b, c], resolve("nvidia"))     # -> the arrays after the run, in the same order
"""

import numpy as np

from mlc_amd.compiler.codegen.spirv import compile_spirv
from tests.dev.spirv.emulator import Kernel


def emulated(func, arrays, profile) -> list[np.ndarray]:
    """One compiled PrimFunc on numpy arrays -> copies of all of them after the run. Fault: of the emulator."""
    module = compile_spirv({"kernel": func}, profile)
    (function,) = module.functions.values()
    memory = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy() for array in arrays]
    memory += [np.full(nbytes, 255, np.uint8) for nbytes in function.scratch]  # no numbers
    for launch in function.launches:
        kernel = module.modules[launch.symbol]
        wave = profile.wave if profile.subgroups else 0
        Kernel(kernel.binary, wave, profile.lane_unit).launch(
            kernel.grid, [memory[i] for i in launch.args], kernel.table
        )
    return [raw.view(array.dtype).reshape(array.shape) for raw, array in zip(memory, arrays, strict=False)]


def execute(kernel, arrays, profile) -> None:
    """Runs the kernel on the arrays of its parameters' names; they hold what it wrote afterwards."""
    names = [param.name for param in kernel.params]
    for name, result in zip(names, emulated(kernel, [arrays[name] for name in names], profile), strict=True):
        arrays[name][...] = result
