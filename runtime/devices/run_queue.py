"""Runs of functions on a GPU that the host does not wait for at once: one in progress, and the one after it.

The host writes the inputs of a run while the one before is in progress, and reads the results of that one while the
next is in progress. So runs alternate between two slots of memory for both. A kind of device has its `RunHooks`, and
derives from `QueuedDevice` the methods that run functions (runtime/devices/__init__.py).
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from mlc_amd.runtime.devices.pieces import Pacer

SLOTS = 2


class QueuedRun(NamedTuple):
    """A run of the function `name`."""

    name: str
    slot: int  # of memory, 0 .. SLOTS - 1
    ahead: bool  # it was started while another one was in progress, and takes its tokens from that
    late: bool  # what reads LATE inputs is submitted separately


class RunHooks(ABC):
    """What a kind of device does for runs. waited: seconds spent waiting for the GPU."""

    waited = 0.0

    def prepare_late(self, name: str) -> None:  # noqa: B027 (most devices need not)
        """While the GPU is idle, before a run of the function whose LATE inputs come later."""

    @abstractmethod
    def prepare(self, run: QueuedRun) -> None:
        """What `submit` needs and keeps, as what it records: may take long, once."""

    @abstractmethod
    def submit(self, run: QueuedRun) -> None:
        """Submits a run with the inputs that the host has written."""

    @abstractmethod
    def submit_late(self, run: QueuedRun) -> None:
        """Submits the rest of a run, with the LATE inputs that the host has written."""

    @abstractmethod
    def done(self, run: QueuedRun | None) -> bool:
        """Whether the oldest run is done; None: a piece of one."""

    @abstractmethod
    def wait(self, run: QueuedRun) -> None:
        """Waits for a run, the oldest, and makes its results readable."""

    @abstractmethod
    def settle(self, busy: bool) -> None:
        """Waits until the GPU is idle, if it is busy; results of earlier runs are not read any more."""


class RunQueue:
    """heads: how many launches of each function precede those that read LATE inputs; 0 if none read them."""

    def __init__(self, hooks: RunHooks, pacer: Pacer, heads: Mapping[str, int]):
        self.hooks, self._pacer, self._heads = hooks, pacer, heads
        self._runs: deque[QueuedRun] = deque()  # not waited for, the oldest first
        self._busy = False  # the GPU may be
        self._slot = 0  # of the next run
        self._pieces: Iterator[None] | None = None  # of the run that `begin` began
        self._begun = self._early = 0  # runs that it began; of which nobody knows yet that they are done
        self._since = 0.0  # when the oldest run had the GPU for itself

    def run(self, name: str, meanwhile: Callable[[], None] | None, pieces: Iterator[None]) -> None:
        """pieces: runs the function in the pacer's pieces instead; each step of it submits one or waits for one."""
        if not self._pacer.pieces(name):
            self.start(name, meanwhile)
            self.wait()
            return
        self.settle()
        if meanwhile:
            meanwhile()
        for _ in pieces:
            pass

    def begin(self, name: str, pieces: Callable[[], Iterator[None]]) -> None:
        """Starts a run for `finished`, which may be called for the one before it later. pieces: as of `run`."""
        cut = pieces() if self._pacer.pieces(name) else None
        if self._begun and (cut or self._pieces):  # long ones have the GPU for themselves
            while not self.finished():
                pass
            self._early += 1
        elif self._busy and not self._begun:
            self.settle()
        self._begun, self._pieces = self._begun + 1, cut
        if cut:
            next(cut)
        else:
            self._submit(name)

    def finished(self) -> bool:
        """Whether the run that was begun first is done and its results can be read; if it is long, submits its next
        piece."""
        if self._early:
            self._early -= 1
            return True
        if not self.hooks.done(self._runs[0] if self._runs else None):
            return False
        if not self._pieces:
            self.wait()
        elif next(self._pieces, self) is not self:
            return False
        self._begun -= 1
        return True

    def feed(self, name: str, pieces: Iterator[None]) -> None:
        """Runs a function whose results nobody wants; does not wait for it, but for all but one of those before."""
        if self._pacer.pieces(name):
            self.run(name, None, pieces)
            return
        while len(self._runs) >= SLOTS:
            self.wait()
        self._submit(name)

    def can_start_ahead(self, name: str, late: bool = False) -> bool:
        if self._pacer.pieces(name) or (late and not self._heads[name]):
            return False
        if late and not self._busy:
            self.hooks.prepare_late(name)
        return True

    def prepare(self, name: str, ahead: bool = False, late: bool = False) -> None:
        if not ahead:
            self.settle()
        self.hooks.prepare(QueuedRun(name, self._slot, ahead, late and self._heads[name] > 0))

    def start(self, name: str, meanwhile: Callable[[], None] | None = None) -> None:
        self.settle()
        if not meanwhile or not self._heads[name]:
            if meanwhile:
                meanwhile()
            self._submit(name)
            return
        self.prepare(name, late=True)
        self._submit(name, late=True)
        try:
            meanwhile()
        except BaseException:
            self.settle()
            raise
        self.complete_inputs()

    def start_ahead(self, name: str, late: bool = False) -> None:
        self._submit(name, ahead=True, late=late)

    def complete_inputs(self) -> None:
        self.hooks.submit_late(self._runs[-1])

    def _submit(self, name: str, ahead: bool = False, late: bool = False) -> None:
        assert len(self._runs) < SLOTS
        run = QueuedRun(name, self._slot, ahead, late)
        if not self._runs:
            self._since = time.perf_counter()
        self._slot, self._busy = (self._slot + 1) % SLOTS, True
        self.hooks.submit(run)
        self._runs.append(run)

    def wait(self) -> None:
        begun = time.perf_counter()
        self.hooks.wait(self._runs[0])
        now = time.perf_counter()
        run = self._runs.popleft()
        self._busy = bool(self._runs)
        self.hooks.waited += now - begun
        self._pacer.record(run.name, now - self._since)
        self._since = now

    def settle(self) -> None:
        """Waits until nothing is in progress: no caller waits for earlier runs any more."""
        self._runs.clear()
        self._begun = self._early = 0
        self.hooks.settle(self._busy)
        self._busy = False


class QueuedDevice(ABC):
    """The protocol's methods that run functions."""

    _queue: RunQueue

    def _usable(self, doing: str) -> AbstractContextManager[None]:
        """Around all that uses the GPU: translates its errors."""
        return nullcontext()

    @abstractmethod
    def _run_alone(self, function: str, plain: bool) -> Iterator[None]:
        """Runs a function, in the pacer's pieces if it is long; after each submission it pauses before it waits.
        plain: see the protocol's `run_plain`."""

    @property
    def waited(self) -> float:
        return self._queue.hooks.waited

    def run(self, function: str, meanwhile: Callable[[], None] | None = None) -> None:
        with self._usable(f"running {function}"):
            self._queue.run(function, meanwhile, self._run_alone(function, plain=False))

    def feed(self, function: str) -> None:
        with self._usable(f"running {function}"):
            self._queue.feed(function, self._run_alone(function, plain=False))

    def begin(self, function: str) -> None:
        with self._usable(f"running {function}"):
            self._queue.begin(function, lambda: self._run_alone(function, plain=False))

    def finished(self) -> bool:
        with self._usable("computing a step"):
            return self._queue.finished()

    def can_start_ahead(self, function: str, late: bool = False) -> bool:
        with self._usable(f"preparing {function}"):
            return self._queue.can_start_ahead(function, late)

    def prepare(self, function: str, ahead: bool = False, late: bool = False) -> None:
        with self._usable(f"preparing {function}"):
            self._queue.prepare(function, ahead, late)

    def start(self, function: str, meanwhile: Callable[[], None] | None = None) -> None:
        with self._usable(f"running {function}"):
            self._queue.start(function, meanwhile)

    def start_ahead(self, function: str, late: bool = False) -> None:
        with self._usable(f"running {function}"):
            self._queue.start_ahead(function, late)

    def complete_inputs(self, function: str) -> None:
        with self._usable(f"running {function}"):
            self._queue.complete_inputs()

    def wait(self) -> None:
        with self._usable("computing a step"):
            self._queue.wait()

    def run_plain(self, function: str, meanwhile: Callable[[], None] | None = None) -> None:
        with self._usable(f"running {function}"):
            self._queue.settle()
            for number, _ in enumerate(self._run_alone(function, plain=True)):
                if meanwhile and number == 0:
                    meanwhile()
