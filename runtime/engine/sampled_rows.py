"""Lets the device choose tokens. In: for each row of a step how its token is chosen (`TokenChoice`), which is written
to the io buffers `sampling`, `changes` and `allowed`. Out: tokens and log-probabilities, from `sampled`, `logprobs` and
`logits`."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mlc_amd.runtime.sampling.device_rows import write_row
from mlc_amd.runtime.sampling.layout import ALL_ALLOWED, CHANGES, FIELDS, LISTED, NO_MIN_P, WORDS
from mlc_amd.runtime.sampling.sampler import most_likely
from mlc_amd.runtime.sampling.settings import Sampling

_POSITION, _TOP_K, _TOP_P, _MIN_P = map(FIELDS.index, ("position", "top_k", "top_p", "min_p"))


class TokenChoice(NamedTuple):
    """How a token is chosen."""

    sampling: Sampling
    seed: int  # used if `sampling` has no seed
    tokens: Sequence[int]  # the tokens before it
    allowed: np.ndarray | None = None  # a mask, int32 [ceil(vocab / 32)] (`device_rows.mask_words`); None: any token
    logprobs: int | None = None  # None: no log-probability; otherwise that of the token and of so many alternatives
    guessed: Sequence[int] = ()  # guessed tokens between `tokens` and this one

    @property
    def position(self) -> int:
        """The token's position in its sequence."""
        return len(self.tokens) + len(self.guessed)


GREEDY = TokenChoice(Sampling(), 0, ())
UNKNOWN = (-1,)  # `guessed` for one token that is not known yet, and on which the choice does not depend


class ChosenToken(NamedTuple):
    """A chosen token. token: -1 if a logit is not finite. logprob, top: see `generation.Piece`; set if requested."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def right_ones(chosen: list[ChosenToken], guesses: Sequence[int]) -> list[ChosenToken]:
    """The tokens that are valid: the first one, and each one that follows a right guess. chosen: the token for the row
    before the guesses, then for each guess."""
    right = next((i for i, guess in enumerate(guesses) if chosen[i].token != guess), len(guesses))
    return chosen[: right + 1]


class SampledRows:
    """Writes and reads the io buffers of `device`. io: the manifest's. Columns of logits from `vocab` on: padding."""

    def __init__(self, device, io, vocab: int) -> None:
        self._allowed = np.zeros(io["allowed"]["shape"], np.int32)
        rows = len(self._allowed)
        self._device, self._vocab = device, vocab
        self._words = np.zeros((rows, WORDS), np.int32)
        self._changes = np.zeros((rows, CHANGES, 2), np.int32)
        self._written = 0  # number of first rows of `sampling` that may not be zero
        # Words and changes of rows without penalties: {(settings, seed, log-probabilities?, mask?): (words, changes)}.
        self._kept: dict[tuple[Sampling, int, bool, bool], tuple[np.ndarray, np.ndarray]] = {}

    def clear(self) -> None:
        """Makes all rows choose the token with the largest logit."""
        if self._written:
            self._words[: self._written] = 0
            self._device.write("sampling", self._words[: self._written])
            self._written = 0

    def write(self, choices: Sequence[TokenChoice]) -> None:
        """Writes how the tokens of the first len(choices) rows are chosen; all others choose the largest logit."""
        self.clear()
        changed = masked = 0
        limited = []  # rows with a mask and random sampling
        for i, choice in enumerate(choices):
            sampling, logprob, mask = choice.sampling, choice.logprobs is not None, choice.allowed
            if mask is not None:
                self._allowed[i, : len(mask)] = mask
                masked = i + 1
                if not sampling.greedy:
                    limited.append(i)
            if sampling.penalizes:
                tokens = [*choice.tokens, *choice.guessed] if choice.guessed else choice.tokens
                write_row(
                    self._words[i], self._changes[i], sampling, tokens, choice.position, choice.seed, self._vocab,
                    logprob, mask is not None,
                )  # fmt: skip
                changed = i + 1
            elif not sampling.greedy or sampling.logit_bias or logprob or mask is not None:
                self._words[i], changes = self._of(choice)
                self._words[i, _POSITION] = choice.position
                if len(changes):
                    self._changes[i, : len(changes)] = changes
                    changed = i + 1
        if limited:
            self._shorten_searches(np.array(limited))
        if self._words[: len(choices)].any():
            self._written = len(choices)
            self._device.write("sampling", self._words[: len(choices)])
        if changed:
            self._device.write("changes", self._changes[:changed])
        if masked:
            self._device.write("allowed", self._allowed[:masked])

    def _shorten_searches(self, rows: np.ndarray) -> None:
        """Makes random choices in rows with masks faster, without changing them. If the mask allows at most top_k
        tokens, removes the top_k filter, for which the device would have to search. If no filter is left and few tokens
        are allowed, adds a filter that keeps all of them: the device then lists them, and draws from the list."""
        words = self._words[rows]
        floats = words.view(np.float32)
        allowed = np.bitwise_count(self._allowed[rows].view(np.uint32)).sum(axis=1, dtype=np.int32)
        words[allowed <= words[:, _TOP_K], _TOP_K] = 0
        free = (words[:, _TOP_K] == 0) & (floats[:, _TOP_P] >= 1) & (floats[:, _MIN_P] == np.float32(NO_MIN_P))
        floats[free & (allowed <= LISTED), _MIN_P] = ALL_ALLOWED
        self._words[rows] = words

    def _of(self, choice: TokenChoice) -> tuple[np.ndarray, np.ndarray]:
        """(words without the position, changes) of a row without penalties."""
        key = choice.sampling, choice.seed, choice.logprobs is not None, choice.allowed is not None
        if key not in self._kept:
            if len(self._kept) > 4096:
                self._kept.clear()
            words, changes = np.zeros(WORDS, np.int32), np.zeros((len(choice.sampling.logit_bias), 2), np.int32)
            write_row(words, changes, choice.sampling, (), 0, choice.seed, self._vocab, *key[2:])
            self._kept[key] = words, changes
        return self._kept[key]

    def read(self, rows: Sequence[int], choices: Sequence[TokenChoice]) -> list[ChosenToken]:
        """The tokens that were chosen in `rows`, one for each of `choices`. Reads logits only for alternatives."""
        if not choices:
            return []
        tokens = self._device.read("sampled", max(rows) + 1).tolist()
        found = [ChosenToken(tokens[row]) for row in rows]
        wanted = [i for i, choice in enumerate(choices) if choice.logprobs is not None and found[i].token >= 0]
        if wanted:
            logprobs = self._device.read("logprobs", max(rows[i] for i in wanted) + 1).tolist()
            for i in wanted:
                found[i] = ChosenToken(found[i].token, logprobs[rows[i]])
        if ranked := [i for i in wanted if choices[i].logprobs]:
            logits = self._device.read("logits", max(rows[i] for i in ranked) + 1)[:, : self._vocab]
            for i in ranked:
                found[i] = found[i]._replace(top=_top(logits[rows[i]], found[i], choices[i].logprobs or 0))
        return found


def _top(logits: np.ndarray, chosen: ChosenToken, count: int) -> tuple[tuple[int, float], ...]:
    """(token, log-probability) of the `count` most likely tokens. The normalization of the softmax follows from the
    logit and the log-probability of the chosen token."""
    assert chosen.logprob is not None
    total = float(logits[chosen.token]) - chosen.logprob  # logarithm of the sum of exp(logits)
    return tuple((int(t), min(float(logits[t]) - total, 0.0)) for t in most_likely(logits, min(count, len(logits))))
