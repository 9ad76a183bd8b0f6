"""The rocm target: kernels from schedules/gpu, compiled to AMD code objects, one file for each arch of the artifact.

The kernels of an arch are divided among several code objects (`_groups`), so that all cores can compile.
"""

import gzip

from tvm import tirx

from mlc_amd.compiler.codegen import hsaco
from mlc_amd.compiler.codegen.gpu_target import GpuTarget
from mlc_amd.compiler.codegen.lower import statements
from mlc_amd.compiler.codegen.rocm import compile_hsaco, find_linker
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import kfd_gpus
from mlc_amd.schedules.gpu.base import arch as archs

CODE_OBJECTS = 24  # approximate number for a file; a kernel may be larger than 1/24 of all


class RocmTarget(GpuTarget):
    """The rocm target. Archs: names of schedules/gpu/base/arch.py. An artifact may combine RDNA3 and RDNA4; archs of
    CDNA; or GPUs without matrix units."""

    kind = "rocm"
    peers = True
    resolve = staticmethod(archs.resolve)
    compiler = staticmethod(compile_hsaco)

    @staticmethod
    def here() -> str:
        if not (found := kfd_gpus()):
            raise UserError(
                "this machine shows no AMD GPU to compile for; name one with --arch, say gfx1100 or 7900xtx"
            )
        return found[0]["arch"]

    def compile_for(self, arch, kernels, directory, lowered, workers):
        """See `GpuTarget.compile_for`. The file holds one code object for each group of kernels."""
        find_linker()
        groups, library, functions, facts, place = _groups(kernels), f"kernels-{arch.name}.hsaco", {}, {}, 0
        # for `mlc-amd inspect`: most machines have no disassembler for AMD code
        listing = gzip.GzipFile(directory / f"kernels-{arch.name}.s.gz", "wb", mtime=0)
        with open(directory / library, "wb") as file, listing:
            for group, module in zip(groups, self.modules(arch, groups, kernels, lowered, workers), strict=True):
                file.write(module.hsaco)
                listing.write(module.assembly.encode())
                functions |= module.functions
                symbols = [launch.symbol for name in group for launch in module.functions[name].launches]
                for symbol in symbols:
                    units = hsaco.instructions(module.assembly, symbol).units
                    facts[symbol] = {"code": [place, len(module.hsaco)], "units": units}
                place += len(module.hsaco)
        return library, functions, facts


def _groups(kernels: dict[str, tirx.PrimFunc]) -> list[list[str]]:
    """The kernels of each code object, those with the most statements first. Groups have about equal work, as far as
    the size of kernels allows, and are the same on every machine."""
    sizes = {name: statements(kernel) for name, kernel in kernels.items()}
    limit, groups, room = sum(sizes.values()) / CODE_OBJECTS, [], 0.0
    for name in sorted(kernels, key=lambda name: (-sizes[name], name)):
        if not groups or sizes[name] > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= sizes[name]
    return groups
