"""What the device samples rows by: the io buffers that say how, as numbers.

A function that samples has a row of each of these buffers for every row of logits that it answers with:

    sampling  int32 [n, WORDS]            one word for each name of FIELDS; floats and unsigned numbers by their bits
    changes   int32 [n, CHANGES, 2]       changes of single tokens' logits: the token, RECENT added if it is a recent
                                          one, and the bits of the float32 that is added to its logit; the word
                                          `changes` counts those that are used, each of another token
    allowed   int32 [n, ceil(padded vocabulary / 32)]   bit t % 32 of word t // 32: token t may be chosen. Read for rows
                                          with the flag MASK only

The order of the steps is `sampling.Sampler`'s. What is off has a value that changes nothing.
"""

import math
from collections.abc import Sequence

import numpy as np

from mlc_amd.runtime.logit_changes import changes_of
from mlc_amd.runtime.philox import SEED_BITS
from mlc_amd.runtime.sampling import Sampling

WORDS = 16
# Words of a row of `sampling`. heat: log2(e) / temperature. min_p: its logarithm. penalty: of repetition; inverse: 1 /
# penalty. position: of the token that is chosen, which is the counter of its random number.
FIELDS = (
    "flags", "changes", "top_k", "position", "seed_low", "seed_high", "heat", "top_p", "min_p", "penalty", "inverse",
)  # fmt: skip
# Flags: a draw, else the largest logit; there are changes or a mask; there is a mask; the log-probability is wanted.
DRAW, ADJUST, MASK, LOGPROB = 1, 2, 4, 8
RECENT = 1 << 30  # in the first word of a change: the token is a recent one, which the repetition penalty applies to
TOKEN = RECENT - 1
NO_MIN_P = -3.0e38


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
    """Writes one row: `words` int32 [WORDS], `changes` int32 [CHANGES, 2] as far as it is read.

    recent: the tokens so far, the latest last. position: of the token to choose, in its sequence. seed: of the
    sequence, where `sampling` has none. masked: whether its row of `allowed` counts, which has at least one token.
    """
    found = changes_of(sampling, recent)
    count, draw = len(found.ids), not sampling.greedy
    changes[:count, 0] = found.ids | np.where(found.recent, np.int32(RECENT), np.int32(0))
    changes[:count, 1] = found.added.view(np.int32)
    flags = DRAW * draw | ADJUST * bool(count or masked) | MASK * masked | LOGPROB * logprob
    seed = seed if sampling.seed is None else sampling.seed
    words[:6] = np.array([flags, count, min(sampling.top_k, vocab), position, *seed_words(seed)], np.uint32).view(
        np.int32
    )
    floats = (
        math.log2(math.e) / sampling.temperature if draw else 0.0,
        sampling.top_p,
        math.log(sampling.min_p) if sampling.min_p > 0 else NO_MIN_P,
        sampling.repetition_penalty,
        1 / sampling.repetition_penalty,
    )
    words[6 : 6 + len(floats)] = np.array(floats, np.float32).view(np.int32)


def seed_words(seed: int) -> tuple[int, int]:
    """(low, high) 32 bits of a seed below 2**SEED_BITS."""
    if not 0 <= seed < 1 << SEED_BITS:
        raise ValueError(f"seed {seed} has more than {SEED_BITS} bits")
    return seed & 0xFFFFFFFF, seed >> 32


def mask_words(allowed: np.ndarray) -> np.ndarray:
    """A row of `allowed` for a bool for each column of the logits."""
    bits = np.zeros(-(-len(allowed) // 32) * 32, bool)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view(np.int32)
