"""Copies activations between this GPU's arena and the host memory (`Handover`) through which GPUs that share a model
exchange them (runtime/devices/staged.py, tensor.py). Other devices copy nothing.

Large copies go to separate queues where the GPU has them, so that another run can compute at the same time."""

import ctypes
from collections.abc import Mapping, Sequence

from mlc_amd.runtime.devices.handover import Handover, is_large, spans
from mlc_amd.runtime.devices.vulkan.commands import CommandRecorder
from mlc_amd.runtime.devices.vulkan.context import Context, Queue, together
from mlc_amd.runtime.devices.vulkan.memory import MemoryBlock, VulkanMemory


class Carried:
    """The copies of the functions of a manifest. arena: the block of the arena. parts: the parts of the `Handover`s
    before and after this GPU that the next run uses."""

    def __init__(self, context: Context, memory: VulkanMemory, arena: MemoryBlock, functions: Mapping[str, Mapping]):
        self._context, self._memory, self._arena, self._functions = context, memory, arena, functions
        self._blocks: dict[str, list[MemoryBlock]] = {"receives": [], "sends": []}
        self._copies: dict[tuple[str, str, int], list[ctypes.Structure]] = {}
        self._kept: list[ctypes.Structure] = []  # submissions that arrays refer to, which must stay alive
        self._semaphores: dict[tuple[str, int], int] = {}  # (direction, part): semaphore between two queues
        self.parts: tuple[int, int] = (0, 0)

    def connect(self, before: Handover | None, after: Handover | None) -> None:
        for key, one in (("receives", before), ("sends", after)):
            if one:
                self._context.held.callback(lambda used: None, one)  # keeps it alive longer than the imported blocks
                self._blocks[key] = [self._memory.imported(address, one.nbytes) for address in one.addresses]

    def received(self, name: str) -> list[ctypes.Structure]:
        """The submissions before a function's launches: they copy what it receives."""
        return self._copied(name, "receives", self.parts[0])

    def sent(self, name: str) -> list[ctypes.Structure]:
        """The submissions after a function's launches: they copy what it sends."""
        return self._copied(name, "sends", self.parts[1])

    def around(self, name: str, launches: ctypes.Structure) -> list[tuple[int, ctypes.Array]]:
        """A whole run, for `Context.enqueue_together`: the copies that it receives, its launches (a submission), and
        the copies that it sends."""
        function, context = self._functions[name], self._context
        found: list[tuple[int, ctypes.Array]] = []
        main, waits, signals = {"receives": [], "sends": []}, [], []
        for i, (key, part) in enumerate(zip(main, self.parts, strict=True)):
            if not (context.copies and is_large(function, key)):
                main[key] = self._copied(name, key, part)
                continue
            if key == "receives":
                main[key] = self._own(name)
            semaphore = self._semaphore(key, part)
            (waits, signals)[i].append(semaphore)
            ends = ((), (semaphore,)) if key == "receives" else ((semaphore,), ())
            copy = self._record(name, key, part, context.copies[i], *ends)
            found.append((context.copies[i].handle, together([copy])))
            self._kept.append(copy)
        if waits or signals:
            launches = context.submission(launches.handles[0], waits, signals)
            self._kept.append(launches)
        computed = context.queue, together([*main["receives"], launches, *main["sends"]])
        found.insert(len(waits), computed)
        return found

    def _semaphore(self, key: str, part: int) -> int:
        if (key, part) not in self._semaphores:
            self._semaphores[key, part] = self._context.semaphore()
        return self._semaphores[key, part]

    def _copied(self, name: str, key: str, part: int) -> list[ctypes.Structure]:
        if not self._functions[name].get(key, ()):
            return []
        if (name, key, part) not in self._copies:
            own = self._own(name) if key == "receives" else []
            self._copies[name, key, part] = [*own, self._record(name, key, part)]
        return self._copies[name, key, part]

    def _own(self, name: str) -> list[ctypes.Structure]:
        """The copy, within the arena, of the part that this GPU computed itself to its place among those received."""
        if "own" not in (function := self._functions[name]):
            return []
        source, target, count = function["own"]
        recorder = CommandRecorder(self._context, 0)
        recorder.begin()
        recorder.copy(self._arena, source, self._arena, target, count)
        self._kept.append(recorder.end())
        return self._kept[-1:]

    def _record(
        self,
        name: str,
        key: str,
        part: int,
        queue: Queue | None = None,
        waits: Sequence[int] = (),
        signals: Sequence[int] = (),
    ) -> ctypes.Structure:
        function, host = self._functions[name], self._blocks[key][part]
        recorder = CommandRecorder(self._context, 0, queue=queue)
        recorder.begin()
        for first, end, at in spans(function, key):
            places = (host, at), (self._arena, first)
            (source, target) = places if key == "receives" else places[::-1]
            recorder.copy(*source, *target, end - first)
        return recorder.end(waits, signals)
