"""One answer's state under a compiled grammar, and the masks of several answers computed side by side.

In: llguidance's matchers. Out: constraints (constraints.py), of which `compute_all` makes the masks of a step at once:
where they take long, on several threads.
"""

import threading
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from mlc_amd.runtime.errors import QUOTED, UserError, one_line
from mlc_amd.runtime.host import available_threads

# Seconds that other threads must save: to hand masks to them and to wait for them takes 30 us, and some 100 us where
# the cpu device's threads poll on all cores.
_WORTH = 300e-6
_FORGET = 0.95  # of what a mask took alone, each time that it is computed beside others: it is measured again then
# Of the time that masks take, the share that the last one has, and the most it counts as: another program that gets the
# processor meanwhile is no reason for threads.
_LAST, _MOST = 0.1, 2 * _WORTH
_MOST_THREADS = 16


def shown(message: str) -> str:
    """A message of llguidance's."""
    return one_line(message.replace("<non-verbose/>", ""), QUOTED)


@cache
def _executor() -> Any:
    import llguidance

    return llguidance.LLExecutor(min(available_threads(), _MOST_THREADS))


class Constrained:
    """A `Constraint`: one answer's state. vocab: the size of the logits."""

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher = matcher
        self._mask = np.zeros(-(-vocab // 32), np.int32)
        self._address = self._mask.ctypes.data  # which takes NumPy as long as llguidance takes for half a mask
        self._seconds = 0.0  # that masks take lately
        self._computed = False  # the mask is that of this state

    @classmethod
    def compute_all(cls, constraints: Sequence["Constrained"]) -> None:
        """Makes the masks that `allowed` gives next."""
        seconds, words = [one._seconds for one in constraints], len(constraints[0]._mask)
        if sum(seconds) - max(seconds) < _WORTH or any(len(one._mask) != words for one in constraints):
            for one in constraints:
                one._compute()
            return
        masks = np.empty((len(constraints), words), np.int32)
        todo = [(one._matcher, row) for row, one in enumerate(constraints)]
        _executor().unsafe_compute_mask_ptr(todo, masks.ctypes.data, 4 * words, len(todo))
        for one, mask in zip(constraints, masks, strict=True):
            one._mask[:] = mask
            one._computed = True
            one._seconds *= _FORGET

    def _compute(self) -> None:
        begun = time.perf_counter()
        self._matcher.unsafe_compute_mask_ptr(self._address, self._mask.nbytes)
        self._seconds += _LAST * (min(time.perf_counter() - begun, _MOST) - self._seconds)
        self._computed = True

    def allowed(self) -> np.ndarray:
        if not self._computed:
            self._compute()
        if self._matcher.is_error():
            raise self._error()
        return self._mask

    def accept(self, token: int) -> None:
        self._computed = False
        if not self._matcher.consume_token(token):
            raise self._error()

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _error(self) -> UserError:
        return UserError(f"the answer cannot follow its grammar: {shown(self._matcher.get_error())}")


class Grammar:
    """A compiled grammar. Called, it gives the constraint of an answer that begins."""

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher, self._vocab = matcher, vocab
        self._lock = threading.Lock()

    def __call__(self) -> Constrained:
        with self._lock:
            return Constrained(self._matcher.deep_copy(), self._vocab)
