"""What a stage's functions take over from the GPU before, and hand over to the next one: bytes of the arena, through
memory of the host. Only devices that are a stage of several have any (runtime/devices/staged.py)."""

from collections.abc import Mapping

import numpy as np

from mlc_amd.runtime.devices.placement import carried_bytes
from mlc_amd.runtime.devices.vulkan.commands import CommandRecorder
from mlc_amd.runtime.devices.vulkan.memory import ALIGN, MemoryBlock, VulkanMemory


class Carried:
    """Of the functions of a manifest; arena: where their launches find what they receive."""

    def __init__(self, memory: VulkanMemory, arena: MemoryBlock, functions: Mapping[str, Mapping]):
        self._memory, self._arena = memory, arena

        def block(key: str, kind: str) -> MemoryBlock:
            most = max((carried_bytes(function.get(key, ())) for function in functions.values()), default=0)
            return memory.block(max(most, ALIGN), kind)

        self._received, self._sent = block("receives", "staging"), block("sends", "output")

    def record_received(self, recorder: CommandRecorder, function: Mapping) -> None:
        at = 0
        for first, end in function.get("receives", ()):
            recorder.copy(self._received, at, self._arena, first, end - first)
            at += end - first

    def record_sent(self, recorder: CommandRecorder, function: Mapping) -> None:
        at = 0
        for first, end in function.get("sends", ()):
            recorder.copy(self._arena, first, self._sent, at, end - first)
            at += end - first

    def receive(self, data: np.ndarray) -> None:
        """uint8: what the next run of a function receives."""
        self._received.view(0, np.uint8, (len(data),))[:] = data

    def sent(self, function: Mapping) -> np.ndarray:
        """uint8: what the last run of that function has sent; valid until the next run."""
        self._memory.invalidate(self._sent)
        return self._sent.view(0, np.uint8, (carried_bytes(function.get("sends", ())),))
