"""The AMD GPUs that kernels are built for: what a kernel builder or the code generator must know about each.

In: a gfx name ("gfx1100", also HIP's "gfx942:sramecc+:xnack-") or a product name ("RX 7900 XTX", "7900xtx"). Out: a
`GpuArch`. Sources: LLVM's AMDGPUUsage (processors, features, wait counters), AMD's ISA manuals, AMD's product pages
(bandwidth, compute units).
"""

import re
from dataclasses import dataclass

from mlc_amd.runtime.errors import UserError

MAX_THREADS = 256  # of a workgroup: TVM marks kernels built without a ROCm device "amdgpu-flat-work-group-size"="1,256"
KIB = 1024

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
class GpuArch:
    """One gfx target.

    name        LLVM's name
    family      a key of FAMILIES
    dot         instruction for four int8 products added to an int32: "sdot4", "sudot4" (signs chosen per operand) or ""
                (none)
    units       compute units of the product that `bandwidth` is of: how many workgroups fill the GPU
    bandwidth   GB/s of device memory, of the fastest usual product (a table's figure, not a measurement)
    products    names that `resolve` takes for it, lower case without blanks
    unified     an APU: its memory is the host's
    lds         bytes of LDS that one workgroup may have
    wave        lanes of a wave
    matrix      "" or the kind of matrix instructions: "mfma", "wmma11", "wmma12" (gfx11 and gfx12 lay operands out
                differently)
    wait        (intrinsic, operand, operand's type) that waits for the wave's LDS operations
    """

    name: str
    family: str
    dot: str
    units: int
    bandwidth: float
    products: tuple[str, ...]
    unified: bool = False
    lds: int = 64 * KIB

    api = "rocm"  # which code the kernels become; `profiles.Profile` has another
    threads = MAX_THREADS  # most threads of a workgroup that kernels use
    float16 = True  # arithmetic
    subgroups = True  # lanes exchange values by shuffles
    amd = True  # scalar registers exist

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


ARCHS = {
    arch.name: arch
    for arch in (
        GpuArch("gfx906", "gcn5", "sdot4", 60, 1024, ("vii", "mi50", "mi60", "vega20")),
        GpuArch("gfx908", "cdna", "sdot4", 120, 1229, ("mi100",)),
        GpuArch("gfx90a", "cdna", "sdot4", 104, 1638, ("mi210", "mi250", "mi250x")),  # one of MI250's two dies
        GpuArch("gfx942", "cdna", "sdot4", 304, 5300, ("mi300x", "mi300a", "mi325x", "mi300")),
        GpuArch("gfx950", "cdna", "sdot4", 256, 8000, ("mi350x", "mi355x", "mi350"), lds=160 * KIB),
        GpuArch("gfx1010", "rdna1", "", 40, 448, ("5700xt", "5700", "5600xt", "navi10")),
        GpuArch("gfx1011", "rdna1", "sdot4", 36, 512, ("v520", "navi12")),
        GpuArch("gfx1012", "rdna1", "sdot4", 22, 224, ("5500xt", "5500", "navi14")),
        GpuArch("gfx1030", "rdna2", "sdot4", 72, 512, ("6950xt", "6900xt", "6800xt", "6800", "w6800", "navi21")),
        GpuArch("gfx1031", "rdna2", "sdot4", 40, 384, ("6700xt", "6750xt", "6700", "navi22")),
        GpuArch("gfx1032", "rdna2", "sdot4", 32, 256, ("6600xt", "6600", "6650xt", "navi23")),
        GpuArch("gfx1033", "rdna2", "sdot4", 8, 88, ("steamdeck", "vangogh"), unified=True),
        GpuArch("gfx1034", "rdna2", "sdot4", 16, 144, ("6500xt", "6400", "navi24")),
        GpuArch("gfx1035", "rdna2", "sdot4", 12, 102, ("680m", "660m", "rembrandt"), unified=True),
        GpuArch("gfx1036", "rdna2", "sdot4", 2, 83, ("610m", "raphael", "graniteridge"), unified=True),
        GpuArch("gfx1100", "rdna3", "sudot4", 96, 960, ("7900xtx", "7900xt", "7900gre", "w7900", "w7800", "navi31")),
        GpuArch("gfx1101", "rdna3", "sudot4", 60, 624, ("7800xt", "7700xt", "w7700", "navi32")),
        GpuArch("gfx1102", "rdna3", "sudot4", 32, 288, ("7600", "7600xt", "navi33")),
        GpuArch(
            "gfx1103",
            "rdna3",
            "sudot4",
            12,
            120,
            ("780m", "760m", "740m", "phoenix", "hawkpoint", "z1extreme"),
            unified=True,
        ),
        GpuArch("gfx1150", "rdna3", "sudot4", 16, 120, ("890m", "880m", "strixpoint"), unified=True),
        GpuArch(
            "gfx1151",
            "rdna3",
            "sudot4",
            40,
            256,
            ("8060s", "8050s", "strixhalo", "aimax395", "aimax+395"),
            unified=True,
        ),
        GpuArch("gfx1152", "rdna3", "sudot4", 8, 120, ("860m", "840m", "krackan"), unified=True),
        GpuArch("gfx1200", "rdna4", "sudot4", 32, 322, ("9060xt", "9060", "navi44")),
        GpuArch("gfx1201", "rdna4", "sudot4", 64, 640, ("9070xt", "9070", "9070gre", "r9700", "navi48")),
    )
}

PRODUCTS = {product: arch for arch in ARCHS.values() for product in arch.products}
BRANDS = {"amd", "radeon", "rx", "pro", "instinct", "ryzen", "graphics"}


def resolve(name: str) -> GpuArch:
    """The arch of a gfx name (features after a colon are ignored) or of a product ("RX 7900 XTX", "steam-deck").
    UserError if unknown."""
    words = re.split(r"[\s_-]+|(?<=rx)(?=\d)", name.lower().split(":")[0])
    plain = "".join(word for word in words if word not in BRANDS)
    if (arch := ARCHS.get(plain) or PRODUCTS.get(plain)) is None:
        raise UserError(
            f"unknown AMD GPU {name!r}; known are {', '.join(ARCHS)} and product names such as 7900xtx, steamdeck, "
            "strixhalo"
        )
    return arch
