"""Runs of functions on a HIP stream: the hooks of a `RunQueue`.

The stream orders all copies and launches on the GPU, so runs need no further synchronization there. It does not order
accesses of the host. So each run has a slot of pinned memory. Its inputs are copied to the slot before they are copied
to the GPU: the host can write the next inputs as soon as the run is enqueued. Its small results are copied to the slot,
followed by an event: the host can read them even when a later run has overwritten them on the GPU.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from mlc_amd.runtime.devices.hip.api import NO_MEMORY, Hip, HipError
from mlc_amd.runtime.devices.hip.carried import HipCarried
from mlc_amd.runtime.devices.hip.launches import HipLaunch, capture, enqueue
from mlc_amd.runtime.devices.hip.memory import HipMemory, host_block
from mlc_amd.runtime.devices.run_queue import SLOTS, QueuedRun, RunHooks
from mlc_amd.runtime.errors import MachineError


class _Slot:
    """The pinned memory of a run. inputs: address of the memory for its inputs (`through` of HipMemory); results:
    {name: array} of small outputs; event: happens at the end of the run."""

    def __init__(self, hip: Hip, held: ExitStack, memory: HipMemory):
        self.memory, self.inputs = memory, host_block(hip, held, memory.written_bytes)
        self._address = host_block(hip, held, memory.result_bytes)
        self.results = memory.results(self._address)
        self.event = hip.event(held)

    def fetch_results(self) -> None:
        self.memory.fetch_results(self._address)


class HipRuns(RunHooks):
    """functions: the manifest's entries. launches: {function: its launches}. graphs: {function: its graph}; empty if
    launches are enqueued one by one. heads: see `RunQueue`. What it allocates is released when `held` closes."""

    def __init__(
        self,
        hip: Hip,
        held: ExitStack,
        stream,
        memory: HipMemory,
        functions: Mapping[str, Mapping],
        launches: Mapping[str, Sequence[HipLaunch]],
        graphs: Mapping[str, object],
        heads: Mapping[str, int],
        carried: HipCarried,
    ):
        self.hip, self.stream, self.memory, self._carried = hip, stream, memory, carried
        self._functions, self._launches, self._graphs, self._heads = functions, launches, graphs, heads
        self._held = held.enter_context(ExitStack())
        self._head_graphs: dict[str, object] = {}  # graphs of the launches before those that read LATE inputs
        self._slots: list[_Slot] = []
        self._results: Mapping[str, np.ndarray] = {}  # small outputs of the run that was waited for last

    def read(self, name: str, rows: int) -> np.ndarray | None:
        """The first rows of a small output of the run that was waited for last; None for others, or after `settle`."""
        return self._results[name][:rows] if name in self._results else None

    def prepare_late(self, name: str) -> None:
        """See RunHooks. The graph is captured now, because captures work only while nothing is enqueued."""
        if self._graphs and name not in self._head_graphs:
            head = self._launches[name][: self._heads[name]]
            self._head_graphs[name] = capture(self.hip, self.stream, head, self._held)

    def prepare(self, run: QueuedRun) -> None:
        self.hip("hipSetDevice", self.memory.gpu.index)  # this thread may have used another GPU since `_usable`
        self._allocate_slots()
        if run.late and not run.ahead:
            self.prepare_late(run.name)

    def submit(self, run: QueuedRun) -> None:
        self.prepare(run)
        self.memory.send_inputs(self._slots[run.slot].inputs)
        self._carried.enqueue_received(run.name)
        if run.ahead:
            self.memory.feed_back(self._functions[run.name]["logits"])
        graph = (self._head_graphs if run.late else self._graphs).get(run.name)
        if graph:
            self.hip("hipGraphLaunch", graph, self.stream)
        else:
            count = self._heads[run.name] if run.late else None
            enqueue(self.hip, self.stream, self._launches[run.name][:count])
        if not run.late:
            self._end(run)

    def submit_late(self, run: QueuedRun) -> None:
        self.hip("hipSetDevice", self.memory.gpu.index)
        self.memory.send_late(self._slots[run.slot].inputs)
        enqueue(self.hip, self.stream, self._launches[run.name][self._heads[run.name] :])
        self._end(run)

    def _end(self, run: QueuedRun) -> None:
        slot = self._slots[run.slot]
        slot.fetch_results()
        self.hip("hipEventRecord", slot.event, self._carried.enqueue_sent(run.name))

    def done(self, run: QueuedRun | None) -> bool:
        if run is None:
            return self.hip.done("hipStreamQuery", self.stream)
        return self.hip.done("hipEventQuery", self._slots[run.slot].event)

    def wait(self, run: QueuedRun) -> None:
        slot = self._slots[run.slot]
        self.hip("hipEventSynchronize", slot.event)
        self._results = slot.results

    def settle(self, busy: bool) -> None:
        self._results = {}
        if busy:
            self.hip("hipStreamSynchronize", self.stream)

    def _allocate_slots(self) -> None:
        try:
            while len(self._slots) < SLOTS:
                self._slots.append(_Slot(self.hip, self._held, self.memory))
        except HipError as e:
            if e.code not in NO_MEMORY:
                raise
            raise MachineError(f"no pinned host memory is left for steps ({e.code}); close other programs") from e
