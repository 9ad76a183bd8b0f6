"""Writes the parameters of sampling on a device: rows of the buffers of layout.py. In: the settings, the tokens so far
and the position. Devices apply the steps in the order of sampler.py."""

import math
from collections.abc import Sequence

import numpy as np

from mlc_amd.runtime.sampling.layout import ADJUST, DRAW, LOGPROB, MASK, NO_MIN_P, RECENT
from mlc_amd.runtime.sampling.logit_changes import changes_of
from mlc_amd.runtime.sampling.philox import SEED_BITS
from mlc_amd.runtime.sampling.settings import Sampling


def write_row(
    words: np.ndarray,
    changes: np.ndarray,
    sampling: Sampling,
    recent: Sequence[int],
    position: int,
    seed: int,
    vocab: int,
    logprob: bool = False,
    masked: bool = False,
) -> None:
    """Writes one row: `words`, int32 [WORDS], and the used part of `changes`, int32 [CHANGES, 2].

    recent: the tokens so far, the latest last. position: of the chosen token in its sequence. seed: of the sequence,
    used if `sampling` has none. vocab: size of the vocabulary. logprob: whether the log-probability is wanted. masked:
    whether the row of `allowed` is used; it must allow at least one token.
    """
    found = changes_of(sampling, recent)
    count, draw = len(found.ids), not sampling.greedy
    changes[:count, 0] = found.ids | np.where(found.recent, np.int32(RECENT), np.int32(0))
    changes[:count, 1] = found.added.view(np.int32)
    flags = DRAW * draw | ADJUST * bool(count or masked) | MASK * masked | LOGPROB * logprob
    seed = seed if sampling.seed is None else sampling.seed
    integers = flags, count, min(sampling.top_k, vocab), position, *seed_words(seed)
    words[:6] = np.array(integers, np.uint32).view(np.int32)
    floats = (
        math.log2(math.e) / sampling.temperature if draw else 0.0,
        sampling.top_p,
        math.log(sampling.min_p) if sampling.min_p > 0 else NO_MIN_P,
        sampling.repetition_penalty,
        1 / sampling.repetition_penalty,
    )
    words[6 : 6 + len(floats)] = np.array(floats, np.float32).view(np.int32)


def seed_words(seed: int) -> tuple[int, int]:
    """The lower and upper 32 bits of a seed. Raises ValueError if it is not below 2**SEED_BITS."""
    if not 0 <= seed < 1 << SEED_BITS:
        raise ValueError(f"seed {seed} has more than {SEED_BITS} bits")
    return seed & 0xFFFFFFFF, seed >> 32


def mask_words(allowed: np.ndarray) -> np.ndarray:
    """A row of the buffer `allowed`, int32. allowed: bool, for each column of the logits."""
    bits = np.zeros(-(-len(allowed) // 32) * 32, bool)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view(np.int32)
