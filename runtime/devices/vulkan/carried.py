"""What functions take over from other GPUs, and hand over to them: bytes of the arena, which this GPU copies from and
to memory of the host. Only GPUs that share a model have any (runtime/devices/staged.py, tensor.py)."""

import ctypes
from collections.abc import Mapping

from mlc_amd.runtime.devices.handover import Handover, spans
from mlc_amd.runtime.devices.vulkan.commands import CommandRecorder
from mlc_amd.runtime.devices.vulkan.context import Context
from mlc_amd.runtime.devices.vulkan.memory import MemoryBlock, VulkanMemory


class Carried:
    """Of the functions of a manifest; arena: where their launches find what they receive. parts: of the `Handover`s
    before and after this stage, which the next run uses."""

    def __init__(self, context: Context, memory: VulkanMemory, arena: MemoryBlock, functions: Mapping[str, Mapping]):
        self._context, self._memory, self._arena, self._functions = context, memory, arena, functions
        self._blocks: dict[str, list[MemoryBlock]] = {"receives": [], "sends": []}
        self._copies: dict[tuple[str, str, int], list[ctypes.Structure]] = {}
        self.parts: tuple[int, int] = (0, 0)

    def connect(self, before: Handover | None, after: Handover | None) -> None:
        for key, one in (("receives", before), ("sends", after)):
            if one:
                self._context.held.callback(lambda used: None, one)  # it lives longer than the blocks
                self._blocks[key] = [self._memory.imported(address, one.nbytes) for address in one.addresses]

    def received(self, name: str) -> list[ctypes.Structure]:
        """What to submit before a function's launches."""
        return self._copied(name, "receives", self.parts[0])

    def sent(self, name: str) -> list[ctypes.Structure]:
        """What to submit after them."""
        return self._copied(name, "sends", self.parts[1])

    def _copied(self, name: str, key: str, part: int) -> list[ctypes.Structure]:
        function = self._functions[name]
        if not function.get(key, ()):
            return []
        if (name, key, part) not in self._copies:
            host = self._blocks[key][part]
            recorder = CommandRecorder(self._context, 0)
            recorder.begin()
            for first, end, at in spans(function, key):
                places = (host, at), (self._arena, first)
                (source, target) = places if key == "receives" else places[::-1]
                recorder.copy(*source, *target, end - first)
            if key == "receives" and (own := function.get("own")):
                source, target, count = own
                recorder.copy(self._arena, source, self._arena, target, count)
            self._copies[name, key, part] = [recorder.end()]
        return self._copies[name, key, part]
