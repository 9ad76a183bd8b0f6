"""The rocm device: runs the code objects of an artifact on an AMD GPU through AMD's HIP runtime.

In: an artifact for target rocm, as specified in dist/README.md. Out: the protocol of runtime/devices/__init__.py.

Everything runs on one stream. The launches of each function are captured once in a HIP graph and replayed, because a
launch from Python takes longer than a small kernel runs. Some drivers replay stale data (ROCm/hip issues 3887 and
3902), so at load a few steps are computed with and without graphs and compared bit by bit; if they differ, graphs are
not used, with a warning. MLC_AMD_GRAPH=0 disables them.
"""

import ctypes
import logging
import os
import sys
import time
import weakref
from collections.abc import Hashable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from typing import TypeVar

import numpy as np

from mlc_amd.runtime.devices.hip_errors import (
    OVERRIDE,
    Hip,
    HipError,
    gpu_memory,
    kfd_gpus,
    open_bindings,
    runtime_version,
    why_no_gpu,
)
from mlc_amd.runtime.devices.hip_gpus import Gpu, list_gpus, relabel, sibling
from mlc_amd.runtime.devices.placement import cut, parts
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.memory import gib, host_shortage, nbytes, of_manifest, on_host, shortage

ALIGN = 256  # bytes between buffers of one allocation, as hipMalloc aligns
CHUNK = 16 << 20  # bytes of weights copied at a time
CHECK_STEPS = 3  # replays compared at load; stale data shows up from the second on
OUTPUTS = ("logits",)  # io buffers that kernels write; the host writes the others
GRAPH_VARIABLE = "MLC_AMD_GRAPH"
CANNOT_LOAD = (
    "hipErrorNoBinaryForGpu",
    "hipErrorInvalidImage",
    "hipErrorInvalidKernelFile",
    "hipErrorSharedObjectInitFailed",
)
NO_MEMORY = ("hipErrorOutOfMemory", "hipErrorMemoryAllocation")

_NO_GRAPHS = "HIP graphs do not work with this driver (%s); continuing without them, which is slower"

log = logging.getLogger("mlc_amd")
_Name = TypeVar("_Name", bound=Hashable)


@dataclass(frozen=True)
class Launch:
    """One prepared kernel launch. `values` holds the kernel's arguments, `params` the address of each: both must stay
    alive."""

    function: object
    grid: tuple[int, ...]
    block: tuple[int, ...]
    values: ctypes.Array
    params: ctypes.Array


def _places(sizes: dict[_Name, int]) -> tuple[dict[_Name, int], int]:
    """Offsets of buffers in one allocation, and its size."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name], end = end, end + -(-size // ALIGN) * ALIGN
    return offsets, max(end, ALIGN)


class HipDevice:
    """See runtime/devices/__init__.py for the protocol. `threads` is for the cpu device only. n_cpu_moe: layers whose
    experts stay in host memory, where the GPU reads them across the bus; an APU has no use for it. `bindings`: a
    substitute for AMD's package."""

    kind = "rocm"

    def __init__(self, artifact, threads: int | None = None, bindings=None, n_cpu_moe: int = 0):
        self.artifact, self.manifest = artifact, artifact.manifest
        self.threads = 1  # host threads
        self._held = ExitStack()  # HIP resources, released in reverse order
        self.close = weakref.finalize(self, self._held.close)  # also at interpreter exit, while the library is loaded
        self.hip = Hip(open_bindings() if bindings is None else bindings)
        self.version = runtime_version(self.hip.names)
        self.gpu, self.code_arch = self._choose_gpu()
        self.name = f"{self.gpu.name} ({self.gpu.arch}{self._override()})"
        self.hip("hipSetDevice", self.gpu.index)
        self.stream = self._own(
            "hipStreamDestroy", self.hip("hipStreamCreateWithFlags", self.hip.names.hipStreamNonBlocking)
        )
        self._load_kernels()
        self._allocate(0 if self.gpu.integrated else n_cpu_moe)
        self._upload()
        self._launches = {name: self._bind(function) for name, function in self.manifest["functions"].items()}
        self._graphs = {}
        self.waited = 0.0
        if os.environ.get(GRAPH_VARIABLE) != "0":
            self._make_graphs()
        self.clear()

    def _own(self, release: str, handle):
        """`handle`, to be released with the HIP function `release` when the device is closed."""
        self._held.callback(getattr(self.hip.names, release), handle)
        return handle

    # ---- which GPU, which code object

    def _choose_gpu(self) -> tuple[Gpu, str]:
        """The best GPU (exact code object, discrete, largest memory) and the arch of the code object to load."""
        try:
            gpus = list_gpus(self.hip)
        except HipError as e:
            raise UserError(why_no_gpu(e.code, self.version)) from e
        if not gpus:
            raise UserError(why_no_gpu("hipErrorNoDevice", self.version))
        libraries = self.manifest["libraries"]
        usable = [(gpu, code) for gpu in gpus if (code := sibling(gpu.arch, libraries))]
        if not usable:
            here = ", ".join(f"{gpu.arch} ({gpu.name})" for gpu in gpus)
            raise UserError(
                f"this model was compiled for {', '.join(libraries)}, but this machine has {here}; "
                f"compile it with --target rocm --arch {gpus[0].arch}"
            )
        gpu, code = min(usable, key=lambda u: (u[0].arch != u[1], u[0].integrated, -u[0].memory, u[0].index))
        if gpu.arch != code:
            log.warning("using the kernels for %s on %s, which has the same instruction set", code, gpu.arch)
        return gpu, code

    def _override(self) -> str:
        """A note that the arch is overridden; "" if it is not."""
        if OVERRIDE not in os.environ:
            return ""
        chip = next((f"; the chip is {gpu['arch']}" for gpu in kfd_gpus() if gpu["pci"] == self.gpu.pci), "")
        return f" by {OVERRIDE}={os.environ[OVERRIDE]}{chip}"

    def _load_kernels(self) -> None:
        file = self.artifact.path / self.manifest["libraries"][self.code_arch]
        self._code = file.read_bytes()  # HIP may read it until the module is unloaded
        if self.gpu.arch != self.code_arch:
            self._code = relabel(self._code, self.code_arch, self.gpu.arch)
        try:
            module = self._own("hipModuleUnload", self.hip("hipModuleLoadData", self._code))
        except HipError as e:
            if e.code not in CANNOT_LOAD:
                raise
            version = ".".join(map(str, self.version))
            raise UserError(
                f"HIP {version} cannot load the kernels for {self.gpu.arch} ({e.code}); install a newer ROCm, or "
                "compile the model again"
            ) from e
        self._kernels = self.manifest["launches"][self.code_arch]
        symbols = {step["symbol"] for kernel in self._kernels.values() for step in kernel["steps"]}
        try:
            self._functions = {
                symbol: self.hip("hipModuleGetFunction", module, symbol.encode()) for symbol in sorted(symbols)
            }
        except HipError as e:
            raise UserError(f"{file} lacks a kernel of this model ({e.code}); compile the model again") from e

    # ---- memory

    def _allocate(self, n_cpu_moe: int) -> None:
        """One block each for weights, KV cache, arena, scratch and io, pinned host memory for io, and a block of host
        memory for each range of weights that stays there."""
        manifest, weights = self.manifest, self.artifact.weights
        self._ranges = cut(weights.places, sys.maxsize, on_host(manifest["tensors"], n_cpu_moe) if n_cpu_moe else ())
        offsets, weight_bytes = _places({one: one.nbytes for one in self._ranges if not one.host})
        # Kernels run one after the other, so they share one block of scratch memory.
        scratch = {name: _places(dict(enumerate(kernel["scratch"]))) for name, kernel in self._kernels.items()}
        self._scratch_at = {name: list(offsets.values()) for name, (offsets, _) in scratch.items()}
        scratch_bytes = max((size for _, size in scratch.values()), default=0)
        self._kv_at, kv_bytes = _places({entry["name"]: nbytes(entry) for entry in manifest["kv"]})
        io = dict(
            sorted(manifest["io"].items(), key=lambda item: item[0] in OUTPUTS)
        )  # inputs first: they are copied at once
        self._io_at, io_bytes = _places({name: nbytes(entry) for name, entry in io.items()})
        self._input_bytes = min(self._io_at[name] for name in OUTPUTS)
        sizes = {
            "weights": weight_bytes,
            "kv": kv_bytes,
            "arena": manifest["arena_bytes"],
            "scratch": scratch_bytes,
            "io": io_bytes,
        }
        self._sizes = {name: max(size, ALIGN) for name, size in sizes.items()}
        needed, (free, _) = sum(self._sizes.values()), self.hip("hipMemGetInfo")
        # An APU's carve-out has no other use, so it is used if everything fits; otherwise the GPU uses system memory.
        # Either way there is one copy of the weights.
        self.host_memory = self.gpu.integrated and free < needed
        try:
            self._blocks = {name: self._block(size) for name, size in self._sizes.items()}
            self._pinned = self._host_block(io_bytes, 0)
        except HipError as e:
            if e.code not in NO_MEMORY:
                raise
            self.close()
            raise UserError(self._out_of_memory(needed, free, n_cpu_moe)) from e
        try:
            hosts = {one: self._mapped_block(one.nbytes) for one in self._ranges if one.host}
        except HipError as e:
            if e.code not in NO_MEMORY:
                raise
            self.close()
            raise UserError(host_shortage(of_manifest(manifest), n_cpu_moe)) from e
        device, host = self._blocks["weights"]
        self._weights = hosts | {
            one: (device + offset, None if host is None else host + offset) for one, offset in offsets.items()
        }
        self._weights_at = {
            name: self._weights[one][0] + first - one.begin
            for name, place in weights.places.items()
            for one, first, _ in parts(self._ranges, *place)
        }
        self._host = {name: self._view(self._pinned + self._io_at[name], entry) for name, entry in io.items()}
        for name in ("arena", "io"):  # stale NaN would spread from unused rows
            self.hip("hipMemsetAsync", self._blocks[name][0], 0, self._sizes[name], self.stream)

    def _block(self, size: int) -> tuple[int, int | None]:
        """(address for the GPU, address for the host or None)."""
        if not self.host_memory:
            return int(self._own("hipFree", self.hip("hipMalloc", size))), None
        return self._mapped_block(size)

    def _mapped_block(self, size: int) -> tuple[int, int]:
        """Host memory that the GPU reads: (address for the GPU, address for the host)."""
        # Non-coherent memory can be cached in the GPU's L2; the end of the stream makes writes visible.
        host = self._host_block(
            size, self.hip.names.hipHostMallocMapped | self.hip.names.hipHostMallocNonCoherent & 0xFFFFFFFF
        )
        return int(self.hip("hipHostGetDevicePointer", host, 0)), host

    def _host_block(self, size: int, flags: int) -> int:
        return int(self._own("hipHostFree", self.hip("hipHostMalloc", size, flags)))

    @staticmethod
    def _view(address: int, entry: dict) -> np.ndarray:
        raw = (ctypes.c_uint8 * nbytes(entry)).from_address(address)
        return np.ctypeslib.as_array(raw).view(entry["dtype"]).reshape(entry["shape"])

    def _out_of_memory(self, needed: int, free: int, n_cpu_moe: int) -> str:
        """The error message, with a change that makes the model fit."""
        limits = gpu_memory(self.gpu.pci) if self.gpu.integrated else {}
        message = shortage(of_manifest(self.manifest), free, self.gpu.name, n_cpu_moe, self.gpu.integrated)
        if "gtt" not in limits:
            return message
        return message + (
            f", or give this APU more: it may use {gib(limits.get('vram', 0))} carved out in the BIOS setup or "
            f"{gib(limits['gtt'])} of the system's memory (kernel parameter ttm.pages_limit={needed * 5 // 4 // 4096})"
        )

    def _upload(self) -> None:
        """Copies the weights: in host memory at once, to the GPU in chunks, where the next is read from the file while
        one is transferred."""
        with ExitStack() as held:
            staged = any(host is None for _, host in self._weights.values())
            slots = cycle([self._slot(held) for _ in range(2)] if staged else [])
            for at, piece in self.artifact.weights.chunks(CHUNK):
                for one, first, last in parts(self._ranges, at, piece.nbytes):
                    (target, host), source = self._weights[one], piece.ctypes.data + first - at
                    if host is not None:
                        ctypes.memmove(host + first - one.begin, source, last - first)
                    else:
                        self._send(*next(slots), source, target + first - one.begin, last - first)
            self.hip("hipStreamSynchronize", self.stream)

    def _slot(self, held: ExitStack) -> tuple[int, object]:
        """(pinned memory for a chunk, event that says when it is free)."""
        staging = int(self.hip("hipHostMalloc", CHUNK, 0))
        held.callback(self.hip, "hipHostFree", staging)
        event = self.hip("hipEventCreateWithFlags", self.hip.names.hipEventDisableTiming)
        held.callback(self.hip, "hipEventDestroy", event)
        return staging, event

    def _send(self, staging: int, event, source: int, target: int, count: int) -> None:
        hip = self.hip
        hip("hipEventSynchronize", event)  # returns at once if nothing was recorded yet
        ctypes.memmove(staging, source, count)
        hip("hipMemcpyAsync", target, staging, count, hip.names.hipMemcpyKind.hipMemcpyHostToDevice, self.stream)
        hip("hipEventRecord", event, self.stream)

    # ---- launches

    def _bind(self, function: dict) -> list[Launch]:
        """Every kernel launch of a function, in order."""
        return [
            self._launch(step, call) for call in function["launches"] for step in self._kernels[call["kernel"]]["steps"]
        ]

    def _launch(self, step: dict, call: dict) -> Launch:
        scratch = [self._blocks["scratch"][0] + at for at in self._scratch_at[call["kernel"]]]
        pointers = [self._address(arg) for arg in call["args"]] + scratch
        values = (ctypes.c_uint64 * len(step["args"]))(*(pointers[i] for i in step["args"]))
        params = (ctypes.c_void_p * len(values))(*(ctypes.addressof(values) + 8 * i for i in range(len(values))))
        return Launch(self._functions[step["symbol"]], tuple(step["grid"]), tuple(step["block"]), values, params)

    def _address(self, arg: list) -> int:
        """GPU address of an argument of the plan; dist/README.md lists the kinds."""
        kind, where = arg[0], arg[1]
        if kind == "weight":
            return self._weights_at[where]
        return self._blocks[kind][0] + (
            where if kind == "arena" else {"kv": self._kv_at, "io": self._io_at}[kind][where]
        )

    def _enqueue(self, function: str) -> None:
        for one in self._launches[function]:
            self.hip(
                "hipModuleLaunchKernel",
                one.function,
                *one.grid,
                *one.block,
                0,
                self.stream,
                ctypes.addressof(one.params),
                None,
            )

    # ---- graphs

    def _make_graphs(self) -> None:
        """Captures all functions and compares replays with launches; graphs are not used if they differ or fail."""
        expected = {name: self._trial(name, {}) for name in self._launches}
        try:
            graphs = {name: self._capture(name) for name in self._launches}
            wrong = [name for name in graphs if self._trial(name, graphs) != expected[name]]
        except HipError as e:
            log.warning(_NO_GRAPHS, e)
            return
        if wrong:
            log.warning(_NO_GRAPHS, f"replays of {', '.join(wrong)} differ from launches")
            return
        self._graphs = graphs

    def _capture(self, function: str):
        # Of the capture modes, only this one works on all drivers (Relaxed faults on RDNA2).
        self.hip(
            "hipStreamBeginCapture", self.stream, self.hip.names.hipStreamCaptureMode.hipStreamCaptureModeThreadLocal
        )
        try:
            self._enqueue(function)
        finally:  # a stream left in capture mode would be unusable
            graph = self._own("hipGraphDestroy", self.hip("hipStreamEndCapture", self.stream))
        return self._own("hipGraphExecDestroy", self.hip("hipGraphInstantiate", graph, 0)[0])

    def _trial(self, function: str, graphs: dict) -> list[bytes]:
        """The logits of a few steps with different tokens and positions, computed with `graphs` or by launches."""
        entry, vocab = self.manifest["functions"][function], self.manifest["model"]["vocab"]
        results, position = [], 0
        self.clear()
        for step in range(CHECK_STEPS):
            live = min(1 + step, entry["tokens"], self.manifest["context"] - position)
            self.write("state", (position, live))
            self.write("tokens", (np.arange(entry["tokens"]) + 7 * step + 1) % vocab)
            self._run(function, graphs)
            results.append(self.read("logits", live if entry["all_logits"] else 1).tobytes())
            position += live
        return results

    # ---- the protocol

    def write(self, name: str, values) -> None:
        self._host[name][: len(values)] = values

    def run(self, function: str) -> None:
        self._run(function, self._graphs)

    def _run(self, function: str, graphs: dict) -> None:
        to_device = self.hip.names.hipMemcpyKind.hipMemcpyHostToDevice
        self.hip("hipMemcpyAsync", self._blocks["io"][0], self._pinned, self._input_bytes, to_device, self.stream)
        if function in graphs:
            self.hip("hipGraphLaunch", graphs[function], self.stream)
        else:
            self._enqueue(function)
        self._wait()

    def _wait(self) -> None:
        start = time.perf_counter()
        self.hip("hipStreamSynchronize", self.stream)
        self.waited += time.perf_counter() - start

    def read(self, name: str, rows: int) -> np.ndarray:
        array, to_host = self._host[name][:rows], self.hip.names.hipMemcpyKind.hipMemcpyDeviceToHost
        self.hip(
            "hipMemcpyAsync",
            array.ctypes.data,
            self._blocks["io"][0] + self._io_at[name],
            array.nbytes,
            to_host,
            self.stream,
        )
        self._wait()
        return array

    def clear(self) -> None:
        self.hip("hipMemsetAsync", self._blocks["kv"][0], 0, self._sizes["kv"], self.stream)
        self.hip("hipStreamSynchronize", self.stream)
