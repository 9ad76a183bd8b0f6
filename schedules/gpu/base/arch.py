"""The AMD GPUs that kernels are built for: what a kernel builder or the code generator must know about each.

In: a gfx name ("gfx1100", also HIP's "gfx942:sramecc+:xnack-") or a product name ("RX 7900 XTX", "7900xtx"). Out: a
`GpuArch`: a chip of runtime/gpus.py with what its family means for code. Sources: LLVM's AMDGPUUsage (wait counters),
AMD's ISA manuals.
"""

import re
from dataclasses import dataclass

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.gpus import CHIPS, Chip

MAX_THREADS = 256  # of a workgroup: TVM marks kernels built without a ROCm device "amdgpu-flat-work-group-size"="1,256"

# family: (lanes of a wave, matrix instructions, intrinsic that waits for a wave's LDS operations: name, operand,
# operand's type). The operand leaves the other counters at "do not wait"; where they lie in the word differs per
# generation.
FAMILIES = {
    "gcn5": (64, "", ("llvm.amdgcn.s.waitcnt", 0xC07F, "int32")),
    "cdna": (64, "mfma", ("llvm.amdgcn.s.waitcnt", 0xC07F, "int32")),
    "rdna1": (32, "", ("llvm.amdgcn.s.waitcnt", 0xC07F, "int32")),
    "rdna2": (32, "", ("llvm.amdgcn.s.waitcnt", 0xC07F, "int32")),
    "rdna3": (32, "wmma11", ("llvm.amdgcn.s.waitcnt", 0xFC07, "int32")),
    "rdna4": (32, "wmma12", ("llvm.amdgcn.s.wait.dscnt", 0, "int16")),
}


@dataclass(frozen=True)
class GpuArch(Chip):
    """One gfx target: the chip's facts, and

    wave        lanes of a wave
    matrix      "" or the kind of matrix instructions: "mfma", "wmma11", "wmma12" (gfx11 and gfx12 lay operands out
                differently)
    wait        (intrinsic, operand, operand's type) that waits for the wave's LDS operations
    """

    api = "rocm"  # which code the kernels become; `profiles.Profile` has another
    threads = most_threads = MAX_THREADS  # most threads of a workgroup that kernels use, by default and at all
    float16 = True  # arithmetic
    subgroups = True  # lanes exchange values by shuffles
    amd = True  # scalar registers exist
    lane_matrix = ()  # as of runtime/gpus.py's DeviceKind

    @property
    def needs(self) -> dict:
        """What a candidate asks of a device besides the arch: nothing."""
        return {}

    @property
    def wave(self) -> int:
        return FAMILIES[self.family][0]

    @property
    def matrix(self) -> str:
        return FAMILIES[self.family][1]

    @property
    def wait(self) -> tuple[str, int, str]:
        return FAMILIES[self.family][2]

    @property
    def dot2(self) -> bool:
        """Whether two float16 products are added to a float32 in one instruction (fdot2): all that have an int8 dot
        product."""
        return bool(self.dot)


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
