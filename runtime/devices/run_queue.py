"""The queue of runs on a GPU: at most two, one in progress and the next one.

While a run is in progress, the host writes the inputs of the next run; while that is in progress, it reads the results
of the first. So there are two slots of io memory, between which runs alternate. Each kind of GPU device implements
`RunHooks`, and inherits from `QueuedDevice` the protocol's methods that run functions (runtime/devices/__init__.py).
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
    slot: int  # slot of io memory, 0 .. SLOTS - 1
    ahead: bool  # it was started by `start_ahead`: its tokens are those that the run before samples
    late: bool  # its launches that read LATE inputs are submitted separately


class RunHooks(ABC):
    """What `RunQueue` needs of a kind of device. waited: total seconds spent waiting for the GPU."""

    waited = 0.0

    def prepare_late(self, name: str) -> None:  # noqa: B027 (most devices need not)
        """Called while the GPU is idle, before a run whose LATE inputs will be written after its start."""

    @abstractmethod
    def prepare(self, run: QueuedRun) -> None:
        """Makes what `submit` needs and keeps, such as recorded commands. This may take long, the first time."""

    @abstractmethod
    def submit(self, run: QueuedRun) -> None:
        """Submits a run with the inputs that the host has written."""

    @abstractmethod
    def submit_late(self, run: QueuedRun) -> None:
        """Submits the launches of a run that read LATE inputs, which the host has written by now."""

    @abstractmethod
    def done(self, run: QueuedRun | None) -> bool:
        """Whether a run, the oldest, is done; None: whether the submitted piece of a long run is done."""

    @abstractmethod
    def wait(self, run: QueuedRun) -> None:
        """Waits for the oldest run, which is `run`, and makes its results readable."""

    @abstractmethod
    def settle(self, busy: bool) -> None:
        """Waits until the GPU is idle, if it is busy. Results of earlier runs will not be read any more."""


class RunQueue:
    """The runs of one device. heads: for each function, the number of launches before the first that reads LATE inputs;
    0 if no launch reads them."""

    def __init__(self, hooks: RunHooks, pacer: Pacer, heads: Mapping[str, int]):
        self.hooks, self._pacer, self._heads = hooks, pacer, heads
        self._runs: deque[QueuedRun] = deque()  # runs that nobody has waited for yet, the oldest first
        self._busy = False  # whether the GPU may be busy
        self._slot = 0  # slot of the next run
        self._pieces: Iterator[None] | None = None  # pieces of the last run of `begin`, if it is long
        # Runs of `begin` that are not known to be done; those that are, but `finished` has not reported them yet.
        self._begun = self._early = 0
        self._since = 0.0  # time from which the oldest run has had the GPU alone

    def run(self, name: str, meanwhile: Callable[[], None] | None, pieces: Iterator[None]) -> None:
        """See the protocol. pieces: an iterator that runs the function in pieces, used if the pacer divides it. Each
        `next` submits a piece or waits for one."""
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
        """Starts a run, whose end `finished` reports. The run before may be unreported yet. pieces: see `run`."""
        cut = pieces() if self._pacer.pieces(name) else None
        if self._begun and (cut or self._pieces):  # no other run is in progress beside a long one
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
        """Whether the oldest run of `begin` is done, so that its results can be read. If that run is long, and a piece
        of it is done, submits the next piece."""
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
        """Starts a function whose results nobody needs. Waits for earlier runs until at most one is left."""
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
        """Waits until the GPU is idle, and forgets all runs: no caller will wait for them."""
        self._runs.clear()
        self._begun = self._early = 0
        self.hooks.settle(self._busy)
        self._busy = False


class QueuedDevice(ABC):
    """The protocol's methods that run functions, on a `RunQueue`."""

    _queue: RunQueue

    def _usable(self, doing: str) -> AbstractContextManager[None]:
        """A context for all code that uses the GPU: it translates errors of the API. doing: for the message."""
        return nullcontext()

    @abstractmethod
    def _run_alone(self, function: str, plain: bool) -> Iterator[None]:
        """Runs a function on the idle GPU, in the pacer's pieces if it is long. The iterator pauses after each
        submission, before it waits for its end. plain: see the protocol's `run_plain`."""

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
