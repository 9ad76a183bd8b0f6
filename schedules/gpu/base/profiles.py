"""The kinds of Vulkan devices that kernels are built for: what kernel builders and the SPIR-V generator may use.

In: the name of a profile, with changes after a colon ("rdna3:matrix=none+wave=64"), or of a product ("steamdeck", "RX
7900 XTX"). Out: a `Profile`. It has the same attributes as `arch.GpuArch`, so that kernels can be built for both. The
runtime checks that a device meets `Profile.needs` before it runs an artifact. Kernels replace features that a profile
lacks by others; they never assume a feature.

Sources: Vulkan's registry of required limits; reports of Mesa's and NVIDIA's drivers (gpuinfo.org); AMD's product
pages.
"""

import re
from dataclasses import dataclass, replace

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.gpus import DEVICE_KINDS, DeviceKind
from mlc_amd.schedules.gpu.base import arch as amd

ADDRESS = 8  # bytes of an address, a kernel's argument


@dataclass(frozen=True)
class Profile(DeviceKind):
    """A kind of Vulkan device, and the requirements of kernels and launches on it."""

    api = "vulkan"
    # Vulkan has no dot product of float16 pairs with a float32 sum. Kernels use float32 multiply-adds instead, which
    # AMD's compiler turns into mixed-precision ones.
    dot2 = False

    # whether there are scalar registers, for which values that are the same in a subgroup should be broadcast
    scalars = property(lambda self: self.family in amd.FAMILIES)
    # see `arch.Family`
    ordered_steps = property(lambda self: self.scalars and amd.FAMILIES[self.family].ordered_steps)
    # lanes that hold a token's elements of a matrix: the number of neighbouring blocks in the layout "lanes"; 0 if
    # unknown
    lane_blocks = property(lambda self: self.wave // self.lane_matrix[1] if self.lane_matrix else 0)
    arguments = property(lambda self: self.push // ADDRESS)  # number of addresses that the push constants hold
    # upper limit of the invocations of a workgroup of any kernel
    most_threads = property(lambda self: max(self.threads, self.lane_threads) if self.lane_matrix else self.threads)

    @property
    def needs(self) -> dict:
        """The requirements that the runtime checks on a device, as in the manifest (dist/README.md)."""
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

# {family of an AMD GPU: its profile}, for GPUs that are given by gfx name or product.
FAMILY_PROFILES = {"rdna2": "rdna2", "rdna3": "rdna3", "rdna4": "rdna4", "gcn5": "gfx90c", "rdna1": "rdna2:dot=none"}
ALIASES = {alias: profile.name for profile in PROFILES.values() for alias in profile.products}
WAVES = ("8", "16", "32", "64")  # at least 8: eight lanes share a block; at most 64: each lane has one of 64 keys
DOTS = {"none": "", "dot4": "dot4"}


def resolve(name: str) -> Profile:
    """The profile of a name, alias, gfx name or product. After a colon there may be changes, separated by +:
    matrix=none or MxNxK, lane_matrix=none, wave=N, dot=none or dot4. They become part of the profile's name. Raises
    UserError for an unknown name or change."""
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
