"""What an answer may consist of, token by token: grammars, schemas.

In: the tokens of the answer. Out: which tokens may follow, as rows of the io buffer `allowed` (sampling/layout.py).
"""

from typing import Protocol

import numpy as np

from mlc_amd.runtime.errors import UserError

_WORD = np.dtype(np.int32)


class Constraint(Protocol):
    """What one answer may consist of. Used by one thread at a time, not always by the same one.

    The mask includes the model's end tokens where the answer may end: nothing adds them to it.
    """

    def allowed(self) -> np.ndarray | None:
        """int32 words [ceil(vocab / 32)]: bit t % 32 of word t // 32 says whether token t may follow. None: any may.
        If none may, the answer fails. The memory may be used again by the next call."""
        ...

    def accept(self, token: int) -> None:
        """The token was chosen; it is no end token."""
        ...

    @property
    def complete(self) -> bool:
        """The answer may end here and nothing can follow: it ends."""
        ...


def mask_of(constraint: Constraint, vocab: int) -> np.ndarray | None:
    """`constraint.allowed()`, of which bits beyond the vocabulary are zero. ValueError for what is no mask."""
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
    """UserError for a token that a mask (`mask_of`) does not allow: then it allows none, as others are chosen only
    where none is."""
    if not int(mask[token // 32]) >> token % 32 & 1:
        raise UserError("the answer cannot go on: its grammar allows no token of this model's vocabulary here")
