"""The memory of a Vulkan device. A block is a Vulkan buffer with memory of its own, which kernels access by address.

`VulkanMemory.block` allocates a block, of a kind of KINDS, within the limits of heaps and drivers. `spread` allocates
blocks for many buffers, none of which is divided between blocks. `imported` makes a block of existing host memory.
`load`, `put`, `scatter` and `fill` write to blocks, `get` and `gather` read them. `shared` returns host memory from
which `scatter` needs no copy.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mlc_amd.runtime.devices.placement import CHUNK
from mlc_amd.runtime.devices.vulkan import api
from mlc_amd.runtime.devices.vulkan.context import Context
from mlc_amd.runtime.devices.vulkan.gpu import HOST_MEMORY
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import HOST_PART, RESERVE, available_memory

ALIGN = 256  # bytes: alignment of the buffers in a block
# Bytes of a block of `spread`, unless a single buffer is larger: a larger block may not fit into two half-empty heaps.
BLOCK = 1 << 30
MAPPED = api.HOST_VISIBLE | api.HOST_COHERENT


class MemoryFlags(NamedTuple):
    """A condition on a memory type: the property flags that it must have, and those that it must not have."""

    flags: int
    without: int = 0


# For each kind of block: (the memory types for GPUs with memory of their own, those for unified GPUs), the best first.
# The device-local memory of a unified GPU may be a carve-out that is too small; other memory is as fast. "host" is for
# data that only the GPU reads, across the bus: memory that the CPU does not cache is best, as reads then snoop no
# caches.
ANYWHERE, LOCAL = MemoryFlags(MAPPED), MemoryFlags(api.DEVICE_LOCAL | MAPPED)
FOR_READING = (MemoryFlags(MAPPED | api.HOST_CACHED), MemoryFlags(api.HOST_VISIBLE | api.HOST_CACHED), ANYWHERE)
FOR_GPU = (MemoryFlags(MAPPED, api.DEVICE_LOCAL | api.HOST_CACHED), MemoryFlags(MAPPED, api.DEVICE_LOCAL))
# For data that GPUs exchange while kernels run. AMD GPUs must not cache it: their L2 is not coherent with the host and
# other devices.
INBOX, OUTBOX = api.DEVICE_LOCAL | MAPPED, MAPPED | api.HOST_CACHED
FOR_EXCHANGE = [tuple(MemoryFlags(flags | more) for more in (api.UNCACHED, 0)) for flags in (INBOX, OUTBOX)]
KINDS: dict[str, tuple[tuple[MemoryFlags, ...], tuple[MemoryFlags, ...]]] = {
    "device": ((MemoryFlags(api.DEVICE_LOCAL),), (LOCAL, ANYWHERE)),
    "host": (FOR_GPU, (LOCAL, ANYWHERE)),
    "input": ((LOCAL, ANYWHERE), (LOCAL, ANYWHERE)),
    "output": (FOR_READING, FOR_READING),
    "inbox": (FOR_EXCHANGE[0], FOR_EXCHANGE[0]),
    "outbox": (FOR_EXCHANGE[1], FOR_EXCHANGE[1]),
    "staging": ((ANYWHERE,), (ANYWHERE,)),
}
KNOWN_FLAGS = 0xF  # memory types with other flags are slow, or need a feature: used only for `MemoryFlags` with these


class OutOfMemory(RuntimeError):
    """An allocation failed. nbytes: its size; kind: a key of KINDS."""

    def __init__(self, nbytes: int, kind: str):
        super().__init__(f"cannot allocate {nbytes} bytes of {kind} memory")
        self.nbytes, self.kind = nbytes, kind


@dataclass(frozen=True)
class MemoryBlock:
    """A buffer with its memory. buffer, memory: handles. address: for kernels. host: the address at which it is mapped,
    or None. flags: the property flags of its memory type."""

    buffer: int
    memory: int
    nbytes: int
    address: int
    host: int | None
    flags: int

    @property
    def mapped(self) -> int:
        """`host` of a block that must be mapped."""
        assert self.host is not None, "this block is not mapped"
        return self.host

    def view(self, offset: int, dtype, shape) -> np.ndarray:
        """A range of a mapped block as an array. offset: in bytes."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        raw = (ctypes.c_uint8 * nbytes).from_address(self.mapped + offset)
        return np.ctypeslib.as_array(raw).view(dtype).reshape(shape)


BlockPart = tuple[MemoryBlock, int, int]  # a block, an offset in it, a number of bytes


def places(sizes: dict, limit: int) -> tuple[dict, list[int]]:
    """Lays out buffers in blocks of at most `limit` bytes (or more, for a single buffer that is larger). sizes: {name:
    bytes}. Returns ({name: (number of the block, offset)}, bytes of each block)."""
    found, blocks = {}, [0]
    for name, nbytes in sizes.items():
        nbytes = -(-max(nbytes, 1) // ALIGN) * ALIGN
        if blocks[-1] and blocks[-1] + nbytes > limit:
            blocks.append(0)
        found[name] = len(blocks) - 1, blocks[-1]
        blocks[-1] += nbytes
    return found, [max(nbytes, ALIGN) for nbytes in blocks]


class VulkanMemory:
    """See the module's docstring. Blocks live until the context's `held` closes."""

    def __init__(self, context: Context):
        self.context, self.gpu = context, context.gpu
        self.limit = min(self.gpu.limits["allocation"], self.gpu.limits["buffer"])
        self._used = [0] * len(self.gpu.heaps)
        self._staging: list[tuple[MemoryBlock, int]] = []  # (block, command buffer that copies from it)
        self._read: MemoryBlock | None = None
        self._written: MemoryBlock | None = None
        self._shared: list[tuple[MemoryBlock, np.ndarray]] = []

    def free(self) -> list[int]:
        """The bytes of each heap that this process may still allocate."""
        found = self.context.instance.budget(self.context.physical, self.context.budget)[1]
        return found if self.context.budget else [size - used for size, used in zip(found, self._used, strict=True)]

    def left(self) -> int:
        """The bytes that a KV cache of size "auto" may take: what is free in the device-local heap with most free but
        for RESERVE; on a unified GPU in all heaps but for RESERVE, at most 1/HOST_PART of the available memory."""
        local = [free for heap, free in zip(self.gpu.heaps, self.free(), strict=True) if heap.device_local]
        if not self.gpu.unified:
            return max(local) - RESERVE
        return min(sum(self.free()) - RESERVE, available_memory() // HOST_PART)

    def block(self, nbytes: int, kind: str) -> MemoryBlock:
        """A new block of at least `nbytes` bytes. kind: a key of KINDS. Raises OutOfMemory if it fits into no heap."""
        context, calls, device = self.context, self.context.calls, self.context.device
        nbytes = -(-nbytes // ALIGN) * ALIGN
        free = self.free()
        if nbytes > self.limit:
            raise OutOfMemory(nbytes, kind)
        info = api.BufferInfo(size=nbytes, usage=api.USAGE, **context.sharing)
        buffer = context.own("vkDestroyBuffer", context.create("vkCreateBuffer", info))
        needs = api.MemoryRequirements()
        calls.vkGetBufferMemoryRequirements(device, buffer, ctypes.byref(needs))
        flags = api.AllocateFlagsInfo(flags=api.ALLOCATE_DEVICE_ADDRESS)
        for index in self._types(KINDS[kind][self.gpu.unified], needs.memoryTypeBits):
            kind_flags, heap = self.gpu.memory[index]
            if free[heap] < needs.size:
                continue
            info = api.AllocateInfo(next=flags, allocationSize=needs.size, memoryTypeIndex=index)
            try:
                memory = context.own("vkFreeMemory", context.create("vkAllocateMemory", info))
            except api.VulkanError as e:
                if e.code not in api.NO_MEMORY:
                    raise
                continue
            self._used[heap] += needs.size
            calls.vkBindBufferMemory(device, buffer, memory, 0)
            return self._bound(buffer, memory, nbytes, kind_flags, kind != "device" or self.gpu.unified)
        raise OutOfMemory(nbytes, kind)

    def imported(self, address: int, nbytes: int) -> MemoryBlock:
        """A block in existing host memory: whole pages, which must outlive the block. Raises UserError if the driver
        cannot import host memory."""
        context, kind = self.context, api.HOST_ALLOCATION
        if HOST_MEMORY not in self.gpu.extensions:
            raise UserError(f"{self.gpu.driver} cannot share memory between GPUs: it lacks {HOST_MEMORY}; update it")
        calls = api.Calls(lambda name: context.instance.calls.vkGetDeviceProcAddr(context.device, name), api.IMPORT)
        buffer = api.BufferInfo(
            next=api.ExternalBuffer(handleTypes=kind), size=nbytes, usage=api.USAGE, **context.sharing
        )
        buffer = context.own("vkDestroyBuffer", context.create("vkCreateBuffer", buffer))
        found, needs = api.HostProperties(), api.MemoryRequirements()
        calls.vkGetMemoryHostPointerPropertiesEXT(context.device, kind, address, ctypes.byref(found))
        context.calls.vkGetBufferMemoryRequirements(context.device, buffer, ctypes.byref(needs))
        index = self._types(FOR_READING, found.memoryTypeBits & needs.memoryTypeBits)[0]
        host = api.ImportedHost(handleType=kind, address=address)
        flags = api.AllocateFlagsInfo(next=host, flags=api.ALLOCATE_DEVICE_ADDRESS)
        info = api.AllocateInfo(next=flags, allocationSize=nbytes, memoryTypeIndex=index)
        memory = context.own("vkFreeMemory", context.create("vkAllocateMemory", info))
        context.calls.vkBindBufferMemory(context.device, buffer, memory, 0)
        return self._bound(buffer, memory, nbytes, self.gpu.memory[index][0], mapped=False)

    def _types(self, wanted: tuple[MemoryFlags, ...], allowed: int) -> list[int]:
        """The indices of the memory types that meet one of the conditions, in the order of the conditions. allowed: a
        bit mask of memory types."""
        possible = [i for i in range(len(self.gpu.memory)) if allowed >> i & 1]
        kinds = [(i, self.gpu.memory[i][0]) for i in possible]
        found = (i for of in wanted for i, flags in kinds if flags & (of.flags | of.without | ~KNOWN_FLAGS) == of.flags)
        return list(dict.fromkeys(found))

    def _bound(self, buffer: int, memory: int, nbytes: int, flags: int, mapped: bool) -> MemoryBlock:
        calls, device, host = self.context.calls, self.context.device, None
        if mapped and flags & api.HOST_VISIBLE:
            host = api.create(calls.vkMapMemory, device, memory, 0, api.FOREVER, 0, kind=ctypes.c_void_p)  # all of it
        address = calls.vkGetBufferDeviceAddress(device, ctypes.byref(api.AddressInfo(buffer=buffer)))
        return MemoryBlock(buffer, memory, nbytes, address, host, flags)

    def spread(self, sizes: dict, kind: str) -> tuple[dict[Any, tuple[MemoryBlock, int]], list[MemoryBlock]]:
        """New blocks for buffers of these sizes. sizes: {name: bytes}. Returns ({name: (block, offset)}, blocks)."""
        found, block_sizes = places(sizes, min(BLOCK, self.limit))
        blocks = [self.block(nbytes, kind) for nbytes in block_sizes]
        return {name: (blocks[index], offset) for name, (index, offset) in found.items()}, blocks

    # ---- contents

    def fill(self, blocks: list[MemoryBlock]) -> None:
        """Zeros blocks. Each block is a submission of its own: one submission for a large cache would take too long."""
        for block in blocks:
            arguments = block.buffer, 0, block.nbytes, 0
            self.context.once(lambda commands, of=arguments: self.context.calls.vkCmdFillBuffer(commands, *of))

    def put(self, block: MemoryBlock, offset: int, source: np.ndarray) -> None:
        """Copies a uint8 array to a block. Later submissions see it."""
        for at in range(0, source.nbytes, CHUNK):
            chunk = source[at : at + CHUNK]
            self.load(block, offset + at, chunk.nbytes, lambda target, chunk=chunk: np.copyto(target, chunk))

    def load(self, block: MemoryBlock, offset: int, count: int, fill: Callable[[np.ndarray], None]) -> None:
        """Writes `count` bytes, at most CHUNK, to a block. `fill` must write them to the uint8 array that it gets."""
        if block.host is not None:
            fill(block.view(offset, np.uint8, (count,)))
            return
        if not self._staging:
            self._staging = [(self.block(CHUNK, "staging"), self.context.command_buffer()) for _ in range(2)]
        staging, commands = self._staging[0]
        self._staging.reverse()  # the next chunk uses the other block
        fill(staging.view(0, np.uint8, (count,)))  # meanwhile the GPU copies the chunk before
        self._copy(commands, staging, block, offset, count)

    def _copy(self, commands: int, source: MemoryBlock, target: MemoryBlock, offset: int, count: int) -> None:
        calls, region = self.context.calls, api.BufferCopy(0, offset, count)
        calls.vkBeginCommandBuffer(commands, ctypes.byref(api.BeginInfo()))
        calls.vkCmdCopyBuffer(commands, source.buffer, target.buffer, 1, ctypes.byref(region))
        calls.vkEndCommandBuffer(commands)
        self.context.submit(self.context.submission(commands))  # first waits for the copy before

    def get(self, block: MemoryBlock, offset: int, nbytes: int) -> bytes:
        """A copy of bytes of a block."""
        return self.gather([(block, offset, nbytes)])

    def gather(self, parts: Sequence[BlockPart]) -> bytes:
        """A copy of several parts of blocks, concatenated."""
        nbytes = sum(count for *_, count in parts)
        staging = self._read = self._at_least(self._read, nbytes, "output")

        def record(commands: int) -> None:
            everything = api.COMPUTE | api.TRANSFER
            written = api.SHADER_WRITE | api.TRANSFER_WRITE
            self.context.barrier(commands, (everything, api.TRANSFER), (written, api.TRANSFER_READ))
            for buffer, regions in _regions(parts).items():
                self._copy_regions(commands, buffer, staging.buffer, regions)
            self.context.barrier(commands, (api.TRANSFER, api.HOST), (api.TRANSFER_WRITE, api.HOST_READ))

        self.context.once(record)
        self.invalidate(staging)
        return ctypes.string_at(staging.mapped, nbytes)

    def scatter(self, parts: Sequence[BlockPart], source: np.ndarray) -> None:
        """Copies consecutive pieces of a uint8 array to parts of blocks. A source in memory of `shared` is copied by
        the GPU directly, any other source through staging memory."""
        if staging := next((block for block, memory in self._shared if np.may_share_memory(source, memory)), None):
            first = source.ctypes.data - staging.mapped
        else:
            staging, first = self._at_least(self._written, source.nbytes, "staging"), 0
            self._written = staging
            staging.view(0, np.uint8, (source.nbytes,))[:] = source

        def record(commands: int) -> None:
            for buffer, regions in _regions(parts).items():
                copies = [(first + at, to, count) for to, at, count in regions]
                self._copy_regions(commands, staging.buffer, buffer, copies)

        self.context.once(record)

    def shared(self, nbytes: int) -> np.ndarray:
        """New host memory, uint8 [nbytes]. The host reads and writes it fast; the GPU accesses it across the bus."""
        block = self.block(nbytes, "output")
        self._shared.append((block, memory := block.view(0, np.uint8, (nbytes,))))
        return memory

    def _copy_regions(self, commands: int, source: int, target: int, regions: Sequence[tuple[int, int, int]]) -> None:
        """Records copies between two buffers. regions: (offset in the source, offset in the target, bytes)."""
        array = np.array(regions, np.uint64)
        self.context.calls.vkCmdCopyBuffer(commands, source, target, len(array), array.ctypes.data)

    def _at_least(self, block: MemoryBlock | None, nbytes: int, kind: str) -> MemoryBlock:
        """`block`, or a new block if this has fewer than `nbytes` bytes."""
        return block if block and block.nbytes >= nbytes else self.block(1 << (nbytes - 1).bit_length(), kind)

    def invalidate(self, block: MemoryBlock) -> None:
        """To be called before the host reads what the GPU has written: has an effect on memory that is not coherent."""
        if not block.flags & api.HOST_COHERENT:
            one = api.MappedRange(memory=block.memory, offset=0, size=api.FOREVER)
            self.context.calls.vkInvalidateMappedMemoryRanges(self.context.device, 1, ctypes.byref(one))


def _regions(parts: Sequence[BlockPart]) -> dict[int, list[tuple[int, int, int]]]:
    """{buffer: [(offset in the buffer, offset in the concatenation of all parts, bytes)]}."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    at = 0
    for block, offset, count in parts:
        found.setdefault(block.buffer, []).append((offset, at, count))
        at += count
    return found
