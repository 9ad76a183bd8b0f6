"""The memory of a loaded artifact on an AMD GPU: one block each for weights, KV cache, arena, scratch memory and io.

The host writes a step's inputs to a pinned block with the same layout as the GPU's io block. If the host waits for the
run, they are copied to the GPU from there. If it does not wait, it may write the next inputs before the copy is done;
so they go *through* another pinned block of the same layout, one for each slot (run_queue.py).
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

ALIGN = 256  # bytes: alignment of the buffers in an allocation, the same as hipMalloc's
SMALL = 64 << 10  # bytes: outputs up to this size (tokens, not logits) are copied to the host after each run

_Name = TypeVar("_Name", bound=Hashable)


def places(sizes: dict[_Name, int]) -> tuple[dict[_Name, int], int]:
    """({name: offset of a buffer in one allocation}, size of the allocation). sizes: {name: bytes}."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name], end = end, end + -(-size // ALIGN) * ALIGN
    return offsets, max(end, ALIGN)


def host_block(hip: Hip, held: ExitStack, size: int, flags: int = 0) -> int:
    """The address of pinned host memory that lives until `held` closes."""
    size = max(size, ALIGN)  # it may be 0: an image encoder has no small outputs
    return int(hip.own(held, "hipHostFree", hip("hipHostMalloc", size, flags)))


def view(address: int, entry: dict) -> np.ndarray:
    """An io buffer in host memory as an array. entry: the manifest's."""
    return _bytes(address, nbytes(entry)).view(entry["dtype"]).reshape(entry["shape"])


def _bytes(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))


def _rank(name: str, entry: dict) -> int:
    """The order of io buffers in memory: 0 for inputs of each step, 1 for *tables* (inputs that are kept for many
    steps, `is_kept`), 2 for large outputs, 3 for small ones."""
    return 2 + (nbytes(entry) <= SMALL) if name in RESULTS else int(is_kept(name))


class HipMemory:
    """Arguments: kv: the size of the KV cache. scratch: {kernel: bytes of each scratch buffer}. n_cpu_moe: the experts
    of so many first layers stay in host memory. Raises UserError if the memory does not suffice. All memory is released
    when `held` closes.

    blocks: {name: (address for the GPU, address for the host or None)} of "weights", "kv", "arena", "scratch" and "io".
    sizes: {name: bytes}. kv_types: see the protocol. pinned: address of the host's copy of io; host: its buffers as
    arrays. The host writes the first `written_bytes` of io; small outputs are the last `result_bytes`.
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
        # Inputs of each step come first, so that one copy transfers them; then tables, copied when they change.
        ranks = {name: _rank(name, entry) for name, entry in manifest["io"].items()}
        self._io = {name: manifest["io"][name] for name in sorted(ranks, key=lambda name: ranks[name])}
        self._io_at, io_bytes = places({name: nbytes(entry) for name, entry in self._io.items()})
        begins = [
            min((self._io_at[name] for name in ranks if ranks[name] >= rank), default=io_bytes) for rank in range(4)
        ]
        _, self._input_bytes, self.written_bytes, self._results_at = begins
        self.result_bytes = io_bytes - self._results_at
        self._moved = np.empty(0, np.uint8)  # pinned memory for copies of the cache's pages
        self._shared: list[np.ndarray] = []
        self._stale: dict[str, int] = {}  # {table: number of first rows that are old on the GPU}
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
        for name in ("arena", "io"):  # a NaN in uninitialized memory would spread from unused rows to results
            self.clear(name)
        for name, array in self.host.items():
            if is_kept(name):
                array[...] = 0

    def _left(self, others: int) -> int:
        """The bytes that a KV cache of size "auto" may take beside `others` bytes: what is free on the GPU but for
        RESERVE; on an APU, if this is more, 1/HOST_PART of the host's available memory."""
        own = self.hip("hipMemGetInfo")[0] - RESERVE - others
        return max(own, available_memory() // HOST_PART - others) if self.gpu.integrated else own

    def _allocate(self, io_bytes: int) -> None:
        needed, (free, _) = sum(self.sizes.values()), self.hip("hipMemGetInfo")
        # An APU's carve-out is used if everything fits there, as nothing else uses it. Otherwise all is in system
        # memory. In both cases there is one copy of the weights.
        self.host_memory = self.gpu.integrated and free < needed
        try:
            self.blocks = {name: self._block(size) for name, size in self.sizes.items()}
            self.pinned = self._host_block(io_bytes)
        except HipError as e:
            if e.code not in NO_MEMORY:
                raise
            raise UserError(self._out_of_memory(needed, free)) from e

    def _place(self, offsets: dict, n_cpu_moe: int) -> None:
        """Sets the addresses of the weights' tensors, in their block or in host memory. offsets: in the block."""
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
        """New memory for a block: (address for the GPU, address for the host or None)."""
        if not self.host_memory:
            return int(self.hip.own(self._held, "hipFree", self.hip("hipMalloc", size))), None
        return self._mapped_block(size)

    def _mapped_block(self, size: int) -> tuple[int, int]:
        """New host memory that the GPU can access: (address for the GPU, address for the host)."""
        # Non-coherent, so that the GPU caches it in its L2; synchronizing the stream makes writes visible to the host.
        flags = self.hip.names.hipHostMallocMapped | self.hip.names.hipHostMallocNonCoherent & 0xFFFFFFFF
        host = self._host_block(size, flags)
        return int(self.hip("hipHostGetDevicePointer", host, 0)), host

    def _host_block(self, size: int, flags: int = 0) -> int:
        return host_block(self.hip, self._held, size, flags)

    def _needs(self) -> Needs:
        needs = replace(of_manifest(self.artifact.manifest), kv=kv_bytes(self.kv_types))
        return needs.in_host_memory() if self.gpu.integrated else needs

    def _out_of_memory(self, needed: int, free: int) -> str:
        """The message for memory that does not suffice, with a change that makes the model fit."""
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
        """The GPU address of an argument of a call in the plan; dist/README.md lists the kinds of arguments."""
        kind, where = arg[0], arg[1]
        if kind == "weight":
            return self._weights_at[where]
        at = where if kind == "arena" else {"kv": self._kv_at, "io": self._io_at}[kind][where]
        return self.blocks[kind][0] + at

    def scratch(self, kernel: str) -> list[int]:
        """The GPU addresses of a kernel's scratch buffers."""
        return [self.blocks["scratch"][0] + at for at in self._scratch_at[kernel]]

    # ---- contents

    def clear(self, name: str) -> None:
        """Enqueues the zeroing of a block."""
        self.hip("hipMemsetAsync", self.blocks[name][0], 0, self.sizes[name], self.stream)

    def write(self, name: str, values) -> None:
        """Writes the first rows of an io buffer of the host."""
        self.host[name][: len(values)] = values
        self._wrote(name, len(values))

    def fill(self, name: str, rows: int, put: Callable[[np.ndarray], None]) -> None:
        put(self.host[name][:rows])
        self._wrote(name, rows)

    def _wrote(self, name: str, rows: int) -> None:
        if is_kept(name):
            self._stale[name] = max(self._stale.get(name, 0), rows)

    def send_inputs(self, through: int | None = None) -> None:
        """Enqueues copies of the inputs, and of the changed rows of tables, to the GPU. through: address of pinned
        memory of `written_bytes` bytes, without pending copies, that keeps them until the copies are done."""
        self._send_io(0, self._input_bytes, through)
        for name in list(self._stale):
            self._send_table(name, through)

    def send_late(self, through: int) -> None:
        """`send_inputs` for LATE inputs alone. Copies of the same run that are pending may already transfer new values;
        this is harmless, as no launch reads them yet."""
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
        """Enqueues the copy of `rows` tokens that the last run samples to the inputs of the next run."""
        target, source = (self.blocks["io"][0] + self._io_at[name] for name in ("tokens", "sampled"))
        kind = self.hip.names.hipMemcpyKind.hipMemcpyDeviceToDevice
        self.hip("hipMemcpyAsync", target, source, self.host["sampled"][:rows].nbytes, kind, self.stream)

    def fetch(self, name: str, rows: int, first: int = 0) -> np.ndarray:
        """Enqueues the copy of rows first .. rows-1 of an io buffer to the host. Returns the array that it fills."""
        array = self.host[name][first:rows]
        self._fetch(self._io_at[name] + self.host[name][:first].nbytes, array.nbytes, array.ctypes.data)
        return array

    def results(self, address: int) -> dict[str, np.ndarray]:
        """{name: array} of the small outputs in `result_bytes` bytes of host memory at `address`."""
        begin = self._results_at
        return {name: view(address + at - begin, self._io[name]) for name, at in self._io_at.items() if at >= begin}

    def fetch_results(self, address: int) -> None:
        """Enqueues the copy of the small outputs to pinned memory, if there are any (image encoders have none)."""
        if self.result_bytes:
            self._fetch(self._results_at, self.result_bytes, address)

    def _fetch(self, at: int, count: int, target: int) -> None:
        kind = self.hip.names.hipMemcpyKind.hipMemcpyDeviceToHost
        self.hip("hipMemcpyAsync", target, self.blocks["io"][0] + at, count, kind, self.stream)

    def read_parts(self, parts: Sequence[tuple[str, int, int]]) -> np.ndarray:
        """Parts (name, offset, bytes) of KV tensors, concatenated, uint8, in memory that the next call overwrites.
        Waits until the stream is idle."""
        found = self._through(sum(count for *_, count in parts))
        self._move(parts, found.ctypes.data, written=False)
        return found

    def write_parts(self, parts: Sequence[tuple[str, int, int]], source: np.ndarray) -> None:
        """Copies consecutive pieces of `source`, uint8, to parts (name, offset, bytes) of KV tensors. A source that is
        not in memory of `shared` is copied to pinned memory first. Waits until the stream is idle."""
        pinned = source
        if not any(np.may_share_memory(source, one) for one in self._shared):
            pinned = self._through(source.nbytes)
            pinned[:] = source.reshape(-1)
        self._move(parts, pinned.ctypes.data, written=True)

    def shared(self, nbytes: int) -> np.ndarray:
        """New pinned memory, uint8 [nbytes]."""
        self._shared.append(_bytes(self._host_block(nbytes), nbytes))
        return self._shared[-1]

    def _through(self, nbytes: int) -> np.ndarray:
        """Pinned memory, uint8 [nbytes], which the next call returns again."""
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
        """Loads the weights. Those in host memory are read in place. Others go through pinned memory: the host reads a
        chunk while the chunk before is copied to the GPU."""
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
                self.hip("hipEventSynchronize", event)  # returns at once for an event that was never recorded
                weights.read(first, _bytes(staging, last - first))
                self._send(staging, event, target + first - one.begin, last - first)
            self.hip("hipStreamSynchronize", self.stream)
        read_in_place(weights, in_place)
        self.artifact.release_weights()

    def _slot(self, held: ExitStack) -> tuple[int, object]:
        """(address of pinned memory for a chunk, event that follows the last copy from it)."""
        staging = int(self.hip("hipHostMalloc", CHUNK, 0))
        held.callback(self.hip, "hipHostFree", staging)
        event = self.hip("hipEventCreateWithFlags", self.hip.names.hipEventDisableTiming)
        held.callback(self.hip, "hipEventDestroy", event)
        return staging, event

    def _send(self, staging: int, event, target: int, count: int) -> None:
        hip = self.hip
        hip("hipMemcpyAsync", target, staging, count, hip.names.hipMemcpyKind.hipMemcpyHostToDevice, self.stream)
        hip("hipEventRecord", event, self.stream)
