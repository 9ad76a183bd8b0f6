"""A call of `Engine.generate`, and its answers. In: the tokens of steps, from the thread that computes them (steps.py).
Out: pieces of text for the thread that consumes the answer, and statistics."""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from mlc_amd.runtime.engine.generation import (
    ENDLESS,
    Piece,
    ProgressCallback,
    Stats,
    check_logprobs,
    check_max_tokens,
    check_min_tokens,
    check_stop,
    check_stop_ids,
)
from mlc_amd.runtime.engine.requests import Request
from mlc_amd.runtime.engine.sampled_rows import GREEDY, UNKNOWN, ChosenToken, TokenChoice
from mlc_amd.runtime.errors import UserError, shorten
from mlc_amd.runtime.grammars.constraints import Constraint, RewindableConstraint, check_chosen, mask_of
from mlc_amd.runtime.sampling.philox import seed_of
from mlc_amd.runtime.sampling.sampler import Sampler, not_finite
from mlc_amd.runtime.sampling.settings import Sampling, without_ends
from mlc_amd.runtime.text.marks import split_at
from mlc_amd.runtime.text.tokenizer import Tokenizer


class Answer:
    """An answer in progress. index: its number among the answers of the call. error: why it failed, or None. done: no
    more pieces will be added.

    The computing thread calls `listener` after each token and at the end of the answer, and `progress` before the first
    chunk of the prompt and after each one. An error of `progress` ends the answer."""

    def __init__(
        self, tokenizer: Tokenizer, call: "GenerateCall", request: Request, sampling: Sampling, index: int
    ) -> None:
        self.request, self.sampling, self.index = request, sampling, index
        self.constraint = call.constraint() if call.constraint else None
        self._logprobs, self._min_tokens = call.logprobs, call.min_tokens
        self._rewindable = self.constraint if isinstance(self.constraint, RewindableConstraint) else None
        # The constraint's masks for the next tokens (None: all tokens are allowed). An exception in place of a mask is
        # raised if the answer reaches that token.
        self._masks: deque[np.ndarray | Exception | None] = deque()
        ends = tokenizer.end_ids.union(call.stop_ids)
        if call.min_tokens >= ENDLESS:  # only the caller's stop_ids may end the answer
            ends = ends.difference(call.stop_ids)
        self._endless = without_ends(sampling, ends) if call.min_tokens else sampling
        self._seed = Sampler(sampling).seed
        self.stats = Stats(prompt_tokens=len(request.prompt))
        self.error: BaseException | None = None
        self.done = False
        self.listener: Callable[[], None] | None = None
        self._limited = request.max_tokens is not None  # whether the limit is the caller's, not that of the context
        self._end_ids, self._vocab, self._stop = tokenizer.end_ids, tokenizer.vocab_size, call.stop
        self._stop_ids, self._include_stop = call.stop_ids, call.include_stop
        # Control tokens in stop texts: their texts are searched, but are not part of the result.
        named = tokenizer.controls_in(call.stop)
        self._hidden = {token: len(text) for text, token in named.items() if text not in call.shown}
        self._decoder = tokenizer.stream(shown=named.keys() | set(call.shown))
        self._lock = threading.Lock()  # for all attributes below: both threads change them
        self._tokens: deque[ChosenToken] = deque()  # tokens that are not decoded yet
        # Decoded tokens whose text may be the beginning of a stop text, or ends inside a character.
        self._held: list[tuple[ChosenToken, str]] = []
        self._pieces: deque[Piece] = deque()
        self.progress = None if index else call.progress
        self._begun = time.perf_counter()
        self._first: float | None = None

    # ---- the computing side

    def begin(self) -> None:
        """To be called before its prompt is computed."""
        if not self.request.generated:
            self.stats.cached_tokens = self.request.cached or 0
            self.prefilled(0)

    def prefilled(self, done: int) -> None:
        """Reports progress. done: how many of the prompt's tokens that were not cached are computed."""
        if self.progress:
            try:
                self.progress(done, self.stats.prompt_tokens - self.stats.cached_tokens)
            except Exception as error:
                self.fail(error)

    @property
    def guessable(self) -> bool:
        """Whether its next tokens may be guessed. A constraint must be able to go back for this."""
        return (self.constraint is None or self._rewindable is not None) and not self.done

    @property
    def limit_guesses(self) -> Callable[[Sequence[int], int], list[int]] | None:
        """`RewindableConstraint.guesses` of its constraint, or None without such a constraint."""
        return self._rewindable.guesses if self._rewindable else None

    @property
    def choice(self) -> TokenChoice:
        """How its next token is chosen, without its constraint's mask."""
        sequence = self.request.sequence
        assert sequence is not None, "its request was added"
        return TokenChoice(self._sampling(0), self._seed, sequence.tokens, logprobs=self._logprobs)

    def choices(self, guesses: Sequence[int] = ()) -> list[TokenChoice]:
        """How its next token is chosen, and the token after each guess: 1 + len(guesses) choices. If its constraint
        fails, the answer fails and the choices do not matter."""
        choice, places = self.choice, range(len(guesses) + 1)
        self._masks.clear()
        if self.constraint:
            self._masks.extend(self._masks_after(self.constraint, guesses))
            if isinstance(error := self._masks[0], Exception):
                self.fail(error)
                return [GREEDY for _ in places]
        masks = [None if isinstance(mask, Exception) else mask for mask in self._masks] or [None for _ in places]
        return [choice._replace(sampling=self._sampling(i), allowed=masks[i], guessed=guesses[:i]) for i in places]

    def _masks_after(self, constraint: Constraint, guesses: Sequence[int]) -> list[np.ndarray | Exception | None]:
        """The masks for the next token and for the token after each guess. An error takes the place of later masks."""
        found, accepted = [], 0
        try:
            for guess in [*guesses, None]:
                mask = mask_of(constraint, self._vocab)
                found.append(mask if mask is None or not guesses else mask.copy())
                if guess is not None:
                    constraint.accept(guess)
                    accepted += 1
        except Exception as error:
            found += [error] * (len(guesses) + 1 - len(found))
        finally:
            if self._rewindable and guesses:
                self._rewindable.rewind(accepted)
        return found

    @property
    def may_overlap(self) -> bool:
        """Whether its next step may start before its token of the step in progress is known."""
        return not self.done and self._logprobs is None  # log-probabilities need logits, which the next step overwrites

    @property
    def predictable(self) -> bool:
        """Whether the choice of a token does not depend on the tokens before it; then `next_choice` may be used."""
        return self.constraint is None and not self.sampling.penalizes

    def next_choice(self) -> TokenChoice:
        """How the token after its next token is chosen. It must be `predictable`."""
        sequence = self.request.sequence
        assert sequence is not None, "its request was added"
        return TokenChoice(self._sampling(1), self._seed, sequence.tokens, guessed=UNKNOWN)

    def _sampling(self, offset: int) -> Sampling:
        """The sampling parameters for the token `offset` places after its next token."""
        return self._endless if self.stats.generated + offset < self._min_tokens else self.sampling

    def verified(self, guessed: int, accepted: int) -> None:
        """Counts guesses that were verified, and those of them that were right."""
        self.stats.guessed += guessed
        self.stats.accepted += accepted

    def push(self, chosen: ChosenToken) -> str | None:
        """Adds its next token. Returns the reason if this ends the answer ("stop", "length", "context", "interrupted"),
        otherwise None."""
        now = time.perf_counter()
        if self._first is None:
            self._first, self.stats.prefill_s = now, now - self._begun
        self.stats.ttft_s, self.stats.decode_s = self._first - self._begun, now - self._first
        if chosen.token < 0:
            return self.fail(not_finite())
        try:
            mask = self._masks.popleft() if self._masks else None
            if isinstance(mask, Exception):
                raise mask
            if mask is not None:
                check_chosen(mask, chosen.token)
            if chosen.token in self._stop_ids:
                return self._end_at(chosen)
            if chosen.token in self._end_ids:
                if chosen.logprob is not None:
                    self.stats.end = Piece(chosen.token, "", self.index, chosen.logprob, chosen.top)
                return self._end("stop")
            if self.constraint:
                self.constraint.accept(chosen.token)
            complete = self.constraint is not None and self.constraint.complete
        except Exception as error:
            return self.fail(error)
        self.stats.generated += 1
        with self._lock:
            self._tokens.append(chosen)
            stopped = bool(self._stop) and self._decode()
        if stopped or complete:
            return self._end("stop")
        if self.stats.generated >= self.request.limit:
            return self._end("length" if self._limited else "context")
        self._notify()
        return None

    def end_with_prompt(self) -> str:
        """Ends an answer without tokens (max_tokens = 0), whose prompt is computed. Returns why it ended."""
        if self.done:
            return self.stats.finish
        self.stats.prefill_s = self.stats.ttft_s = time.perf_counter() - self._begun
        return self._end("length")

    def fail(self, error: BaseException) -> str:
        """Ends the answer with an error. Returns why it ended."""
        if not self.done:
            self.error = error
        return self.interrupt()

    def interrupt(self) -> str:
        """Ends the answer as if it were complete. Returns why it ended."""
        return self.stats.finish if self.done else self._end("interrupted", flush=False)

    def _end(self, reason: str, flush: bool = True) -> str:
        """Ends the answer. flush: an incomplete character at the end becomes U+FFFD; otherwise it is dropped."""
        self.stats.finish = reason
        with self._lock:
            if not self._decode() and self._held:
                chosen, text = self._held[-1]
                self._held[-1] = chosen, text + (self._decoder.flush() if flush else "")
                self._release(last=True)
            self.done = True
        self._notify()
        return reason

    def _end_at(self, chosen: ChosenToken) -> str:
        """Ends the answer at a token of `stop_ids`."""
        if self._include_stop:
            self.stats.generated += 1
            with self._lock:
                self._tokens.append(chosen)
        return self._end("stop")

    def _notify(self) -> None:
        if listener := self.listener:  # the consumer may remove it
            listener()

    # ---- the consumer's side

    @property
    def ready(self) -> bool:
        """Whether there are new pieces, or it is done."""
        return self.done or bool(self._tokens or self._pieces)

    @property
    def complete(self) -> bool:
        """Whether it is done and all its pieces have been taken. Only then should the consumer raise its error."""
        return self.done and not (self._tokens or self._pieces)

    def take(self) -> list[Piece]:
        """The pieces since the last call."""
        with self._lock:
            self._decode()
            return [self._pieces.popleft() for _ in range(len(self._pieces))]

    # ---- methods that need the lock

    def _decode(self) -> bool:
        """Makes pieces of new tokens, up to a stop text. Returns whether there is a stop text."""
        while self._tokens:
            chosen = self._tokens.popleft()
            self._held.append((chosen, self._decoder.push(chosen.token)))
            if self._release():
                return True
        return False

    def _release(self, last: bool = False) -> bool:
        """Makes pieces of the held tokens whose text cannot be part of a stop text; last: of all held tokens. Returns
        whether there is a stop text."""
        text, stopped, _ = split_at("".join(text for _, text in self._held), self._stop, last)
        every, left, count = last or stopped is not None, len(text), 0
        stop = len(stopped) if stopped and self._include_stop else 0  # characters of the stop text left to show
        for chosen, own in self._held if every or not self._decoder.incomplete else self._held[:-1]:
            if len(own) > left and not every:
                break
            before, rest = own[: min(left, len(own) - self._hidden.get(chosen.token, 0))], own[left:][:stop]
            self._pieces.append(Piece(chosen.token, before + rest, self.index, chosen.logprob, chosen.top))
            left, stop, count = max(left - len(own), 0), stop - len(rest), count + 1
        del self._held[:count]
        self.stats.stop = stopped
        return stopped is not None


@dataclass
class GenerateCall:
    """The arguments of `Engine.generate`. prompts: token ids. Raises UserError for invalid arguments."""

    prompts: Sequence[list[int]]
    sampling: Sampling
    max_tokens: int | None
    stop: str | Sequence[str]
    shown: Collection[str]
    n: int
    client: Hashable
    logprobs: int | None
    constraint: Callable[[], Constraint] | None
    min_tokens: int
    stop_ids: Collection[int]
    include_stop: bool
    progress: ProgressCallback | None

    def __post_init__(self) -> None:
        self.max_tokens, self.stop = check_max_tokens(self.max_tokens, 0), check_stop(self.stop)
        self.logprobs, self.min_tokens = check_logprobs(self.logprobs), check_min_tokens(self.min_tokens)
        self.stop_ids = check_stop_ids(self.stop_ids)
        if not isinstance(self.n, int) or self.n < 1:
            raise UserError(f"n is {shorten(self.n)}: it must be a whole number of at least 1")
        if self.constraint is not None and not callable(self.constraint):
            raise UserError(f"constraint is {shorten(self.constraint)}: it must be a function that makes a constraint")

    def answers(self, tokenizer: Tokenizer, longest: int) -> list[Answer]:
        """New answers: n to the first prompt, then n to the next one, and so on. longest: how many tokens of a sequence
        the cache holds; this limits answers whose max_tokens is larger."""
        found = []
        for ids in self.prompts:
            most = longest - len(ids) + 1  # the last token is not computed
            limit = None if self.max_tokens is None or self.max_tokens > most else self.max_tokens
            first = Request(ids, limit, self.client)
            for request in [first, *(first.fork() for _ in range(self.n - 1))]:
                index, seed = len(found), self.sampling.seed
                sampling = self.sampling if seed is None else self.sampling.changed(seed=seed_of(seed, index))
                found.append(Answer(tokenizer, self, request, sampling, index))
        return found
