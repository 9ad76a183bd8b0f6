"""Constraints on the tokens of answers: grammars, schemas; rows of the io buffer `allowed` (sampling/layout.py)."""

import re
import threading
from typing import Any, Protocol

import numpy as np

from mlc_amd.runtime.errors import QUOTED, UserError, one_line

_WORD = np.dtype(np.int32)
_QUOTE = re.compile(r"^(at )?[0-9]+\([0-9]+\): |^ +([0-9]+ \|.*|\^)\n?", re.MULTILINE)


class Constraint(Protocol):
    """The constraint of one answer. Used by one thread at a time, not always by the same one. The mask includes the
    model's end tokens where the answer may end."""

    def allowed(self) -> np.ndarray | None:
        """int32 words [ceil(vocab / 32)]: bit t % 32 of word t // 32 is set if token t may follow. None: any may. If
        none may, the answer fails. The next call may overwrite the memory."""
        ...

    def accept(self, token: int) -> None:
        """The token was chosen; it is no end token."""
        ...

    @property
    def complete(self) -> bool:
        """Whether the answer ends here, as no token can follow."""
        ...


def mask_of(constraint: Constraint, vocab: int) -> np.ndarray | None:
    """`constraint.allowed()`, with zero bits beyond the vocabulary. ValueError for an invalid mask."""
    mask = constraint.allowed()
    if mask is None:
        return None
    words = -(-vocab // 32)
    if mask.dtype != _WORD or mask.shape != (words,):
        raise ValueError(f"a mask is {mask.dtype} {list(mask.shape)}: it must be int32 [{words}]")
    if (rest := vocab % 32) and int(mask[-1]) >> rest:
        mask = mask.copy()
        mask[-1] &= np.int32((1 << rest) - 1)
    return mask


def check_chosen(mask: np.ndarray, token: int) -> None:
    """UserError for a token that a mask (`mask_of`) does not allow, which is only chosen if it allows none."""
    if not int(mask[token // 32]) >> token % 32 & 1:
        raise UserError("the answer cannot continue: its grammar allows no token of this model's vocabulary here")


def shown(message: str, quoting: bool = True) -> str:
    """A message of llguidance's. quoting: with lines of the grammar, which are of use where a user wrote them."""
    if not quoting:
        message = _QUOTE.sub("", message).rpartition("\nerror: ")[2]  # of an error in a regular expression its reason
    return one_line(message.replace("<non-verbose/>", ""), QUOTED)


class AnswerConstraint:
    """A `Constraint`: one answer's state under a grammar of llguidance. vocab: the size of the logits. Masks of several
    answers are computed sequentially: llguidance's threads (LLExecutor) take longer, on 2 cores and on 16 (8 answers,
    152,000 tokens)."""

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
