"""Records launches: each function of the plan becomes one command buffer, recorded once and replayed.

Barriers are recorded only at hazards: a launch reads or writes what an earlier one wrote, or writes what one reads.
Hazards are detected by address ranges; `CommandRecorder` keeps those accessed since the last barrier.
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
    push: ctypes.Array  # its push constants
    spans: tuple[tuple[int, int, bool], ...]  # (first byte, end, whether the kernel writes there) of its arguments
    symbol: str = ""  # of its kernel's module
    base: tuple[int, ...] | None = None  # the first workgroup, which pipelines for parts of a grid allow


def prepare(
    kernel: str, pipeline: int, step: dict, spans: Sequence[tuple[int, int]], table: int | None = None
) -> VulkanLaunch:
    """The launch of a step, as the manifest describes it. spans: (first byte, end) of its arguments; table: where their
    addresses are, if they do not fit the push constants."""
    begins = [begin for begin, _ in spans] if table is None else [table]
    touched = tuple((begin, end, place in step["writes"]) for place, (begin, end) in enumerate(spans))
    push = (ctypes.c_uint64 * len(begins))(*begins)
    return VulkanLaunch(kernel, pipeline, tuple(step["grid"]), push, touched, step["symbol"])


class Hazards:
    """The memory read and written since the last barrier."""

    def __init__(self):
        self._spans: list[tuple[int, int, bool]] = []

    def clash(self, spans) -> bool:
        """Whether a launch with these arguments must wait for those before it."""
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
    """Records into one command buffer. queries: (a pool of timestamps, the first one, their number); two are written
    for each launch: at the end of those before it, and at its own. queue: another one than that which computes."""

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
        self.barrier()  # the run before may still write its results

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
        """Between blocks, ordered with the launches like one of them."""
        first, copied = source.address + source_at, target.address + target_at
        spans = [(first, first + nbytes, False), (copied, copied + nbytes, True)]
        if self._hazards.clash(spans):
            self.barrier()
        self._hazards.add(spans)
        region = api.BufferCopy(source_at, target_at, nbytes)
        self.context.calls.vkCmdCopyBuffer(self.commands, source.buffer, target.buffer, 1, ctypes.byref(region))

    def end(self, waits: Sequence[int] = (), signals: Sequence[int] = ()) -> ctypes.Structure:
        """Ends recording; makes copies visible to the host. Returns the submission of what is recorded. waits, signals:
        semaphores before and after it."""
        self.context.barrier(self.commands, (self._work, api.HOST), (self._writes, api.HOST_READ))
        self.context.calls.vkEndCommandBuffer(self.commands)
        return self.context.submission(self.commands, waits, signals)
