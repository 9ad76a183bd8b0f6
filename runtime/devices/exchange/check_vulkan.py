"""A Vulkan GPU of a check (check.py)."""

import ctypes

import numpy as np

from mlc_amd.runtime.devices.exchange.check import FRAMES, Kernel, arguments
from mlc_amd.runtime.devices.exchange.vulkan import RelayedBoxes
from mlc_amd.runtime.devices.vulkan.commands import CommandRecorder, VulkanLaunch
from mlc_amd.runtime.devices.vulkan.context import Context
from mlc_amd.runtime.devices.vulkan.memory import VulkanMemory
from mlc_amd.runtime.devices.vulkan.pipelines import Pipelines


class CheckedVulkanGpu:
    """kernel.code: SPIR-V; parts: of this rank; push, subgroup: as of `Pipelines`."""

    def __init__(
        self,
        context: Context,
        boxes: RelayedBoxes,
        rank: int,
        kernel: Kernel,
        parts: np.ndarray,
        push: int,
        subgroup: int,
    ):
        self.context, self.name, self._nbytes = context, context.gpu.name, kernel.values * 4
        self._memory = VulkanMemory(context)
        frames, self._sums = (self._memory.block(count * self._nbytes, "device") for count in (FRAMES, 2))
        self._memory.fill([self._sums])
        self._memory.put(frames, 0, parts.reshape(-1).view(np.uint8))
        builder = Pipelines(context, push, subgroup)
        pipeline = builder.build({"exchange": (kernel.code, kernel.block)})["exchange"]
        recorder = CommandRecorder(context, builder.layout)
        recorder.begin()
        written = ((self._sums.address, self._sums.address + self._sums.nbytes, True),)  # so one waits for another
        for addresses in arguments(kernel, frames.address, self._sums.address, boxes.arguments(rank)):
            values = (ctypes.c_uint64 * len(addresses))(*addresses)
            recorder.launch(VulkanLaunch("exchange", pipeline, kernel.grid, values, written))
        self._submission = recorder.end()

    def begin(self) -> None:
        self.context.submit(self._submission)

    def wait(self) -> None:
        self.context.wait()

    def sums(self) -> np.ndarray:
        return np.frombuffer(self._memory.get(self._sums, 0, self._nbytes), np.float32)
