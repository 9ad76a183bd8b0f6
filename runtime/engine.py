"""The engine: token ids in, logits or text out, with the KV cache kept between calls.

`tokens` are the tokens in the cache; all other state follows from them. The plan has functions for one token (decode)
and for chunks of several sizes (prefill). Kernels read the position and the number of live tokens from the io buffer
`state`, so the same launches serve every step.

Layers that see only the last keys may keep no others: their cache is a ring, in which new keys replace old ones. Going
back by more tokens than a ring has places to spare means to compute the remaining tokens again.

There is one cache, so an engine serves one caller at a time: a generation holds it until its iterator ends, and
whatever else would use the cache meanwhile, from the same thread or another one, is refused (EngineBusy).
"""

import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np

from mlc_amd.runtime.artifact import Artifact
from mlc_amd.runtime.chat import Conversation
from mlc_amd.runtime.chat_template import ChatTemplate
from mlc_amd.runtime.closing import Closing
from mlc_amd.runtime.devices import open_device
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.exclusive import Exclusive
from mlc_amd.runtime.generation import (
    ContextFull,
    Ids,
    Piece,
    Progress,
    Stats,
    check_ids,
    check_max_tokens,
    check_stop,
)
from mlc_amd.runtime.marks import split_at
from mlc_amd.runtime.messages import check_question
from mlc_amd.runtime.sampling import Sampler, Sampling, SamplingChanges
from mlc_amd.runtime.tokenizer import Tokenizer

_SCORED = 64  # tokens per call of a score function: with a large vocabulary, the logits of one take half a megabyte


class Engine(Closing):
    """A loaded model on a device, a context manager that closes it. One caller at a time: others get EngineBusy."""

    def __init__(self, artifact: Artifact, device):
        self.artifact, self.device = artifact, device
        self.config: dict = artifact.manifest["model"]
        self.context: int = artifact.manifest["context"]
        self.vocab: int = self.config["vocab"]
        self.tokenizer = Tokenizer.load(artifact.path)
        self.chat_template = ChatTemplate.load(artifact.path)
        self.sampling = Sampling(**artifact.manifest["sampling"])  # the model's own defaults
        self.tokens: list[int] = []
        self.last = Stats()
        self._conversation: Conversation | None = None
        functions = artifact.manifest["functions"]
        self._sizes = sorted((f["tokens"], name) for name, f in functions.items() if not f["all_logits"])
        self._score = next((f["tokens"], name) for name, f in functions.items() if f["all_logits"])
        self._rings = [(ring["places"], ring["span"]) for ring in artifact.manifest["rings"]]
        self._end = 0  # of the positions that were written since the cache was empty
        self._use, self._cancelled = Exclusive(), False

    def __repr__(self) -> str:
        name, state = self.artifact.manifest["name"], f"{self.position} of {self.context} tokens"
        return f"<Engine {name} on {self.device.name}, {'closed' if self._use.closed else state}>"

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str | None = None,
        threads: int | None = None,
        verify: bool = False,
        n_cpu_moe: int = 0,
    ) -> "Engine":
        """Loads an artifact folder. `verify` also verifies the checksum of the weights, which reads all of them;
        device, threads and n_cpu_moe: see `open_device`. UserError if it cannot run here."""
        if Path(path).suffix == ".gguf":
            raise UserError(f"{path} is not compiled yet: mlc_amd.load() and `mlc-amd compile` do that")
        artifact = Artifact.open(path, verify)
        return cls(artifact, open_device(artifact, device, threads, n_cpu_moe))

    def close(self) -> None:
        """Releases the device and all memory. EngineBusy while a generation is in progress."""
        if not self._use.closed:
            with self._use:
                self._use.closed = True
                self.device.close()
                self.artifact.close()

    # ---- the KV cache

    @property
    def position(self) -> int:
        """Number of tokens in the cache."""
        return len(self.tokens)

    def reset(self) -> None:
        """Empties the cache and ends the conversation of `chat`."""
        with self._use:
            self._conversation = None
            self._clear()

    def truncate(self, n: int) -> None:
        """Keeps the first `n` tokens; later steps overwrite the rest of the cache. The tokens are computed again where
        a ring of the cache has lost keys that the next step needs."""
        with self._use:
            if not 0 <= n <= len(self.tokens):
                raise ValueError(f"cannot keep {n} of {len(self.tokens)} tokens")
            if self._holds(n):
                del self.tokens[n:]
                return
            kept = np.array(self.tokens[:n], np.int64)
            self._clear()
            if n:
                self._advance(kept)

    def match(self, ids: Sequence[int]) -> int:
        """Truncates the cache to the longest prefix that it shares with `ids`, leaving at least one id to prefill;
        returns its length. It is 0 where a ring of the cache has lost keys of that prefix."""
        with self._use:
            return self._match(ids)

    def _match(self, ids: Sequence[int]) -> int:
        limit = min(len(self.tokens), len(ids) - 1)
        n = max(next((i for i in range(limit) if self.tokens[i] != ids[i]), limit), 0)
        if self._holds(n):
            del self.tokens[n:]
        else:
            self._clear()
        return len(self.tokens)

    def _clear(self) -> None:
        self.tokens, self._end = [], 0

    def _holds(self, n: int) -> bool:
        """Whether the cache has all keys that a step behind `n` tokens needs: the oldest one that a row sees there is
        still in its place in every ring."""
        oldest = [(max(n - span + 1, 0), places) for places, span in self._rings]
        return all(self._end <= position + places for position, places in oldest)

    # ---- logits

    def advance(self, ids: Ids) -> np.ndarray:
        """Appends `ids` to the cache. Returns the logits of the last one, float32 [vocab], in memory that the next step
        overwrites.

        ContextFull leaves the cache unchanged.
        """
        with self._use:
            return self._advance(self._check(ids, self.position))

    def _advance(self, ids: np.ndarray) -> np.ndarray:
        for _ in self._prefill(ids):
            pass
        return self.device.read("logits", 1)[0, : self.vocab]

    def prefill(self, ids: Ids) -> np.ndarray:
        """`advance`, with a copy of the logits; copying takes longer than greedy sampling."""
        return self.advance(ids).copy()

    def decode(self, token: int) -> np.ndarray:
        """`prefill` of one token."""
        return self.prefill([token])

    def score(self, ids: Ids) -> np.ndarray:
        """Appends `ids`. Returns the logits of all of them, float32 [len(ids), vocab]."""
        with self._use:
            checked, (size, function) = self._check(ids, self.position), self._score
            size = min(size, _SCORED)
            logits = np.empty((len(checked), self.vocab), np.float32)
            for start in range(0, len(checked), size):
                part = checked[start : start + size]
                self._step(function, part)
                logits[start : start + len(part)] = self.device.read("logits", len(part))[:, : self.vocab]
            return logits

    def time(self, ids: Ids) -> tuple[str, int, list[tuple[str, float, float]]]:
        """Times the kernels of the first step of `prefill(ids)`: (function, tokens, [(kernel, seconds, gap before)]).

        Cache and position are unchanged. UserError if the device cannot time kernels.
        """
        with self._use:
            checked = self._check(ids, self.position)
            if not hasattr(self.device, "time"):
                raise UserError(f"the device of target '{self.device.kind}' cannot time single kernels")
            _, count, function = next(self._chunks(len(checked)))
            self._write(checked[:count])
            return function, count, self.device.time(function)

    def _check(self, ids: Ids, kept: int) -> np.ndarray:
        """Ids as int64, which fit the vocabulary, and the cache behind its first `kept` tokens."""
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

    def _chunks(self, n: int) -> Iterator[tuple[int, int, str]]:
        """(start, count, function): the largest size while it is filled, then the smallest that holds the rest."""
        start, largest = 0, self._sizes[-1][0]
        while start < n:
            count = min(n - start, largest)
            yield start, count, next(name for size, name in self._sizes if size >= count)
            start += count

    def _prefill(self, ids: np.ndarray) -> Iterator[int]:
        """Appends `ids`, chunk by chunk; yields how many are computed: 0, then after each chunk."""
        yield 0
        for start, count, function in self._chunks(len(ids)):
            self._step(function, ids[start : start + count])
            yield start + count

    def _step(self, function: str, ids: np.ndarray) -> None:
        self._write(ids)
        self.device.run(function)
        self.tokens.extend(ids.tolist())

    def _write(self, ids: np.ndarray) -> None:
        self._end = max(self._end, self.position + len(ids))
        self.device.write("state", (self.position, len(ids)))
        self.device.write("tokens", ids)

    # ---- text

    def generate(
        self,
        prompt: str | Ids,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        shown: Collection[str] = (),
        progress: Progress | None = None,
        **changes: Unpack[SamplingChanges],
    ) -> Generator[Piece, None, None]:
        """Continues a text, or token ids, one token at a time; a prefix that is in the cache is not computed again.

        sampling: None: the model's defaults. changes: single parameters of it, such as temperature=0.7. stop: texts
        that end the text before them. shown: control tokens whose text is part of the result. progress: is told how
        much of the prompt is computed: before the first chunk, and after each one.
        Ends at an end token, a stop text, `max_tokens`, a full context or `cancel`, as reported in `last.finish`.

        Raises UserError for arguments out of range and ContextFull at once, EngineBusy at the first step, from which on
        the engine is in use until the iterator ends or is closed.
        """
        ids = self._check(self.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt, 0)
        sampler = Sampler((sampling or self.sampling).changed(**changes))
        return self._generate(ids, sampler, check_max_tokens(max_tokens), check_stop(stop), shown, progress)

    def cancel(self) -> None:
        """Ends the generation in progress, if there is one, after its current step: a token, or a chunk of the prompt.
        Its iterator then ends as if it were complete. May be called from any thread and from signal handlers."""
        self._cancelled = True

    def _generate(
        self,
        ids: np.ndarray,
        sampler: Sampler,
        max_tokens: int | None,
        stop: Sequence[str],
        shown: Collection[str],
        progress: Progress | None,
    ) -> Generator[Piece, None, None]:
        with self._use:
            self._cancelled, begin = False, time.perf_counter()
            decoder, recent = self.tokenizer.stream(shown=shown), ids.tolist()
            stats = self.last = Stats(prompt_tokens=len(ids))
            stats.cached_tokens = self._match(recent)
            new = ids[stats.cached_tokens :]
            for done in self._prefill(new):
                if progress:
                    progress(done, len(new))
                if self._cancelled:
                    return
            logits = self.device.read("logits", 1)[0, : self.vocab]
            stats.prefill_s = time.perf_counter() - begin
            held = ""  # text that may be the beginning of a stop text
            first = None
            while max_tokens is None or stats.generated < max_tokens:
                token = sampler.sample(logits, recent)
                now = time.perf_counter()
                first = first or now
                stats.ttft_s, stats.decode_s = first - begin, now - first
                if token in self.tokenizer.end_ids:
                    stats.finish = "stop"
                    break
                stats.generated += 1
                recent.append(token)
                text, stopped, held = split_at(held + decoder.push(token), stop)
                yield Piece(token, text)
                if stopped is not None:
                    stats.finish = "stop"
                    return
                if self._cancelled:
                    return
                if self.position == self.context:
                    stats.finish = "context"
                    break
                logits = self._advance(np.array([token]))
            else:
                stats.finish = "length"
            text, _, _ = split_at(held + decoder.flush(), stop, last=True)
            if text:
                yield Piece(recent[-1], text)

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
        conversation; a list of messages (see runtime/messages.py), the last of which is the user's, begins a new one,
        as `reset` does.

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
