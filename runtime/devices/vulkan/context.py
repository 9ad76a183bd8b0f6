"""A logical device on one of an Instance's GPUs: its queues, fences and command buffers. All objects are registered
with the ExitStack `held`, and destroyed in reverse order when it closes."""

import ctypes
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from mlc_amd.runtime.devices.vulkan import api
from mlc_amd.runtime.devices.vulkan.gpu import BUDGET, FEATURES, HOST_MEMORY, Instance, VulkanGpu, offered
from mlc_amd.runtime.devices.vulkan.reconvergence import MODES
from mlc_amd.runtime.errors import UserError

# The features that are enabled if the GPU has them; their extensions are in gpu.FEATURES.
ENABLED = {
    "shaderInt64", "shaderInt16", "storageBuffer16BitAccess", "storageBuffer8BitAccess", "shaderFloat16", "shaderInt8",
    "bufferDeviceAddress", "vulkanMemoryModel", "vulkanMemoryModelDeviceScope", "shaderIntegerDotProduct",
    "subgroupSizeControl",
    "computeFullSubgroups", "cooperativeMatrix", "deviceCoherentMemory", *MODES,
}  # fmt: skip
AHEAD = 2  # upper limit of the pending submissions with a fence
SLICE = 10**9  # ns of one wait; Python handles Ctrl-C between two waits
# Seconds for which the host polls before it sleeps. Waking up takes 50 to 150 us, a large part of the time of a token
# on a fast GPU. A unified GPU shares its power budget with the CPU, so polling would slow it down.
POLL, POLL_UNIFIED = 0.01, 0.0


class Queue(NamedTuple):
    """A queue. pool: its command pool; work: the pipeline stages that it has (VkPipelineStageFlags)."""

    handle: int
    pool: int
    work: int


class Context:
    """A logical device. copies (argument): whether to open two more queues, for copies at the same time as kernels.

    calls: the device's functions. device, queue, pool: handles. gpu: its description. family: index of the queue family
    that computes. clock_bits: valid bits of timestamps, 0 if there are none. copies: the queues for copies to the GPU
    and from it; empty without such. sharing: fields of BufferInfo for buffers that several queue families use.

    Only the thread that made it may use it, but where Vulkan allows several threads."""

    def __init__(self, instance: Instance, gpu: VulkanGpu, held: ExitStack, copies: bool = False):
        self.instance, self.gpu, self.held = instance, gpu, held
        self.physical = instance.handles[gpu.index]
        self.budget = BUDGET in gpu.extensions
        assert gpu.queue is not None, "gpu.missing accepts no GPU without a compute queue"
        self.family, self.clock_bits = gpu.queue
        further = gpu.copy_queues if copies else ()
        families = sorted({self.family, *(family for family, _ in further)})
        self._open({family: 1 + max((i for at, i in further if at == family), default=0) for family in families})
        self.queue, self.pool, _ = self._queue(self.family, 0)
        self.copies = [self._queue(*one) for one in further]
        self._families = (ctypes.c_uint32 * len(families))(*families)
        self.sharing: dict[str, int] = {}
        if len(families) > 1:  # CONCURRENT
            at = ctypes.addressof(self._families)
            self.sharing = {"sharing": 1, "familyCount": len(families), "families": at}
        fences = [self.own("vkDestroyFence", self.create("vkCreateFence", api.FenceInfo())) for _ in range(AHEAD)]
        self._free = [(ctypes.c_uint64 * 1)(fence) for fence in fences]
        self._running: deque[ctypes.Array] = deque()  # fences of pending submissions, the oldest first
        self._unfenced = False  # the last submission has no fence

    def _queue(self, family: int, number: int) -> Queue:
        handle = api.create(self.calls.vkGetDeviceQueue, self.device, family, number, kind=ctypes.c_void_p)
        # RESET_COMMAND_BUFFER: the command buffers for uploads are recorded again for each upload
        pool = self.create("vkCreateCommandPool", api.CommandPoolInfo(flags=2, family=family))
        work = api.COMPUTE | api.TRANSFER if family == self.family else api.TRANSFER
        return Queue(handle, self.own("vkDestroyCommandPool", pool), work)

    def _open(self, counts: Mapping[int, int]) -> None:
        """Creates the device. counts: {queue family: number of queues}. Raises UserError if the driver refuses."""
        gpu = self.gpu
        features = self.instance.features(self.physical, offered(FEATURES, gpu.api, gpu.extensions))
        for part in features:
            for name, kind, *_ in type(part)._fields_[2:]:
                if name not in ENABLED:
                    setattr(part, name, 0 if kind is ctypes.c_uint32 else kind())
        further = [name for since, name in FEATURES.values() if since is None or gpu.api < since]
        names = api.strings([name for name in (*further, BUDGET, HOST_MEMORY) if name in gpu.extensions])
        priorities = (ctypes.c_float * max(counts.values()))(*[1.0] * max(counts.values()))
        at = ctypes.addressof(priorities)
        queues = (api.QueueInfo * len(counts))(
            *(api.QueueInfo(family=family, count=count, priorities=at) for family, count in counts.items())
        )
        info = api.DeviceInfo(
            next=features[0],
            queueCount=len(queues),
            queues=ctypes.addressof(queues),
            extensionCount=len(names),
            extensions=ctypes.addressof(names),
        )
        calls = self.instance.calls
        try:
            self.device = api.create(
                calls.vkCreateDevice, self.physical, ctypes.byref(info), None, kind=ctypes.c_void_p
            )
        except api.VulkanError as e:
            raise UserError(
                f"{gpu.name} does not start ({e.code}); close other programs that use it, or update its driver"
            ) from e
        self.calls = api.Calls(lambda name: calls.vkGetDeviceProcAddr(self.device, name), api.DEVICE)
        self.held.callback(self.calls.vkDestroyDevice, self.device, None)
        self.idle_first()

    def create(self, name: str, info: ctypes.Structure) -> int:
        return api.create(getattr(self.calls, name), self.device, ctypes.byref(info), None)

    def own(self, release: str, handle: int) -> int:
        """Registers an object to be destroyed with the function `release`. Returns its handle."""
        self.held.callback(getattr(self.calls, release), self.device, handle, None)
        return handle

    def command_buffer(self, queue: Queue | None = None) -> int:
        """A new command buffer for a queue, by default the one that computes. It is freed with the queue's pool."""
        info = api.CommandBufferInfo(pool=queue.pool if queue else self.pool, level=0, count=1)
        return api.create(self.calls.vkAllocateCommandBuffers, self.device, ctypes.byref(info), kind=ctypes.c_void_p)

    def semaphore(self) -> int:
        """A new binary semaphore: each time one queue signals it, another queue must wait for it."""
        return self.own("vkDestroySemaphore", self.create("vkCreateSemaphore", api.SemaphoreInfo()))

    def submission(self, commands: int, waits: Sequence[int] = (), signals: Sequence[int] = ()) -> ctypes.Structure:
        """The argument of vkQueueSubmit for a command buffer. It may be submitted any number of times. waits, signals:
        the semaphores for which it waits, and which it signals."""
        handles = (ctypes.c_void_p * 1)(commands)
        before, after = ((ctypes.c_uint64 * len(ones))(*ones) for ones in (waits, signals))
        stages = (ctypes.c_uint32 * len(waits))(*[api.ALL_COMMANDS] * len(waits))
        info = api.SubmitInfo(
            waitCount=len(waits),
            waits=ctypes.addressof(before),
            waitStages=ctypes.addressof(stages),
            commandCount=1,
            commands=ctypes.addressof(handles),
            signalCount=len(signals),
            signals=ctypes.addressof(after),
        )
        info.handles, info.others = handles, (before, stages, after)  # live as long as the structure
        return info

    def release(self, submission: ctypes.Structure) -> None:
        """Frees the command buffer of a submission."""
        self.settle()
        self.calls.vkFreeCommandBuffers(self.device, self.pool, 1, submission.handles)

    @property
    def busy(self) -> bool:
        """Whether there are submissions that nobody has waited for."""
        return bool(self._running) or self._unfenced

    def submit(self, *submissions: ctypes.Structure) -> None:
        """Waits until the device is idle, then starts submissions, in order."""
        self.settle()
        self.enqueue(*submissions)

    def enqueue(self, *submissions: ctypes.Structure) -> None:
        """Starts submissions after those that are running, without waiting. Each call needs a `wait` of its own, in the
        same order. At most AHEAD calls may be pending."""
        self.enqueue_together([(self.queue, together(submissions))])

    def enqueue_together(self, parts: Sequence[tuple[int, ctypes.Array]]) -> None:
        """`enqueue` for several queues. parts: (queue, array of submissions to it), which semaphores order. One `wait`
        waits for the last of them. The arrays may be used any number of times."""
        *before, (queue, last) = parts
        for handle, submissions in before:
            self.calls.vkQueueSubmit(handle, len(submissions), submissions, 0)
        self._running.append(self._free.pop())
        self.calls.vkQueueSubmit(queue, len(last), last, self._running[-1][0])
        self._unfenced = False

    def enqueue_unfenced(self, *submissions: ctypes.Structure) -> None:
        """Starts submissions after those that are running. They have no `wait`: that of the next `enqueue`, or
        `settle`, waits for them, too."""
        self._unfenced = True
        self.calls.vkQueueSubmit(self.queue, len(submissions), together(submissions), 0)

    def settle(self) -> None:
        """Waits until the device is idle."""
        if self.busy:
            self.calls.vkDeviceWaitIdle(self.device)
            self._unfenced = False
            while self._running:
                self._release()

    def _release(self) -> None:
        """Frees the oldest fence for another submission."""
        fence = self._running.popleft()
        self.calls.vkResetFences(self.device, 1, fence)
        self._free.append(fence)

    def done(self) -> bool:
        """Whether the oldest pending `enqueue` is done."""
        return self.calls.vkWaitForFences(self.device, 1, self._running[0], 1, 0) != api.TIMEOUT

    def wait(self) -> None:
        """Waits for the oldest pending `enqueue`, if there is one."""
        if not self._running:
            return
        calls, device, fence = self.calls, self.device, self._running[0]
        timeout, until = 0, time.perf_counter() + (POLL_UNIFIED if self.gpu.unified else POLL)
        while calls.vkWaitForFences(device, 1, fence, 1, timeout) == api.TIMEOUT:
            if not timeout and time.perf_counter() > until:
                timeout = SLICE
        self._release()

    def run(self, submission: ctypes.Structure) -> None:
        """Submits `submission` and waits for it."""
        self.submit(submission)
        self.wait()

    def idle_first(self) -> None:
        """When `held` closes, waits for the GPU before it releases what is registered so far."""
        self.held.callback(_idle, self.calls, self.device)

    def once(self, record) -> None:
        """Records commands with `record(command buffer)`, runs them and waits."""
        commands = self.command_buffer()
        submission = self.submission(commands)
        try:
            self.calls.vkBeginCommandBuffer(commands, ctypes.byref(api.BeginInfo(flags=1)))  # ONE_TIME_SUBMIT
            record(commands)
            self.calls.vkEndCommandBuffer(commands)
            self.run(submission)
        finally:
            if not self.busy:
                self.release(submission)

    def barrier(self, commands: int, stages: tuple[int, int], access: tuple[int, int]) -> None:
        """Records a memory barrier: later commands in stages[1] wait for earlier ones in stages[0]; access[1] sees what
        access[0] wrote."""
        one = api.MemoryBarrier(source=access[0], destination=access[1])
        self.calls.vkCmdPipelineBarrier(commands, *stages, 0, 1, ctypes.byref(one), 0, None, 0, None)


def together(submissions: Sequence[ctypes.Structure]) -> ctypes.Array:
    """The submissions as one array for vkQueueSubmit. They must outlive the array."""
    return (api.SubmitInfo * len(submissions))(*submissions)


def _idle(calls: api.Calls, device: int) -> None:
    """Waits until the device is idle. A lost device counts as idle."""
    try:
        calls.vkDeviceWaitIdle(device)
    except api.VulkanError as e:
        if e.code != api.DEVICE_LOST:
            raise
