"""The rocm target: kernels from schedules/gpu, and one code object for each arch of the artifact.

RDNA3 and RDNA4 go together in an artifact, CDNA's go together, GPUs without matrix units go together.
"""

import gzip

from mlc_amd.compiler.codegen.gpu_target import GpuTarget
from mlc_amd.compiler.codegen.rocm import compile_hsaco
from mlc_amd.runtime.cache.kv_types import KV_TYPE
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import kfd_gpus
from mlc_amd.schedules.gpu.base import arch as archs


class RocmTarget(GpuTarget):
    """`arch`: names of schedules/gpu/base/arch.py, separated by commas, or "auto" for this machine's GPU. UserError if
    one is unknown, or they cannot share an artifact."""

    kind = "rocm"
    matrix_layout = "half"

    def __init__(self, arch: str, kv: str = KV_TYPE):
        names = _here() if arch in ("native", "auto") else arch.split(",")
        super().__init__([archs.resolve(name) for name in names], kv)

    def compile_for(self, arch, kernels, directory, lowered):
        module = compile_hsaco(kernels, arch, lowered=lowered)
        library = f"kernels-{arch.name}.hsaco"
        (directory / library).write_bytes(module.hsaco)
        # for `inspect`: most machines have no disassembler for these
        (directory / f"kernels-{arch.name}.s.gz").write_bytes(gzip.compress(module.assembly.encode(), mtime=0))
        return library, module.functions, {}


def _here() -> list[str]:
    """The arch of this machine's GPU. UserError without one."""
    found = kfd_gpus()
    if not found:
        raise UserError("this machine shows no AMD GPU to compile for; name one with --arch, as gfx1100 or 7900xtx")
    return [found[0]["arch"]]
