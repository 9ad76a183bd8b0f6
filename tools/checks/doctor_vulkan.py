"""What `mlc-amd doctor` reports about Vulkan: the loader, the drivers and the devices. In: facts of
tools/checks/machine.py."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mlc_amd.tools.terminal import display

# ("ok", "missing" (but not needed) or "problem"; a finding; what to do about it, or "")
Check = tuple[str, str, str]


def judge(facts: dict) -> list[Check]:
    """The checks. facts: `vulkan`, and if known `gpus` and `distribution`."""
    found, hardware = facts["vulkan"], [gpu for gpu in facts.get("gpus", ()) if gpu["vendor"] in _DRIVERS]
    vendor = hardware[0]["vendor"] if hardware else "AMD"
    missing = "problem" if hardware else "missing"  # only a problem if there is a GPU that could be used
    distribution = facts.get("distribution", [])
    install = _DRIVERS[vendor].install(distribution)
    if not found["loader"]:
        return [(missing, "target vulkan cannot run here: no Vulkan loader (libvulkan.so.1)", install)]
    if not found["drivers"] and not found["devices"]:
        return [(missing, "target vulkan cannot run here: no Vulkan driver", install)]
    devices = [check for device in found["devices"] for check in _device(device)]
    devices += _several(found["devices"])
    if found["devices"] and not (hardware and all(device["type"] == "cpu" for device in found["devices"])):
        return devices
    # The driver that fails to start: that of the GPU's vendor, if there are such a GPU and driver.
    its = [path for path in found["drivers"] if _DRIVERS[vendor].names(path)]
    failed = [one for one in found["failed"] if not hardware or one["manifest"] in its or not one["library"]]
    if failed:
        told = ((missing, f"target vulkan: {one['text']}", _advice(one, vendor, distribution)) for one in failed)
        return [*devices, *told]
    if not found["devices"]:
        what, _, advice = found["problem"].partition("; ")
        return [(missing, f"target vulkan cannot run here: {what}", advice or install)]
    advice = f"its driver ({its[0]}) is installed and finds no GPU; {_DEBUG}" if its else install
    return [*devices, ("problem", f"Vulkan does not show the {vendor} GPU, only the CPU", advice)]


def _several(devices: list[dict]) -> Iterator[Check]:
    """The total memory of several GPUs with memory of their own."""
    own = [device for device in devices if device["type"] == "discrete"]
    if len(own) > 1:
        names = ", ".join(str(device["index"]) for device in own)
        total = display.size(sum(device["memory"] for device in own))
        yield "ok", f"models that no GPU holds alone are divided between devices {names} ({total})", ""


def _device(device: dict) -> Iterator[Check]:
    kind = _TYPES.get(device["type"], "GPU")
    what = f"{kind} {device['name']}, {display.size(device['memory'])}"
    what += f" (and {display.size(device['host_memory'])} of the host's for experts)" if device["host_memory"] else ""
    what += f", profile {device['profile']} ({device['driver']}, Vulkan {device['api']})"
    yield "ok", f"target vulkan: device {device['index']}, {what}", ""
    base, _, changes = device["profile"].partition(":")
    # The chips of these profiles have what is missing, but the driver does not support it.
    if device["lacks"] and device["vendor"] in _UPDATES and (base == "generic" or "matrix=none" in changes):
        lacks = ", ".join(device["lacks"])
        yield "missing", f"{device['name']} would be faster with {lacks}", _UPDATES[device["vendor"]]


def _advice(failure: dict, vendor: str, distribution: list[str]) -> str:
    """What to do about a driver that fails to start. vendor: of the GPU; it is used if the manifest's name does not
    tell the vendor."""
    if not failure["library"]:
        return "correct that file, or the variable that names it (VK_DRIVER_FILES, VK_ICD_FILENAMES)"
    vendor = next((name for name, its in _DRIVERS.items() if its.names(failure["manifest"])), vendor)
    if not failure["missing"]:
        return f"{_DRIVERS[vendor].broken}; {_DEBUG}"
    if failure["missing"] == failure["library"]:
        return _DRIVERS[vendor].install(distribution)
    command = next((_LIBRARIES[name] for name in distribution if name in _LIBRARIES), None)
    return command(failure["missing"]) if command else f"install the package that has {failure['missing']}"


def _debian(library: str) -> str:
    """By Debian's policy a library's package is named after its soname: libX11.so.6 -> libx11-6."""
    name, _, version = library.lower().partition(".so.")
    return f"sudo apt install {name}{'-' if name[-1:].isdigit() else ''}{version}"


# name of a distribution in os-release -> command that installs a shared library by its name
_LIBRARIES: dict[str, Callable[[str], str]] = {
    **dict.fromkeys(("debian", "ubuntu"), _debian),
    **dict.fromkeys(("fedora", "rhel"), lambda library: f"sudo dnf install '{library}()(64bit)'"),
    "suse": lambda library: f"sudo zypper install --capability '{library}()(64bit)'",
    "arch": lambda library: f"install the package that `pacman -F {library}` names",
}
# name of a distribution in os-release -> command that installs Vulkan
_MESA = {
    **dict.fromkeys(("debian", "ubuntu"), "sudo apt install libvulkan1 mesa-vulkan-drivers"),
    **dict.fromkeys(("fedora", "rhel"), "sudo dnf install vulkan-loader mesa-vulkan-drivers"),
    "arch": "sudo pacman -S vulkan-icd-loader vulkan-radeon (Intel: vulkan-intel)",
    "suse": "sudo zypper install libvulkan1 libvulkan_radeon (Intel: libvulkan_intel)",
    "alpine": "sudo apk add vulkan-loader mesa-vulkan-ati (Intel: mesa-vulkan-intel)",
}


def _mesa(distribution: list[str]) -> str:
    """The command that installs Vulkan's loader and Mesa's drivers."""
    other = "install your distribution's packages of the Vulkan loader and of Mesa's Vulkan drivers (for AMD: RADV)"
    return next((_MESA[name] for name in distribution if name in _MESA), other)


@dataclass(frozen=True)
class _Vendor:
    """The drivers for a vendor's GPUs. words: each name of their manifests contains one of these.
    install(distribution): how to install one. broken: what to check if an installed driver fails to start."""

    words: tuple[str, ...]
    install: Callable[[list[str]], str]
    broken: str

    def names(self, manifest: str) -> bool:
        return any(word in Path(manifest).name.lower() for word in self.words)


_OPEN = "runs, and who may open /dev/dri/renderD*"
_CONTAINER = "in a container, set NVIDIA_DRIVER_CAPABILITIES=all"
_DRIVERS = {
    "AMD": _Vendor(("radeon", "amd"), _mesa, f"check that the kernel driver amdgpu {_OPEN}"),
    "Intel": _Vendor(("intel",), _mesa, f"check that the kernel driver i915 or xe {_OPEN}"),
    "NVIDIA": _Vendor(
        ("nvidia", "nouveau"),
        lambda _: f"install NVIDIA's driver with its graphics part and the Vulkan loader; {_CONTAINER}",
        f"check with nvidia-smi that the kernel module runs and has the version of the libraries; {_CONTAINER}",
    ),
}
_DEBUG = "VK_LOADER_DEBUG=all vulkaninfo --summary shows more"
_TYPES = {"discrete": "GPU", "integrated": "APU", "virtual": "virtual GPU", "cpu": "CPU"}
# PCI id of a vendor -> the driver version that supports matrix units and subgroups
_UPDATES = {
    "0x1002": "update Mesa: 23.3 or newer for RDNA3, a current one for RDNA4",
    "0x10de": "update NVIDIA's driver: 550 or newer",
}
