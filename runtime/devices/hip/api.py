"""Access to AMD's HIP runtime. `open_bindings()` returns the module rocm.bindings.hip of AMD's package
rocm-bindings-hip, which opens libamdhip64.so at its first call. `Hip(bindings)` calls its functions, and raises
HipError for errors."""

import ctypes.util
import importlib
import os
from contextlib import ExitStack
from typing import Any

from mlc_amd.runtime import extras
from mlc_amd.runtime.errors import UserError

OLDEST_RUNTIME = (6, 0)  # the first HIP version with hipGetDevicePropertiesR0600, which the bindings use
INSTALL = (
    "install ROCm's HIP runtime, {}.{} or newer (https://rocm.docs.amd.com), or set ROCM_PATH to its location".format(
        *OLDEST_RUNTIME
    )
)
# HIP's names of errors: of loading code objects, and of allocating memory
CANNOT_LOAD = (
    "hipErrorNoBinaryForGpu",
    "hipErrorInvalidImage",
    "hipErrorInvalidKernelFile",
    "hipErrorSharedObjectInitFailed",
)
NO_MEMORY = ("hipErrorOutOfMemory", "hipErrorMemoryAllocation")


class HipError(RuntimeError):
    """A call of the HIP runtime failed. call: the function's name; code: HIP's name of the error, such as
    "hipErrorOutOfMemory"."""

    def __init__(self, call: str, code: str):
        super().__init__(f"{call} failed: {code}")
        self.call, self.code = call, code


class Hip:
    """Calls the bindings' functions by name, such as hip("hipMalloc", 64). Returns the results without the error code:
    None, a value or a tuple. Raises HipError."""

    def __init__(self, bindings):
        self.names = bindings  # constants and enumerations

    def __call__(self, name: str, *args) -> Any:
        code, *values = getattr(self.names, name)(*args)
        if code != 0:
            raise HipError(name, getattr(code, "name", str(code)))
        return (values[0] if len(values) == 1 else tuple(values)) if values else None

    def done(self, query: str, what) -> bool:
        """Whether a stream is idle (query "hipStreamQuery"), or an event has happened ("hipEventQuery")."""
        try:
            self(query, what)
        except HipError as e:
            if e.code != "hipErrorNotReady":
                raise
            return False
        return True

    def stream(self, held: ExitStack):
        """A stream that is destroyed when `held` closes."""
        return self.own(held, "hipStreamDestroy", self("hipStreamCreateWithFlags", self.names.hipStreamNonBlocking))

    def event(self, held: ExitStack):
        """An event without a time stamp, which is destroyed when `held` closes."""
        return self.own(held, "hipEventDestroy", self("hipEventCreateWithFlags", self.names.hipEventDisableTiming))

    def own(self, held: ExitStack, release: str, handle):
        """Registers `handle` to be released with the HIP function `release` when `held` closes. Returns it."""
        held.callback(getattr(self.names, release), handle)
        return handle


def open_bindings():
    """AMD's bindings, with the HIP runtime loaded. Raises UserError if package or runtime are missing or too old."""
    try:
        bindings = importlib.import_module("rocm.bindings.hip")
        paths = importlib.import_module("rocm.bindings.util.paths")
    except ImportError as e:
        raise extras.absence("rocm.bindings.hip") from e
    _find_versioned_library(paths)
    try:
        version = runtime_version(bindings)
    except RuntimeError as e:  # dlopen or dlsym failed
        raise UserError(f"cannot load AMD's HIP runtime ({_reason(e)}); {INSTALL}") from e
    if version < OLDEST_RUNTIME:
        raise UserError(f"AMD's HIP runtime here is version {version[0]}.{version[1]}, which is too old; {INSTALL}")
    return bindings


def runtime_version(bindings) -> tuple[int, int]:
    """(major, minor) of the HIP runtime. HIP encodes it as major*10^7 + minor*10^5 + patch."""
    number = Hip(bindings)("hipRuntimeGetVersion")
    return number // 10_000_000, number // 100_000 % 100


def _find_versioned_library(paths) -> None:
    """Makes the bindings find a versioned library, such as libamdhip64.so.6. They search for libamdhip64.so, a link
    that only the development packages of Debian and Fedora have."""
    found = os.fsdecode(paths.get_library_path("amdhip64"))
    versioned = ctypes.util.find_library("amdhip64")
    if "/" in found or versioned in (None, found):
        return
    original = paths.get_library_path

    def get_library_path(shortname, *args, **kwargs):
        return os.fsencode(versioned) if shortname == "amdhip64" else original(shortname, *args, **kwargs)

    paths.get_library_path = get_library_path  # the bindings call it when they open the library


def _reason(error: Exception) -> str:
    """dlopen's message, which is a part of the bindings' one: failed to dlopen 'b'NAME'': b'REASON'."""
    return str(error).rsplit(": b", 1)[-1].strip("'\"")
