"""Computes the probability of each token of a prompt given the tokens before it. `TokenScores` reduces logits to scores
after each step, as the logits of a whole prompt may take gigabytes. `computed` is for asyncio."""

import asyncio
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from mlc_amd.runtime.engine.requests import Request, Scoring
from mlc_amd.runtime.engine.step_loop import StepLoop
from mlc_amd.runtime.sampling.sampler import log_sums, most_likely, not_finite


class TokenScore(NamedTuple):
    """logprob: a token's natural log-probability in its place. rank: its rank among all tokens, 1 for the most likely.
    top: (token, log-probability) of the most likely tokens in its place, the most likely first."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class TokenScores(Scoring):
    """ids: the prompt, at least two tokens. count: length of `TokenScore.top`. listener: called by the computing thread
    at the end. found: the score of each token but the first, complete when it is `done` without an `error`."""

    def __init__(self, ids: list[int], count: int, client: Hashable, listener: Callable[[], None]) -> None:
        self.request = Request(ids[:-1], client=client, scored=0)
        self.found: list[TokenScore] = []
        self.done, self.error = False, None
        self._ids, self._count, self._listener = ids, count, listener

    def take(self, start: int, logits: np.ndarray) -> None:
        del self.found[start:]  # scores from a step that failed, and that is computed again
        try:
            following = self._ids[start + 1 : start + 1 + len(logits)]
            self.found += [score(row, token, self._count) for row, token in zip(logits, following, strict=True)]
        except Exception as error:  # only this request fails; other requests continue
            self.fail(error)
        self.done = self.done or len(self.found) == len(self._ids) - 1

    def ended(self) -> None:
        if self.request.sequence:
            self.request.sequence.free()
        self.done = True
        self._listener()


def score(logits: np.ndarray, token: int, count: int) -> TokenScore:
    """The score of a token. logits: float32 [vocab], those that predict its place. count: length of `TokenScore.top`.
    Raises UserError if a logit is not finite."""
    if not np.isfinite(logits).all():
        raise not_finite()
    total = float(log_sums(logits))
    top = most_likely(logits, min(count, len(logits))) if count else ()
    rank = int((logits > logits[token]).sum()) + 1
    return TokenScore(float(logits[token]) - total, rank, tuple((int(one), float(logits[one]) - total) for one in top))


async def computed(loop: StepLoop, ids: list[int], count: int, client: Hashable) -> list[TokenScore]:
    """The scores of all tokens but the first, by a background thread. Raises QueueFull, ContextFull, UserError."""
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
