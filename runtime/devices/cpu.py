"""The device of target cpu: calls the compiled kernels of `kernels.so` with NumPy arrays. Kernels run on the thread
pool of `cpu.c`, which is linked into `kernels.so`. The only part of TVM that is needed is its function interface
(apache-tvm-ffi)."""

import contextlib
import ctypes
import hashlib
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tvm_ffi

from mlc_amd.runtime.cache.cache_types import kv_bytes, kv_types, page_parts
from mlc_amd.runtime.cache.kv_pool import ONE_SEQUENCE, KvSize
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.folders import temporary
from mlc_amd.runtime.host import HOST_PART, available_memory, available_threads, cpu_flags

ALIGNMENT = 64  # bytes: alignment of every array that kernels read or write
_TENSOR = 70  # kTVMFFITensor: the type index of an argument that is a tensor
_PIECE = 32  # launches of a replay between two checks for signals

# Function of TVM's backend API that kernels call: its implementation in cpu.c.
_CALLS = {
    "TVMBackendParallelLaunch": "mlc_amd_launch",
    "TVMBackendAllocWorkspace": "mlc_amd_scratch",
    "TVMBackendFreeWorkspace": "mlc_amd_free_scratch",
}
_loaded: dict[str, tuple[tvm_ffi.Module, ctypes.CDLL]] = {}  # key: SHA-256 of the file's content
_pool: ctypes.CDLL | None = None  # the first library that was loaded: this process uses its thread pool


def _load(path: Path) -> tuple[tvm_ffi.Module, ctypes.CDLL]:
    """Loads a library. The system's loader identifies libraries by path, and would return an old one for a file that
    was replaced; so this function identifies them by content. Raises RuntimeError or OSError if loading fails."""
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest not in _loaded:
        with temporary("kernels") as folder, open(os.memfd_create(digest, os.MFD_CLOEXEC), "wb") as memory:
            memory.write(content)
            memory.flush()
            own = folder / f"{digest}.so"
            own.symlink_to(f"/proc/self/fd/{memory.fileno()}")
            _loaded[digest] = tvm_ffi.load_module(str(own)), ctypes.CDLL(str(own))
    return _loaded[digest]


class Kernels:
    """A kernel library with this process's thread pool. Raises RuntimeError, OSError or AttributeError if loading
    fails."""

    def __init__(self, path: Path):
        global _pool
        self._module, self._library = _load(path)
        _pool = _pool or self._library
        for name, implementation in _CALLS.items():
            try:
                pointer = ctypes.c_void_p.in_dll(self._library, f"__{name}")
            except ValueError:  # no kernel of this library calls this function
                continue
            pointer.value = _address(getattr(_pool, implementation))

    def call(self, name: str, arrays: Sequence[np.ndarray]) -> "KernelCall | None":
        """A call of the kernel `name` with these arrays, which are not checked; None if there is no such kernel."""
        function = self._module.get_function(name)
        if function is None:
            return None
        tensors = [tvm_ffi.from_dlpack(array) for array in arrays]
        return KernelCall(function, _address(self._library[f"__tvm_ffi_{name}"]), tensors)


def _address(function) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None, "a loaded function has an address"
    return address


def _threads() -> ctypes.CDLL:
    assert _pool is not None, "the thread pool comes with the first Kernels"
    return _pool


class _Native(ctypes.Structure):
    """The struct `KernelCall` of cpu.c."""

    _fields_ = (("kernel", ctypes.c_void_p), ("arguments", ctypes.c_void_p), ("count", ctypes.c_int32))


class KernelCall:
    """A kernel and its arguments. It can be called directly, or be part of a `Replay`."""

    def __init__(self, function, address: int, tensors: list):
        self.function, self.tensors = function, tensors
        values = [value for tensor in tensors for value in (_TENSOR, tensor.__chandle__())]
        self._arguments = (ctypes.c_int64 * len(values))(*values)
        self.native = _Native(address, ctypes.addressof(self._arguments), len(tensors))

    def __call__(self) -> None:
        self.function(*self.tensors)


class Replay:
    """A list of kernel calls, of which cpu.c runs _PIECE at a time: calling each from Python would take as long as a
    small kernel itself. Python handles signals between two pieces."""

    def __init__(self, calls: list[KernelCall]):
        self._calls = calls
        pieces = [calls[i : i + _PIECE] for i in range(0, len(calls), _PIECE)]
        self._pieces = [((_Native * len(piece))(*(call.native for call in piece)), len(piece)) for piece in pieces]

    def __call__(self) -> None:
        for place, (calls, count) in enumerate(self._pieces):
            if (failed := _threads().mlc_amd_replay(calls, count)) >= 0:
                self._calls[place * _PIECE + failed]()  # raises the error
                raise RuntimeError("a kernel failed, but succeeded when it was called again")


def start_threads(threads: int) -> None:
    """Resizes the thread pool of a loaded `Kernels`. Raises UserError if the system grants fewer threads."""
    if (started := _threads().mlc_amd_start_threads(threads)) < threads:
        raise UserError(f"the system grants this process only {started} of {threads} threads; use fewer")


def _zeros(shape, dtype) -> np.ndarray:
    """Zeroed, page-aligned memory, which takes no RAM before it is written. It is in huge pages where the system has
    them: with small pages, the TLB does not cover the KV cache of a long context."""
    dtype, count = np.dtype(dtype), int(np.prod(shape, dtype=np.int64))
    memory = mmap.mmap(-1, max(count * dtype.itemsize, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # an operating system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype, count).reshape(shape)


class CpuDevice:
    """See runtime/devices/__init__.py for the protocol. threads: number of threads, by default one for each usable
    core. kv: the size of the KV cache; "auto" takes half of the available memory that the weights leave."""

    kind, on_host = "cpu", True

    def __init__(self, artifact, threads: int | None = None, kv: KvSize = ONE_SEQUENCE):
        target = artifact.manifest["target"]
        self.name = f"cpu ({target['mcpu']})"
        self.threads = available_threads() if threads is None else threads
        if self.threads < 1:
            raise UserError(f"threads is {self.threads}: it must be at least 1")
        missing = set(target["flags"]) - cpu_flags()
        if missing and cpu_flags():
            raise UserError(
                f"this model was compiled for '{target['arch']}', but this CPU lacks {', '.join(sorted(missing))}; "
                "compile it here with --arch native, or with --arch x86-64-v2 for any machine"
            )
        room = (available_memory() - artifact.manifest["weight_bytes"]) // HOST_PART if kv.auto else 0
        self.artifact, self.kv_types = artifact, kv_types(artifact.manifest, kv.pages(artifact.manifest, room))
        self._load_kernels()
        start_threads(self.threads)
        self.io = {name: _zeros(entry["shape"], entry["dtype"]) for name, entry in artifact.manifest["io"].items()}
        self._allocate()
        self._launches = {name: self._bind(function) for name, function in artifact.manifest["functions"].items()}
        self._replays = {name: Replay(calls) for name, calls in self._launches.items()}
        self.waited = 0.0

    def _load_kernels(self) -> None:
        try:
            files = self.artifact.manifest["libraries"].values()
            self.libraries = [Kernels(self.artifact.path / name) for name in files]
        except (RuntimeError, OSError, AttributeError) as e:
            raise UserError(
                f"cannot load the kernels of {self.artifact.path} ({str(e).splitlines()[0]}); compile the model again"
            ) from e

    def _allocate(self) -> None:
        try:
            self.kv = {name: _zeros(*of) for name, of in self.kv_types.items()}
            self.arena = _zeros((self.artifact.manifest["arena_bytes"],), "uint8")
        except (OSError, ValueError, MemoryError) as e:
            nbytes = kv_bytes(self.kv_types) + self.artifact.manifest["arena_bytes"]
            raise UserError(
                f"not enough memory for the KV cache and buffers ({nbytes >> 20} MiB); give the cache less memory or "
                "compile with a smaller --ctx"
            ) from e

    def _bind(self, function: dict) -> list[KernelCall]:
        calls = function["launches"]
        return [self._call(call["kernel"], [self._array(arg) for arg in call["args"]]) for call in calls]

    def _call(self, name: str, arrays: list[np.ndarray]) -> KernelCall:
        for library in self.libraries:
            if call := library.call(name, arrays):
                return call
        raise UserError(f"{self.artifact.path} lacks the kernel {name}; compile the model again")

    def _array(self, arg: list) -> np.ndarray:
        kind, where = arg[0], arg[1]
        if kind == "arena":
            dtype, shape = np.dtype(arg[2]), arg[3]
            count = int(np.prod(shape, dtype=np.int64))
            array = self.arena[where : where + count * dtype.itemsize].view(dtype).reshape(shape)
        elif kind == "weight":
            array = self.artifact.weights[where]
        elif kind == "kv":
            array = self.kv[where]
        else:
            array = self.io[where]
        if array.ctypes.data % ALIGNMENT:  # kernels assume the alignment without a check
            raise UserError(
                f"{self.artifact.path} has {where} at an address that is no multiple of {ALIGNMENT}; compile the "
                "model again"
            )
        return array

    # ---- the protocol

    def write(self, name: str, values) -> None:
        self.io[name][: len(values)] = values

    def fill(self, name: str, rows: int, put: Callable[[np.ndarray], None]) -> None:
        put(self.io[name][:rows])

    def run(self, function: str, meanwhile: Callable[[], None] | None = None) -> None:
        if meanwhile:  # before the kernels, not beside them: both would compete for the same cores
            meanwhile()
        start = time.perf_counter()
        self._replays[function]()
        self.waited += time.perf_counter() - start

    def feed(self, function: str) -> None:
        self.run(function)

    def can_start_ahead(self, function: str, late: bool = False) -> bool:
        return False

    def run_plain(self, function: str) -> None:
        for call in self._launches[function]:
            call()

    def time(self, function: str) -> list[tuple[str, float, float]]:
        times, last, plan = [], None, self.artifact.manifest["functions"][function]["launches"]
        for step, call in zip(plan, self._launches[function], strict=True):
            start = time.perf_counter()
            call()
            end = time.perf_counter()
            times.append((step["kernel"], end - start, start - last if last else 0.0))
            last = end
        return times

    def read(self, name: str, rows: int, first: int = 0) -> np.ndarray:
        return self.io[name][first:rows]

    def clear(self) -> None:
        for array in self.kv.values():
            array[:] = 0

    def page_parts(self, span: int) -> list[tuple[str, int]]:
        return page_parts(self.artifact.manifest, span)

    def _page_bytes(self, span: int) -> list[np.ndarray]:
        """The KV tensors of a span, each as uint8 [pages, bytes of its part of a page]."""
        return [self.kv[name].view(np.uint8).reshape(-1, count) for name, count in self.page_parts(span)]

    def read_pages(self, span: int, pages: Sequence[int]) -> np.ndarray:
        return np.concatenate([part[pages] for part in self._page_bytes(span)], 1)

    def write_pages(self, span: int, pages: Sequence[int], contents: np.ndarray) -> None:
        at = 0
        for part in self._page_bytes(span):
            part[pages] = contents[:, at : at + part.shape[1]]
            at += part.shape[1]

    def page_memory(self, span: int, count: int) -> np.ndarray:
        return np.empty((count, sum(nbytes for _, nbytes in self.page_parts(span))), np.uint8)

    def close(self) -> None:
        """Releases all memory. The kernel libraries stay loaded."""
        self._replays, self._launches, self.kv, self.io = {}, {}, {}, {}
        self.arena = np.empty(0, np.uint8)
