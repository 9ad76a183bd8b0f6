"""Changes of single tokens' logits: penalties of recent tokens, and biases. For sampling on host and devices."""

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlc_amd.runtime.sampling.layout import CHANGES
from mlc_amd.runtime.sampling.settings import Sampling


@dataclass(frozen=True)
class Changes:
    """ids: distinct tokens, int32. recent: bool, for the repetition penalty. added: to their logits, float32."""

    ids: np.ndarray
    recent: np.ndarray
    added: np.ndarray


_NONE = Changes(np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, np.float32))


def changes_of(sampling: Sampling, recent: Sequence[int]) -> Changes:
    """At most CHANGES changes after the tokens `recent`, the latest last: of biased tokens, then of the latest ones."""
    penalized = _penalized(sampling, recent)
    bias = dict(sampling.logit_bias)
    if not bias and not penalized:
        return _NONE
    ids = list(dict.fromkeys([*bias, *penalized]))[:CHANGES]
    each, once = sampling.frequency_penalty, sampling.presence_penalty
    penalties = (penalized[t] * each + once if t in penalized else 0.0 for t in ids)
    added = [bias.get(t, 0.0) - penalty for t, penalty in zip(ids, penalties, strict=True)]
    return Changes(np.array(ids, np.int32), np.array([t in penalized for t in ids], bool), np.array(added, np.float32))


def _penalized(sampling: Sampling, recent: Sequence[int]) -> dict[int, int]:
    """The number of occurrences of each recent token, the latest token first. Empty if there are no penalties."""
    off = sampling.repetition_penalty == 1 and not sampling.presence_penalty and not sampling.frequency_penalty
    if off or not sampling.repetition_window:
        return {}
    # Python's integers: counting NumPy's takes ten times as long
    latest = map(operator.index, reversed(recent[-sampling.repetition_window :]))
    return Counter(token for token in latest if token >= 0)  # rows of images have negative numbers
