"""The arguments and results of a generation, which engines, conversations and commands share: `Piece`, `Stats`,
`ContextFull`, checks of arguments (of sampling: sampling/settings.py; of messages: text/messages.py)."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from mlc_amd.runtime.errors import UserError, shorten

Ids = Sequence[int] | np.ndarray  # token ids
ProgressCallback = Callable[[int, int], None]  # (tokens of the prompt that are computed, tokens to compute)

ENDLESS = 1 << 30  # a `min_tokens` beyond any context: the model's end tokens are never chosen
MOST_LOGPROBS = 20  # upper limit of `logprobs`, that of OpenAI's API


class ContextFull(UserError):
    """More tokens than the KV cache or the context holds. what: the first part of the message, without the advice.
    turns: whether a conversation has earlier turns that could be removed."""

    def __init__(self, what: str, advice: str, turns: bool = False) -> None:
        super().__init__(f"{what}: {advice}")
        self.what, self.turns = what, turns


@dataclass(frozen=True)
class Piece:
    """One generated token and its text. There is one piece for each token but the end token, in order. If several
    tokens form one character, the piece of the last one has it. A stop text and the text after it are left out.

    Log-probabilities are those of the model's own distribution, as in llama.cpp: the softmax of its logits before
    penalties, biases, constraints, temperature and truncation.
    """

    id: int
    text: str
    index: int = 0  # the number of the answer: answer j to prompt i has the index i * n + j
    logprob: float | None = None  # the token's natural log-probability, if requested
    top: tuple[tuple[int, float], ...] = ()  # (token, log-probability) of the most likely tokens in its place

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class PromptProgress:
    """How much of the prompt of answer `index` is computed."""

    total: int  # tokens of the prompt
    cached: int  # tokens of it that were in the KV cache
    processed: int  # cached tokens and computed tokens
    seconds: float  # since the prompt was begun
    index: int = 0


@dataclass
class Stats:
    """Statistics of one generation, in tokens and seconds; updated while it runs."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # tokens of the prompt that were in the KV cache
    prefill_s: float = 0.0
    ttft_s: float = 0.0  # time to first token, from the call
    generated: int = 0
    decode_s: float = 0.0
    guessed: int = 0  # guessed tokens that were verified (speculation.py)
    accepted: int = 0  # guessed tokens that were right
    finish: str = "interrupted"  # "stop", "length", "context" or "interrupted"
    stop: str | None = None  # the stop text that ended it
    end: Piece | None = None  # the end token that ended it, if log-probabilities were requested; it has no text

    @property
    def tokens(self) -> int:
        """The number of tokens of the sequence so far."""
        return self.prompt_tokens + self.generated


def check_ids(ids: Ids) -> np.ndarray:
    """Token ids as an integer vector that is not empty. Raises UserError for anything else."""
    try:
        found = np.asarray(ids)
    except ValueError:  # lists of different lengths
        found = np.empty((0, 0))
    if found.ndim == 1 and not found.size:
        raise UserError("nothing to evaluate: the prompt has no tokens")
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise UserError(f"token ids are {shorten(ids)}: they must be a list of whole numbers")
    return found


def _whole(name: str, value: object, limits: str, low: int, high: float = math.inf) -> int:
    if not isinstance(value, Integral) or not low <= int(value) <= high:
        raise UserError(f"{name} is {shorten(value)}: it must be a whole number{limits}")
    return int(value)


def check_max_tokens(value: object, least: int = 1) -> int | None:
    """`value`, where None means no limit. Raises UserError if it is not a whole number of at least `least`."""
    return None if value is None else _whole("max_tokens", value, f" of at least {least}", least)


def check_logprobs(value: object) -> int | None:
    """The number of alternatives to each token, or None. Raises UserError unless it is None or 0 .. MOST_LOGPROBS."""
    return None if value is None else _whole("logprobs", value, f" from 0 to {MOST_LOGPROBS}", 0, MOST_LOGPROBS)


def check_min_tokens(value: object) -> int:
    """The least number of tokens of an answer. Raises UserError if it is not a whole number of at least 0."""
    return _whole("min_tokens", value, ", at least 0", 0)


def check_stop(value: object) -> tuple[str, ...]:
    """The texts that end a generation. value: one or several texts, none empty. Raises UserError for anything else."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise UserError(f"stop is {shorten(value)}: it must be a text or a list of texts")
    if "" in texts:
        raise UserError("a stop text is empty: leave it out")
    return tuple(texts)


def check_stop_ids(value: object) -> frozenset[int]:
    """The tokens that end a generation. Raises UserError for anything but a collection of token ids."""
    if not isinstance(value, Collection) or not all(isinstance(one, Integral) and int(one) >= 0 for one in value):
        raise UserError(f"stop_ids is {shorten(value)}: it must be a list of token ids")
    return frozenset(map(int, value))
