"""The vulkan target: kernels from schedules/gpu, compiled to SPIR-V, one file of modules for each profile of the
artifact.

An artifact may combine profiles with matrix units, or profiles without them.
"""

import re
from typing import Any

from mlc_amd.compiler.codegen import spirv_reader
from mlc_amd.compiler.codegen.gpu_target import GpuTarget
from mlc_amd.compiler.codegen.lower import statements
from mlc_amd.compiler.codegen.spirv import compile_spirv
from mlc_amd.runtime.artifact.manifest import ManifestTarget
from mlc_amd.schedules.gpu.base import profiles
from mlc_amd.schedules.gpu.base.probes import copy, fragment_probe

COPY_BYTES = 64 << 20  # bytes of the copy that measures bandwidth: reading and writing them exceeds all caches


class VulkanTarget(GpuTarget):
    """The vulkan target. Archs: names of profiles (schedules/gpu/base/profiles.py) or of GPUs. Changes to a profile
    follow a colon, separated by "+": rdna3:matrix=none+wave=64."""

    kind = "vulkan"
    resolve = staticmethod(profiles.resolve)
    compiler = staticmethod(compile_spirv)

    @staticmethod
    def here() -> str:
        from mlc_amd.runtime.devices.vulkan.gpu import profile_here  # queries the driver, so only when needed

        return profile_here()

    @property
    def description(self) -> ManifestTarget:
        return {
            **super().description,
            "needs": {profile.name: profile.needs for profile in self.archs},
            "copy_bytes": COPY_BYTES,
        }

    def own_kernels(self, arch):
        kernels: dict[str, Any] = {"copy": copy(COPY_BYTES // 4, arch, "copy")}
        if arch.lane_matrix:
            kernels["fragment_probe"] = fragment_probe(arch, "fragment_probe")
        return kernels

    def compile_for(self, profile, kernels, directory, lowered, workers):
        groups = [[name] for name in sorted(kernels, key=lambda name: statements(kernels[name]), reverse=True)]
        made = list(self.modules(profile, groups, kernels, lowered, workers))
        functions = {name: function for module in made for name, function in module.functions.items()}
        modules = sorted((symbol, kernel) for module in made for symbol, kernel in module.modules.items())
        library, facts, place = f"kernels-{re.sub(r'[^a-z0-9]+', '-', profile.name)}.spv", {}, 0
        with open(directory / library, "wb") as file:
            for symbol, kernel in modules:
                file.write(kernel.binary)
                facts[symbol] = {
                    "code": [place, len(kernel.binary)],
                    "units": spirv_reader.read(kernel.binary).units,
                    "writes": list(kernel.writes),
                    "table": kernel.table,
                }
                place += len(kernel.binary)
        return library, functions, facts
