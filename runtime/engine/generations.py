"""The results of `Engine.generate` and `agenerate`: iterators over the pieces of one or several answers.

The first `next` queues the answers. They are computed while they are consumed, together with all other answers of the
engine. Closing the iterator, or dropping the last reference to it, ends the answers that are not complete.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import suppress
from functools import partial

from mlc_amd.runtime.engine.answers import Answer
from mlc_amd.runtime.engine.generation import Piece, PromptProgress, Stats
from mlc_amd.runtime.engine.step_loop import StepLoop
from mlc_amd.runtime.images.rows import Prompt, images_among


class Results:
    """The answers of a call. make: a function that creates them, called when they are queued."""

    def __init__(self, make: Callable[[], Sequence[Answer]]) -> None:
        self._make = make
        self._answers: Sequence[Answer] = ()

    def begin(self) -> Sequence[Answer]:
        self._answers = self._make()
        return self._answers

    @property
    def answers(self) -> list[Stats]:
        """Statistics of each answer, by index; none before the first step."""
        return [answer.stats for answer in self._answers]

    @property
    def sequences(self) -> list[Prompt]:
        """For each answer the tokens of prompt and answer that the KV cache may have: all but the last one."""
        requests = [answer.request for answer in self._answers]
        return [Prompt([*of.prompt, *of.generated][:-1], images_among(of.prompt)) for of in requests]

    @property
    def stats(self) -> Stats:
        """Statistics of the answer, or of several together: numbers of tokens are sums, times are maxima."""
        if len(self._answers) == 1:
            return self._answers[0].stats
        parts = self.answers
        found = Stats()
        for name in ("prompt_tokens", "cached_tokens", "generated", "guessed", "accepted"):
            setattr(found, name, sum(getattr(part, name) for part in parts))
        for name in ("prefill_s", "ttft_s", "decode_s"):
            setattr(found, name, max((getattr(part, name) for part in parts), default=0.0))
        if parts and len({part.finish for part in parts}) == 1:
            found.finish = parts[0].finish
        return found


class _WithResults:
    def __init__(self, make: Callable[[], Sequence[Answer]]) -> None:
        self.results = Results(make)  # must not refer to the iterator, so that dropping the iterator ends it

    @property
    def answers(self) -> list[Stats]:
        """See `Results`."""
        return self.results.answers

    @property
    def sequences(self) -> list[Prompt]:
        """See `Results`."""
        return self.results.sequences

    @property
    def stats(self) -> Stats:
        """See `Results`."""
        return self.results.stats


class Generation(_WithResults, Iterator[Piece]):
    """The result of `Engine.generate`: see the module's docstring."""

    def __init__(self, loop: StepLoop, make: Callable[[], Sequence[Answer]]) -> None:
        super().__init__(make)
        self._pieces = _pieces(loop, self.results)

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the answers that are not complete."""
        self._pieces.close()


def _pieces(loop: StepLoop, results: Results) -> Generator[Piece, None, None]:
    answers = results.begin()
    loop.start(answers)
    left = list(answers)
    try:
        while left:
            loop.wait(left)
            for answer in list(left):
                yield from answer.take()
                if answer.complete:
                    left.remove(answer)
                    _check([answer])
    finally:
        if left:
            loop.cancel(left)


def _check(ended: Sequence[Answer]) -> None:
    """Raises the error of the first answer that failed."""
    if error := next((answer.error for answer in ended if answer.error), None):
        raise error


class AsyncGeneration(_WithResults, AsyncIterator[Piece]):
    """The result of `Engine.agenerate`. A background thread computes. progress: called in the event loop."""

    def __init__(
        self,
        loop: StepLoop,
        make: Callable[[], Sequence[Answer]],
        progress: Callable[[PromptProgress], None] | None = None,
    ) -> None:
        super().__init__(make)
        self._events = _LoopEvents(progress)
        self._batches = _batches(loop, self.results, self._events)
        self._started = False
        self._ready: deque[Piece] = deque()

    async def start(self) -> None:
        """Queues the answers, unless this was done before. Raises what the first `next` of `generate` raises."""
        if not self._started:
            self._started = True
            await anext(self._batches)

    async def batch(self) -> list[Piece]:
        """All new pieces; waits for one piece or call of `progress` at least. Raises StopAsyncIteration at the end."""
        await self.start()
        return await anext(self._batches)

    async def pause(self, seconds: float) -> None:
        """Waits so many seconds, or until all answers are complete; to be used between two batches."""
        await self._events.pause(seconds)

    async def __anext__(self) -> Piece:
        while not self._ready:
            self._ready.extend(await self.batch())
        return self._ready.popleft()

    async def aclose(self) -> None:
        """Ends the answers that are not complete. If a task is waiting for a piece, cancel that task instead."""
        await self._batches.aclose()


async def _batches(loop: StepLoop, results: Results, events: "_LoopEvents") -> AsyncGenerator[list[Piece], None]:
    """Yields an empty list when the answers are queued, then lists of their pieces."""

    def begin() -> Sequence[Answer]:
        answers = results.begin()  # in a thread, because making constraints may take long
        events.listen(answers)
        return answers

    events.loop = asyncio.get_running_loop()
    answers = await asyncio.to_thread(begin)
    left = list(answers)
    try:
        await asyncio.to_thread(loop.start, answers, True)  # waits for the end of a step
        yield []
        while left:
            await events.wait()
            reported = events.report_progress()
            pieces = [piece for answer in left for piece in answer.take()]
            ended = [answer for answer in left if answer.complete]
            left = [answer for answer in left if answer not in ended]
            if pieces or reported:
                yield pieces
            _check(ended)  # after their last pieces
    finally:
        for answer in answers:
            answer.listener = answer.progress = None
        if left:
            loop.cancel(left)


class _LoopEvents:
    """Passes events from the computing thread to a task of an event loop, which is woken only if the task waits."""

    loop: asyncio.AbstractEventLoop

    def __init__(self, progress: Callable[[PromptProgress], None] | None) -> None:
        self._progress = progress
        self._reports: deque[PromptProgress] = deque()  # reports that were not passed to `progress` yet
        self._begun: dict[int, float] = {}  # {index of an answer: time at which its prompt was begun}
        self._event = asyncio.Event()
        self._any = self._waiting = self._pausing = False
        self._unfinished = 0  # answers that are not done

    def listen(self, answers: Sequence[Answer]) -> None:
        """Listens to answers, which must not have begun."""
        self._unfinished = len(answers)
        for answer in answers:
            answer.listener = partial(self._notify, answer)
            if self._progress:
                answer.progress = partial(self._add_report, answer)

    def _add_report(self, answer: Answer, done: int, _: int) -> None:
        now, cached = time.perf_counter(), answer.stats.cached_tokens
        seconds = now - self._begun.setdefault(answer.index, now)
        self._reports.append(PromptProgress(answer.stats.prompt_tokens, cached, cached + done, seconds, answer.index))
        self._notify(answer)

    def report_progress(self) -> bool:
        """Calls `progress` with all new reports. Returns whether there were any."""
        found = bool(self._reports)
        while self._progress and self._reports:
            self._progress(self._reports.popleft())
        return found

    def _notify(self, answer: Answer) -> None:
        self._any = True
        self._unfinished -= answer.done
        if self.loop.is_closed():  # the answer has no consumer
            answer.request.cancelled = True
        elif self._waiting or (self._pausing and not self._unfinished):
            self._waiting = self._pausing = False
            with suppress(RuntimeError):  # the event loop was closed meanwhile
                self.loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        """Waits for the first event since the last call. It may return without one."""
        self._waiting = True  # set before the check: an event in between is reported twice instead of lost
        if not self._any:
            await self._event.wait()
        self._waiting = self._any = False  # before the task takes the pieces, so that later events wake it again
        self._event.clear()

    async def pause(self, seconds: float) -> None:
        """Waits so many seconds, or until all answers are done."""
        self._pausing = True
        timer = asyncio.get_running_loop().call_later(seconds, self._event.set)
        try:
            if self._unfinished:
                await self._event.wait()
        finally:
            timer.cancel()
            self._pausing = False
            self._event.clear()
