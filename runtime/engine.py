"""The engine: token ids in, logits or text out, with the KV cache kept between calls.

`tokens` are the tokens in the cache; all other state follows from them. The plan has functions for one token (decode)
and for chunks of several sizes (prefill). Kernels read the position and the number of live tokens from the io buffer
`state`, so the same launches serve every step.

Layers that see only the last keys may keep no others: their cache is a ring, in which new keys replace old ones. Going
back by more tokens than a ring has places to spare means to compute the remaining tokens again.
"""

import time
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlc_amd.runtime.artifact import Artifact
from mlc_amd.runtime.chat_template import ChatTemplate
from mlc_amd.runtime.devices import open_device
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.marks import split_at
from mlc_amd.runtime.sampling import Sampler, Sampling
from mlc_amd.runtime.tokenizer import Tokenizer

Ids = Sequence[int] | np.ndarray  # token ids

_SCORED = 64  # tokens per call of a score function: with a large vocabulary, the logits of one take half a megabyte


class ContextFull(UserError):
    """More tokens than the KV cache holds."""


@dataclass(frozen=True)
class Piece:
    """One generated token and the text that it completed (may be empty, may hold several tokens' text)."""

    id: int
    text: str


@dataclass
class Stats:
    """Statistics of one generation, in tokens and seconds; updated while it runs."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the KV cache
    prefill_s: float = 0.0
    ttft_s: float = 0.0  # time to first token, from the call
    generated: int = 0
    decode_s: float = 0.0
    finish: str = "interrupted"  # "stop", "length", "context" or "interrupted"

    @property
    def prefill_rate(self) -> float:
        """Tokens per second."""
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second, without the first one."""
        return (self.generated - 1) / self.decode_s if self.decode_s and self.generated > 1 else 0.0


class Engine:
    """A loaded model on a device. Not thread-safe."""

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
        self._conversation = None
        functions = artifact.manifest["functions"]
        self._sizes = sorted((f["tokens"], name) for name, f in functions.items() if not f["all_logits"])
        self._score = next((f["tokens"], name) for name, f in functions.items() if f["all_logits"])
        self._rings = [(ring["places"], ring["span"]) for ring in artifact.manifest["rings"]]
        self._end = 0  # of the positions that were written since the cache was empty

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
            raise UserError(f"{path} is not compiled yet; run: mlc-amd compile {path}")
        artifact = Artifact.open(path, verify)
        return cls(artifact, open_device(artifact, device, threads, n_cpu_moe))

    # ---- the KV cache

    @property
    def position(self) -> int:
        return len(self.tokens)

    def reset(self) -> None:
        self.tokens, self._end = [], 0

    def truncate(self, n: int) -> None:
        """Keeps the first `n` tokens; later steps overwrite the rest of the cache. The tokens are computed again where
        a ring of the cache has lost keys that the next step needs."""
        if not 0 <= n <= len(self.tokens):
            raise ValueError(f"cannot keep {n} of {len(self.tokens)} tokens")
        if self._holds(n):
            del self.tokens[n:]
            return
        kept = np.array(self.tokens[:n], np.int64)
        self.reset()
        self._prefill(kept)

    def match(self, ids: Sequence[int]) -> int:
        """Truncates the cache to the longest prefix that it shares with `ids`, leaving at least one id to prefill;
        returns its length. It is 0 where a ring of the cache has lost keys of that prefix."""
        limit = min(len(self.tokens), len(ids) - 1)
        n = max(next((i for i in range(limit) if self.tokens[i] != ids[i]), limit), 0)
        if self._holds(n):
            self.truncate(n)
        else:
            self.reset()
        return len(self.tokens)

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
        self._prefill(self._check(ids))
        return self.device.read("logits", 1)[0, : self.vocab]

    def prefill(self, ids: Ids) -> np.ndarray:
        """`advance`, with a copy of the logits; copying takes longer than greedy sampling."""
        return self.advance(ids).copy()

    def decode(self, token: int) -> np.ndarray:
        """`prefill` of one token."""
        return self.prefill([token])

    def score(self, ids: Ids) -> np.ndarray:
        """Appends `ids`. Returns the logits of all of them, float32 [len(ids), vocab]."""
        checked, (size, function) = self._check(ids), self._score
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
        checked = self._check(ids)
        if not hasattr(self.device, "time"):
            raise UserError(f"the device of target '{self.device.kind}' cannot time single kernels")
        _, count, function = next(self._chunks(len(checked)))
        self._write(checked[:count])
        return function, count, self.device.time(function)

    def _check(self, sequence: Ids) -> np.ndarray:
        ids = np.asarray(sequence, np.int64)
        if ids.ndim != 1 or not len(ids):
            raise UserError("nothing to evaluate: the prompt has no tokens")
        if ids.min() < 0 or ids.max() >= self.vocab:
            bad = ids[(ids < 0) | (ids >= self.vocab)][0]
            raise UserError(f"token id {bad} is outside the vocabulary of {self.vocab}")
        if self.position + len(ids) > self.context:
            raise ContextFull(
                f"{self.position + len(ids)} tokens do not fit the context of {self.context}; "
                "shorten the prompt or compile with a larger --ctx"
            )
        return ids

    def _chunks(self, n: int) -> Iterator[tuple[int, int, str]]:
        """(start, count, function): the largest size while it is filled, then the smallest that holds the rest."""
        start, largest = 0, self._sizes[-1][0]
        while start < n:
            count = min(n - start, largest)
            yield start, count, next(name for size, name in self._sizes if size >= count)
            start += count

    def _prefill(self, ids: np.ndarray) -> None:
        for start, count, function in self._chunks(len(ids)):
            self._step(function, ids[start : start + count])

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
        ids: Sequence[int],
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        shown: Collection[str] = (),
    ) -> Generator[Piece, None, None]:
        """Continues `ids`, one token at a time; a prefix that is in the cache is not computed again.

        sampling: None: the model's defaults. shown: control tokens whose text is part of the result.
        Ends at an end token, a stop string (not part of the text), `max_tokens`, or a full context, as reported in
        `last.finish`.
        """
        begin = time.perf_counter()
        sampler, decoder = Sampler(sampling or self.sampling), self.tokenizer.stream(shown=shown)
        stats = self.last = Stats(prompt_tokens=len(ids))
        recent = list(ids)
        stats.cached_tokens = self.match(ids)
        logits = self.advance(ids[stats.cached_tokens :])
        stats.prefill_s = time.perf_counter() - begin
        held = ""  # text that may be the beginning of a stop string
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
            if self.position == self.context:
                stats.finish = "context"
                break
            logits = self.advance([token])
        else:
            stats.finish = "length"
        text, _, _ = split_at(held + decoder.flush(), stop, last=True)
        if text:
            yield Piece(recent[-1], text)

    def chat(self, message: str | list[dict], **options) -> Iterator[str]:
        """The answer's text, in pieces, without what the model thinks. A string is the next turn of the engine's
        conversation, a list of messages starts a new one.

        `options`: sampling, max_tokens, stop, as in `generate`; thinking, as in `Conversation`.
        """
        from mlc_amd.runtime.chat import Conversation  # which is built on this module

        if self._conversation is None or not isinstance(message, str):
            self._conversation = Conversation(self)
        if isinstance(message, str):
            text = message
        else:
            *self._conversation.messages, final = message
            text = final["content"]
        for name in options.keys() & {"sampling", "thinking"}:
            setattr(self._conversation, name, options.pop(name))
        return self._conversation.ask(text, **options)
