"""How likely each token of a prompt is after those before it: `TokenScores`, by a scoring whose logits are reduced
step by step, as those of a whole prompt may take gigabytes; `computed`, for asyncio."""

import asyncio
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from mlc_amd.runtime.engine.requests import Request, Scoring
from mlc_amd.runtime.engine.step_loop import StepLoop
from mlc_amd.runtime.sampling.sampler import log_sums, most_likely, not_finite


class TokenScore(NamedTuple):
    """A token's natural log-probability in its place; its rank there, 1: the most likely one; the most likely tokens
    in its place and their log-probabilities, the most likely first."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class TokenScores(Scoring):
    """found: of each token but the first, once it is `done`, unless there is an `error`. ids: at least two. count: of
    the most likely tokens. listener: called by the computing thread at the end."""

    def __init__(self, ids: list[int], count: int, client: Hashable, listener: Callable[[], None]) -> None:
        self.request = Request(ids[:-1], client=client, scored=0)
        self.found: list[TokenScore] = []
        self.done, self.error = False, None
        self._ids, self._count, self._listener = ids, count, listener

    def take(self, start: int, logits: np.ndarray) -> None:
        del self.found[start:]  # of a step that failed
        try:
            following = self._ids[start + 1 : start + 1 + len(logits)]
            self.found += [score(row, token, self._count) for row, token in zip(logits, following, strict=True)]
        except Exception as error:  # its own: other requests of the engine go on
            self.fail(error)
        self.done = self.done or len(self.found) == len(self._ids) - 1

    def ended(self) -> None:
        if self.request.sequence:
            self.request.sequence.free()
        self.done = True
        self._listener()


def score(logits: np.ndarray, token: int, count: int) -> TokenScore:
    """Of a token in the place that these logits, float32 [vocab], predict. UserError for one that is not finite."""
    if not np.isfinite(logits).all():
        raise not_finite()
    total = float(log_sums(logits))
    top = most_likely(logits, min(count, len(logits))) if count else ()
    rank = int((logits > logits[token]).sum()) + 1
    return TokenScore(float(logits[token]) - total, rank, tuple((int(one), float(logits[one]) - total) for one in top))


async def computed(loop: StepLoop, ids: list[int], count: int, client: Hashable) -> list[TokenScore]:
    """Of each token but the first, by a background thread. QueueFull, ContextFull, UserError."""
    if len(ids) < 2:
        return []
    events, ended = asyncio.get_running_loop(), asyncio.Event()

    def notify() -> None:
        with suppress(RuntimeError):  # the event loop is closed
            events.call_soon_threadsafe(ended.set)

    scores = TokenScores(ids, count, client, notify)
    try:
        await asyncio.to_thread(loop.start_scoring, scores)
        await ended.wait()
    finally:
        if not scores.done:
            loop.cancel([scores])
    if scores.error:
        raise scores.error
    return scores.found
