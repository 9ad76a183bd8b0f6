"""Memory of a loaded artifact on an AMD GPU: one block each for weights, KV cache, arena, scratch and io.

The host writes a step's inputs to one pinned block, laid out as on the GPU, from which they are copied while it waits.
Where it does not wait, they go *through* other pinned memory of the same layout, which keeps them until the copy is
done.
"""

import ctypes
import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle
from typing import TypeVar

import numpy as np

from mlc_amd.runtime.artifact.io_names import LATE, RESULTS, is_kept
from mlc_amd.runtime.artifact.memory import Needs, gib, host_shortage, nbytes, of_manifest, on_host, shortage
from mlc_amd.runtime.cache.cache_types import kv_bytes, kv_types
from mlc_amd.runtime.cache.kv_pool import ONE_SEQUENCE, KvSize
from mlc_amd.runtime.devices.hip.api import NO_MEMORY, Hip, HipError
from mlc_amd.runtime.devices.hip.diagnosis import gpu_memory
from mlc_amd.runtime.devices.hip.gpu import HipGpu
from mlc_amd.runtime.devices.placement import CHUNK, chunks, cut, parts, read_in_place
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import HOST_PART, RESERVE, available_memory

ALIGN = 256  # bytes between buffers of one allocation, as hipMalloc aligns
SMALL = 64 << 10  # bytes of an output, at most, that is copied with others: of tokens, not of a vocabulary's logits

_Name = TypeVar("_Name", bound=Hashable)


def places(sizes: dict[_Name, int]) -> tuple[dict[_Name, int], int]:
    """Offsets of buffers in one allocation, and its size."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name], end = end, end + -(-size // ALIGN) * ALIGN
    return offsets, max(end, ALIGN)


def host_block(hip: Hip, held: ExitStack, size: int, flags: int = 0) -> int:
    """The address of pinned host memory that lives until `held` closes."""
    size = max(size, ALIGN)  # of an encoder, whose results are all large, slots keep none
    return int(hip.own(held, "hipHostFree", hip("hipHostMalloc", size, flags)))


def view(address: int, entry: dict) -> np.ndarray:
    """An io buffer in host memory. entry: the manifest's."""
    return _bytes(address, nbytes(entry)).view(entry["dtype"]).reshape(entry["shape"])


def _bytes(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))


def _rank(name: str, entry: dict) -> int:
    """Of an io buffer: 0 for inputs of each step, 1 for those that are kept, 2 for outputs, 3 for small ones."""
    return 2 + (nbytes(entry) <= SMALL) if name in RESULTS else int(is_kept(name))


class HipMemory:
    """blocks: (address for the GPU, address for the host or None) of "weights", "kv", "arena", "scratch" and "io";
    sizes: their bytes; pinned: host memory of io; host: its buffers as arrays. The host writes the first
    `written_bytes` of io; the last `result_bytes` are small outputs.

    All of it lives until `held` closes. kv: how large the cache is; kv_types: its tensors. scratch: bytes of each
    scratch buffer, by kernel. n_cpu_moe: layers whose experts stay in host memory. UserError if it does not fit.
    """

    def __init__(
        self,
        hip: Hip,
        held: ExitStack,
        stream,
        artifact,
        gpu: HipGpu,
        kv: KvSize,
        scratch: dict[str, list[int]],
        n_cpu_moe: int,
    ):
        self.hip, self.stream, self.artifact, self.gpu = hip, stream, artifact, gpu
        self._held, self._n_cpu_moe, self._sized = held, n_cpu_moe, kv != ONE_SEQUENCE
        manifest, weights = artifact.manifest, artifact.weights
        self._ranges = cut(weights.places, sys.maxsize, on_host(manifest["tensors"], n_cpu_moe) if n_cpu_moe else ())
        offsets, weight_bytes = places({one: one.nbytes for one in self._ranges if not one.host})
        # Kernels run one after the other, so they share one block of scratch memory.
        found = {name: places(dict(enumerate(sizes))) for name, sizes in scratch.items()}
        self._scratch_at = {name: list(offsets.values()) for name, (offsets, _) in found.items()}
        # Inputs of each step first, which one copy transfers; then the page tables, which are copied when they change.
        ranks = {name: _rank(name, entry) for name, entry in manifest["io"].items()}
        self._io = {name: manifest["io"][name] for name in sorted(ranks, key=lambda name: ranks[name])}
        self._io_at, io_bytes = places({name: nbytes(entry) for name, entry in self._io.items()})
        begins = [
            min((self._io_at[name] for name in ranks if ranks[name] >= rank), default=io_bytes) for rank in range(4)
        ]
        _, self._input_bytes, self.written_bytes, self._results_at = begins
        self.result_bytes = io_bytes - self._results_at
        self._moved = np.empty(0, np.uint8)  # pinned memory through which pages of caches go
        self._shared: list[np.ndarray] = []
        self._stale: dict[str, int] = {}  # tables of which the GPU has old rows, and their number
        sizes = {
            "weights": weight_bytes,
            "arena": manifest["arena_bytes"],
            "scratch": max((size for _, size in found.values()), default=0),
            "io": io_bytes,
        }
        self.kv_types = kv_types(manifest, kv.pages(manifest, self._left(sum(sizes.values())) if kv.auto else 0))
        self._kv_at, sizes["kv"] = places({name: kv_bytes({name: of}) for name, of in self.kv_types.items()})
        self.sizes = {name: max(size, ALIGN) for name, size in sizes.items()}
        self._allocate(io_bytes)
        self._place(offsets, n_cpu_moe)
        self.host = {name: view(self.pinned + self._io_at[name], entry) for name, entry in self._io.items()}
        for name in ("arena", "io"):  # stale NaN would spread from unused rows
            self.clear(name)
        for name, array in self.host.items():
            if is_kept(name):
                array[...] = 0

    def _left(self, others: int) -> int:
        """Bytes that a cache of unknown size may take beside `others`: of the GPU's memory but for RESERVE, or of an
        APU's host no more than a part of what is available."""
        own = self.hip("hipMemGetInfo")[0] - RESERVE - others
        return max(own, available_memory() // HOST_PART - others) if self.gpu.integrated else own

    def _allocate(self, io_bytes: int) -> None:
        needed, (free, _) = sum(self.sizes.values()), self.hip("hipMemGetInfo")
        # An APU's carve-out has no other use, so it is used if everything fits; otherwise the GPU uses system memory.
        # In both cases there is one copy of the weights.
        self.host_memory = self.gpu.integrated and free < needed
        try:
            self.blocks = {name: self._block(size) for name, size in self.sizes.items()}
            self.pinned = self._host_block(io_bytes)
        except HipError as e:
            if e.code not in NO_MEMORY:
                raise
            raise UserError(self._out_of_memory(needed, free)) from e

    def _place(self, offsets: dict, n_cpu_moe: int) -> None:
        """The addresses of the weights' tensors, in their block or in host memory. offsets: of ranges in the block."""
        try:
            hosts = {one: self._mapped_block(one.nbytes) for one in self._ranges if one.host}
        except HipError as e:
            if e.code not in NO_MEMORY:
                raise
            raise UserError(host_shortage(self._needs(), n_cpu_moe)) from e
        device, host = self.blocks["weights"]
        self._weights = hosts | {one: (device + at, None if host is None else host + at) for one, at in offsets.items()}
        self._weights_at = {
            name: self._weights[one][0] + first - one.begin
            for name, place in self.artifact.weights.places.items()
            for one, first, _ in parts(self._ranges, *place)
        }

    def _block(self, size: int) -> tuple[int, int | None]:
        """(address for the GPU, address for the host or None)."""
        if not self.host_memory:
            return int(self.hip.own(self._held, "hipFree", self.hip("hipMalloc", size))), None
        return self._mapped_block(size)

    def _mapped_block(self, size: int) -> tuple[int, int]:
        """Host memory that the GPU reads: (address for the GPU, address for the host)."""
        # Non-coherent memory can be cached in the GPU's L2; the end of the stream makes writes visible.
        flags = self.hip.names.hipHostMallocMapped | self.hip.names.hipHostMallocNonCoherent & 0xFFFFFFFF
        host = self._host_block(size, flags)
        return int(self.hip("hipHostGetDevicePointer", host, 0)), host

    def _host_block(self, size: int, flags: int = 0) -> int:
        return host_block(self.hip, self._held, size, flags)

    def _needs(self) -> Needs:
        needs = replace(of_manifest(self.artifact.manifest), kv=kv_bytes(self.kv_types))
        return needs.in_host_memory() if self.gpu.integrated else needs

    def _out_of_memory(self, needed: int, free: int) -> str:
        """The error message, with a change that makes the model fit."""
        limits = gpu_memory(self.gpu.pci) if self.gpu.integrated else {}
        needs = self._needs()
        message = shortage(needs, free, self.gpu.name, self._n_cpu_moe, self._sized)
        if "gtt" not in limits:
            return message
        return message + (
            f", or give this APU more: it may use {gib(limits.get('vram', 0))} carved out in the BIOS setup or "
            f"{gib(limits['gtt'])} of the system's memory (kernel parameter ttm.pages_limit={needed * 5 // 4 // 4096})"
        )

    # ---- addresses

    def address(self, arg: list) -> int:
        """GPU address of an argument of the plan; dist/README.md lists the kinds."""
        kind, where = arg[0], arg[1]
        if kind == "weight":
            return self._weights_at[where]
        at = where if kind == "arena" else {"kv": self._kv_at, "io": self._io_at}[kind][where]
        return self.blocks[kind][0] + at

    def scratch(self, kernel: str) -> list[int]:
        """GPU addresses of a kernel's scratch buffers."""
        return [self.blocks["scratch"][0] + at for at in self._scratch_at[kernel]]

    # ---- contents

    def clear(self, name: str) -> None:
        """Enqueues zeros for a block."""
        self.hip("hipMemsetAsync", self.blocks[name][0], 0, self.sizes[name], self.stream)

    def write(self, name: str, values) -> None:
        """Fills the first part of an io buffer."""
        self.host[name][: len(values)] = values
        self._wrote(name, len(values))

    def fill(self, name: str, rows: int, put: Callable[[np.ndarray], None]) -> None:
        put(self.host[name][:rows])
        self._wrote(name, rows)

    def _wrote(self, name: str, rows: int) -> None:
        if is_kept(name):
            self._stale[name] = max(self._stale.get(name, 0), rows)

    def send_inputs(self, through: int | None = None) -> None:
        """Enqueues the copy of the host's io inputs to the GPU: of tables the changed rows. through: pinned memory of
        `written_bytes` without pending copies."""
        self._send_io(0, self._input_bytes, through)
        for name in list(self._stale):
            self._send_table(name, through)

    def send_late(self, through: int) -> None:
        """The same of LATE inputs alone; copies that are pending may transfer them, as nothing reads them yet."""
        for name in LATE:
            if name in self._stale:
                self._send_table(name, through)
            elif name in self.host and not is_kept(name):
                self._send_io(self._io_at[name], self.host[name].nbytes, through)

    def _send_table(self, name: str, through: int | None) -> None:
        self._send_io(self._io_at[name], self.host[name][: self._stale.pop(name)].nbytes, through)

    def _send_io(self, at: int, count: int, through: int | None) -> None:
        source, kind = self.pinned + at, self.hip.names.hipMemcpyKind.hipMemcpyHostToDevice
        if through is not None:
            ctypes.memmove(through + at, source, count)
            source = through + at
        self.hip("hipMemcpyAsync", self.blocks["io"][0] + at, source, count, kind, self.stream)

    def feed_back(self, rows: int) -> None:
        """Enqueues the copy of the tokens that the last run samples, of so many rows, to the inputs of the next one."""
        target, source = (self.blocks["io"][0] + self._io_at[name] for name in ("tokens", "sampled"))
        kind = self.hip.names.hipMemcpyKind.hipMemcpyDeviceToDevice
        self.hip("hipMemcpyAsync", target, source, self.host["sampled"][:rows].nbytes, kind, self.stream)

    def fetch(self, name: str, rows: int, first: int = 0) -> np.ndarray:
        """Enqueues the copy of rows first to rows - 1 of an io buffer to the host; returns the array that will have
        them."""
        array = self.host[name][first:rows]
        self._fetch(self._io_at[name] + self.host[name][:first].nbytes, array.nbytes, array.ctypes.data)
        return array

    def results(self, address: int) -> dict[str, np.ndarray]:
        """The arrays of small outputs in `result_bytes` of host memory."""
        begin = self._results_at
        return {name: view(address + at - begin, self._io[name]) for name, at in self._io_at.items() if at >= begin}

    def fetch_results(self, address: int) -> None:
        """Enqueues the copy of small outputs to pinned memory; encoders have none."""
        if self.result_bytes:
            self._fetch(self._results_at, self.result_bytes, address)

    def _fetch(self, at: int, count: int, target: int) -> None:
        kind = self.hip.names.hipMemcpyKind.hipMemcpyDeviceToHost
        self.hip("hipMemcpyAsync", target, self.blocks["io"][0] + at, count, kind, self.stream)

    def read_parts(self, parts: Sequence[tuple[str, int, int]]) -> np.ndarray:
        """Parts of caches (name, offset, bytes), one after the other, uint8, in memory that the next call overwrites.
        Waits for what the stream has."""
        found = self._through(sum(count for *_, count in parts))
        self._move(parts, found.ctypes.data, written=False)
        return found

    def write_parts(self, parts: Sequence[tuple[str, int, int]], source: np.ndarray) -> None:
        """The reverse: from memory of `shared`, or through other."""
        pinned = source
        if not any(np.may_share_memory(source, one) for one in self._shared):
            pinned = self._through(source.nbytes)
            pinned[:] = source.reshape(-1)
        self._move(parts, pinned.ctypes.data, written=True)

    def shared(self, nbytes: int) -> np.ndarray:
        """Pinned memory, uint8."""
        self._shared.append(_bytes(self._host_block(nbytes), nbytes))
        return self._shared[-1]

    def _through(self, nbytes: int) -> np.ndarray:
        """Pinned memory that the next call overwrites."""
        if self._moved.nbytes < nbytes:
            size = 1 << (nbytes - 1).bit_length()
            self._moved = _bytes(self._host_block(size), size)
        return self._moved[:nbytes]

    def _move(self, parts: Sequence[tuple[str, int, int]], host: int, written: bool) -> None:
        kinds = self.hip.names.hipMemcpyKind
        for name, offset, count in parts:
            device = self.blocks["kv"][0] + self._kv_at[name] + offset
            if written:
                self.hip("hipMemcpyAsync", device, host, count, kinds.hipMemcpyHostToDevice, self.stream)
            else:
                self.hip("hipMemcpyAsync", host, device, count, kinds.hipMemcpyDeviceToHost, self.stream)
            host += count
        self.hip("hipStreamSynchronize", self.stream)

    def upload(self) -> None:
        """Reads the weights, to where kernels find them if that is host memory; else through pinned memory, one chunk
        while the one before is copied to the GPU."""
        weights, in_place = self.artifact.weights, []
        with ExitStack() as held:
            staged = any(host is None for _, host in self._weights.values())
            slots = cycle([self._slot(held) for _ in range(2)] if staged else [])
            for one, first, last in chunks(self._ranges):
                target, host = self._weights[one]
                if host is not None:
                    in_place.append((first, _bytes(host + first - one.begin, last - first)))
                    continue
                staging, event = next(slots)
                self.hip("hipEventSynchronize", event)  # returns at once if nothing was recorded yet
                weights.read(first, _bytes(staging, last - first))
                self._send(staging, event, target + first - one.begin, last - first)
            self.hip("hipStreamSynchronize", self.stream)
        read_in_place(weights, in_place)
        self.artifact.release_weights()

    def _slot(self, held: ExitStack) -> tuple[int, object]:
        """(pinned memory for a chunk, event after its last copy)."""
        staging = int(self.hip("hipHostMalloc", CHUNK, 0))
        held.callback(self.hip, "hipHostFree", staging)
        event = self.hip("hipEventCreateWithFlags", self.hip.names.hipEventDisableTiming)
        held.callback(self.hip, "hipEventDestroy", event)
        return staging, event

    def _send(self, staging: int, event, target: int, count: int) -> None:
        hip = self.hip
        hip("hipMemcpyAsync", target, staging, count, hip.names.hipMemcpyKind.hipMemcpyHostToDevice, self.stream)
        hip("hipEventRecord", event, self.stream)
