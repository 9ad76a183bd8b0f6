"""The kinds of Vulkan devices that kernels are built for: what a kernel builder or the SPIR-V generator may count on.

In: a profile's name, with changes after a colon ("rdna3:matrix=none+wave=64"), or a product's ("steamdeck", "RX 7900
XTX"). Out: a `Profile`. It has the attributes of `arch.GpuArch` that kernels use, so the same kernels serve both. The
runtime checks a device against `Profile.needs` before it runs an artifact. What a profile lacks is lowered to something
that it has, never assumed.

Sources: Vulkan's registry of required limits; reports of Mesa's and NVIDIA's drivers (gpuinfo.org); AMD's product
pages.
"""

import re
from dataclasses import dataclass, replace

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.gpus import DEVICE_KINDS, DeviceKind
from mlc_amd.schedules.gpu.base import arch as amd

ADDRESS = 8  # bytes of a kernel's argument


@dataclass(frozen=True)
class Profile(DeviceKind):
    """A kind of Vulkan device, and what kernels and their launches ask of it."""

    api = "vulkan"
    # no product of float16 pairs with a float32 sum: float32 multiply-adds, which AMD's compiler makes "mixed" ones
    dot2 = False

    # whether scalar registers exist: values that a subgroup shares are worth a broadcast
    scalars = property(lambda self: self.family in amd.FAMILIES)
    # as of `arch.Family`
    ordered_steps = property(lambda self: self.scalars and amd.FAMILIES[self.family].ordered_steps)
    # blocks of columns side by side in the layout "lanes": a token's lanes of a matrix; 0 if lanes are unknown
    lane_blocks = property(lambda self: self.wave // self.lane_matrix[1] if self.lane_matrix else 0)
    arguments = property(lambda self: self.push // ADDRESS)  # addresses that fit the push constants
    # most invocations of a workgroup of any kernel
    most_threads = property(lambda self: max(self.threads, self.lane_threads) if self.lane_matrix else self.threads)

    @property
    def needs(self) -> dict:
        """What the runtime asks of a device, as in the manifest (dist/README.md)."""
        features = ["bufferDeviceAddress", "shaderInt64", "storageBuffer16BitAccess", "storageBuffer8BitAccess"]
        optional = {
            "shaderFloat16": self.float16,
            "shaderIntegerDotProduct": bool(self.dot),
            "subgroupSizeControl": self.subgroups,
            "vulkanMemoryModel": bool(self.matrix),
            "cooperativeMatrix": bool(self.matrix),
        }
        shapes = dict.fromkeys((self.fragment, self.lane_matrix)) if self.matrix else ()
        return {
            "features": features + [name for name, wanted in optional.items() if wanted],
            "subgroup_size": self.wave if self.subgroups else 0,
            "fragments": [list(shape) for shape in shapes if shape],
            "shared_memory": self.lds,
            "threads": self.most_threads,
            "push_constants": self.push,
        }


Device = amd.GpuArch | Profile  # what GPU kernels are built for

PROFILES = {name: Profile(**vars(kind)) for name, kind in DEVICE_KINDS.items()}

# RDNA and Vega GPUs by their gfx name or product: the profile that fits.
FAMILY_PROFILES = {"rdna2": "rdna2", "rdna3": "rdna3", "rdna4": "rdna4", "gcn5": "gfx90c", "rdna1": "rdna2:dot=none"}
ALIASES = {alias: profile.name for profile in PROFILES.values() for alias in profile.products}
WAVES = ("8", "16", "32", "64")  # eight lanes share a block of activations; of 64 keys each lane has one or more
DOTS = {"none": "", "dot4": "dot4"}


def resolve(name: str) -> Profile:
    """The profile of that name, alias, gfx name or product, changed as it says: matrix=none or MxNxK, lane_matrix=none,
    wave=N, dot=none or dot4; its name then tells them. UserError for one that is not known."""
    base, _, changes = name.partition(":")
    plain = re.sub(r"[\s_-]", "", base.lower())
    profile = PROFILES.get(plain) or PROFILES.get(ALIASES.get(plain, "")) or _of_gfx(base)
    for change in filter(None, changes.split("+")):
        profile = _changed(profile, change, name)
    return profile


def _of_gfx(name: str) -> Profile:
    try:
        gpu = amd.resolve(name)
    except UserError:
        raise UserError(
            f"unknown Vulkan profile {name!r}; known are {', '.join(PROFILES)}, auto, and AMD GPUs such as 7900xtx"
        ) from None
    if gpu.family not in FAMILY_PROFILES:
        raise UserError(f"{gpu.name} has no Vulkan driver for graphics; use --target rocm --arch {gpu.name}")
    profile = resolve(FAMILY_PROFILES[gpu.family])
    numbers = ("units", "bandwidth", "clock", "unified", "registers", "loads")
    return replace(profile, **{name: getattr(gpu, name) for name in numbers})


def _changed(profile: Profile, change: str, name: str) -> Profile:
    key, _, value = change.partition("=")
    if key in ("matrix", "lane_matrix") and value == "none":
        changed = replace(profile, matrix="" if key == "matrix" else profile.matrix, lane_matrix=())
    elif key == "matrix" and re.fullmatch(r"\d+x\d+x\d+", value):
        changed = replace(profile, matrix="coop", fragment=tuple(int(n) for n in value.split("x")))
    elif key == "wave" and value in WAVES:
        lanes = profile.lane_matrix if int(value) == profile.wave else ()
        changed = replace(profile, wave=int(value), lane_matrix=lanes)
    elif key == "dot" and value in DOTS:
        changed = replace(profile, dot=DOTS[value])
    else:
        raise UserError(
            f"cannot change {change!r} of {name!r}; possible are matrix=none or MxNxK, lane_matrix=none, wave=N, "
            "dot=none or dot4"
        )
    if changed == profile:
        return profile
    joint = "+" if ":" in profile.name else ":"
    return replace(changed, name=f"{profile.name}{joint}{change}")
