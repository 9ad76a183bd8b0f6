"""The cpu device: calls the compiled kernels of `kernels.so` on numpy memory, on the thread pool that comes with them (`threads.c`).

TVM is not needed, only its function interface (apache-tvm-ffi).
"""

import ctypes
import mmap
import time
from pathlib import Path

import numpy as np
import tvm_ffi

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import available_threads, cpu_flags

ALIGN = 64  # bytes


# What kernels call, by the names of TVM's runtime, and what answers in threads.c.
_CALLS = {
    "TVMBackendParallelLaunch": "mlc_amd_launch",
    "TVMBackendAllocWorkspace": "mlc_amd_scratch",
    "TVMBackendFreeWorkspace": "mlc_amd_free_scratch",
}
_pool: ctypes.CDLL | None = None  # the library whose threads this process uses, the first that it loaded


def load_kernels(path: Path):
    """A library of kernels as a TVM module, tied to this process's threads. RuntimeError or OSError where it does not load."""
    global _pool
    module, library = tvm_ffi.load_module(str(path)), ctypes.CDLL(str(path))
    _pool = _pool or library
    for theirs, ours in _CALLS.items():
        try:
            pointer = ctypes.c_void_p.in_dll(library, f"__{theirs}")
        except ValueError:  # no kernel in it calls that
            continue
        pointer.value = ctypes.cast(getattr(_pool, ours), ctypes.c_void_p).value
    return module


def start_threads(threads: int) -> None:
    """Makes the pool one of so many threads, after the first `load_kernels`. UserError if the system gives fewer."""
    if (started := _pool.mlc_amd_start_threads(threads)) < threads:
        raise UserError(f"the system gives this process {started} of {threads} threads; use fewer (--threads)")


def _zeros(shape, dtype) -> np.ndarray:
    """Zeroed memory at a multiple of 64 bytes that takes no RAM before it is written."""
    dtype = np.dtype(dtype)
    nbytes = max(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, 1)
    return np.frombuffer(mmap.mmap(-1, nbytes), dtype, int(np.prod(shape, dtype=np.int64))).reshape(shape)


class CpuDevice:
    """See runtime/devices/__init__.py for the protocol. `threads`: default all cores that the process may use."""

    kind = "cpu"

    def __init__(self, artifact, threads: int | None = None):
        target = artifact.manifest["target"]
        self.name = f"cpu ({target['mcpu']})"
        self.threads = available_threads() if threads is None else threads
        if self.threads < 1:
            raise UserError(f"--threads must be at least 1, not {self.threads}")
        missing = set(target["flags"]) - cpu_flags()
        if missing and cpu_flags():
            raise UserError(
                f"this model was compiled for '{target['arch']}', and this CPU lacks {', '.join(sorted(missing))}; "
                "compile it here with --arch native, or with --arch x86-64-v2 for any machine"
            )
        self.artifact = artifact
        self._load_kernels()
        start_threads(self.threads)
        self.io = {name: _zeros(entry["shape"], entry["dtype"]) for name, entry in artifact.manifest["io"].items()}
        self._allocate(artifact.kv_bytes + artifact.manifest["arena_bytes"])
        self._launches = {name: self._bind(function) for name, function in artifact.manifest["functions"].items()}
        self.waited = 0.0

    def _load_kernels(self) -> None:
        try:
            self.modules = [load_kernels(self.artifact.path / name) for name in self.artifact.manifest["libraries"]]
        except (RuntimeError, OSError, AttributeError) as e:
            raise UserError(f"cannot load the kernels of {self.artifact.path} ({str(e).splitlines()[0]}); compile the model again") from e

    def _allocate(self, nbytes: int) -> None:
        try:
            self.kv = {entry["name"]: _zeros(entry["shape"], entry["dtype"]) for entry in self.artifact.manifest["kv"]}
            self.arena = _zeros((self.artifact.manifest["arena_bytes"],), "uint8")
        except (OSError, ValueError, MemoryError) as e:
            raise UserError(f"not enough memory for the KV cache and buffers ({nbytes >> 20} MiB); compile with a smaller --ctx") from e

    def _bind(self, function: dict) -> list[tuple]:
        """(kernel, tensors) of each launch, ready to call."""
        return [(self._kernel(step["kernel"]), [self._tensor(arg, function) for arg in step["args"]]) for step in function["launches"]]

    def _kernel(self, name: str):
        for module in self.modules:
            function = module.get_function(name)
            if function is not None:
                return function
        raise UserError(f"{self.artifact.path} lacks the kernel {name}; compile the model again")

    def _tensor(self, arg: list, function: dict):
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
            rows = {"state": 4, "tokens": function["tokens"], "logits": function["tokens"] if function["all_logits"] else 1}[where]
            array = self.io[where][:rows]
        return tvm_ffi.from_dlpack(array)

    # ---- the protocol

    def write(self, name: str, values) -> None:
        self.io[name][: len(values)] = values

    def run(self, function: str) -> None:
        start = time.perf_counter()
        for kernel, tensors in self._launches[function]:
            kernel(*tensors)
        self.waited += time.perf_counter() - start

    def time(self, function: str) -> list[tuple[str, float, float]]:
        times, last, plan = [], None, self.artifact.manifest["functions"][function]["launches"]
        for step, (kernel, tensors) in zip(plan, self._launches[function], strict=True):
            start = time.perf_counter()
            kernel(*tensors)
            end = time.perf_counter()
            times.append((step["kernel"], end - start, start - last if last else 0.0))
            last = end
        return times

    def read(self, name: str, rows: int) -> np.ndarray:
        return self.io[name][:rows]

    def clear(self) -> None:
        for array in self.kv.values():
            array[:] = 0
