"""What `Engine.generate` and `agenerate` give: an iterator over the pieces of one answer or of several.

The answers are queued at the first step of the iterator, and computed as they are consumed, together with all others of
the engine. Closing the iterator, or dropping it, ends the ones that are not complete.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence

from mlc_amd.runtime.answers import Answer
from mlc_amd.runtime.core import Core
from mlc_amd.runtime.generation import Piece, Stats


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
    """What `Engine.agenerate` gives: the same for asyncio. The background thread computes the answers."""

    def __init__(self, core: Core, make: Callable[[], Sequence[Answer]]) -> None:
        super().__init__(make)
        self._batches = _batches(core, self.results)
        self._started = False
        self._ready: deque[Piece] = deque()

    async def start(self) -> None:
        """Queues the answers, unless they are. Raises what the first step would."""
        if not self._started:
            self._started = True
            await anext(self._batches)

    async def batch(self) -> list[Piece]:
        """All pieces that there are, at least one: for consumers that take time. StopAsyncIteration after the last."""
        await self.start()
        return await anext(self._batches)

    async def __anext__(self) -> Piece:
        if not self._ready:
            self._ready.extend(await self.batch())
        return self._ready.popleft()

    async def aclose(self) -> None:
        """Ends the answers that are not complete. While a task waits for a piece, cancel that task instead."""
        await self._batches.aclose()


async def _batches(core: Core, results: Results) -> AsyncGenerator[list[Piece], None]:
    """An empty list once the answers are queued, then their pieces."""
    news = _News(asyncio.get_running_loop())
    answers = await asyncio.to_thread(results.begin)  # constraints may take long to make
    for answer in answers:
        answer.listener = news.listener(answer)
    left = list(answers)
    try:
        await asyncio.to_thread(core.start, answers, True)  # which waits for the end of a step
        yield []
        while left:
            await news.wait()
            pieces = [piece for answer in left for piece in answer.take()]
            left = [answer for answer in left if not answer.complete]
            if pieces:
                yield pieces
    finally:
        for answer in answers:
            answer.listener = None
        if left:
            core.cancel(left)


class _News:
    """Wakes a task of an event loop from the thread that computes: once, however much there is until the task looks.
    Waking costs a system call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._event = loop, asyncio.Event()
        self._told = False

    def listener(self, answer: Answer) -> Callable[[], None]:
        def tell() -> None:
            if self._told:
                return
            self._told = True
            try:
                self._loop.call_soon_threadsafe(self._event.set)
            except RuntimeError:  # the loop is closed: nobody wants the answer
                answer.request.cancelled = True

        return tell

    async def wait(self) -> None:
        await self._event.wait()
        self._event.clear()
        self._told = False  # before the task looks: what comes later tells again
