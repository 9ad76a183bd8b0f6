"""The state of one answer under a compiled grammar.

In: llguidance's matchers. Out: constraints (constraints.py). Masks of several answers are computed sequentially:
llguidance's threads (LLExecutor) take longer, on 2 cores and on 16 (8 answers, 152,000 tokens).
"""

import threading
from typing import Any

import numpy as np

from mlc_amd.runtime.errors import QUOTED, UserError, one_line


def shown(message: str) -> str:
    """A message of llguidance's."""
    return one_line(message.replace("<non-verbose/>", ""), QUOTED)


class AnswerConstraint:
    """A `Constraint`: one answer's state. vocab: the size of the logits."""

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher = matcher
        self._mask = np.zeros(-(-vocab // 32), np.int32)
        self._address = self._mask.ctypes.data  # kept: it takes NumPy as long as llguidance takes for half a mask

    def allowed(self) -> np.ndarray:
        self._matcher.unsafe_compute_mask_ptr(self._address, self._mask.nbytes)
        if self._matcher.is_error():
            raise self._error()
        return self._mask

    def accept(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise self._error()

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _error(self) -> UserError:
        return UserError(f"the answer cannot follow its grammar: {shown(self._matcher.get_error())}")


class Grammar:
    """A compiled grammar. A call returns the constraint of a new answer."""

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher, self._vocab = matcher, vocab
        self._lock = threading.Lock()

    def __call__(self) -> AnswerConstraint:
        with self._lock:
            return AnswerConstraint(self._matcher.deep_copy(), self._vocab)
