"""Constraints on the tokens of answers: grammars, schemas; rows of the io buffer `allowed` (sampling/layout.py)."""

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

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


@runtime_checkable
class RewindableConstraint(Constraint, Protocol):
    """One that knows whether tokens may follow one another: its answer's next tokens can be guessed."""

    def guesses(self, drafts: Sequence[int], most: int) -> list[int]:
        """The first of the drafts, guesses of the next tokens, that may follow, and further tokens of a text that must
        follow these; at most `most`, and none that ends the answer. Changes nothing."""
        ...

    def rewind(self, count: int) -> None:
        """As before the last `count` tokens were accepted, also after an error."""
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


SPECIAL = b"\xff"  # in llguidance's bytes, before a token that is no text


class AnswerConstraint:
    """A `RewindableConstraint`: one answer's state under a grammar of llguidance. new: makes matchers; vocab: the size
    of the logits; encode: tokens of bytes within a text. Masks of several answers are computed sequentially:
    llguidance's threads (LLExecutor) take longer, on 2 cores and on 16 (8 answers, 152,000 tokens)."""

    def __init__(self, new: Callable[[], Any], vocab: int, encode: Callable[[bytes], Sequence[int]]) -> None:
        self._new, self._encode = new, encode
        self._matcher = new()
        self._accepted: list[int] = []
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
        self._accepted.append(token)

    def guesses(self, drafts: Sequence[int], most: int) -> list[int]:
        if most < 1:
            return []
        found = list(drafts[:most])
        consumed = self._matcher.try_consume_tokens(found)
        del found[consumed:]
        if self._matcher.is_stopped():
            del found[-1:]  # it ends the answer
        elif len(found) < most:
            found += self._forced(found, most - len(found))
        self._rollback(consumed)
        return found

    def _forced(self, guesses: Sequence[int], most: int) -> list[int]:
        """Tokens of the text that must follow guesses that the matcher has consumed."""
        text, special, _ = self._matcher.compute_ff_bytes().partition(SPECIAL)
        if special:  # the matcher would make no more masks
            self._renew(guesses)
        # the last token is perhaps the beginning of a longer one
        forced = list(self._encode(text)[:-1][:most])
        return forced[: self._matcher.validate_tokens(forced)]

    def rewind(self, count: int) -> None:
        del self._accepted[len(self._accepted) - count :]
        self._rollback(count)

    def _rollback(self, count: int) -> None:
        """Of the matcher, to the state after the accepted tokens. One with an error, as of a guess that takes too much
        work, has no way back."""
        if count and not self._matcher.is_error():
            self._matcher.rollback(count)
        if self._matcher.is_error():
            self._renew()

    def _renew(self, guesses: Sequence[int] = ()) -> None:
        self._matcher = self._new()
        self._matcher.consume_tokens([*self._accepted, *guesses])

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _error(self) -> UserError:
        return UserError(f"the answer cannot follow its grammar: {shown(self._matcher.get_error())}")


class Grammar:
    """A compiled grammar. A call returns the constraint of a new answer."""

    def __init__(self, matcher: Any, vocab: int, encode: Callable[[bytes], Sequence[int]]) -> None:
        self._matcher, self._vocab, self._encode = matcher, vocab, encode
        self._lock = threading.Lock()

    def _new(self) -> Any:
        with self._lock:
            return self._matcher.deep_copy()

    def __call__(self) -> AnswerConstraint:
        return AnswerConstraint(self._new, self._vocab, self._encode)
