"""The logits of all of a sequence's new tokens, computed in chunks between the steps of answers.

In: rows of logits, from the thread that computes the steps (step_loop.py). Out: all of them, for the caller, who waits.
"""

import numpy as np

from mlc_amd.runtime.cache.sequence import Sequence
from mlc_amd.runtime.engine.requests import Request


class Scoring:
    """The tokens of `sequence` from number `first` on. logits: float32 [tokens, vocab], complete when it is `done`
    without an `error`."""

    def __init__(self, sequence: Sequence, first: int, vocab: int) -> None:
        # A client of its own: it delays no other client's next chunk.
        self.request = Request(sequence.tokens, client=self, scored=first, sequence=sequence)
        self.logits = np.empty((len(sequence.tokens) - first, vocab), np.float32)
        self.done = False
        self.error: BaseException | None = None
        self._sequence, self._first = sequence, first

    @property
    def ready(self) -> bool:
        return self.done

    def take(self, start: int, logits: np.ndarray) -> None:
        """The rows of the tokens from number `start` on."""
        self.logits[start - self._first : start - self._first + len(logits)] = logits
        self.done = start + len(logits) == len(self._sequence.tokens)

    def fail(self, error: BaseException) -> None:
        self.done, self.error = True, error
