"""Generations. In: prompts. Out: iterators over pieces of text. Any number of generations, from any number of threads,
share steps. A prefix that prompts have in common, with one another or with earlier ones, is computed once."""

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Unpack

import numpy as np

from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.engine.admission import SchedulerLimits
from mlc_amd.runtime.engine.answers import Answer, GenerateCall
from mlc_amd.runtime.engine.generation import Ids, ProgressCallback, PromptProgress, Stats, check_logprobs
from mlc_amd.runtime.engine.generations import AsyncGeneration, Generation, Results
from mlc_amd.runtime.engine.logits_engine import LogitsEngine
from mlc_amd.runtime.engine.scheduler import RequestCounts
from mlc_amd.runtime.engine.token_scores import TokenScore, computed
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.grammars.constraints import Constraint
from mlc_amd.runtime.images.prompts import ImagePrompts
from mlc_amd.runtime.images.rows import images_among
from mlc_amd.runtime.sampling.settings import Sampling, SamplingChanges
from mlc_amd.runtime.text.chat_template import ChatTemplate
from mlc_amd.runtime.text.fill_in_middle import FillInMiddle


class CompletionOptions(SamplingChanges, total=False):
    """Options of `complete`: see `TextEngine.generate`."""

    sampling: Sampling | None
    max_tokens: int | None
    stop: str | Sequence[str]
    min_tokens: int
    stop_ids: Collection[int]
    include_stop: bool
    shown: Collection[str]
    client: Hashable
    constraint: Callable[[], Constraint] | None


class TextEngine(LogitsEngine):
    """A `LogitsEngine` with generations. sampling: the model's default sampling parameters. fill: makes prompts for the
    text between two given texts. images: makes prompts of texts with images."""

    def __init__(self, artifact: Artifact, device, limits: SchedulerLimits | None = None):
        super().__init__(artifact, device, limits)
        self.chat_template = ChatTemplate.load(artifact.path)
        self.fill = FillInMiddle(self.tokenizer)
        self.images = ImagePrompts(self.tokenizer, artifact.manifest.get("vision"))
        self.sampling = Sampling(**artifact.manifest["sampling"])
        self._last: Results | None = None

    def close(self) -> None:
        super().close()
        self.chat_template.close()

    @property
    def last(self) -> Stats:
        """Statistics of the generation that was begun last, which may be in progress; all zero before the first."""
        return self._last.stats if self._last else Stats()

    @property
    def queue(self) -> RequestCounts:
        """The number of answers that wait, and of those that are being generated."""
        return self._loop.queue

    def generate(
        self,
        prompt: str | Ids | Sequence[str] | Sequence[Ids],
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        shown: Collection[str] = (),
        progress: ProgressCallback | None = None,
        n: int = 1,
        client: Hashable = None,
        logprobs: int | None = None,
        constraint: Callable[[], Constraint] | None = None,
        min_tokens: int = 0,
        stop_ids: Collection[int] = (),
        include_stop: bool = False,
        **changes: Unpack[SamplingChanges],
    ) -> Generation:
        """Continues texts or lists of token ids. A prefix that is in the KV cache is not computed again.

        prompt: a text, a list of ids, or several of one kind; `Piece.index` is the number of a piece's answer.
        sampling: None for the model's defaults.
        max_tokens: None for no limit but the context; 0 computes only the prompt, for the cache.
        stop: texts before which an answer ends; they may contain control tokens.
        shown: control tokens whose text is part of the result.
        progress: called with (computed tokens, tokens to compute) of the first prompt, before its first chunk and after
            each chunk, by the computing thread. It must not use the engine, except for `cancel`.
        n: number of answers to each prompt. With a seed, answer 0 uses it; answer j uses one derived from it and j.
        client: identifies the caller; the scheduler is fair between clients.
        logprobs: None, or the number of alternatives (0 to 20): sets `Piece.logprob` and `Piece.top`.
        constraint: called once for each answer, returns its constraint. An answer whose constraint raises an error, or
            allows no token, fails; other answers continue.
        min_tokens: no end token is chosen before an answer has so many, unless its constraint allows no other token.
        stop_ids: additional tokens that end an answer.
        include_stop: whether the stop text, or the token of `stop_ids`, is part of the result.
        changes: single sampling parameters, such as temperature=0.7.

        `Stats.finish` has the reason for an answer's end: an end token, a stop text, a complete constraint,
        `max_tokens`, a full context, or `cancel`. Raises UserError for invalid arguments and ContextFull at once; at
        the first `next` QueueFull, UserError for images, and ContextFull if the KV cache is smaller than the context.
        """
        options = max_tokens, stop, shown, n, client, logprobs, constraint, min_tokens, stop_ids, include_stop
        found = Generation(self._loop, self._call(prompt, sampling, changes, *options, progress))
        self._last = found.results
        return found

    def agenerate(
        self,
        prompt: str | Ids | Sequence[str] | Sequence[Ids],
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        shown: Collection[str] = (),
        n: int = 1,
        client: Hashable = None,
        logprobs: int | None = None,
        constraint: Callable[[], Constraint] | None = None,
        min_tokens: int = 0,
        stop_ids: Collection[int] = (),
        include_stop: bool = False,
        progress: Callable[[PromptProgress], None] | None = None,
        **changes: Unpack[SamplingChanges],
    ) -> AsyncGeneration:
        """`generate` for asyncio: `async for piece in engine.agenerate(..)`. A background thread computes. progress:
        called in the event loop, for each prompt: when it is begun, and after each chunk."""
        options = max_tokens, stop, shown, n, client, logprobs, constraint, min_tokens, stop_ids, include_stop
        found = AsyncGeneration(self._loop, self._call(prompt, sampling, changes, *options, None), progress)
        self._last = found.results
        return found

    def complete(self, prompt: str | Ids, **options: Unpack[CompletionOptions]) -> str:
        """The whole continuation of one prompt, with the options and errors of `generate`. `last` has its statistics.
        If `cancel` ends it, the part so far."""
        return "".join(map(str, self.generate(_single(prompt, options), **options)))

    async def acomplete(self, prompt: str | Ids, **options: Unpack[CompletionOptions]) -> str:
        """`complete` for asyncio."""
        return "".join([piece.text async for piece in self.agenerate(_single(prompt, options), **options)])

    async def ascore(self, ids: Ids, logprobs: int = 0, client: Hashable = None) -> list[TokenScore]:
        """The probability of each token of a prompt, but the first, given the tokens before it. logprobs: number of
        alternatives to each token. A background thread computes. Raises ContextFull, QueueFull and UserError."""
        checked, count = self._check(ids, 0, images=False), check_logprobs(logprobs)
        return await computed(self._loop, checked, count or 0, client)

    def _call(
        self, prompt, sampling: Sampling | None, changes: SamplingChanges, *options
    ) -> Callable[[], Sequence[Answer]]:
        """Checks the arguments. Returns a function that makes the answers, to be called when they are queued."""
        prompts = [self._check(ids, 0) for ids in self._prompts(prompt)]
        chosen = (sampling or self.sampling).changed(**changes)
        if (token := max(chosen.logit_bias, default=0)) >= self.vocab:
            raise UserError(f"logit_bias has the token {token}: the vocabulary has {self.vocab}")
        call = GenerateCall(prompts, chosen, *options)
        if (token := max(call.stop_ids, default=0)) >= self.vocab:
            raise UserError(f"stop_ids has the token {token}: the vocabulary has {self.vocab}")

        def make() -> Sequence[Answer]:
            for ids in prompts:
                self.features.prepare(images_among(ids).values())
            return call.answers(self.tokenizer, self.cache.longest)

        return make

    def _prompts(self, prompt) -> list[Ids]:
        """The ids of each prompt."""
        if isinstance(prompt, str):
            return [self.tokenizer.encode_prompt(prompt)]
        if _several(prompt):
            return [ids for one in prompt for ids in self._prompts(one)]
        return [prompt]

    def cancel(self) -> None:
        """Ends all generations after the step in progress. Their iterators then end as if they were complete. May be
        called from any thread and from signal handlers."""
        self._loop.cancel_all()


def _several(prompt) -> bool:
    """Whether `prompt` is a list of prompts."""
    listed = isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0
    return listed and all(isinstance(one, (str, Sequence, np.ndarray)) for one in prompt)


def _single(prompt: str | Ids, options: CompletionOptions) -> str | Ids:
    """Returns the prompt. Raises UserError for several prompts, and for the option `n`."""
    if _several(prompt) or "n" in options:
        raise UserError("one text is returned, of one prompt: `generate` answers several prompts, or one several times")
    return prompt
