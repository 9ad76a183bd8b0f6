"""AMD's HIP runtime from Python: opens it, turns error codes into exceptions, and diagnoses missing GPUs.

`open_bindings()` gives the module `rocm.bindings.hip` of AMD's package rocm-bindings-hip, which opens libamdhip64.so at
its first call. `Hip(bindings)` calls its functions and raises HipError. `why_no_gpu()` inspects the
system and says in one line what is wrong: the driver, permissions, a variable that hides GPUs, or a runtime that does
not support the chip.
"""

import ctypes
import ctypes.util
import importlib
import os
from pathlib import Path
from typing import Any

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import TOPOLOGY, kfd_gpus

OLDEST_RUNTIME = (6, 0)  # HIP version with hipGetDevicePropertiesR0600, the layout of properties that the bindings read
KFD, WSL = Path("/dev/kfd"), Path("/dev/dxg")
HIDING = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
INSTALL = (
    "install ROCm's HIP runtime, {}.{} or newer (https://rocm.docs.amd.com), or set ROCM_PATH to its location".format(
        *OLDEST_RUNTIME
    )
)


class HipError(RuntimeError):
    """A call of the HIP runtime failed; `code` is HIP's name for the reason, such as "hipErrorOutOfMemory"."""

    def __init__(self, call: str, code: str):
        super().__init__(f"{call} failed: {code}")
        self.call, self.code = call, code


class Hip:
    """Calls the bindings' functions by name: hip("hipMalloc", 64) -> the results besides the error code: None, a value
    or a tuple."""

    def __init__(self, bindings):
        self.names = bindings  # constants and enumerations

    def __call__(self, name: str, *args) -> Any:
        code, *values = getattr(self.names, name)(*args)
        if code != 0:
            raise HipError(name, getattr(code, "name", str(code)))
        return (values[0] if len(values) == 1 else tuple(values)) if values else None


def open_bindings():
    """AMD's bindings with the runtime's library loaded. UserError if the package or the library is missing, or
    the library is too old."""
    try:
        bindings, paths = (
            importlib.import_module("rocm.bindings.hip"),
            importlib.import_module("rocm.bindings.util.paths"),
        )
    except ImportError as e:
        raise UserError(
            "target rocm needs the package rocm-bindings-hip; install it with: pip install 'mlc-amd[rocm]'"
        ) from e
    _find_versioned_library(paths)
    try:
        version = runtime_version(bindings)
    except RuntimeError as e:  # what the bindings raise when dlopen or dlsym fails
        raise UserError(f"cannot load AMD's HIP runtime ({_reason(e)}); {INSTALL}") from e
    if version < OLDEST_RUNTIME:
        raise UserError(f"AMD's HIP runtime here is version {version[0]}.{version[1]}, which is too old; {INSTALL}")
    return bindings


def runtime_version(bindings) -> tuple[int, int]:
    """(major, minor) of the HIP runtime; it is encoded as major*10^7 + minor*10^5 + patch."""
    number = Hip(bindings)("hipRuntimeGetVersion")
    return number // 10_000_000, number // 100_000 % 100


def _find_versioned_library(paths) -> None:
    """Makes the bindings find libamdhip64.so.6 where the link libamdhip64.so of the development package is missing, as
    on Debian and Fedora."""
    found = os.fsdecode(paths.get_library_path("amdhip64"))
    versioned = ctypes.util.find_library("amdhip64")
    if "/" in found or versioned in (None, found):
        return
    original = paths.get_library_path

    def get_library_path(shortname, *args, **kwargs):
        return os.fsencode(versioned) if shortname == "amdhip64" else original(shortname, *args, **kwargs)

    paths.get_library_path = get_library_path  # the bindings call it when they open the library


def _reason(error: Exception) -> str:
    """The message of dlopen in that of the bindings: failed to dlopen 'b'NAME'': b'REASON'."""
    return str(error).rsplit(": b", 1)[-1].strip("'\"")


# ---- diagnosis


def gpu_memory(pci: str, devices: Path = Path("/sys/bus/pci/devices")) -> dict[str, int]:
    """Bytes of a GPU's dedicated memory ("vram"; an APU's carve-out) and of system memory that it may use ("gtt");
    empty if unknown."""
    sizes = {}
    for kind in ("vram", "gtt"):
        file = devices / pci / f"mem_info_{kind}_total"
        if file.exists():
            sizes[kind] = int(file.read_text())
    return sizes


def why_no_gpu(code: str, version: tuple[int, int], kfd: Path = KFD, topology: Path = TOPOLOGY) -> str:
    """One line for a HIP runtime that finds no GPU and reports `code`: what is wrong, what to do."""
    gpus, hiding = kfd_gpus(topology), [name for name in HIDING if name in os.environ]
    blocked = [gpu["node"] for gpu in gpus if not os.access(gpu["node"], os.R_OK | os.W_OK)]
    archs = ", ".join(gpu["arch"] for gpu in gpus)
    driver = "load the kernel driver (modprobe amdgpu); in a container, pass --device /dev/kfd --device /dev/dri"
    reasons = (  # the first that applies
        (
            code == "hipErrorInsufficientDriver",
            "the kernel driver is too old for this HIP runtime; install a newer kernel or amdgpu-dkms",
        ),
        (
            WSL.exists() and not kfd.exists(),
            "no GPU for ROCm in WSL; install AMD's WSL driver and librocdxg, or run on Linux itself",
        ),
        (not kfd.exists(), f"no {kfd}: no AMD GPU for ROCm; {driver}"),
        (not os.access(kfd, os.R_OK | os.W_OK), f"no permission on {kfd}; {join_group(kfd)}"),
        (not gpus, f"the kernel driver reports no AMD GPU for compute; check that one is installed, then {driver}"),
        (blocked, f"no permission on {', '.join(blocked)}; {join_group(Path(blocked[0])) if blocked else ''}"),
        (hiding, f"the GPU ({archs}) may be hidden by {' and '.join(hiding)}; unset it"),
    )
    unknown = (
        f"HIP {version[0]}.{version[1]} does not support this GPU ({archs}, {code}); install a newer ROCm, or try "
        f"{OVERRIDE} (README)"
    )
    return next((text for holds, text in reasons if holds), unknown)


def join_group(file: Path) -> str:
    """How to get permission for a device file."""
    import grp  # not on Windows

    try:
        group = grp.getgrgid(file.stat().st_gid).gr_name
    except (KeyError, OSError):  # a group of the host that the container does not know
        return "in a container, pass --group-add with the group number of the host's render group"
    group = "render" if group == "root" else group
    return f"join its group: sudo usermod -aG {group} $USER, then log in again"
