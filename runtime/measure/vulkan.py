"""Measures on a GPU through Vulkan. Calls are recorded with barriers between them; the queue's own clock times them."""

import ctypes
from contextlib import ExitStack

import numpy as np

from mlc_amd.runtime.devices.vulkan import api, timing
from mlc_amd.runtime.devices.vulkan.commands import CommandRecorder, VulkanLaunch, prepare
from mlc_amd.runtime.devices.vulkan.context import Context
from mlc_amd.runtime.devices.vulkan.gpu import Instance, choose
from mlc_amd.runtime.devices.vulkan.memory import ALIGN, VulkanMemory
from mlc_amd.runtime.devices.vulkan.pipelines import Pipelines
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import last_level_cache

CACHE = 512 << 20  # bytes to rotate over: more than the largest last-level cache of a GPU (256 MiB)
SHARE = 8  # at most 1 / SHARE of the GPU's memory
TABLES = 1 << 20  # bytes of a block that holds tables of addresses


class _Marks(CommandRecorder):
    """A recorder that writes timestamps only at `mark`."""

    def stamp(self) -> None:
        """Does nothing: launches get no timestamps."""

    def mark(self) -> None:
        super().stamp()


class VulkanBackend:
    """The backend for Vulkan; see `timing.py`. device: a GPU's number or part of its name, or None."""

    noise = 0.0  # noise is unknown: other programs on the GPU show as drift

    def __init__(self, device: str | None, candidate):
        self._held, self._group = ExitStack(), ExitStack()  # open until the end, until the next group
        self._needs = candidate.facts["needs"]
        self.instance = Instance()
        self._held.callback(self.instance.close)
        try:
            self.gpu, _ = choose(self.instance.gpus, {candidate.facts["arch"]: self._needs}, device)
            if self.gpu.queue is None or not self.gpu.queue[1]:
                raise UserError(f"{self.gpu.name} cannot time kernels: its driver has no timestamps for compute queues")
        except UserError:
            self._held.close()
            raise
        self.name = self.gpu.name
        self.facts = {"device": self.gpu.name, "driver": self.gpu.driver}
        heaps = [heap.free for heap in self.gpu.heaps if self.gpu.unified or heap.device_local]
        self.cache = 2 * last_level_cache() if self.gpu.type == "cpu" else min(CACHE, max(heaps) // SHARE)
        self.target = 0.05 if self.gpu.type == "cpu" else 0.004

    def open(self, sizes: dict) -> None:
        self._group.close()
        self.context = Context(self.instance, self.gpu, self._group)
        self.memory = VulkanMemory(self.context)
        self._found, blocks = self.memory.spread(sizes, "device")
        self.memory.fill(blocks)
        self._sizes, self._tables, self._tables_end = sizes, None, 0
        self._recorded, self._recorded_of = None, None
        self._pipelines = Pipelines(self.context, self._needs["push_constants"], self._needs["subgroup_size"])
        self._queries = timing.query_pool(self.context, 2)

    def put(self, key, array: np.ndarray) -> None:
        self.context.wait()
        self.memory.put(*self._found[key], np.ascontiguousarray(array))

    def get(self, key, nbytes: int) -> bytes:
        return self.memory.get(*self._found[key], nbytes)

    def load(self, candidates) -> list:
        kernels = [self._modules(candidate) for candidate in candidates]
        try:
            together = {(i, symbol): module for i, modules in enumerate(kernels) for symbol, module in modules.items()}
            made = self._pipelines.build(together)
            return [{symbol: made[i, symbol] for symbol in modules} for i, modules in enumerate(kernels)]
        except api.VulkanError:  # one candidate fails: the others are used
            return [self._load(modules) for modules in kernels]

    def _load(self, modules: dict):
        try:
            return self._pipelines.build(modules)
        except api.VulkanError as e:
            return e

    def _modules(self, candidate) -> dict:
        code, modules = memoryview(candidate.code.read_bytes()), {}
        for step in candidate.steps:
            offset, nbytes = step["code"]
            modules[step["symbol"]] = bytes(code[offset : offset + nbytes]), tuple(step["block"])
        return modules

    def bind(self, handle, candidate, keys) -> list[VulkanLaunch]:
        spans = []
        for key in keys:
            block, offset = self._found[key]
            spans.append((block.address + offset, block.address + offset + self._sizes[key]))
        return [self._launch(handle, step, [spans[i] for i in step["args"]]) for step in candidate.steps]

    def _launch(self, handle, step: dict, spans) -> VulkanLaunch:
        if any(count > most for count, most in zip(step["grid"], self.gpu.limits["groups"], strict=True)):
            raise ValueError(f"{self.gpu.name} cannot launch {step['grid']} workgroups")
        table = self._table([begin for begin, _ in spans]) if step["table"] else None
        return prepare(step["symbol"], handle[step["symbol"]], step, spans, table)

    def _table(self, addresses: list[int]) -> int:
        """The address of a table of addresses, which is written to a free place of a block."""
        values = np.array(addresses, np.uint64).view(np.uint8)
        if self._tables is None or self._tables_end + values.nbytes > TABLES:
            self._tables, self._tables_end = self.memory.block(TABLES, "device"), 0
        self.context.wait()
        place = self._tables_end
        self.memory.put(self._tables, place, values)
        self._tables_end += -(-values.nbytes // ALIGN) * ALIGN
        return self._tables.address + place

    def run(self, calls) -> float:
        # recording takes longer than small kernels run, and clocks would fall while the GPU waits
        made_of = [id(call) for call in calls]
        if made_of != self._recorded_of:
            self._recorded_of, self._calls = made_of, calls  # keeps the calls alive, so that their ids stay unique
            self._recorded = self._record(calls)
        assert self._recorded is not None  # with the calls
        self.context.run(self._recorded)
        return timing.seconds(self.context, *timing.results(self.context, self._queries, 2))

    def _record(self, calls) -> ctypes.Structure:
        """Records the calls between two timestamps, in place of the last recording. Returns what is submitted."""
        if self._recorded:
            self.context.release(self._recorded)
        recorder = _Marks(self.context, self._pipelines.layout, (self._queries, 0, 2))
        recorder.begin()
        recorder.mark()
        for launches in calls:
            for launch in launches:
                recorder.launch(launch)
            recorder.barrier()  # in a model, the next kernel reads what this one wrote
        recorder.mark()
        return recorder.end()

    def close(self) -> None:
        self._group.close()
        self._held.close()
