"""One answer that is being generated: from the tokens of steps to pieces of text, and when it ends.

In: the tokens, one after the other, from whichever thread computes the steps (`Core`). Out: pieces for the one consumer
of the answer, and its statistics.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from mlc_amd.runtime.generation import Piece, Progress, Stats
from mlc_amd.runtime.marks import split_at
from mlc_amd.runtime.requests import Request
from mlc_amd.runtime.sampled_rows import Choice
from mlc_amd.runtime.sampling import Sampler, Sampling
from mlc_amd.runtime.tokenizer import Tokenizer


class Answer:
    """stop: texts that end it, before them. shown: control tokens with a text. index: its number among the answers of a
    call. listener, progress: called, by the computing thread, when there is something new, and between chunks of the
    prompt.

    error: why it failed, if it did; done: no more pieces are added.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: Request,
        sampling: Sampling,
        stop: Sequence[str] = (),
        shown: Collection[str] = (),
        index: int = 0,
        progress: Progress | None = None,
    ) -> None:
        self.request, self.sampling, self.index = request, sampling, index
        self._seed = Sampler(sampling).seed
        self.stats = Stats(prompt_tokens=len(request.prompt))
        self.error: BaseException | None = None
        self.done = False
        self.listener: Callable[[], None] | None = None
        self._limited = request.max_tokens is not None  # the caller's limit, not the context's, ends it
        self._end_ids, self._stop = tokenizer.end_ids, stop
        self._decoder = tokenizer.stream(shown=shown)
        self._held = ""  # text that may be the beginning of a stop text
        self._last = 0  # token
        self._tokens: deque[int] = deque()  # whose text is not decoded yet
        self._pieces: deque[Piece] = deque()
        self._progress = progress
        self._begun = time.perf_counter()
        self._first: float | None = None

    # ---- the computing side

    def begin(self) -> None:
        """Its prompt is about to be computed."""
        cached = self.request.cached or 0
        if not self.request.generated:
            self.stats.cached_tokens = cached
        self.prefilled(0)

    def prefilled(self, done: int) -> None:
        """So many tokens of what was not cached of the prompt are computed."""
        if self._progress:
            self._progress(done, self.stats.prompt_tokens - self.stats.cached_tokens)

    def choice(self) -> Choice:
        """How its next token is chosen."""
        sequence = self.request.sequence
        assert sequence is not None, "its request was added"
        return Choice(self.sampling, self._seed, sequence.tokens)

    def push(self, token: int) -> str | None:
        """Takes its next token. Returns why it ends with that token, if it does: "stop", "length" or "context"."""
        now = time.perf_counter()
        if self._first is None:
            self._first, self.stats.prefill_s = now, now - self._begun
        self.stats.ttft_s, self.stats.decode_s = self._first - self._begun, now - self._first
        if token in self._end_ids:
            return self._end("stop")
        self.stats.generated += 1
        self._tokens.append(token)
        if self._stop and self._decode():
            return self._end("stop", flush=False)
        if self.stats.generated >= self.request.limit:
            return self._end("length" if self._limited else "context")
        self._notify()
        return None

    def fail(self, error: BaseException) -> None:
        self.error = error
        self._end("interrupted", flush=False)

    def interrupt(self) -> None:
        """Ends it as if it were complete."""
        if not self.done:
            self._end("interrupted", flush=False)

    def _end(self, reason: str, flush: bool = True) -> str:
        self.stats.finish = reason
        if flush:
            self._decode()
            text, _, _ = split_at(self._held + self._decoder.flush(), self._stop, last=True)
            if text:
                self._pieces.append(Piece(self._last, text, self.index))
        self.done = True
        self._notify()
        return reason

    def _notify(self) -> None:
        if self.listener:
            self.listener()

    # ---- the consumer's side

    @property
    def ready(self) -> bool:
        """Whether there is something to take, or it is done."""
        return self.done or bool(self._tokens or self._pieces)

    @property
    def complete(self) -> bool:
        """Whether it is done and all its pieces, or its error, are taken."""
        return self.done and not (self._tokens or self._pieces or self.error)

    def take(self) -> list[Piece]:
        """The pieces since the last call. The error that ended it, once all are taken."""
        self._decode()
        taken = [self._pieces.popleft() for _ in range(len(self._pieces))]
        if not taken and self.error:
            error, self.error = self.error, None
            raise error
        return taken

    def _decode(self) -> bool:
        """Makes pieces of the tokens. Returns whether there is a stop text, which ends them."""
        while self._tokens:
            token = self._last = self._tokens.popleft()
            text, stopped, self._held = split_at(self._held + self._decoder.push(token), self._stop)
            self._pieces.append(Piece(token, text, self.index))
            if stopped is not None:
                self._held = ""
                return True
        return False
