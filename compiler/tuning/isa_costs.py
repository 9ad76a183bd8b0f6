"""Costs of instructions, memory traffic and waits on AMD GPUs: the constants of `static.py`'s model.

In: an arch or a profile, an instruction's name. Out: a `Machine`; the pipe that the instruction occupies ("valu",
"matrix", "salu", "memory" or "lds"), and for how many clocks.

Where the constants come from. [ISA] AMD's instruction set manuals; [WP] AMD's architecture whitepapers (RDNA, CDNA 3);
[P] product pages: clocks, peak rates, from which those of matrix instructions follow: operations of the instruction /
operations per clock and SIMD. [E] are estimates: round numbers near what published microbenchmarks of latency show. No
AMD GPU has confirmed any of them here.
"""

import functools
import re
from dataclasses import dataclass

from mlc_amd.compiler.codegen import hsaco, radv
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.base.arch import GpuArch

NONE = "none"  # what is no work: waits, hints


@dataclass(frozen=True)
class Family:
    """One generation's compute unit.

    simds     SIMDs of a compute unit
    lanes     of a SIMD: a wave's instruction takes wave / lanes clocks
    scalar    clocks after which a wave can issue again behind a scalar instruction
    memory    bytes a clock and compute unit through the vector cache [WP]
    lds       bytes a clock and compute unit [WP]
    matrix    clocks of a matrix instruction: (pattern of its name, clocks)
    apart     whether matrix instructions leave the vector ALU to other waves
    """

    simds: int
    lanes: int
    scalar: int
    memory: float
    lds: float
    matrix: tuple[tuple[str, int], ...] = ()
    apart: bool = False


# Peak rates, multiply-adds counted twice [P]: RDNA3 512 a clock and compute unit in float16, RDNA4 1024, CDNA2 and
# MI100 1024, CDNA3 2048; 16x16x16 are 8192 operations, 32x32x8 16384.
_CDNA2 = (
    (r"32x32x8_?f16|32x32x8_?bf16|32x32x8_?i8", 64),
    (r"16x16x16_?f16|16x16x16_?bf16|16x16x16_?i8", 32),
    (r"", 64),
)
_CDNA3 = ((r"32x32x8_f16|32x32x8_bf16|32x32x16_i8", 32), (r"16x16x16_f16|16x16x16_bf16|16x16x32_i8", 16), (r"", 32))
FAMILIES = {
    "gcn5": Family(4, 16, 4, 64, 128),
    "cdna": Family(4, 16, 4, 64, 128, _CDNA3, True),
    "rdna1": Family(2, 32, 1, 64, 64),
    "rdna2": Family(2, 32, 1, 64, 64),
    "rdna3": Family(2, 32, 1, 64, 64, ((r"", 32),)),
    "rdna4": Family(2, 32, 1, 64, 64, ((r"_iu?8|fp8|bf8", 8), (r"", 16))),
}
OLDER = dict.fromkeys(("gfx908", "gfx90a"), Family(4, 16, 4, 64, 128, _CDNA2, True))

# Nanoseconds from a load of device memory to its use [E]; Profile "nvidia" is none of these.
LATENCY = {"gcn5": 600.0, "cdna": 800.0, "rdna1": 400.0, "rdna2": 350.0, "rdna3": 400.0, "rdna4": 400.0}
UNIFIED = 1.5  # how much longer it takes to the host's memory [E]
LDS_CLOCKS, SCALAR_CLOCKS = 64, 120  # from an LDS operation, a scalar load out of the cache, to its use [E]
EFFICIENCY = 0.88  # of the table's bandwidth that streams of reads can reach [E; copies on many GPUs]
# Bytes whose time a jump to another place in memory costs: a row of which so many bytes are read at once takes (1
# + RUN / bytes) times as long. Fits what Q4_0 GEMV plans took on an NVIDIA H200 through Vulkan; for AMD's memory [E].
RUN = 32
LAUNCH = 2.5e-6  # seconds that a launch costs which waits for the one before [E; DESIGN of replayed graphs]
SCRATCH = 2.0  # factor of a kernel that keeps registers in memory, beside what its loads and stores cost [E]
CODE_CACHE = 32 << 10  # bytes [WP]; two compute units share it
CODE_MISS = 1.5  # factor of issuing code that does not fit [E]

SLOW = 4  # times as long as plain vector instructions: transcendental ones, 32-bit integer products [ISA]
DOUBLE = 16  # float64 on GPUs for graphics [P]
RULES = (
    (r"v_(wmma|swmmac|mfma|smfmac)", "matrix", None),
    (r"v_\w*_f64", "valu", DOUBLE),
    (r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_|v_mul_(lo|hi)_[iu]32|v_mad_[iu]64", "valu", SLOW),
    (r"v_", "valu", 1),
    (r"ds_(bpermute|permute|swizzle)", "lds", 4),
    (r"(global|flat|buffer|scratch)_(load|store|read|write|atomic)", "memory", None),
    (r"ds_", "lds", None),
    (r"s_(wait|delay_alu|clause|nop|code_end|sendmsg|barrier|set_inst|inst_prefetch|endpgm|setreg|sleep)", NONE, 0),
    (r"s_", "salu", 1),
)


@dataclass(frozen=True)
class Machine:
    """One GPU. clock in Hz, latency in clocks, bandwidth in bytes a second as far as kernels reach it; the rest as
    `Family`. gpu: whose registers and LDS count."""

    name: str
    family: Family
    units: int
    clock: float
    latency: float
    bandwidth: float
    gpu: GpuArch | None

    def held(self, kernel: hsaco.Kernel, threads: int) -> tuple[int, str]:
        """(waves that a SIMD holds at once, what limits them) with workgroups of so many threads."""
        assert self.gpu is not None  # a machine without one counts for itself
        return hsaco.occupancy(kernel, self.gpu, threads)

    def cost(self, mnemonic: str, wave: int, size: int) -> tuple[str, float]:
        """(pipe, clocks) of a wave's instruction. size: bytes a lane that a memory operation moves."""
        family, passes = self.family, max(1, wave // self.family.lanes)
        pipe, factor = next(
            ((pipe, factor) for pattern, pipe, factor in RULES if re.match(pattern, mnemonic)), (NONE, 0)
        )
        if pipe == "matrix":
            return ("matrix" if family.apart else "valu"), next(
                n for pattern, n in family.matrix if re.search(pattern, mnemonic)
            )
        if factor is None:
            return pipe, max(1.0, wave * size / (family.memory if pipe == "memory" else family.lds))
        if pipe == "salu":
            return pipe, family.scalar
        return pipe, factor * passes


@functools.lru_cache(maxsize=64)
def machine(arch) -> Machine:
    """The machine of a GpuArch or of a Profile whose code RADV can make. UserError for others."""
    gpu = arch if arch.api == "rocm" else radv.gpu_of(arch) if arch.api == "vulkan" else None
    if gpu is None:
        raise UserError(
            f"there is no model of {arch.name}: static ranking knows AMD GPUs; measure on the device, or through a kit"
        )
    clock = gpu.clock * 1e9
    latency = LATENCY[gpu.family] * (UNIFIED if arch.unified else 1) * 1e-9 * clock
    family = OLDER[gpu.name] if gpu.name in OLDER else FAMILIES[gpu.family]
    return Machine(arch.name, family, arch.units, clock, latency, arch.bandwidth * 1e9 * EFFICIENCY, gpu)
