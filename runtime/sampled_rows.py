"""What the device is told about the rows that it samples: the io buffers `sampling`, `changes` and `allowed` of a step.

In: for each answer of a step a `Choice`. Out: the buffers are written, those that most steps do not need only where
they are needed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mlc_amd.runtime.sampling import Sampling
from mlc_amd.runtime.sampling_layout import CHANGES, FIELDS, WORDS
from mlc_amd.runtime.sampling_rows import write_row

_POSITION = FIELDS.index("position")


class Choice(NamedTuple):
    """How a token is chosen: settings, the seed where these have none, and the tokens before it. allowed: a row of the
    io buffer (`sampling_rows.mask_words`), or None: any token. logprob: whether its log-probability is wanted."""

    sampling: Sampling
    seed: int
    tokens: Sequence[int]
    allowed: np.ndarray | None = None
    logprob: bool = False


class SampledRows:
    """Writes the buffers of `device`, which have `rows` rows for logits of `vocab` columns."""

    def __init__(self, device, rows: int, vocab: int) -> None:
        self._device, self._vocab = device, vocab
        self._words = np.zeros((rows, WORDS), np.int32)
        self._changes = np.zeros((rows, CHANGES, 2), np.int32)
        self._written = 0  # rows of `sampling` that are not zero
        self._plain: dict[tuple[Sampling, int, bool], np.ndarray] = {}  # words of settings without changes

    def clear(self) -> None:
        """All rows take the largest logit."""
        if self._written:
            self._words[: self._written] = 0
            self._device.write("sampling", self._words[: self._written])
            self._written = 0

    def write(self, choices: Sequence[Choice], first: int = 0) -> None:
        """choices: of the rows from `first` on; rows before these take the largest logit."""
        self.clear()
        changed = 0
        for i, choice in enumerate(choices, first):
            sampling = choice.sampling
            if sampling.adjusts or choice.allowed is not None:
                words, changes, masked = self._words[i], self._changes[i], choice.allowed is not None
                write_row(
                    words, changes, sampling, choice.tokens, len(choice.tokens), choice.seed, self._vocab,
                    choice.logprob, masked,
                )  # fmt: skip
                changed = i + 1 if sampling.adjusts else changed
            elif not sampling.greedy or choice.logprob:
                self._words[i] = self._plain_words(choice)
                self._words[i, _POSITION] = len(choice.tokens)
        end = first + len(choices)
        if self._words[:end].any():
            self._device.write("sampling", self._words[:end])
            self._written = end
        if changed:
            self._device.write("changes", self._changes[:changed])
        masks = [choice.allowed for choice in choices]
        if any(mask is not None for mask in masks):
            width = next(len(mask) for mask in masks if mask is not None)
            rows = np.zeros((end, width), np.int32)
            for i, mask in enumerate(masks, first):
                if mask is not None:
                    rows[i] = mask
            self._device.write("allowed", rows)

    def _plain_words(self, choice: Choice) -> np.ndarray:
        """The words of a row without changes, but for the position."""
        key = choice.sampling, choice.seed, choice.logprob
        if key not in self._plain:
            if len(self._plain) > 4096:
                self._plain.clear()
            words, none = np.zeros(WORDS, np.int32), np.zeros((0, 2), np.int32)
            write_row(words, none, choice.sampling, (), 0, choice.seed, self._vocab, choice.logprob)
            self._plain[key] = words
        return self._plain[key]
