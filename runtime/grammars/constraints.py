"""Constraints on the tokens of an answer, as of grammars and schemas.

In: the tokens of the answer. Out: the tokens that may follow, as rows of the io buffer `allowed` (sampling/layout.py).
"""

from typing import Protocol

import numpy as np

from mlc_amd.runtime.errors import UserError

_WORD = np.dtype(np.int32)


class Constraint(Protocol):
    """The constraint of one answer. Used by one thread at a time, not always by the same one.

    The mask includes the model's end tokens where the answer may end.
    """

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
    """UserError for a token that a mask (`mask_of`) does not allow: such a token is only chosen where the mask allows
    none."""
    if not int(mask[token // 32]) >> token % 32 & 1:
        raise UserError("the answer cannot continue: its grammar allows no token of this model's vocabulary here")
