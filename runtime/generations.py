"""What `Engine.generate` gives: an iterator over the pieces of one answer or of several.

The answers are queued at the first step of the iterator, and computed as they are consumed, together with all others of
the engine. Closing the iterator, or dropping it, ends the ones that are not complete.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from mlc_amd.runtime.answers import Answer
from mlc_amd.runtime.core import Core
from mlc_amd.runtime.generation import Piece, Stats


class Generation(Iterator[Piece]):
    """See the module's docstring. make: gives the answers, when they are to be queued."""

    def __init__(self, core: Core, make: Callable[[], Sequence[Answer]]) -> None:
        self._core, self._make = core, make
        self._answers: Sequence[Answer] = ()
        self._pieces: Iterator[Piece] = self._run()

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the answers that are not complete."""
        self._pieces.close()  # type: ignore[attr-defined]

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
        for name in ("prompt_tokens", "cached_tokens", "generated"):
            setattr(found, name, sum(getattr(part, name) for part in parts))
        for name in ("prefill_s", "ttft_s", "decode_s"):
            setattr(found, name, max((getattr(part, name) for part in parts), default=0.0))
        if parts and len({part.finish for part in parts}) == 1:
            found.finish = parts[0].finish
        return found

    def _run(self) -> Iterator[Piece]:
        self._answers = self._make()
        self._core.start(self._answers)
        left = list(self._answers)
        try:
            while left:
                self._core.wait(left)
                for answer in list(left):
                    yield from answer.take()
                    if answer.complete:
                        left.remove(answer)
        finally:
            if left:
                self._core.cancel(left)

    async def stream(self) -> AsyncIterator[Piece]:
        """The pieces for asyncio: the background thread computes them."""
        self._answers = self._make()
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            loop.call_soon_threadsafe(news.set)

        for answer in self._answers:
            answer.listener = tell
        await asyncio.to_thread(self._core.start, self._answers, True)
        left = list(self._answers)
        try:
            while left:
                await news.wait()
                news.clear()
                for answer in list(left):
                    for piece in answer.take():
                        yield piece
                    if answer.complete:
                        left.remove(answer)
        finally:
            for answer in self._answers:
                answer.listener = None
            self._core.unwatch(len(self._answers))
            if left:
                self._core.cancel(left)
