"""The AMD GPUs that kernels are built for: what a kernel builder or the code generator must know about each.

In: a gfx name ("gfx1100", also HIP's "gfx942:sramecc+:xnack-") or a product name ("RX 7900 XTX", "7900xtx"). Out: a
`GpuArch`: a chip of runtime/gpus.py with what its family means for code. Sources: LLVM's AMDGPUUsage (wait counters),
AMD's ISA manuals.
"""

import re
from dataclasses import dataclass
from typing import ClassVar

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.gpus import CHIPS, Chip

MAX_THREADS = 256  # of a workgroup: TVM marks kernels built without a ROCm device "amdgpu-flat-work-group-size"="1,256"

Intrinsic = tuple[str, int, str]  # name, operand, operand's type


@dataclass(frozen=True)
class Family:
    """What a generation of chips means for code. Sources: AMD's ISA manuals; LLVM's AMDGPUBaseInfo.cpp
    (getVGPRAllocGranule, getMaxWavesPerEU)."""

    wave: int  # lanes of a wave
    most_waves: int  # of a SIMD
    allotments: int = 64  # parts into which the registers of a SIMD are divided: waves get whole ones
    accumulators: int = 0  # of a lane's registers, those that only matrix instructions access
    # Waits for the wave's LDS operations. The operand leaves the other counters at "do not wait"; where they lie in the
    # word differs per generation.
    wait: Intrinsic = ("llvm.amdgcn.s.waitcnt", 0xC07F, "int32")
    wait_stores: Intrinsic | None = None  # for the wave's stores to device memory; None: there is no such instruction
    matrix: str = ""  # the kind of matrix instructions: "mfma", "wmma11", "wmma12" (they lay operands out differently)
    int8_columns: int = 0  # of an int8 matrix instruction; 0 without any
    coherent: bool = True  # whether all compute units share one L2: stores that reach it are visible to all of them
    # Whether the arithmetic of a GEMV's steps must stay in order. LLVM would mix them until more than 128 registers are
    # live: llama3-8b's q, k and v in Q4_K would leave a SIMD of gfx1030 7 waves instead of 9, for the same number of
    # instructions and with fewer loads in flight. gfx11's code for Q8_0 would be longer.
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
    """One gfx target: the chip's facts, what its `Family` says of code, and what kernels know of all of them."""

    api = "rocm"  # which code the kernels become; `profiles.Profile` has another
    threads = most_threads = MAX_THREADS  # most threads of a workgroup that kernels use, by default and at all
    float16 = True  # arithmetic
    subgroups = True  # lanes exchange values by shuffles
    # as of runtime/gpus.py's DeviceKind
    scalars = True
    unrolls = False  # TVM's code has loops or copies, as kernels say
    lone_waves = False
    fragment: ClassVar[tuple[int, int, int]] = (0, 0, 0)
    lane_matrix: ClassVar[tuple[int, ...]] = ()
    needs: ClassVar[dict] = {}  # what a candidate asks of a device besides the arch
    query_registers = 0
    launch_us = 3.9  # of a node of a HIP graph: published of a W7900
    join_us = 0.0

    @property
    def code(self) -> Family:
        return FAMILIES[self.family]

    wave = property(lambda self: self.code.wave)
    matrix = property(lambda self: self.code.matrix)
    lane_unit = matrix
    # as of `profiles.Profile`: a token's lanes of a matrix of 16 x 16
    lane_blocks = property(lambda self: self.wave // 16 if self.matrix else 0)
    ordered_steps = property(lambda self: self.code.ordered_steps)

    # whether two float16 products are added to a float32 in one instruction (fdot2): all with an int8 dot product
    dot2 = property(lambda self: bool(self.dot))


ARCHS = {name: GpuArch(**vars(chip)) for name, chip in CHIPS.items()}
PRODUCTS = {product: arch for arch in ARCHS.values() for product in arch.products}
BRANDS = {"amd", "radeon", "rx", "pro", "instinct", "ryzen", "graphics"}


def plain(name: str) -> str:
    """A GPU's name as tables have it: "RX 7900 XTX" -> "7900xtx"."""
    words = re.split(r"[\s_-]+|(?<=rx)(?=\d)", name.lower().split(":")[0])
    return "".join(word for word in words if word not in BRANDS)


def resolve(name: str) -> GpuArch:
    """The arch of a gfx name (features after a colon are ignored) or of a product ("RX 7900 XTX", "steam-deck").
    UserError if unknown."""
    if (arch := ARCHS.get(plain(name)) or PRODUCTS.get(plain(name))) is None:
        raise UserError(
            f"unknown AMD GPU {name!r}; known are {', '.join(ARCHS)} and product names such as 7900xtx, steamdeck, "
            "strixhalo"
        )
    return arch
