"""Chooses the next token on the host. In: logits. Out: a token id.

The steps have the order of llama.cpp's default chain, so that settings have the same effect: penalties, logit bias,
mask, top-k, top-p, min-p (top-p and min-p on probabilities at temperature 1), temperature, one draw. At temperature 0,
the largest logit after the mask is taken; the first one if several are equal. Devices do the same
(schedules/sampling.py) with the same random numbers; tests compare the two. Only the remaining candidates are sorted,
as a token must not take more than a millisecond.
"""

import math
import secrets
from collections.abc import Sequence

import numpy as np

from mlc_amd.runtime.errors import MachineError, UserError
from mlc_amd.runtime.sampling.logit_changes import changes_of
from mlc_amd.runtime.sampling.philox import SEED_BITS, uniform
from mlc_amd.runtime.sampling.settings import Sampling

# The number of largest logits in which the top-p search begins; multiplied by 8 until they have enough probability.
_FIRST_CANDIDATES = 128
_SLICE = 512
# The logit of tokens that a mask excludes.
LOWEST = np.float32(-3.0e38)


def not_finite(near: int | None = None) -> MachineError:
    """The error for a logit that is NaN or infinite. near: the token with it or one near it, None if unknown."""
    where = "" if near is None else f" (near token {near})"
    return MachineError(f"the model computed a logit that is not a finite number{where}: the model file is damaged")


class Sampler:
    """Samples tokens with one `Sampling`. The same seed, positions and logits give the same tokens. seed: the seed of
    `sampling`, or a new one if it has none."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.seed: int = secrets.randbits(SEED_BITS) if sampling.seed is None else int(sampling.seed)
        self._samples = 0

    def sample(
        self,
        logits: np.ndarray,
        recent: Sequence[int] = (),
        position: int | None = None,
        allowed: np.ndarray | None = None,
    ) -> int:
        """Returns a token id for `logits` (float32 [vocab], not changed). recent: the tokens so far, the latest last.
        position: of the token in its sequence, which determines its random number; None: the number of earlier samples.
        allowed: bool [vocab], the tokens that may be chosen, at least one.

        Raises MachineError if a logit is NaN or infinite.
        """
        position = self._samples if position is None else position
        self._samples += 1
        best = int(np.argmax(logits))  # the first NaN if there is one
        if not (np.isfinite(logits[best]) and np.isfinite(logits.min())):
            raise not_finite(best)
        if self.sampling.greedy:
            return int(np.argmax(_changed(logits, self.sampling, recent, allowed)))
        ids, weights = self.left(logits, recent, allowed)
        index = _draw(weights, uniform(self.seed, position))
        return index if ids is None else int(ids[index])

    def left(
        self, logits: np.ndarray, recent: Sequence[int] = (), allowed: np.ndarray | None = None
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """The candidates of a draw: (ids in ascending order, or None for all; their weights, the largest is 1)."""
        logits = _changed(logits, self.sampling, recent, allowed)
        largest = logits.max()
        ids, kept = self._candidates(logits, largest)
        # The largest logit is subtracted before the division, so that exp stays in range at any temperature. In place,
        # because allocating new pages takes as long as the computation.
        weights = kept - largest
        weights /= np.float32(self.sampling.temperature)
        return ids, np.exp(weights, out=weights)

    def _candidates(self, logits: np.ndarray, largest: float) -> tuple[np.ndarray | None, np.ndarray]:
        """The tokens after top-k, top-p and min-p: (ids, logits) in the order of ids, or (None, all logits)."""
        s = self.sampling
        ids, kept = None, logits
        if 0 < s.top_k < len(logits):
            ids = most_likely(logits, s.top_k)
            kept = logits[ids]
        if s.top_p < 1.0:
            chosen = _nucleus(kept, s.top_p, largest)
            ids, kept = (chosen if ids is None else ids[chosen]), kept[chosen]
        if s.min_p > 0.0:
            chosen = np.flatnonzero(kept >= largest + math.log(s.min_p))
            ids, kept = (chosen if ids is None else ids[chosen]), kept[chosen]
        if ids is None:
            return None, kept
        order = np.argsort(ids)
        return ids[order], kept[order]


def _draw(weights: np.ndarray, uniform: float) -> int:
    """An index, drawn with probabilities proportional to the weights. uniform: the random number, 0 <= uniform < 1."""
    # In two levels, a slice and then an index in it: a sum over a whole vocabulary takes more than a millisecond.
    starts = np.arange(0, len(weights), _SLICE)
    slices = np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)
    point = uniform * slices[-1]
    at = min(int(np.searchsorted(slices, point, side="right")), len(slices) - 1)
    inside = np.cumsum(weights[starts[at] : starts[at] + _SLICE], dtype=np.float64)
    point -= slices[at - 1] if at else 0.0
    # After rounding the point may be beyond the last weight: then the last index with a weight is chosen.
    last = int(np.flatnonzero(inside < inside[-1])[-1]) + 1 if inside[0] < inside[-1] else 0
    return int(starts[at]) + min(int(np.searchsorted(inside, point, side="right")), last)


def _changed(logits: np.ndarray, sampling: Sampling, recent: Sequence[int], allowed: np.ndarray | None) -> np.ndarray:
    """`logits` after penalties, bias and mask. A copy if any of them applies."""
    changes = changes_of(sampling, recent)
    if allowed is None and not len(changes.ids):
        return logits
    if len(changes.ids) and changes.ids.max() >= len(logits):
        raise UserError(f"token id {changes.ids.max()} is outside the vocabulary of {len(logits)}")
    logits, penalty = logits.copy(), np.float32(sampling.repetition_penalty)
    values = logits[changes.ids]
    penalized = values * np.where(values > 0, np.float32(1 / sampling.repetition_penalty), penalty)
    logits[changes.ids] = np.where(changes.recent, penalized, values) + changes.added
    if allowed is not None:
        logits[~allowed] = LOWEST
    return logits


def most_likely(logits: np.ndarray, k: int) -> np.ndarray:
    """The indices of the k largest logits, the largest first; equal logits in the order of their indices."""
    # First a selection without sorting: at least k logits are not smaller than the k-th largest of the maxima of
    # `columns` disjoint slices.
    values, candidates = logits, None
    columns = 8 * k
    if columns * 4 <= len(logits):
        rows = len(logits) // columns
        maxima = logits[: rows * columns].reshape(rows, columns).max(axis=0)
        candidates = np.flatnonzero(logits >= np.partition(maxima, columns - k)[columns - k])
        values = logits[candidates]
    threshold = np.partition(values, len(values) - k)[len(values) - k]
    above = np.flatnonzero(values > threshold)
    ties = np.flatnonzero(values == threshold)[: k - len(above)]
    found = np.sort(np.concatenate([above, ties]))
    found = found[np.argsort(-values[found], kind="stable")]
    return found if candidates is None else candidates[found]


def log_sums(logits: np.ndarray) -> np.ndarray:
    """The logarithm of the sum of e**logit of each row. logits: float32 [.., vocab]. Returns float64 [..]."""
    values = logits.astype(np.float64)
    largest = values.max(-1, keepdims=True)
    return np.log(np.exp(values - largest).sum(-1)) + largest[..., 0]


def _nucleus(logits: np.ndarray, top_p: float, largest: float) -> np.ndarray:
    """The indices of the smallest set of most probable tokens whose probabilities sum to at least `top_p`."""
    total = float(np.exp(logits - largest).sum(dtype=np.float64))
    count = min(_FIRST_CANDIDATES, len(logits))
    while True:
        ids = most_likely(logits, count)
        mass = np.cumsum(np.exp((logits[ids] - largest).astype(np.float64)))
        if count == len(logits) or mass[-1] >= top_p * total:
            return ids[: int(np.searchsorted(mass, top_p * total)) + 1]
        count = min(count * 8, len(logits))
