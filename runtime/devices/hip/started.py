"""Runs of functions that the host does not wait for at once, at most two at a time: one in progress and one behind it.

In: each function's launches and graphs, the device's memory, and a Pacer, which is told how long runs take. Out:
`Started`, of the contract of `start` .. `wait` in runtime/devices/__init__.py.

One stream orders everything on the GPU: what a run reads there is what was copied for it, and the run behind it takes
its tokens from there. What takes care is the host's memory, as copies from and to it are made when the stream comes to
them. So each run has one of two *sides* of it, by turns. Its inputs go through its side: the host may write others as
soon as the run is enqueued. Small results are copied to its side behind its launches, with an event that says when they
are there: they can be read when a later run has overwritten them on the GPU.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from mlc_amd.runtime.devices.hip.api import NO_MEMORY, Hip, HipError
from mlc_amd.runtime.devices.hip.launches import Launch, capture, enqueue
from mlc_amd.runtime.devices.hip.memory import Memory, host_block
from mlc_amd.runtime.devices.pieces import Pacer
from mlc_amd.runtime.errors import UserError

SIDES = 2


class _Side:
    """What one run at a time has of the host's memory. inputs: address of memory that they go through; results: the
    arrays of small outputs; event: is recorded behind a run."""

    def __init__(self, hip: Hip, held: ExitStack, memory: Memory):
        self.memory, self.inputs = memory, host_block(hip, held, memory.written_bytes)
        self._address = host_block(hip, held, memory.result_bytes)
        self.results = memory.results(self._address)
        flag = hip.names.hipEventDisableTiming
        self.event = hip.own(held, "hipEventDestroy", hip("hipEventCreateWithFlags", flag))

    def fetch_results(self) -> None:
        self.memory.fetch_results(self._address)


class Started:
    """functions: the manifest's entries; launches: of each function; graphs: of each, none where launches go one by
    one; heads: how many launches come before LATE inputs are read, 0 if none are.

    What it makes is released when `held` closes, behind a wait for the stream.
    """

    def __init__(
        self,
        hip: Hip,
        held: ExitStack,
        stream,
        memory: Memory,
        pacer: Pacer,
        functions: Mapping[str, Mapping],
        launches: Mapping[str, Sequence[Launch]],
        graphs: Mapping[str, object],
        heads: Mapping[str, int],
    ):
        self.hip, self.stream, self.memory, self.pacer = hip, stream, memory, pacer
        self._functions, self._launches, self._graphs, self._heads = functions, launches, graphs, heads
        self._held = held.enter_context(ExitStack())
        held.callback(hip.names.hipStreamSynchronize, stream)
        self._head_graphs: dict[str, object] = {}
        self._sides: list[_Side] = []
        self._next = 0  # side of the next run
        self._busy = False  # something is enqueued that was not waited for
        self._running: deque[tuple[str, _Side]] = deque()  # the oldest first
        self._since = 0.0  # when the oldest of them was alone on the GPU
        self._found: Mapping[str, np.ndarray] = {}  # results of the run that was waited for last

    # ---- the protocol

    def can_start_ahead(self, name: str, late: bool) -> bool:
        if self.pacer.pieces(name) or (late and not self._heads[name]):
            return False
        if late:
            self._capture_head(name)
        return True

    def start(self, name: str, meanwhile: Callable[[], None] | None = None) -> None:
        """What `meanwhile` raises is raised when the GPU is idle."""
        self.settle()
        if not (meanwhile and self._heads[name]):
            if meanwhile:
                meanwhile()
            self._begin(name)
            return
        self._capture_head(name)
        self._begin(name, late=True)
        try:
            meanwhile()
        except BaseException:
            self.settle()
            raise
        self.complete_inputs(name)

    def start_ahead(self, name: str, late: bool = False) -> None:
        self._begin(name, late, behind=True)

    def complete_inputs(self, name: str) -> None:
        _, side = self._running[-1]
        self.memory.send_late(side.inputs)
        enqueue(self.hip, self.stream, self._launches[name][self._heads[name] :])
        self._end(side)

    def wait(self) -> float:
        """Returns the seconds that it took."""
        name, side = self._running[0]
        begun = time.perf_counter()
        self.hip("hipEventSynchronize", side.event)
        now = time.perf_counter()
        self._running.popleft()
        self._busy = bool(self._running)
        self.pacer.took(name, now - self._since)
        self._since, self._found = now, side.results
        return now - begun

    def read(self, name: str, rows: int) -> np.ndarray | None:
        """What the run that was waited for last gave, None if it was not copied or another run came since."""
        return self._found[name][:rows] if name in self._found else None

    def settle(self) -> None:
        """Waits for everything that is enqueued: nobody waits for these runs any more."""
        self._running.clear()
        self._found = {}
        if self._busy:
            self.hip("hipStreamSynchronize", self.stream)
            self._busy = False

    # ---- parts of a run

    def _capture_head(self, name: str) -> None:
        """The graph of what comes before LATE inputs: while nothing is enqueued, as captures want it."""
        if self._graphs and name not in self._head_graphs and not self._busy:
            head = self._launches[name][: self._heads[name]]
            self._head_graphs[name] = capture(self.hip, self.stream, head, self._held)

    def _begin(self, name: str, late: bool = False, behind: bool = False) -> None:
        """Enqueues a run, late: but for what `complete_inputs` enqueues; behind: with the tokens of the one before."""
        assert len(self._running) < SIDES
        self._make_sides()
        side, self._next = self._sides[self._next], (self._next + 1) % SIDES
        if not self._running:
            self._since = time.perf_counter()
        self._busy = True
        self.memory.send_inputs(side.inputs)
        if behind:
            self.memory.feed_back(self._functions[name]["logits"])
        graph = (self._head_graphs if late else self._graphs).get(name)
        if graph:
            self.hip("hipGraphLaunch", graph, self.stream)
        else:
            enqueue(self.hip, self.stream, self._launches[name][: self._heads[name] if late else None])
        self._running.append((name, side))
        if not late:
            self._end(side)

    def _make_sides(self) -> None:
        try:
            while len(self._sides) < SIDES:
                self._sides.append(_Side(self.hip, self._held, self.memory))
        except HipError as e:
            if e.code not in NO_MEMORY:
                raise
            raise UserError(f"no pinned host memory is left for steps ({e.code}); close other programs") from e

    def _end(self, side: _Side) -> None:
        """Behind a run's launches."""
        side.fetch_results()
        self.hip("hipEventRecord", side.event, self.stream)
