"""Lets any number of threads share the steps of an engine.

The engine needs no thread of its own: a thread that waits for an answer takes the step lock, and computes one step
(steps.py) for all answers. A thread that starts an answer waits for one step at most. A thread that needs the device
for another purpose takes the lock, and first completes the step in progress. Answers for asyncio are computed by a
background thread, which starts with the first such answer.
"""

import threading
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager

from mlc_amd.runtime.cache.kv_cache import KvCache
from mlc_amd.runtime.engine.admission import SchedulerLimits
from mlc_amd.runtime.engine.answers import Answer
from mlc_amd.runtime.engine.requests import Request, Scoring
from mlc_amd.runtime.engine.restoring import Restoring
from mlc_amd.runtime.engine.runner import Runner
from mlc_amd.runtime.engine.scheduler import RequestCounts
from mlc_amd.runtime.engine.steps import Steps
from mlc_amd.runtime.errors import MachineError
from mlc_amd.runtime.step_lock import CLOSED, StepLock


class StepLoop(Steps):
    """Steps for the answers that were started. Methods may be called by any thread."""

    def __init__(self, runner: Runner, cache: KvCache, limits: SchedulerLimits) -> None:
        super().__init__(runner, cache, limits)
        self._lock = StepLock()
        self._background: threading.Thread | None = None

    def restore_with(self, restoring: Restoring) -> None:
        """Makes requests wait for pages that `restoring` reads from disk."""
        with self.exclusive():
            self._works.append(restoring)
            self.scheduler.admission.restore = restoring.begin

    # ---- the lock

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Holds the step lock for the `with` block, with no step in progress. MachineError if the engine is closed."""
        self._lock.acquire()
        try:
            self._settle()
            yield
        finally:
            self._lock.release()

    @property
    def closed(self) -> bool:
        return self._lock.closed

    # ---- answers

    @property
    def queue(self) -> RequestCounts:
        return RequestCounts(self.scheduler.waiting, len(self.scheduler.running))

    @property
    def busy(self) -> bool:
        """Whether there are answers or scorings that are not complete."""
        return bool(self._answers or self._scorings)

    def score(self, scoring: Scoring) -> None:
        """Queues a scoring, and computes steps until it is done. Raises its error, QueueFull and ContextFull."""
        self.start_scoring(scoring, watched=False)
        try:
            self.wait([scoring])
        finally:
            with self.exclusive():
                self._drop_scoring(scoring.request)
        if scoring.error:
            raise scoring.error

    def start_scoring(self, scoring: Scoring, watched: bool = True) -> None:
        """Queues a scoring. watched: the background thread must compute it. Raises QueueFull and ContextFull."""
        with self.exclusive():
            self.scheduler.add(scoring.request)
            self._scorings[scoring.request] = scoring
            self._watch([scoring.request] if watched else [])

    def start(self, answers: SequenceOf[Answer], watched: bool = False) -> None:
        """Queues answers. watched: whether the background thread must compute them. Raises QueueFull and ContextFull;
        then no answer is queued."""
        with self.exclusive():
            added = []
            try:
                for answer in answers:
                    self.scheduler.add(answer.request)
                    added.append(answer)
            except BaseException:
                for answer in added:
                    self.scheduler.finish(answer.request, "refused")
                raise
            self._answers |= {answer.request: answer for answer in answers}
            self._watch([answer.request for answer in answers] if watched else [])

    def cancel(self, answers: Iterable[Answer | Scoring]) -> None:
        """Ends answers after the step in progress, and then releases their pages."""
        for answer in answers:
            self.scheduler.cancel(answer.request)
        if not self._lock.try_acquire():
            return
        try:
            self._drop_ended()
            if not (self._answers or self._background):  # a background thread would complete the step itself
                self._settle()
        finally:
            self._lock.release()

    def cancel_all(self) -> None:
        self.cancel(list(self._answers.values()))

    def _watch(self, requests: SequenceOf[Request]) -> None:
        self._watched.update(requests)
        if requests:
            self._background = self._background or self._start_thread()

    def wait(self, answers: SequenceOf[Answer | Scoring]) -> None:
        """Computes steps until one of `answers` is ready."""

        def ready() -> bool:
            return any(answer.ready for answer in answers)

        while self._lock.acquire(ready):
            try:
                progressed = self._step()
            finally:
                self._lock.release()
            if not progressed and not ready():
                raise RuntimeError("no step can be computed, but an answer is wanted")

    # ---- in the background

    def _start_thread(self) -> threading.Thread:
        thread = threading.Thread(target=self._run_background, name="mlc-amd", daemon=True)
        thread.start()
        return thread

    def _run_background(self) -> None:
        while True:
            self._lock.wait_for_work(lambda: self._watched or (self._started and not self._answers))
            if not self._lock.acquire(lambda: self.closed):
                return
            try:
                self._step()
            except Exception as error:
                for request in [*self._answers, *self._scorings]:
                    self._fail(request, error)
            finally:
                self._lock.release()

    def end_all(self) -> None:
        """Ends all answers and scorings, and waits for the step in progress."""
        self.cancel_all()
        with self.exclusive():
            self._drop_ended()
            for request in list(self._scorings):
                self._fail(request, MachineError(CLOSED))

    def close(self) -> None:
        """Calls `end_all`, and closes the engine: answers cannot be started any more."""
        if self.closed:
            return
        self.end_all()
        with self.exclusive():
            self._lock.closed = True
        if self._background and self._background is not threading.current_thread():
            self._background.join()
        if self.speculation:
            self.speculation.drafter.close()
