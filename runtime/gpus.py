"""The GPUs that this project knows, in one table: AMD's chips by LLVM's name, and the kinds of Vulkan devices.

Everything else is derived from this table: the arch that kernels are built for (schedules/gpu/base/arch.py,
profiles.py), which code object runs on which chip and which profile fits a device (runtime/devices), rooflines and the
static model's machines (tools, compiler/tuning). Sources: LLVM's AMDGPUUsage (processors, features, ELF numbers); AMD's
product pages (bandwidth, memory, compute units, clocks); Vulkan's registry of required limits; reports of Mesa's and
NVIDIA's drivers (gpuinfo.org).
"""

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

KIB = 1024


@dataclass(frozen=True)
class Chip:
    """An AMD chip. A chip is sold in several products; the figures are those of the first one in `products`."""

    name: str  # LLVM's name
    family: str  # its generation: gcn5, cdna1 to cdna4, rdna1 to rdna4
    # instruction for four int8 products added to an int32: "sdot4", "sudot4" (signs chosen per operand), or "" (none)
    dot: str
    units: int  # compute units: how many workgroups fill the GPU
    bandwidth: float  # GB/s of device memory (from the product's data sheet, not a measurement)
    clock: float  # GHz: AMD's "boost" or "peak engine" clock, for upper bounds
    products: tuple[str, ...]  # names that users may write, lower case without blanks, the usual one first
    unified: bool = False  # an APU: its memory is the host's memory
    lds: int = 64 * KIB  # bytes of LDS that a workgroup may have
    # loads that a lane keeps in flight in kernels bound by memory, to hide latency, as far as registers allow
    loads: int = 2
    # 32-bit registers that a lane of a SIMD has for all of its waves, including the accumulators of matrices
    registers: int = 1024
    # EF_AMDGPU_MACH of chips that share instructions, bugs and registers with the other chips of their family, so that
    # code compiled for one of them runs on all: LLVM's AMDGPUUsage puts no restriction on generic code for such a group
    # (it does for gfx10-1-generic and gfx11-generic). 0: the chip is in no such group.
    mach: int = 0


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("gfx906", "gcn5", "sdot4", 60, 1024, 1.75, ("vii", "mi50", "mi60", "vega20"), loads=1, registers=256),
        Chip("gfx908", "cdna1", "sdot4", 120, 1229, 1.5, ("mi100",), registers=512),
        # one of MI250's two dies
        Chip("gfx90a", "cdna2", "sdot4", 104, 1638, 1.7, ("mi210", "mi250", "mi250x"), registers=512),
        Chip("gfx942", "cdna3", "sdot4", 304, 5300, 2.1, ("mi300x", "mi300a", "mi325x", "mi300"), registers=512),
        Chip("gfx950", "cdna4", "sdot4", 256, 8000, 2.4, ("mi355x", "mi350x", "mi350"), lds=160 * KIB, registers=512),
        Chip("gfx1010", "rdna1", "", 40, 448, 1.905, ("5700xt", "5700", "5600xt", "navi10")),
        Chip("gfx1011", "rdna1", "sdot4", 36, 512, 1.6, ("v520", "navi12")),
        Chip("gfx1012", "rdna1", "sdot4", 22, 224, 1.845, ("5500xt", "5500", "navi14")),
        Chip("gfx1030", "rdna2", "sdot4", 72, 512, 2.25, ("6800xt", "6900xt", "6950xt", "6800", "w6800", "navi21"),
        mach=0x36),
        Chip("gfx1031", "rdna2", "sdot4", 40, 384, 2.58, ("6700xt", "6750xt", "6700", "navi22"), mach=0x37),
        Chip("gfx1032", "rdna2", "sdot4", 32, 256, 2.59, ("6600xt", "6600", "6650xt", "navi23"), mach=0x38),
        Chip("gfx1033", "rdna2", "sdot4", 8, 88, 1.6, ("steamdeck", "vangogh"), unified=True, mach=0x39),
        Chip("gfx1034", "rdna2", "sdot4", 16, 144, 2.815, ("6500xt", "6400", "navi24"), mach=0x3e),
        Chip("gfx1035", "rdna2", "sdot4", 12, 102, 2.4, ("680m", "660m", "rembrandt"), unified=True, mach=0x3d),
        Chip("gfx1036", "rdna2", "sdot4", 2, 83, 2.2, ("610m", "raphael", "graniteridge"), unified=True, mach=0x45),
        Chip("gfx1100", "rdna3", "sudot4", 96, 960, 2.5, ("7900xtx", "7900xt", "7900gre", "w7900", "w7800", "navi31"),
        registers=1536),
        Chip("gfx1101", "rdna3", "sudot4", 60, 624, 2.43, ("7800xt", "7700xt", "7700", "w7700", "navi32"),
        registers=1536),
        Chip("gfx1102", "rdna3", "sudot4", 32, 288, 2.655, ("7600", "7600xt", "navi33")),
        Chip("gfx1103", "rdna3", "sudot4", 12, 120, 2.7, ("780m", "760m", "740m", "phoenix", "hawkpoint", "z1extreme"),
        unified=True),
        Chip("gfx1150", "rdna3", "sudot4", 16, 120, 2.9, ("890m", "880m", "strixpoint"), unified=True),
        Chip("gfx1151", "rdna3", "sudot4", 40, 256, 2.9, ("8060s", "8050s", "strixhalo", "aimax395", "aimax+395"),
        unified=True, registers=1536),
        Chip("gfx1152", "rdna3", "sudot4", 8, 120, 3.0, ("860m", "840m", "krackan"), unified=True),
        Chip("gfx1200", "rdna4", "sudot4", 32, 322, 3.13, ("9060xt", "9060", "navi44"), registers=1536, mach=0x48),
        Chip("gfx1201", "rdna4", "sudot4", 64, 640, 2.97, ("9070xt", "9070", "9070gre", "r9700", "navi48"),
        registers=1536, mach=0x4e),
    )
}  # fmt: skip

# GiB of memory by product; several values where several versions are sold. MI250: memory of one of its two dies. APUs
# use the system's memory: only APUs that come with one size are listed, and Strix Halo with its largest size. Source:
# "AMD GPU specifications" of ROCm's documentation (7.13); product pages for what it lacks. It says 16 for the 9070 GRE,
# but its 192-bit bus has 12.
MEMORY: dict[str, tuple[int, ...]] = {
    "vii": (16,), "mi50": (16, 32), "mi60": (32,), "mi100": (32,), "mi210": (64,), "mi250": (64,), "mi250x": (64,),
    "mi300x": (192,), "mi300a": (128,), "mi325x": (256,), "mi350x": (288,), "mi355x": (288,),
    "5700xt": (8,), "5700": (8,), "5600xt": (6,), "v520": (8,), "5500xt": (4, 8), "5500": (4, 8),
    "6950xt": (16,), "6900xt": (16,), "6800xt": (16,), "6800": (16,), "w6800": (32,), "6750xt": (12,), "6700xt": (12,),
    "6700": (10,), "6650xt": (8,), "6600xt": (8,), "6600": (8,), "6500xt": (4, 8), "6400": (4,), "steamdeck": (16,),
    "7900xtx": (24,), "7900xt": (20,), "7900gre": (16,), "w7900": (48,), "w7800": (32, 48), "7800xt": (16,),
    "7700xt": (12,), "7700": (16,), "w7700": (16,), "7600xt": (16,), "7600": (8,), "8060s": (128,), "strixhalo": (128,),
    "9070xt": (16,), "9070": (16,), "9070gre": (12,), "r9700": (32,), "9060xt": (8, 16), "9060": (8,),
}  # fmt: skip

# GB/s of device memory by product. This bounds decoding, which reads every weight for each token. Only products with
# one kind of memory are listed, as most APUs have whatever memory the machine has. The first product of a chip that is
# no APU has the bandwidth of its `Chip`; the Steam Deck's chips are named by the driver's names only. Source: AMD's and
# NVIDIA's product pages; MI250: one of its two dies.
BANDWIDTH: dict[str, float] = {chip.products[0]: chip.bandwidth for chip in CHIPS.values() if not chip.unified} | {
    "mi50": 1024, "mi60": 1024, "mi250": 1638, "mi250x": 1638, "mi300a": 5300, "mi325x": 6000, "mi350x": 8000,
    "5700": 448, "5600xt": 336, "5500": 224, "6950xt": 576, "6900xt": 512, "6800": 512, "w6800": 512, "6750xt": 432,
    "6700": 320, "6650xt": 280, "6600": 224, "6400": 128, "customgpu0405": 88, "customgpu0932": 102,
    "7900xt": 800, "7900gre": 576, "w7900": 864, "w7800": 576, "7700xt": 432, "7700": 624, "w7700": 576, "7600xt": 288,
    "8060s": 256, "8050s": 256, "9070": 640, "9070gre": 432, "r9700": 640, "9060": 288,
    "h100": 3352, "h100pcie": 2039, "h100nvl": 3938, "h200": 4800,
}  # fmt: skip
VENDORS = {"amd", "radeon", "nvidia"}  # a device's name must contain one of these words to be matched with a product


def peak_bandwidth(name: str) -> tuple[str, float] | None:
    """(product, GB/s) for the device name that a driver reports, or None if the product is unknown. Finds the longest
    name of BANDWIDTH that consists of consecutive words of the device name."""
    words = re.findall(r"[A-Za-z0-9]+", name)
    runs = [words[i:j] for j in range(1, len(words) + 1) for i in range(max(j - 3, 0), j)]
    known = [run for run in runs if "".join(run).lower() in BANDWIDTH]
    if not known or VENDORS.isdisjoint(map(str.lower, words)):
        return None
    product = max(known, key=lambda run: len("".join(run)))
    return " ".join(product), BANDWIDTH["".join(product).lower()]


def same_isa() -> tuple[dict[str, int], ...]:
    """Groups of chips that run the same code. A group is {name: `mach`}."""
    groups: dict[str, dict[str, int]] = {}
    for chip in CHIPS.values():
        if chip.mach:
            groups.setdefault(chip.family, {})[chip.name] = chip.mach
    return tuple(groups.values())


@dataclass(frozen=True)
class DeviceKind:
    """A kind of Vulkan device. The figures are what kernels compiled for it may rely on."""

    name: str  # the name for --arch
    family: str  # AMD: as in `Chip`
    # subgroup size that pipelines require; without `subgroups`: threads of a workgroup that acts as a subgroup
    wave: int
    units: int  # compute units: how many workgroups fill the GPU
    bandwidth: float  # GB/s, as in `Chip`; 0: unknown
    products: tuple[str, ...] = ()  # other names, lower case without blanks
    unified: bool = False  # its memory is the host's memory
    clock: float = 1.9  # GHz, as in `Chip`, but rough: one kind stands for many chips
    subgroups: bool = True  # has subgroup arithmetic and shuffles, with a subgroup size that can be required
    dot: str = "dot4"  # packed products of 4x8 signed bits in hardware; "": plain multiplication
    loads: int = 2  # as in `Chip`
    registers: int = 0  # as in `Chip`; 0: unknown
    # whether kernels whose subgroups share nothing use workgroups of one subgroup: then values that depend only on the
    # workgroup's number are known to be uniform, which this driver's compiler does not find out for other values
    lone_waves: bool = False
    # the driver's compiler unrolls short loops; otherwise it keeps arrays that such loops index in memory
    unrolls: bool = True
    # microseconds of a launch in a command buffer that depends on the launch before it. Kernels avoid such a launch by
    # repeating small work in each workgroup (schedules/gpu/linear/norm_place.py); 0: they never do. Measured: 2.6 to 3
    # on an H100 and an H200; published for a W7900 with RADV: 0.9.
    launch_us: float = 0.0
    # microseconds of a barrier between all workgroups of a launch, through device memory; 0: not measured
    join_us: float = 0.0
    float16: bool = True  # arithmetic on float16 (otherwise only storage)
    matrix: str = ""  # "coop" for KHR_cooperative_matrix, else ""
    # registers of a lane that the driver's compiler keeps for one operand fragment; kernels must count these to avoid
    # spills: 16 with ACO (Mesa 25). 0: kernels need not count them
    query_registers: int = 0
    fragment: tuple[int, int, int] = (16, 16, 16)  # (m, n, k) of its float16 matrices with float32 sums
    # (m, n, k) of float16 matrices with float32 sums for kernels that know which lane has which component
    # (gemm_lanes.py, gemm_matrix.py and attention_rows_matrix.py of schedules/gpu); (): there are no such kernels
    lane_matrix: tuple[int, ...] = ()
    # how the components of these are distributed over lanes: a key of DISTRIBUTIONS in runtime/matrix_lanes.py
    lane_unit: str = ""
    lds: int = 32 * KIB  # bytes of shared memory that a workgroup may have
    threads: int = 256  # largest number of threads of a workgroup that kernels use
    # the same for kernels of the layout "lanes" (schedules/gpu/linear/gemm_lanes.py); 0: `threads`
    lane_threads: int = 0
    push: int = 256  # bytes of push constants; further arguments are read from memory
    chips: str = ""  # AMD: pattern of the beginnings of the chip names that Mesa's driver reports; "": not AMD


DEVICE_KINDS = {
    kind.name: kind
    for kind in (
        DeviceKind("vangogh", "rdna2", 32, 8, 88, ("steamdeck", "deck"), unified=True, clock=1.6,
        registers=1024, launch_us=0.9, chips="VANGOGH"),
        # NAVI1 has no dot products; the driver reports that
        DeviceKind("rdna2", "rdna2", 32, 40, 512, ("rembrandt", "680m", "660m"), registers=1024, launch_us=0.9,
        chips="NAVI1|NAVI2|REMBRANDT|RAPHAEL|MENDOCINO"),
        DeviceKind("rdna3", "rdna3", 32, 60, 960, registers=1536, matrix="coop", query_registers=16,
        launch_us=0.9, lane_matrix=(16, 16, 16), lane_unit="wmma11",
        chips="NAVI3|PHOENIX|HAWK|STRIX|KRACKAN|GFX115|GFX110"),
        DeviceKind("rdna4", "rdna4", 32, 64, 640, registers=1536, matrix="coop", query_registers=16,
        launch_us=0.9, lane_matrix=(16, 16, 16), lane_unit="wmma12",
        chips="NAVI4|GFX12"),
        DeviceKind("gfx90c", "gcn5", 64, 8, 51, ("vega", "renoir", "cezanne", "lucienne", "barcelo"), unified=True,
        dot="", loads=1, registers=256, launch_us=0.9, lds=64 * KIB, chips="VEGA|RAVEN|RENOIR"),
        DeviceKind("nvidia", "nvidia", 32, 132, 4800, ("h200", "h100"), loads=4, registers=512, lone_waves=True,
        unrolls=False, launch_us=3.0, join_us=3.0,
        matrix="coop", lane_matrix=(16, 8, 16), lane_unit="mma", lane_threads=512, lds=48 * KIB),
        # Mesa's CPU driver. Its subgroup is a vector of the host: 256 bits. No GPU has such small subgroups, so this is
        # also a good stress test.
        DeviceKind("lavapipe", "generic", 8, 4, 0, ("llvmpipe", "swrast"), unified=True, loads=1, push=128),
        # What Vulkan 1.2 guarantees on every device with buffer addresses and small integers in memory.
        DeviceKind("generic", "generic", 32, 16, 0, subgroups=False, dot="", loads=1, float16=False, lds=16 * KIB,
        threads=32, push=128),
    )
}  # fmt: skip

# ---- upper bounds of a GPU's speed

Unit = Literal["fma", "packed16", "dot4", "matrix16", "matrix8"]
# Operations per clock and compute unit (NVIDIA: multiprocessor), by what multiplies. A multiplication and an addition
# count as two. fma: float32 multiply-adds; packed16: pairs of float16 (dot2, packed multiply-adds); dot4: four int8
# products; matrix16, matrix8: matrices of float16 and of int8, without sparsity. 0: there is no such instruction.
# Sources, with which each figure was compared:
# - matrices: AMD's matrix instruction calculator (github.com/ROCm/amd_matrix_instruction_calculator), for the shapes
#   that kernels use: per compute unit of CDNA 1 to 3, per half of a work group processor of RDNA 3 and 4; CDNA 4's
#   white paper ("AMD CDNA 4 architecture", peak rates); "AMD matrix cores" and "Using the Matrix Cores of AMD RDNA 4
#   architecture GPUs" of GPUOpen, which tabulate MI100, MI250X, RDNA 2, 3 and 4 per clock and compute unit;
# - fma: these two GPUOpen articles (MI100, MI250X); white papers of CDNA 2 to 4 (packed float32); ISA guides of RDNA 3
#   and 4 ("Dual Issue VALU": two operations are issued together);
# - packed16: GPUOpen's table (RDNA 2; RDNA 3 with dual issue), product pages ("peak half precision"); CDNA: one
#   instruction a clock in each of 64 lanes (ISA guides, V_PK_FMA_F16, V_DOT2_F32_F16);
# - dot4: V_DOT4 in 64 lanes a clock (ISA guides); it is not among the instructions of dual issue;
# - NVIDIA: Hopper white paper. Tests compare the figures with product pages, too.
RATES: dict[str, dict[Unit, int]] = {
    family: dict(zip(("fma", "packed16", "dot4", "matrix16", "matrix8"), rates, strict=True))
    for family, rates in {
        "gcn5": (128, 256, 512, 0, 0),
        "cdna1": (128, 256, 512, 1024, 1024),
        "cdna2": (256, 256, 512, 1024, 1024),
        "cdna3": (256, 256, 512, 2048, 4096),
        "cdna4": (256, 256, 512, 4096, 8192),
        "rdna1": (128, 256, 512, 0, 0),
        "rdna2": (128, 256, 512, 0, 0),
        "rdna3": (256, 512, 512, 512, 512),
        "rdna4": (256, 512, 512, 1024, 2048),
        "nvidia": (256, 512, 512, 4096, 8192),
    }.items()
}


class Limits(NamedTuple):
    """Upper bounds of a GPU's speed. bandwidth: bytes per second, 0 if unknown. rates: operations per second for each
    Unit that the GPU has, empty if unknown."""

    bandwidth: float
    rates: dict[str, float]


def limits(gpu: Chip | DeviceKind, device: str = "") -> Limits:
    """The limits of a chip, or of a kind of Vulkan device, from the tables. device: the name that a driver reports; if
    it names a known product, that product's bandwidth and chip are used."""
    name, bandwidth = peak_bandwidth(device) or ("", gpu.bandwidth)
    product = name.replace(" ", "").lower()
    chip = next((chip for chip in CHIPS.values() if product in chip.products), gpu)
    clocks = chip.units * chip.clock * 1e9
    return Limits(bandwidth * 1e9, {unit: ops * clocks for unit, ops in RATES.get(chip.family, {}).items() if ops})


def limits_of(arch: str, device: str = "") -> Limits:
    """`limits` by name: of a chip, or of a kind with changes (rdna3:wave=64). No figures for unknown names."""
    gpu = CHIPS.get(arch) or DEVICE_KINDS.get(arch.partition(":")[0])
    return limits(gpu, device) if gpu else Limits(0.0, {})
