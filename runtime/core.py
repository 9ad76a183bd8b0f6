"""Runs an engine's steps: who computes, and who gets what they give.

One thread at a time has the *turn*. A thread that waits for an answer takes it when it is free and computes one step,
for all answers; so several threads, each with an answer of its own, are served together without a thread of the engine.
Answers that are consumed from asyncio are computed by a background thread, which begins with the first of them.
"""

import threading
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager

from mlc_amd.runtime.answers import Answer
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.kv_cache import Cache
from mlc_amd.runtime.requests import Request
from mlc_amd.runtime.runner import Runner
from mlc_amd.runtime.sampling import not_finite
from mlc_amd.runtime.scheduler import Limits, Scheduler, Step
from mlc_amd.runtime.sequence import Sequence

CLOSED = "this engine is closed: load the model again"


class Core:
    """Steps of `runner` for the answers that were started. Methods may be called by any thread."""

    def __init__(self, runner: Runner, cache: Cache, limits: Limits) -> None:
        self.runner = runner
        self.scheduler = Scheduler(cache, limits)
        self.closed = False
        self.private: Sequence | None = None  # a sequence of the engine's own, which gives way to requests
        self._answers: dict[Request, Answer] = {}
        self._changed = threading.Condition()
        self._taken = False  # a thread has the turn
        self._background: threading.Thread | None = None
        self._watched = 0  # answers that the background thread is to compute

    # ---- the turn

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Waits for the turn and has it for the `with` block. UserError once the engine is closed."""
        with self._changed:
            while self._taken:
                self._changed.wait()
            self._check_open()
            self._taken = True
        try:
            yield
        finally:
            self._give_turn()

    def _give_turn(self) -> None:
        with self._changed:
            self._taken = False
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self.closed:
            raise UserError(CLOSED)

    # ---- answers

    @property
    def busy(self) -> bool:
        """Whether there are answers that are not complete."""
        return bool(self._answers)

    def start(self, answers: SequenceOf[Answer], watched: bool = False) -> None:
        """Queues their requests. watched: the background thread computes them. QueueFull and ContextFull, for which
        none of them is queued."""
        with self.turn():
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
        if watched:
            self._watch(len(answers))

    def cancel(self, answers: Iterable[Answer]) -> None:
        """Ends answers after the step in progress; their pages are free then."""
        for answer in answers:
            self.scheduler.cancel(answer.request)
        with self._changed:
            if self._taken:
                return
            self._taken = True
        try:
            self._drop_cancelled()
        finally:
            self._give_turn()

    def cancel_all(self) -> None:
        self.cancel(list(self._answers.values()))

    def wait(self, answers: SequenceOf[Answer]) -> None:
        """Returns when one of `answers` is ready. Computes meanwhile."""

        def ready() -> bool:
            return any(answer.ready for answer in answers)

        while True:
            with self._changed:
                while self._taken and not ready():
                    self._changed.wait()
                if ready():
                    return
                self._check_open()
                self._taken = True
            try:
                progressed = self._step()
            finally:
                self._give_turn()
            if not progressed and not ready():
                raise RuntimeError("no step can be computed, but an answer is wanted")

    # ---- steps, by the thread that has the turn

    def _step(self) -> bool:
        """Computes a step. False if there is nothing to compute."""
        self._drop_cancelled()
        before = set(self.scheduler.running)
        step = self.scheduler.plan()
        if step is None and self.scheduler.unfinished and self.private:
            self.private.free()
            step = self.scheduler.plan()
        for request in self.scheduler.running:
            if request not in before and request in self._answers and request.cached is not None:
                self._answers[request].begin()
        if step is None:
            return False
        try:
            tokens = self._run(step)
        except BaseException:
            self.scheduler.abandon(step)
            raise
        computed = step.singles + ([(step.chunk.request, step.chunk.sequence)] if step.chunk else [])
        prompts = [(self._answers[request], sequence) for request, sequence in computed if not request.generated]
        self.scheduler.complete(step, [max(token, 0) for token in tokens])
        for answer, sequence in prompts:
            answer.prefilled(sequence.computed - answer.stats.cached_tokens)
        for request, token in zip(step.answers, tokens, strict=True):
            answer = self._answers[request]
            reason = "failed" if answer.done else answer.push(token)
            if reason:
                self._forget(request, reason)
        return True

    def _run(self, step: Step) -> list[int]:
        """The token of each of the step's answers; -1 for one that failed."""
        singles = [(seq.tokens[seq.computed], seq.computed, seq.table_row) for _, seq in step.singles]
        chunk = None
        if step.chunk:
            sequence, start = step.chunk.sequence, step.chunk.start
            chunk = sequence.tokens[start : start + step.chunk.count], start, sequence.table_row
        answers = [self._answers[request] for request in step.answers]
        tokens = self.runner.sample(singles, chunk, [answer.choice() for answer in answers])
        for answer, token in zip(answers, tokens, strict=True):
            if token < 0:
                answer.fail(not_finite())
        return tokens

    def _drop_cancelled(self) -> None:
        for request in [request for request in self._answers if request.cancelled]:
            self._answers[request].interrupt()
            self._forget(request, "cancelled")

    def _forget(self, request: Request, reason: str) -> None:
        self.scheduler.finish(request, reason)
        del self._answers[request]

    # ---- in the background

    def _watch(self, count: int) -> None:
        with self._changed:
            self._watched += count
            if self._background is None:
                self._background = threading.Thread(target=self._compute, name="mlc-amd", daemon=True)
                self._background.start()
            self._changed.notify_all()

    def unwatch(self, count: int) -> None:
        with self._changed:
            self._watched -= count

    def _compute(self) -> None:
        while True:
            with self._changed:
                while not self.closed and (self._taken or not self._watched or not self._answers):
                    self._changed.wait()
                if self.closed:
                    return
                self._taken = True
            try:
                self._step()
            except Exception as error:
                for answer in list(self._answers.values()):
                    answer.fail(error)
                    self._forget(answer.request, "failed")
            finally:
                self._give_turn()

    def close(self) -> None:
        """Ends all answers, and waits for the step in progress."""
        if self.closed:
            return
        self.cancel_all()
        with self.turn():
            self._drop_cancelled()
            self.closed = True
        if self._background and self._background is not threading.current_thread():
            self._background.join()
