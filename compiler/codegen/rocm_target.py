"""The rocm target: kernels from schedules/gpu as AMD code objects, one file of them for each arch of the artifact.

The kernels are divided among several code objects (`_groups`), which all cores compile (`hsaco_worker.py`).
"""

import gzip
from collections.abc import Iterator

from tvm import tirx

from mlc_amd.compiler import nodes
from mlc_amd.compiler.codegen import hsaco, hsaco_worker
from mlc_amd.compiler.codegen.gpu_target import GpuTarget
from mlc_amd.compiler.codegen.lower import walk
from mlc_amd.compiler.codegen.rocm import HsacoModule, compile_hsaco, find_linker
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import kfd_gpus
from mlc_amd.schedules.gpu.base import arch as archs

CODE_OBJECTS = 24  # of a library, about; a kernel may be larger than such a part
FEW_GROUPS = 4  # that are compiled sooner here than in other processes, which import TVM


class RocmTarget(GpuTarget):
    """Names are those of schedules/gpu/base/arch.py. RDNA3 and RDNA4 go together in an artifact, CDNA's go together,
    GPUs without matrix units go together."""

    kind = "rocm"
    resolve = staticmethod(archs.resolve)

    @staticmethod
    def here() -> str:
        if not (found := kfd_gpus()):
            raise UserError("this machine shows no AMD GPU to compile for; name one with --arch, as gfx1100 or 7900xtx")
        return found[0]["arch"]

    def compile_for(self, arch, kernels, directory, lowered, workers):
        """One code object for each group of kernels, all in one file."""
        groups, library, functions, facts, place = _groups(kernels), f"kernels-{arch.name}.hsaco", {}, {}, 0
        # for `inspect`: most machines have no disassembler for these
        listing = gzip.GzipFile(directory / f"kernels-{arch.name}.s.gz", "wb", mtime=0)
        with open(directory / library, "wb") as file, listing:
            for group, module in zip(groups, self._compiled(arch, groups, kernels, lowered, workers), strict=True):
                file.write(module.hsaco)
                listing.write(module.assembly.encode())
                functions |= module.functions
                symbols = [launch.symbol for name in group for launch in module.functions[name].launches]
                for symbol in symbols:
                    units = hsaco.instructions(module.assembly, symbol).units
                    facts[symbol] = {"code": [place, len(module.hsaco)], "units": units}
                place += len(module.hsaco)
        return library, functions, facts

    def _compiled(self, arch, groups, kernels, lowered, workers) -> Iterator[HsacoModule]:
        """Groups of operators in `workers` processes, meanwhile here the others and, if they are few, all."""
        find_linker()
        away = [all(name in self.workloads for name in group) for group in groups]
        if workers == 1 or sum(away) < FEW_GROUPS:
            away = [False] * len(groups)
        with hsaco_worker.Workers(arch.name, workers) as pool:
            futures = [
                pool.compile(self._operators(arch, group)) if is_away else None
                for group, is_away in zip(groups, away, strict=True)
            ]
            for group, future in zip(groups, futures, strict=True):
                if future is None:
                    yield compile_hsaco({name: kernels[name] for name in group}, arch, lowered)
                    continue
                yield hsaco_worker.result(future)
                for name in group:
                    lowered(name)

    def _operators(self, arch, group: list[str]) -> list[hsaco_worker.Kernel]:
        operators = [(name, self.workloads[name]) for name in group]
        return [hsaco_worker.Kernel(name, op, self.plan(op, arch)[0]) for name, op in operators]


def _groups(kernels: dict[str, tirx.PrimFunc]) -> list[list[str]]:
    """The kernels of each code object, those of the most statements first: of equal work, as far as kernels allow it,
    and the same on every machine."""
    sizes = {name: _statements(kernel) for name, kernel in kernels.items()}
    limit, groups, room = sum(sizes.values()) / CODE_OBJECTS, [], 0.0
    for name in sorted(kernels, key=lambda name: (-sizes[name], name)):
        if not groups or sizes[name] > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= sizes[name]
    return groups


def _statements(kernel: tirx.PrimFunc) -> int:
    found = []
    walk(nodes.body(kernel), (tirx.BufferStore, tirx.Bind), lambda _: found.append(1))
    return len(found)
