"""What `Engine.generate` and `agenerate` give: an iterator over the pieces of one answer or of several.

The answers are queued at the first step of the iterator, and computed as they are consumed, together with all others of
the engine. Closing the iterator, or dropping it, ends the ones that are not complete.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import suppress
from functools import partial

from mlc_amd.runtime.engine.answers import Answer
from mlc_amd.runtime.engine.core import Core
from mlc_amd.runtime.engine.generation import Piece, PromptProgress, Stats


class Results:
    """The answers of a call. make: gives them, when they are to be queued."""

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
    def stats(self) -> Stats:
        """Statistics of the answer, or of all of them together: tokens are sums, times the longest ones."""
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
        self.results = Results(make)  # which does not keep the iterator: dropping that ends it

    @property
    def answers(self) -> list[Stats]:
        """See `Results`."""
        return self.results.answers

    @property
    def stats(self) -> Stats:
        """See `Results`."""
        return self.results.stats


class Generation(_WithResults, Iterator[Piece]):
    """What `Engine.generate` gives: see the module's docstring."""

    def __init__(self, core: Core, make: Callable[[], Sequence[Answer]]) -> None:
        super().__init__(make)
        self._pieces = _pieces(core, self.results)

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the answers that are not complete."""
        self._pieces.close()


def _pieces(core: Core, results: Results) -> Generator[Piece, None, None]:
    answers = results.begin()
    core.start(answers)
    left = list(answers)
    try:
        while left:
            core.wait(left)
            for answer in list(left):
                yield from answer.take()
                if answer.complete:
                    left.remove(answer)
    finally:
        if left:
            core.cancel(left)


class AsyncGeneration(_WithResults, AsyncIterator[Piece]):
    """What `Engine.agenerate` gives: the same for asyncio. The background thread computes the answers. progress: is
    called in the event loop."""

    def __init__(
        self,
        core: Core,
        make: Callable[[], Sequence[Answer]],
        progress: Callable[[PromptProgress], None] | None = None,
    ) -> None:
        super().__init__(make)
        self._news = _News(progress)
        self._batches = _batches(core, self.results, self._news)
        self._started = False
        self._ready: deque[Piece] = deque()

    async def start(self) -> None:
        """Queues the answers, unless they are. Raises what the first step would."""
        if not self._started:
            self._started = True
            await anext(self._batches)

    async def batch(self) -> list[Piece]:
        """All pieces that there are, at least one unless `progress` was called: for consumers that take time.
        StopAsyncIteration after the last."""
        await self.start()
        return await anext(self._batches)

    async def pause(self, seconds: float) -> None:
        """Waits between two batches: so long, or until the answers are complete."""
        await self._news.pause(seconds)

    async def __anext__(self) -> Piece:
        while not self._ready:
            self._ready.extend(await self.batch())
        return self._ready.popleft()

    async def aclose(self) -> None:
        """Ends the answers that are not complete. While a task waits for a piece, cancel that task instead."""
        await self._batches.aclose()


async def _batches(core: Core, results: Results, news: "_News") -> AsyncGenerator[list[Piece], None]:
    """An empty list once the answers are queued, then their pieces."""

    def begin() -> Sequence[Answer]:
        answers = results.begin()  # constraints may take long to make
        news.listen(answers)
        return answers

    news.loop = asyncio.get_running_loop()
    answers = await asyncio.to_thread(begin)
    left = list(answers)
    try:
        await asyncio.to_thread(core.start, answers, True)  # which waits for the end of a step
        yield []
        while left:
            await news.wait()
            told = news.tell_progress()
            pieces = [piece for answer in left for piece in answer.take()]
            left = [answer for answer in left if not answer.complete]
            if pieces or told:
                yield pieces
    finally:
        for answer in answers:
            answer.listener = answer.progress = None
        if left:
            core.cancel(left)


class _News:
    """Wakes a task of an event loop from the thread that computes, if the task waits: waking costs a system call and a
    round of the loop."""

    loop: asyncio.AbstractEventLoop

    def __init__(self, progress: Callable[[PromptProgress], None] | None) -> None:
        self._progress = progress
        self._reports: deque[PromptProgress] = deque()  # that `progress` is still to be told
        self._begun: dict[int, float] = {}  # when the prompt of each answer was
        self._event = asyncio.Event()
        self._any = self._waiting = self._pausing = False
        self._going = 0  # answers that are not done

    def listen(self, answers: Sequence[Answer]) -> None:
        """To answers that are not begun."""
        self._going = len(answers)
        for answer in answers:
            answer.listener = partial(self._tell, answer)
            if self._progress:
                answer.progress = partial(self._report, answer)

    def _report(self, answer: Answer, done: int, _: int) -> None:
        now, cached = time.perf_counter(), answer.stats.cached_tokens
        seconds = now - self._begun.setdefault(answer.index, now)
        self._reports.append(PromptProgress(answer.stats.prompt_tokens, cached, cached + done, seconds, answer.index))
        self._tell(answer)

    def tell_progress(self) -> bool:
        """Whether there was any to tell."""
        found = bool(self._reports)
        while self._progress and self._reports:
            self._progress(self._reports.popleft())
        return found

    def _tell(self, answer: Answer) -> None:
        self._any = True
        self._going -= answer.done
        if self.loop.is_closed():  # nobody wants the answer
            answer.request.cancelled = True
        elif self._waiting or (self._pausing and not self._going):
            self._waiting = self._pausing = False
            with suppress(RuntimeError):  # it is closed now
                self.loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        """Returns once there is something that came after the last call, perhaps without."""
        self._waiting = True  # first: what comes between this and the look is told twice, not never
        if not self._any:
            await self._event.wait()
        self._waiting = self._any = False  # before the task looks: what comes later tells again
        self._event.clear()

    async def pause(self, seconds: float) -> None:
        """Returns after that time, or once all answers are done."""
        self._pausing = True
        timer = self.loop.call_later(seconds, self._event.set)
        try:
            if self._going:
                await self._event.wait()
        finally:
            timer.cancel()
            self._pausing = False
            self._event.clear()
