"""Determines the profile for which a model is compiled on a Vulkan GPU. Kernels rely on which lane has which component
of a matrix (runtime/matrix_lanes.py).

In: a GPU and its profile's name. Out: this name, with lane_matrix=none if the driver distributes matrices differently.
The driver is tested once; the result is kept in the user's cache for each version of the driver.
"""

from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from mlc_amd.runtime.devices.vulkan import api, fragments
from mlc_amd.runtime.devices.vulkan.gpu import Instance, VulkanGpu
from mlc_amd.runtime.devices.vulkan.memory import OutOfMemory
from mlc_amd.runtime.devices.vulkan.pipelines import cache_file
from mlc_amd.runtime.devices.vulkan.profile import without_lanes
from mlc_amd.runtime.folders import temporary
from mlc_amd.runtime.gpus import DEVICE_KINDS
from mlc_amd.schedules.gpu.base import profiles
from mlc_amd.tools.terminal import display

if TYPE_CHECKING:
    from mlc_amd.schedules.gpu.base.profiles import Profile

_PROBE = "fragment_probe"


def suited(gpu: VulkanGpu, name: str) -> str:
    """The profile to compile for. A line on stderr says why it is another one than the given one."""
    profile = profiles.resolve(name)
    if not profile.lane_matrix or _known(gpu, profile):
        return name
    _tell(gpu.name, gpu.driver)
    return without_lanes(name)


@cache
def _tell(gpu: str, driver: str) -> None:
    display.message(f"{gpu}: {driver} distributes matrices over lanes as no kernel expects it: compiling plain kernels")


def _known(gpu: VulkanGpu, profile: "Profile") -> bool:
    """Whether the driver distributes matrices as kernels assume. True if the driver cannot be tested: it cannot run the
    kernels then, either."""
    pipelines = cache_file(gpu)
    file = pipelines.with_name(f"{pipelines.stem}-{profile.lane_unit}.txt")
    with suppress(OSError):
        return file.read_text() == "known"
    try:
        known = _ask(gpu, profile)
    except (api.VulkanError, OutOfMemory):
        return True
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("known" if known else "other")
    return known


def _ask(gpu: VulkanGpu, profile: "Profile") -> bool:
    # imports TVM: only when a model is about to be compiled
    from mlc_amd.compiler.codegen.vulkan_target import VulkanTarget

    target = VulkanTarget(profile.name)
    kernels = {_PROBE: target.own_kernels(profile)[_PROBE]}
    with temporary("probe") as folder:
        library, launches = target.compile_arch(profile, kernels, folder)
        code = (folder / library).read_bytes()
    (step,) = launches[_PROBE]["steps"]
    module = code, tuple(step["block"])
    kind = DEVICE_KINDS.get(profile.name.partition(":")[0])
    with Instance() as instance:
        return fragments.known_order(instance, gpu, kind, profile.needs, step, module)
