"""Finds the installed Vulkan drivers that do not start, and why. Vulkan's loader ignores such drivers silently.

A driver is a shared library, named by a manifest: a JSON file (Vulkan-Loader's docs/LoaderDriverInterface.md). This
module calls the library directly, without the loader, and so knows which call fails.
"""

import ctypes
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlc_amd.runtime.devices.vulkan import api

FORCING = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")  # list the only drivers to use; the loader uses the first that is set
ADDING = "VK_ADD_DRIVER_FILES"
_INTERFACE = 5  # version of the interface between loader and driver
_CALLS = ("vkEnumeratePhysicalDevices", "vkDestroyInstance")


@dataclass(frozen=True)
class Failure:
    """Why a driver does not start."""

    manifest: str
    library: str  # the library that the manifest names, "" if the manifest is unreadable
    reason: str
    missing: str = ""  # the shared library that the driver needs and that was not found, "" for other reasons

    def __str__(self) -> str:
        return f"the Vulkan driver of {self.manifest} does not start: {self.reason}"


def manifests(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """The manifests that the loader reads. Those that environment variables name may not exist."""
    forced = next((environment[name] for name in FORCING if environment.get(name)), None)
    if forced:
        return _listed(forced)
    home = Path(environment.get("HOME") or "/")
    places = [environment.get("XDG_CONFIG_HOME") or str(home / ".config")]
    places += (environment.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)
    places += ["/etc", environment.get("XDG_DATA_HOME") or str(home / ".local/share")]
    places += (environment.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share").split(os.pathsep)
    found = [file for place in places for file in sorted(Path(place, "vulkan/icd.d").glob("*.json"))]
    return list(dict.fromkeys([*_listed(environment.get(ADDING, "")), *found]))


def _listed(value: str) -> list[Path]:
    """The manifests that the value of a variable names: files, and all manifests in folders."""
    found = []
    for path in (Path(part) for part in value.split(os.pathsep) if part):
        found += sorted(path.glob("*.json")) if path.is_dir() else [path]
    return found


def failures() -> list[Failure]:
    """The failures of all drivers that do not start."""
    return [found for manifest in manifests() if (found := failure(manifest))]


def failure(manifest: Path) -> Failure | None:
    """Loads the driver of a manifest and lists its devices. None if this works, and for another CPU architecture."""
    try:
        described = json.loads(manifest.read_text())["ICD"]
        library = str(described["library_path"])
    except OSError as e:
        return Failure(str(manifest), "", f"the file cannot be read ({e.strerror})")
    except (ValueError, KeyError, TypeError):
        return Failure(str(manifest), "", "the file is not a manifest of a Vulkan driver")
    if str(described.get("library_arch", "64")) != "64":
        return None
    place = str(manifest.parent / library) if "/" in library else library  # the system searches for a plain name
    try:
        driver = ctypes.CDLL(place)
    except OSError as e:
        if "wrong ELF class" in str(e):
            return None
        missing = re.match(r"(\S+): cannot open shared object file", str(e))
        return Failure(str(manifest), place, f"{library} cannot be loaded ({e})", missing[1] if missing else "")
    try:
        _start(driver)
    except AttributeError:
        return Failure(str(manifest), place, f"{library} is not a Vulkan driver")
    except api.VulkanError as e:
        return Failure(str(manifest), place, str(e))
    return None


def _start(driver: ctypes.CDLL) -> None:
    """Creates an instance and lists its devices. Raises AttributeError if the library is not a driver, VulkanError if a
    call fails."""
    lookup = driver.vk_icdGetInstanceProcAddr
    lookup.restype, lookup.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]
    if hasattr(driver, "vk_icdNegotiateLoaderICDInterfaceVersion"):
        driver.vk_icdNegotiateLoaderICDInterfaceVersion(ctypes.byref(ctypes.c_uint32(_INTERFACE)))
    application = api.ApplicationInfo(name=b"mlc-amd", apiVersion=api.version(1, 1))
    info = api.InstanceInfo(application=ctypes.addressof(application))
    create: Any = api.Calls(lambda name: lookup(None, name), api.GLOBAL).vkCreateInstance
    instance = api.create(create, ctypes.byref(info), None, kind=ctypes.c_void_p)
    calls = api.Calls(lambda name: lookup(instance, name), {name: api.INSTANCE[name] for name in _CALLS})
    try:
        api.listed(calls.vkEnumeratePhysicalDevices, ctypes.c_void_p, instance)
    finally:
        calls.vkDestroyInstance(instance, None)
