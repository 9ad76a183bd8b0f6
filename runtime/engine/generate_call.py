"""A call of `Engine.generate`: its arguments, checked, and the answers that it asks for."""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

from mlc_amd.runtime.engine.answers import Answer
from mlc_amd.runtime.engine.generation import (
    ProgressCallback,
    check_logprobs,
    check_max_tokens,
    check_min_tokens,
    check_stop,
)
from mlc_amd.runtime.engine.requests import Request
from mlc_amd.runtime.errors import UserError, shorten
from mlc_amd.runtime.grammars.constraints import Constraint
from mlc_amd.runtime.sampling.settings import Sampling
from mlc_amd.runtime.text.tokenizer import Tokenizer


@dataclass
class GenerateCall:
    """Arguments of `Engine.generate`; prompts: ids. UserError for those that cannot be used."""

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
    progress: ProgressCallback | None

    def __post_init__(self) -> None:
        self.max_tokens, self.stop = check_max_tokens(self.max_tokens), check_stop(self.stop)
        self.logprobs, self.min_tokens = check_logprobs(self.logprobs), check_min_tokens(self.min_tokens)
        if not isinstance(self.n, int) or self.n < 1:
            raise UserError(f"n is {shorten(self.n)}: it must be a whole number of at least 1")
        if self.constraint is not None and not callable(self.constraint):
            raise UserError(f"constraint is {shorten(self.constraint)}: it must be a function that makes a constraint")

    def answers(self, tokenizer: Tokenizer, longest: int) -> list[Answer]:
        """New answers: those to the first prompt, then those to the next one. longest: tokens that the cache holds of a
        sequence; where they are fewer than max_tokens, they are the limit."""
        found = []
        for ids in self.prompts:
            most = longest - len(ids) + 1  # the last token is not computed
            limit = self.max_tokens if self.max_tokens and self.max_tokens <= most else None
            first = Request(ids, limit, self.client)
            for j, request in enumerate([first, *(first.fork() for _ in range(self.n - 1))]):
                sampling = self.sampling
                if sampling.seed is not None:
                    sampling = sampling.changed(seed=sampling.seed + j)
                found.append(
                    Answer(
                        tokenizer,
                        request,
                        sampling,
                        self.stop,
                        self.shown,
                        len(found),
                        self.logprobs,
                        self.constraint() if self.constraint else None,
                        self.min_tokens,
                        None if found else self.progress,
                    )
                )
        return found
