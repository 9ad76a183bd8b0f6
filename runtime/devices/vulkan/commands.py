"""Records launches and copies into a command buffer.

In: launches with the address ranges that they read and write. Out: a submission, which may be submitted any number of
times. A barrier is recorded only at a hazard: before a launch that reads or writes a range that was written since the
last barrier, or that writes a range that was read since.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from mlc_amd.runtime.devices.vulkan import api
from mlc_amd.runtime.devices.vulkan.context import Context, Queue


@dataclass(frozen=True)
class VulkanLaunch:
    """One dispatch."""

    kernel: str
    pipeline: int
    grid: tuple[int, ...]
    push: ctypes.Array  # push constants: the addresses of the arguments, or of a table of them
    spans: tuple[tuple[int, int, bool], ...]  # (address, end, whether the kernel writes it) of each argument
    symbol: str = ""  # name of the kernel's module
    base: tuple[int, ...] | None = None  # the first workgroup; needs a pipeline of `BasedPipelines`


def prepare(
    kernel: str, pipeline: int, step: dict, spans: Sequence[tuple[int, int]], table: int | None = None
) -> VulkanLaunch:
    """The dispatch of an entry of the manifest's `steps`. spans: (address, end) of each argument. table: the address of
    a table of the arguments' addresses, for kernels with more arguments than push constants can hold."""
    begins = [begin for begin, _ in spans] if table is None else [table]
    touched = tuple((begin, end, place in step["writes"]) for place, (begin, end) in enumerate(spans))
    push = (ctypes.c_uint64 * len(begins))(*begins)
    return VulkanLaunch(kernel, pipeline, tuple(step["grid"]), push, touched, step["symbol"])


class Hazards:
    """The address ranges that were read and written since the last barrier."""

    def __init__(self):
        self._spans: list[tuple[int, int, bool]] = []

    def clash(self, spans) -> bool:
        """Whether a launch with these spans needs a barrier before it."""
        return any(
            (writes or wrote) and begin < other_end and other < end
            for begin, end, writes in spans
            for other, other_end, wrote in self._spans
        )

    def add(self, spans) -> None:
        self._spans.extend(spans)

    def clear(self) -> None:
        self._spans.clear()


class CommandRecorder:
    """Records one command buffer. layout: of the pipelines. queries: (query pool, first query, number of queries) for
    two timestamps around each launch: at the end of the launches before it, and at its own end. queue: by default the
    queue that computes."""

    def __init__(
        self,
        context: Context,
        layout: int,
        queries: tuple[int, int, int] | None = None,
        queue: Queue | None = None,
    ):
        self.context, self.layout, self.queries = context, layout, queries
        self._work = queue.work if queue else api.COMPUTE | api.TRANSFER
        computes = self._work & api.COMPUTE
        self._reads = api.TRANSFER_READ | (api.SHADER_READ if computes else 0)
        self._writes = api.TRANSFER_WRITE | (api.SHADER_WRITE if computes else 0)
        self.commands = context.command_buffer(queue)
        self._hazards, self._bound, self._stamps = Hazards(), None, queries[1] if queries else 0
        self._after = api.MemoryBarrier(source=self._writes, destination=self._reads | self._writes)

    def begin(self) -> None:
        self.context.calls.vkBeginCommandBuffer(self.commands, ctypes.byref(api.BeginInfo()))
        if self.queries is not None:
            self.context.calls.vkCmdResetQueryPool(self.commands, *self.queries)
        self.barrier()  # launches of an earlier submission may still be writing

    def barrier(self) -> None:
        self._hazards.clear()
        self.context.calls.vkCmdPipelineBarrier(
            self.commands, self._work, self._work, 0, 1, ctypes.byref(self._after), 0, None, 0, None
        )

    def launch(self, one: VulkanLaunch) -> None:
        calls, commands = self.context.calls, self.commands
        if self._hazards.clash(one.spans):
            self.barrier()
        self._hazards.add(one.spans)
        if self._bound != one.pipeline:
            calls.vkCmdBindPipeline(commands, api.BIND_COMPUTE, one.pipeline)
            self._bound = one.pipeline
        calls.vkCmdPushConstants(commands, self.layout, api.STAGE_COMPUTE, 0, ctypes.sizeof(one.push), one.push)
        self.stamp()
        if one.base is None:
            calls.vkCmdDispatch(commands, *one.grid)
        else:
            calls.vkCmdDispatchBase(commands, *one.base, *one.grid)
        self.stamp()

    def stamp(self) -> None:
        if self.queries is not None:
            self.context.calls.vkCmdWriteTimestamp(self.commands, api.BOTTOM, self.queries[0], self._stamps)
            self._stamps += 1

    def copy(self, source, source_at: int, target, target_at: int, nbytes: int) -> None:
        """Records a copy of bytes between two blocks. Barriers order it with launches as if it were one."""
        first, copied = source.address + source_at, target.address + target_at
        spans = [(first, first + nbytes, False), (copied, copied + nbytes, True)]
        if self._hazards.clash(spans):
            self.barrier()
        self._hazards.add(spans)
        region = api.BufferCopy(source_at, target_at, nbytes)
        self.context.calls.vkCmdCopyBuffer(self.commands, source.buffer, target.buffer, 1, ctypes.byref(region))

    def end(self, waits: Sequence[int] = (), signals: Sequence[int] = ()) -> ctypes.Structure:
        """Ends the recording, with a barrier that makes copies visible to the host. Returns the submission. waits,
        signals: the semaphores for which it waits, and which it signals."""
        self.context.barrier(self.commands, (self._work, api.HOST), (self._writes, api.HOST_READ))
        self.context.calls.vkEndCommandBuffer(self.commands)
        return self.context.submission(self.commands, waits, signals)
