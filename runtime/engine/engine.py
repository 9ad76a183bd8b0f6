"""The engine: token ids in, logits or text out, for many callers at once.

An engine has a pool of cache pages (`Cache`), a scheduler of requests (`Core`), and one sequence of its own, for those
who want logits: `tokens` are its tokens; `prefill`, `decode`, `score`, `truncate` and `match` work on it.

`generate` is for text: any number of generations, from any number of threads, share steps. What their prompts have in
common, with one another and with earlier ones, is computed once.
"""

import threading
from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np

from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.cache.kv_cache import Cache, KvUsage
from mlc_amd.runtime.cache.kv_pool import KvSize
from mlc_amd.runtime.devices import open_device
from mlc_amd.runtime.engine.answers import Answer
from mlc_amd.runtime.engine.batch import Batch
from mlc_amd.runtime.engine.chat import Conversation
from mlc_amd.runtime.engine.closing import Closing
from mlc_amd.runtime.engine.core import Core
from mlc_amd.runtime.engine.generate_call import Ask
from mlc_amd.runtime.engine.generation import ContextFull, Ids, Progress, PromptProgress, Stats, check_ids
from mlc_amd.runtime.engine.generations import AsyncGeneration, Generation, Results
from mlc_amd.runtime.engine.runner import Runner
from mlc_amd.runtime.engine.scheduler import Limits, Queue
from mlc_amd.runtime.engine.scoring import Scoring
from mlc_amd.runtime.engine.single_sequence import compute, next_chunk
from mlc_amd.runtime.engine.steps import pages_of
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.grammars.constraints import Constraint
from mlc_amd.runtime.sampling.sampler import Sampling, SamplingChanges
from mlc_amd.runtime.speculation.drafters import OWN, open_drafter
from mlc_amd.runtime.speculation.own_draft import OwnDraft
from mlc_amd.runtime.speculation.speculation import Counts, Drafter, Speculation
from mlc_amd.runtime.text.chat_template import ChatTemplate
from mlc_amd.runtime.text.messages import check_question
from mlc_amd.runtime.text.tokenizer import Tokenizer


class Engine(Closing):
    """A loaded model on a device, a context manager that closes it. May be used from several threads."""

    def __init__(self, artifact: Artifact, device, limits: Limits | None = None):
        """device: of `open_device`. limits: of steps and of the queue, None: what the functions can compute."""
        self.artifact, self.device = artifact, device
        self.config = artifact.manifest["model"]
        self.context: int = artifact.manifest["context"]
        self.vocab: int = self.config["vocab"]
        self.tokenizer = Tokenizer.load(artifact.path)
        if self.tokenizer.vocab_size > self.vocab:  # ids beyond are beyond the tables that kernels read
            raise UserError(
                f"{artifact.path} has a tokenizer of {self.tokenizer.vocab_size} tokens for a model of {self.vocab}; "
                "compile the model again"
            )
        self.chat_template = ChatTemplate.load(artifact.path)
        self.sampling = Sampling(**artifact.manifest["sampling"])  # the model's own defaults
        self._conversation: Conversation | None = None
        self._limits = limits
        self._last: Results | None = None
        self._open()

    def _open(self) -> None:
        """A cache without contents, and what works with it."""
        self.cache = Cache(pages_of(self.device, self.artifact.manifest), self.context)
        self._runner = Runner(self.artifact, self.device, self.cache)
        functions = self._runner.functions
        rows = functions.single_rows, functions.chunk_rows, functions.mixed_rows, self._runner.scored
        limits = self._limits or Limits(*rows, sizes=functions.chunk_sizes)
        self._core = Core(self._runner, self.cache, limits)
        self._own = self._core.private = self.cache.sequence()
        self._owning = threading.Lock()  # whoever uses the own sequence, also between the steps of `score`

    def __repr__(self) -> str:
        name, state = self.artifact.manifest["name"], f"{self.position} of {self.context} tokens"
        return f"<Engine {name} on {self.device.name}, {'closed' if self._core.closed else state}>"

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str | None = None,
        threads: int | None = None,
        verify: bool = False,
        n_cpu_moe: int = 0,
        kv_tokens: int | None = None,
        kv_memory: int | str | None = None,
        draft: str | Path | None = None,
    ) -> "Engine":
        """Loads an artifact folder. `verify` also verifies the checksum of the weights, which reads all of them;
        kv_tokens: how many tokens the cache holds, of all sequences together; kv_memory: instead how much memory it
        takes: bytes, "4G", or "auto" for what the device has left; none of both: one sequence of full length.
        device, threads and n_cpu_moe: see `open_device`; draft: `speculate`. UserError if it cannot run here."""
        if Path(path).suffix == ".gguf" and not Path(path).is_dir():
            raise UserError(f"{path} is not compiled yet: mlc_amd.load() and `mlc-amd compile` do that")
        size = KvSize.of(kv_tokens, kv_memory)
        artifact = Artifact.open(path, verify)
        engine = cls(artifact, open_device(artifact, device, threads, n_cpu_moe, size))
        try:
            if draft == OWN:
                engine.speculate(engine.own_draft())
            else:
                engine.speculate(open_drafter(draft, engine.tokenizer, device, threads, size))
        except BaseException:
            engine.close()
            raise
        return engine

    def own_draft(self) -> OwnDraft:
        """Guesses by a layer of the model that was trained for them. UserError if it has none."""
        return OwnDraft(self._runner, self.artifact.manifest["name"])

    def speculate(self, drafter: Drafter | None) -> None:
        """From now on steps verify guesses of that drafter, which is closed with the engine, or none. What is answered
        does not depend on it."""
        with self._core.turn():
            before, rows = self._core.speculation, self._core.scheduler.limits.step_rows
            self._core.speculation = Speculation(drafter, rows) if drafter else None
        if before:
            before.drafter.close()

    @property
    def guesses(self) -> Counts:
        """Guesses that were verified so far, and how many of them were right."""
        return self._core.speculation.counts if self._core.speculation else Counts(0, 0)

    def close(self) -> None:
        """Ends all generations, and releases the device and all memory."""
        if not self._core.closed:
            self._core.close()
            self.chat_template.close()
            self.device.close()
            self.artifact.close()

    # ---- the engine's own sequence

    @contextmanager
    def _own_turn(self) -> Iterator[None]:
        with self._owning, self._core.turn():
            yield

    @property
    def tokens(self) -> list[int]:
        """The tokens of the engine's own sequence."""
        return self._own.tokens

    @property
    def position(self) -> int:
        """Number of tokens of the engine's own sequence."""
        return len(self._own.tokens)

    def reset(self) -> None:
        """Empties the cache, unless generations are using it, and ends the conversation of `chat`."""
        self._conversation = None
        with self._own_turn():
            self._own.truncate(0)
            if not self._core.busy:
                self._own.free()
                self.cache.index.clear()

    def truncate(self, n: int) -> None:
        """Keeps the first `n` tokens; later steps overwrite the rest. Up to a page of tokens is computed again by the
        next step, more where layers with a window have lost keys that it needs."""
        with self._own_turn():
            self._own.truncate(n)

    def match(self, ids: Sequence[int]) -> int:
        """Keeps the longest prefix that the own sequence shares with `ids`, leaving at least one id to compute; returns
        its length."""
        with self._own_turn():
            limit = min(self.position, len(ids) - 1)
            n = max(next((i for i in range(limit) if self.tokens[i] != ids[i]), limit), 0)
            self._own.truncate(n)
            return n

    # ---- logits

    def advance(self, ids: Ids) -> np.ndarray:
        """Appends `ids`. Returns the logits of the last one, float32 [vocab], in memory that the next step
        overwrites.

        ContextFull leaves the sequence unchanged.
        """
        with self._own_turn():
            return self._advance(self._check(ids, self.position))

    def _advance(self, ids: np.ndarray) -> np.ndarray:
        before = self.position
        self._own.append(ids.tolist())
        try:
            logits = compute(self.cache, self._runner, self._own)
        except BaseException:
            self._own.truncate(before)
            raise
        assert logits is not None, "there is at least one token"
        return logits

    def prefill(self, ids: Ids) -> np.ndarray:
        """`advance`, with a copy of the logits; copying takes longer than greedy sampling."""
        return self.advance(ids).copy()

    def decode(self, token: int) -> np.ndarray:
        """`prefill` of one token."""
        return self.prefill([token])

    def score(self, ids: Ids) -> np.ndarray:
        """Appends `ids`. Returns the logits of all of them, float32 [len(ids), vocab]. Answers in progress go on
        meanwhile: each chunk is a request's, of a client of its own."""
        with self._owning:
            checked = self._check(ids, self.position)
            before = self.position
            with self._core.turn():
                self._own.append(checked.tolist())
            scoring = Scoring(self._own, before, self.vocab)
            try:
                self._core.score(scoring)
            except BaseException:
                with self._core.turn():
                    self._own.truncate(before)
                raise
            return scoring.logits

    def time(self, ids: Ids) -> tuple[str, int, list[tuple[str, float, float]]]:
        """Times the kernels of the first step of `prefill(ids)`: (function, tokens, [(kernel, seconds, gap before)]).

        The sequence is unchanged. UserError if the device cannot time kernels.
        """
        with self._own_turn():
            checked = self._check(ids, self.position)
            if not hasattr(self.device, "time"):
                raise UserError(f"the device of target '{self.device.kind}' cannot time single kernels")
            compute(self.cache, self._runner, self._own)
            before = self.position
            self._own.append(checked.tolist())
            try:
                chunk = next_chunk(self.cache, self._runner, self._own)
                function = self._runner.prepare_chunk(chunk)
                return function, len(chunk[0]), self.device.time(function)
            finally:
                self._own.truncate(before)

    def _check(self, ids: Ids, kept: int) -> np.ndarray:
        """Ids as int64, which fit the vocabulary, and the context behind `kept` tokens."""
        checked = check_ids(ids)
        if checked.min() < 0 or checked.max() >= self.vocab:
            bad = checked[(checked < 0) | (checked >= self.vocab)][0]
            raise UserError(f"token id {bad} is outside the vocabulary of {self.vocab}")
        if kept + len(checked) > self.context:
            raise ContextFull(
                f"{kept + len(checked)} tokens do not fit the context of {self.context}",
                "shorten the prompt, or load the model with a larger context",
            )
        return checked.astype(np.int64)

    @contextmanager
    def batch(self, count: int) -> Iterator[Batch]:
        """`count` sequences that advance together, for measurements. Whoever else uses the engine waits meanwhile."""
        with self._core.turn():
            found = Batch(self.cache, self._runner, count)
            try:
                yield found
            finally:
                found.close()

    # ---- text

    @property
    def last(self) -> Stats:
        """Statistics of the generation that was begun last, also while it is going on; all zero before the first."""
        return self._last.stats if self._last else Stats()

    @property
    def kv_usage(self) -> KvUsage:
        """How full the KV cache is."""
        return self.cache.usage

    @property
    def queue(self) -> Queue:
        """How many answers wait, and how many are being generated."""
        return self._core.queue

    def generate(
        self,
        prompt: str | Ids | Sequence[str] | Sequence[Ids],
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        shown: Collection[str] = (),
        progress: Progress | None = None,
        n: int = 1,
        client: Hashable = None,
        logprobs: int | None = None,
        constraint: Callable[[], Constraint] | None = None,
        min_tokens: int = 0,
        **changes: Unpack[SamplingChanges],
    ) -> Generation:
        """Continues a text, or token ids, one token at a time; a prefix that is in the cache is not computed again.

        prompt: several texts, or several lists of ids, are continued together: `Piece.index` says whose piece it is.
        sampling: None: the model's defaults. changes: single parameters of it, such as temperature=0.7. stop: texts
        that end the text before them. shown: control tokens whose text is part of the result. progress: is told how
        much of the (first) prompt is computed: before the first chunk, and after each one, by the thread that computes:
        it must not use the engine, but may `cancel`. n: answers to each prompt; with a seed, answer j takes seed + j.
        client: whoever asks; the scheduler is fair between clients. logprobs: log-probabilities of each token and of so
        many alternatives (0 to 20), `Piece.logprob` and `top`; None: none. constraint: called once for each answer,
        gives what it may consist of; an answer that its constraint leaves no token, or whose constraint raises, fails
        alone. min_tokens: as long as an answer has fewer, no end token is chosen unless its constraint leaves no other.
        An answer ends at an end token, a stop text, where its constraint is complete, at `max_tokens`, a full context
        or by `cancel`: `Stats.finish`.

        Raises UserError for arguments out of range and ContextFull at once, QueueFull at the first step.
        """
        options = max_tokens, stop, shown, n, client, logprobs, constraint, min_tokens
        ask = self._ask(prompt, sampling, changes, *options, progress)
        made = Generation(self._core, self._maker(ask))
        self._last = made.results
        return made

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
        progress: Callable[[PromptProgress], None] | None = None,
        **changes: Unpack[SamplingChanges],
    ) -> AsyncGeneration:
        """`generate` for asyncio: `async for piece in engine.agenerate(..)`. A thread of the engine computes. progress:
        is told how far each prompt is, in the event loop: when it is begun, and after each chunk."""
        options = max_tokens, stop, shown, n, client, logprobs, constraint, min_tokens
        ask = self._ask(prompt, sampling, changes, *options, None)
        made = AsyncGeneration(self._core, self._maker(ask), progress)
        self._last = made.results
        return made

    def _ask(self, prompt, sampling: Sampling | None, changes: SamplingChanges, *options) -> Ask:
        prompts = [self._check(ids, 0).tolist() for ids in self._prompts(prompt)]
        chosen = (sampling or self.sampling).changed(**changes)
        if (token := max(chosen.logit_bias, default=0)) >= self.vocab:
            raise UserError(f"logit_bias has the token {token}: the vocabulary has {self.vocab}")
        return Ask(prompts, chosen, *options)

    def _maker(self, ask: Ask) -> Callable[[], Sequence[Answer]]:
        return lambda: ask.answers(self.tokenizer, self.cache.longest)

    def _prompts(self, prompt) -> list[Ids]:
        """The ids of each prompt."""
        if isinstance(prompt, str):
            return [self.tokenizer.encode_prompt(prompt)]
        if (
            isinstance(prompt, Sequence)
            and prompt
            and all(isinstance(one, (str, Sequence, np.ndarray)) for one in prompt)
        ):
            return [ids for one in prompt for ids in self._prompts(one)]
        return [prompt]

    def cancel(self) -> None:
        """Ends the generations in progress after the current step: a token of each, or a chunk of a prompt. Their
        iterators then end as if they were complete. May be called from any thread and from signal handlers."""
        self._core.cancel_all()

    # ---- conversations

    def conversation(
        self,
        system: str | None = None,
        sampling: Sampling | None = None,
        on_full: Literal["error", "drop"] = "error",
        thinking: str = "auto",
        **changes: Unpack[SamplingChanges],
    ) -> Conversation:
        """A new conversation, for its arguments see `Conversation`; changes: single sampling parameters.

        An engine may have several, which take turns: what theirs has in common stays in the cache.
        """
        return Conversation(self, system, (sampling or self.sampling).changed(**changes), on_full, thinking)

    def chat(
        self,
        message: str | Sequence[Mapping[str, Any]],
        *,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        thinking: str | None = None,
        progress: Progress | None = None,
        **changes: Unpack[SamplingChanges],
    ) -> Generator[str, None, None]:
        """The answer's text, in pieces, without what the model thinks. A string is the next turn of the engine's
        conversation; a list of messages (see runtime/text/messages.py), the last of which is the user's, begins a new
        one, as `reset` does.

        All options are those of this turn alone; see `generate`, and `Conversation` for thinking. UserError for
        messages and options that cannot be used, at once.
        """
        if isinstance(message, str):
            conversation, text = self._conversation or Conversation(self), message
        else:
            *before, question = check_question(message)
            conversation, text = Conversation(self), question["content"]
            conversation.messages = before
        answer = conversation.ask(
            text, max_tokens, stop, sampling=sampling, thinking=thinking, progress=progress, **changes
        )
        self._conversation = conversation
        return answer
