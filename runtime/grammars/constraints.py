"""Constraints on the tokens of answers, from grammars and schemas. They make rows of the io buffer `allowed`
(sampling/layout.py)."""

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mlc_amd.runtime.errors import QUOTED, UserError, one_line

_WORD = np.dtype(np.int32)
_QUOTE = re.compile(r"^(at )?[0-9]+\([0-9]+\): |^ +([0-9]+ \|.*|\^)\n?", re.MULTILINE)


class Constraint(Protocol):
    """The constraint of one answer. It is used by one thread at a time, but not always by the same thread. Where the
    answer may end, its mask includes the model's end tokens."""

    def allowed(self) -> np.ndarray | None:
        """The mask of the next token, int32 [ceil(vocab / 32)]: bit t % 32 of word t // 32 is set if token t may
        follow. None: all tokens may follow. If the mask has no bits set, the answer fails. The next call may overwrite
        the memory."""
        ...

    def accept(self, token: int) -> None:
        """Called when the token was chosen. It must not be an end token."""
        ...

    @property
    def complete(self) -> bool:
        """Whether the answer must end here, because no token can follow."""
        ...


@runtime_checkable
class RewindableConstraint(Constraint, Protocol):
    """A constraint that can go back, so that its answer's next tokens can be guessed."""

    def guesses(self, drafts: Sequence[int], most: int) -> list[int]:
        """Returns the longest beginning of `drafts` (guesses of the next tokens) that the constraint allows, followed
        by tokens of the text that must follow; at most `most` tokens, none of which ends the answer. Changes no
        state."""
        ...

    def rewind(self, count: int) -> None:
        """Returns to the state before the last `count` tokens were accepted, even after an error."""
        ...


def mask_of(constraint: Constraint, vocab: int) -> np.ndarray | None:
    """`constraint.allowed()`, with zero bits beyond the vocabulary. Raises ValueError for a mask of a wrong form."""
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
    """Raises UserError for a chosen token that the mask (`mask_of`) does not allow: then it allows no token."""
    if not int(mask[token // 32]) >> token % 32 & 1:
        raise UserError("the answer cannot continue: its grammar allows no token of this model's vocabulary here")


def shown(message: str, quoting: bool = True) -> str:
    """A message of llguidance for users. quoting: keeps lines of the grammar, which are useful if a user wrote it."""
    if not quoting:
        # keeps only the reason of an error in a regular expression
        message = _QUOTE.sub("", message).rpartition("\nerror: ")[2]
    return one_line(message.replace("<non-verbose/>", ""), QUOTED)


SPECIAL = b"\xff"  # in llguidance's bytes, before a token that is not text


class AnswerConstraint:
    """A `RewindableConstraint`: the state of one answer under a grammar of llguidance. new: makes matchers. vocab: the
    size of the logits. encode: the tokens of bytes within a text. Masks of several answers are computed one after the
    other, because llguidance's threads (LLExecutor) take longer on 2 and on 16 cores (8 answers, 152,000 tokens)."""

    def __init__(self, new: Callable[[], Any], vocab: int, encode: Callable[[bytes], Sequence[int]]) -> None:
        self._new, self._encode = new, encode
        self._matcher = new()
        self._accepted: list[int] = []
        self._mask = np.zeros(-(-vocab // 32), np.int32)
        # kept, because NumPy takes as long to get it as llguidance takes for half a mask
        self._address = self._mask.ctypes.data

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
            del found[-1:]  # this token ends the answer
        elif len(found) < most:
            found += self._forced(found, most - len(found))
        self._rollback(consumed)
        return found

    def _forced(self, guesses: Sequence[int], most: int) -> list[int]:
        """The tokens of the text that must follow the guesses, which the matcher has consumed."""
        text, special, _ = self._matcher.compute_ff_bytes().partition(SPECIAL)
        if special:  # after such a token the matcher would make no more masks
            self._renew(guesses)
        # the last token may be the beginning of a longer token
        forced = list(self._encode(text)[:-1][:most])
        return forced[: self._matcher.validate_tokens(forced)]

    def rewind(self, count: int) -> None:
        del self._accepted[len(self._accepted) - count :]
        self._rollback(count)

    def _rollback(self, count: int) -> None:
        """Returns the matcher to the state after the accepted tokens. A matcher with an error (for example, after a
        guess that takes too much work) cannot go back, and is replaced."""
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
    """A compiled grammar. Calling it returns the constraint for a new answer."""

    def __init__(self, matcher: Any, vocab: int, encode: Callable[[bytes], Sequence[int]]) -> None:
        self._matcher, self._vocab, self._encode = matcher, vocab, encode
        self._lock = threading.Lock()

    def _new(self) -> Any:
        with self._lock:
            return self._matcher.deep_copy()

    def __call__(self) -> AnswerConstraint:
        return AnswerConstraint(self._new, self._vocab, self._encode)
