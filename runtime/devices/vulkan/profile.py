"""Chooses the profile to compile for. In: a VulkanGpu. Out: the name of a profile (schedules/gpu/base/profiles.py),
with changes for the GPU's driver, such as "rdna3:dot=none". It depends on vendor, device, driver and features."""

import re

from mlc_amd.runtime.gpus import DEVICE_KINDS, DeviceKind

AMD, NVIDIA = 0x1002, 0x10DE  # vendors, by PCI
LLVMPIPE = 13  # VkDriverId
WAVES = (8, 16, 32, 64)  # subgroup sizes that kernels can be built for
VANGOGH = (0x163F, 0x1435)  # PCI devices: the Steam Deck's two chips
SUBGROUP_BASIC_SHUFFLE_ARITHMETIC = 0x1 | 0x4 | 0x10


def profile_of(gpu) -> str:
    """The name of the profile to compile for, with the changes for this GPU and its driver."""
    usual, matrices = SUBGROUP_BASIC_SHUFFLE_ARITHMETIC, gpu.float16_matrices
    able = gpu.full and "subgroupSizeControl" in gpu.features and gpu.subgroup_operations & usual == usual
    base = _base(gpu)
    name, usual_shape = base.name, base.fragment if base.matrix else ()
    if name == "generic" or not able or "shaderFloat16" not in gpu.features:
        return "generic"
    changes = []
    if not gpu.subgroup[1] <= base.wave <= gpu.subgroup[2]:
        if gpu.subgroup[0] not in WAVES:
            return "generic"
        changes.append(f"wave={gpu.subgroup[0]}")
    # Mesa's CPU driver reports dot products as not accelerated, as it does all operations.
    fast = "shaderIntegerDotProduct" in gpu.features and (gpu.dot or gpu.driver_id == LLVMPIPE)
    if base.dot and not fast:
        changes.append("dot=none")
    shape = "none"
    if matrices and "vulkanMemoryModel" in gpu.features:
        shape = "x".join(map(str, usual_shape if usual_shape in matrices else matrices[0]))
    if shape != ("x".join(map(str, usual_shape)) if usual_shape else "none"):
        changes.append(f"matrix={shape}")
    if base.lane_matrix and shape != "none" and base.lane_matrix not in matrices:
        changes.append("lane_matrix=none")
    return name + (":" + "+".join(changes) if changes else "")


def without_lanes(name: str) -> str:
    """The name of a profile, changed so that kernels do not depend on how matrices are distributed over lanes."""
    return f"{name}{'+' if ':' in name else ':'}lane_matrix=none"


def _base(gpu) -> DeviceKind:
    """The kind of device that a GPU is; its name is that of the profile without changes."""
    name = "generic"
    if gpu.driver_id == LLVMPIPE:
        name = "lavapipe"
    elif gpu.vendor == NVIDIA:
        name = "nvidia"
    elif gpu.vendor == AMD:
        code = re.search(r"RADV ([A-Z0-9_]+)", gpu.name)
        known = (kind for kind in DEVICE_KINDS.values() if kind.chips)
        by_code = next((kind.name for kind in known if code and re.match(kind.chips, code[1])), None)
        # AMD's own driver reports no code name. RDNA3 and later have matrices, RDNA and later waves of 32 lanes.
        by_features = "rdna3" if gpu.matrices else "rdna2" if gpu.subgroup[1] <= 32 else "gfx90c"
        name = "vangogh" if gpu.device in VANGOGH else by_code or by_features
    return DEVICE_KINDS[name]
