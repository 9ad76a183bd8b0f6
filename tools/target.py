"""Determines the target and the arch for which a model is compiled on this machine.

In: --target, --arch and --device as the user gives them. Out: a target other than "auto", and an arch other than
"native"; only for CPUs it remains "native", as their flags are part of the cache's key. If there is a GPU, a line on
stderr says what "auto" has chosen.
"""

from collections.abc import Callable

from mlc_amd.runtime.devices.division import KINDS
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import kfd_gpus
from mlc_amd.tools.terminal import display

AUTO = "auto"
HERE = ("native", "auto")  # values of --arch for this machine


def resolve(target: str, arch: str, device: str | None = None) -> tuple[str, str]:
    """(target, arch) to compile for. device: selects the GPU, as for `open_device`. Raises UserError for a GPU that
    this machine does not have, and for an arch that does not determine its target."""
    if target == AUTO and device in KINDS:
        target = device
    if target == AUTO:
        target = _target_of(arch)
    if target == AUTO:
        return _here(device)
    return target, arch_here(target, device) if arch in HERE else arch


def arch_here(target: str, device: str | None = None) -> str:
    """The name of this machine's arch. For a GPU it is the GPU's own, so that its artifacts are not used on another
    GPU; "native" for a CPU, and for rocm without a GPU (then compilation reports it). Raises UserError if there is no
    Vulkan device."""
    if target == "vulkan":
        # queries the driver, so it is imported only when needed
        from mlc_amd.runtime.devices.vulkan.gpu import list_gpus, preferred
        from mlc_amd.runtime.devices.vulkan.profile import profile_of
        from mlc_amd.tools.lane_probe import suited

        gpu = preferred(list_gpus(), device)[0]
        if gpu.type == "cpu":
            display.message(f"target vulkan runs on the CPU here: {gpu.name} is no GPU ({gpu.driver})")
        return suited(gpu, profile_of(gpu))
    if target == "rocm":
        from mlc_amd.runtime.devices.hip.gpu import arch_here as rocm_arch

        return rocm_arch(device)
    return "native"


def _target_of(arch: str) -> str:
    """The target of an arch; "auto" for this machine's arch."""
    if arch in HERE:
        return AUTO
    from mlc_amd.schedules.gpu.base import arch as gpus
    from mlc_amd.schedules.gpu.base import profiles

    def known(look_up: Callable[[str], object]) -> bool:
        try:
            return all(map(look_up, arch.split(",")))
        except UserError:
            return False

    found = [target for target, of in (("rocm", gpus.resolve), ("vulkan", profiles.resolve)) if known(of)]
    if len(found) > 1:
        raise UserError(f"--arch {arch}: such a GPU runs two targets; add --target rocm or --target vulkan")
    return found[0] if found else "cpu"


def _here(device: str | None) -> tuple[str, str]:
    """The best target that works here, with its arch: rocm, else vulkan on a GPU, else cpu."""
    reasons = []
    for target, find in (("rocm", _rocm), ("vulkan", _vulkan)):
        try:
            name, arch = find(device)
        except UserError as error:
            reasons.append(f"{target}: {error}")
            continue
        # why target rocm is not used only interests users with an AMD GPU
        why = f"; not {reasons[0]}" if reasons and kfd_gpus() else ""
        display.message(f"target {target}: {name}{why}")
        return target, arch
    from mlc_amd.tools.checks import machine

    if machine.gpus():
        display.message(f"target cpu: no GPU of this machine can be used ({'; '.join(reasons)})")
    return "cpu", "native"


def _rocm(device: str | None) -> tuple[str, str]:
    """(name, arch) of the best GPU that HIP finds. Raises UserError if kernels can be compiled for none."""
    from mlc_amd.runtime.devices.hip.api import Hip, open_bindings
    from mlc_amd.runtime.devices.hip.gpu import usable_gpus
    from mlc_amd.runtime.gpus import CHIPS

    gpus = usable_gpus(Hip(open_bindings()), device)
    usable = [gpu for gpu in gpus if gpu.arch in CHIPS]
    if not usable:
        raise UserError(f"there are no kernels for {', '.join(gpu.arch for gpu in gpus)}")
    best = min(usable, key=lambda gpu: (gpu.integrated, -gpu.memory, gpu.index))
    return f"{best.name} ({best.arch})", best.arch


def _vulkan(device: str | None) -> tuple[str, str]:
    """(name, profile) of the best GPU that Vulkan shows. Raises UserError if it shows none."""
    from mlc_amd.runtime.devices.vulkan.api import VulkanError
    from mlc_amd.runtime.devices.vulkan.gpu import list_gpus, missing, preferred
    from mlc_amd.runtime.devices.vulkan.profile import profile_of
    from mlc_amd.schedules.gpu.base import profiles
    from mlc_amd.tools.lane_probe import suited

    try:
        gpus = [gpu for gpu in list_gpus() if gpu.type != "cpu"]
    except VulkanError as error:  # a driver without its hardware may fail in any way
        raise UserError(str(error)) from error
    if not gpus:
        raise UserError("its only driver here runs on the CPU")
    best = preferred(gpus, device)[0]
    profile = profile_of(best)
    if lacks := missing(best, profiles.resolve(profile).needs):
        raise UserError(f"{best.name} ({best.driver}) lacks {', '.join(lacks)}")
    profile = suited(best, profile)
    return f"{best.name} ({profile})", profile
