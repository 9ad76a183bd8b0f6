"""The AMD GPUs of target rocm: the facts that kernel builders and the code generator need about each.

In: a gfx name ("gfx1100", also HIP's "gfx942:sramecc+:xnack-") or a product name ("RX 7900 XTX", "7900xtx"). Out: a
`GpuArch`: the chip's facts from runtime/gpus.py, and those of its family. Sources: LLVM's AMDGPUUsage (wait counters),
AMD's ISA manuals.
"""

import re
from dataclasses import dataclass
from typing import ClassVar

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.gpus import CHIPS, Chip

MAX_THREADS = 256  # of a workgroup: without a ROCm device, TVM sets "amdgpu-flat-work-group-size"="1,256"

Intrinsic = tuple[str, int, str]  # name, operand, operand's type


@dataclass(frozen=True)
class Family:
    """The facts about a generation of chips that affect code. Sources: AMD's ISA manuals; LLVM's AMDGPUBaseInfo.cpp
    (getVGPRAllocGranule, getMaxWavesPerEU)."""

    wave: int  # lanes of a wave
    most_waves: int  # upper limit of the waves of a SIMD
    allotments: int = 64  # allocation granules in the register file of a SIMD; a wave gets whole granules
    accumulators: int = 0  # registers of a lane that only matrix instructions access (AccVGPRs)
    # Instruction that waits for the wave's LDS operations. Its operand sets all other counters to "do not wait"; their
    # positions in the operand differ between generations.
    wait: Intrinsic = ("llvm.amdgcn.s.waitcnt", 0xC07F, "int32")
    wait_stores: Intrinsic | None = None  # the same for stores to device memory; None if there is no such instruction
    matrix: str = ""  # kind of matrix instructions: "mfma", "wmma11", "wmma12" (their operand layouts differ)
    int8_columns: int = 0  # columns (k) of an int8 matrix instruction; 0 if there is none
    coherent: bool = True  # whether all compute units share one L2, in which stores are visible to all of them
    # Whether a GEMV must prevent LLVM from mixing the arithmetic of its steps. On RDNA2, LLVM would mix it until more
    # than 128 registers are live: for llama3-8b's q, k and v in Q4_K, a SIMD of gfx1030 would hold 7 waves instead of
    # 9, with the same number of instructions and fewer loads in flight. On gfx11 the order would make the code for Q8_0
    # longer.
    ordered_steps: bool = False


FAMILIES = {
    "gcn5": Family(64, 10),
    "cdna1": Family(64, 10, accumulators=256, matrix="mfma", int8_columns=16),
    "cdna2": Family(64, 8, matrix="mfma", int8_columns=16),
    "cdna3": Family(64, 8, matrix="mfma", int8_columns=32, coherent=False),
    "cdna4": Family(64, 8, matrix="mfma", int8_columns=32, coherent=False),
    "rdna1": Family(32, 20, allotments=128),
    "rdna2": Family(32, 16, ordered_steps=True),
    "rdna3": Family(32, 16, wait=("llvm.amdgcn.s.waitcnt", 0xFC07, "int32"), matrix="wmma11", int8_columns=16),
    "rdna4": Family(32, 16, wait=("llvm.amdgcn.s.wait.dscnt", 0, "int16"),
    wait_stores=("llvm.amdgcn.s.wait.storecnt", 0, "int16"), matrix="wmma12", int8_columns=16),
}  # fmt: skip


@dataclass(frozen=True)
class GpuArch(Chip):
    """A gfx target: the facts of its chip and of its `Family`, and those that all AMD GPUs share."""

    api = "rocm"  # selects the code that kernels emit; `profiles.Profile` has "vulkan"
    threads = most_threads = MAX_THREADS  # upper limits of the threads of a workgroup: by default, and for any kernel
    float16 = True  # whether there is float16 arithmetic
    subgroups = True  # whether lanes can exchange values by shuffles
    # the following are described at DeviceKind of runtime/gpus.py
    scalars = True
    unrolls = False  # kernels decide: their loops stay loops, `device.each` copies bodies
    lone_waves = False
    fragment: ClassVar[tuple[int, int, int]] = (0, 0, 0)
    lane_matrix: ClassVar[tuple[int, ...]] = ()
    needs: ClassVar[dict] = {}  # requirements on a device besides the arch
    query_registers = 0
    launch_us = 3.9  # microseconds of a node of a HIP graph: published for a W7900
    join_us = 0.0

    @property
    def code(self) -> Family:
        return FAMILIES[self.family]

    wave = property(lambda self: self.code.wave)
    matrix = property(lambda self: self.code.matrix)
    lane_unit = matrix
    # see `profiles.Profile`: the lanes that hold a token's elements of a matrix of 16 x 16
    lane_blocks = property(lambda self: self.wave // 16 if self.matrix else 0)
    ordered_steps = property(lambda self: self.code.ordered_steps)

    # whether there is fdot2, which adds two float16 products to a float32: on all chips with an int8 dot product
    dot2 = property(lambda self: bool(self.dot))


ARCHS = {name: GpuArch(**vars(chip)) for name, chip in CHIPS.items()}
PRODUCTS = {product: arch for arch in ARCHS.values() for product in arch.products}
BRANDS = {"amd", "radeon", "rx", "pro", "instinct", "ryzen", "graphics"}


def plain(name: str) -> str:
    """A GPU's name as in the tables: "RX 7900 XTX" -> "7900xtx"."""
    words = re.split(r"[\s_-]+|(?<=rx)(?=\d)", name.lower().split(":")[0])
    return "".join(word for word in words if word not in BRANDS)


def resolve(name: str) -> GpuArch:
    """The arch of a gfx name (features after a colon are ignored) or of a product ("RX 7900 XTX", "steam-deck"). Raises
    UserError for an unknown name."""
    if (arch := ARCHS.get(plain(name)) or PRODUCTS.get(plain(name))) is None:
        raise UserError(
            f"unknown AMD GPU {name!r}; known are {', '.join(ARCHS)} and product names such as 7900xtx, steamdeck, "
            "strixhalo"
        )
    return arch
