"""CPU architectures: which LLVM cpu to compile for, and which instruction set the kernels use on it.

In: an `--arch` name. Out: `Arch` with the instruction set class (isa.py) and the CPU flags that a machine must have to
run the code.
"""

from dataclasses import dataclass

import tvm
from tvm.target import codegen

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import cpu_flags
from mlc_amd.schedules.cpu.base.isa import Avx2, AvxVnni, Isa, Portable, Vnni512, Zen4

# The names that `--help` and errors show; any other cpu that LLVM knows works too.
LEVELS = ("x86-64-v4", "x86-64-v3", "x86-64-v2")
CPUS = ("znver1", "znver2", "znver3", "znver4", "znver5", "haswell", "alderlake", "icelake-server")
NAMES = ("native", *reversed(LEVELS), *CPUS)

# Cpus whose best tile sizes differ from those of others with the same instructions.
OWN = {"znver4": Zen4}

# The best first: (LLVM features, instruction set)
ISAS = (
    (("avx512vnni", "avx512bw", "avx512dq"), Vnni512),
    (("avxvnni",), AvxVnni),
    (("avx2", "fma", "f16c"), Avx2),
    ((), Portable),
)

# LLVM feature: the flag in /proc/cpuinfo. What a machine must have of these is recorded in the artifact.
FLAGS = {
    "sse4.2": "sse4_2", "avx": "avx", "avx2": "avx2", "fma": "fma", "f16c": "f16c", "avxvnni": "avx_vnni",
    "avx512f": "avx512f", "avx512bw": "avx512bw", "avx512dq": "avx512dq", "avx512vl": "avx512vl",
    "avx512vnni": "avx512_vnni",
}  # fmt: skip


@dataclass(frozen=True)
class Arch:
    name: str  # as the user named it; "native" becomes the cpu's own name
    mcpu: str  # LLVM's name
    isa: Isa  # a class of isa.py
    flags: tuple[str, ...]  # /proc/cpuinfo flags that the code needs

    api = "cpu"

    @property
    def needs(self) -> dict:
        """What a candidate asks of a machine."""
        return {"flags": list(self.flags)}

    @property
    def target(self) -> tvm.target.Target:
        return tvm.target.Target({"kind": "llvm", "mcpu": self.mcpu})


def _arch(name: str, mcpu: str) -> Arch:
    target = tvm.target.Target({"kind": "llvm", "mcpu": mcpu})
    has = {feature for feature in FLAGS if codegen.llvm_cpu_has_features([feature], target)}
    isa = OWN.get(mcpu) or next(isa for needs, isa in ISAS if has.issuperset(needs))
    return Arch(name, mcpu, isa, tuple(FLAGS[f] for f in FLAGS if f in has))


def resolve(name: str = "native") -> Arch:
    """The architecture of that name. UserError for a name that LLVM does not know."""
    triple = codegen.llvm_get_system_triple()
    if name in ("native", "auto"):
        cpu, host = codegen.llvm_get_system_cpu(), cpu_flags()
        # A hypervisor may hide features of the CPU that LLVM recognizes: then the best level that the flags allow.
        if not host:
            return _arch(cpu, cpu)
        candidates = [_arch(name, name) for name in (cpu, *LEVELS)]
        return next((arch for arch in candidates if host.issuperset(arch.flags)), candidates[-1])
    if not codegen.llvm_is_valid_cpu(name, triple):
        raise UserError(f"unknown CPU arch '{name}'; use one of {', '.join(NAMES)} or another cpu name of LLVM")
    return _arch(name, name)


def tile_rows(m: int, arch: Arch) -> int:
    """Rows of an activation tile, also of kernels whose activations are not laid out in tiles."""
    return min(m, arch.isa.tokens)
