"""Token ids in, logits out: a loaded model, its KV cache, and one sequence of the caller's (`tokens`), on which
`prefill`, `decode`, `score`, `truncate` and `match` work. For measurements: several sequences (`batch`), times of
kernels (`time`)."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.cache.kv_cache import KvCache, KvUsage
from mlc_amd.runtime.closing import Closing
from mlc_amd.runtime.devices.steps import pages_of
from mlc_amd.runtime.engine.admission import SchedulerLimits
from mlc_amd.runtime.engine.batch import Batch, compute, next_chunk
from mlc_amd.runtime.engine.generation import ContextFull, Ids, check_ids
from mlc_amd.runtime.engine.requests import Scoring
from mlc_amd.runtime.engine.runner import Runner
from mlc_amd.runtime.engine.step_loop import StepLoop
from mlc_amd.runtime.engine.stored_pages import StoredPages
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.images.encoder import ImageEncoder
from mlc_amd.runtime.images.features import Features
from mlc_amd.runtime.images.prepared import PreparedImage
from mlc_amd.runtime.images.rows import Prompt
from mlc_amd.runtime.speculation.own_draft import OwnDraft
from mlc_amd.runtime.speculation.speculation import Counts, Drafter, NoDrafts, Speculation
from mlc_amd.runtime.text.tokenizer import Tokenizer


class LogitsEngine(Closing):
    """A loaded model on a device. Methods may be called from several threads."""

    def __init__(self, artifact: Artifact, device, limits: SchedulerLimits | None = None):
        """device: of `open_device`. limits: of steps and of the queue, None: what the functions can compute."""
        if artifact.manifest["model"]["encoder"]:
            name, others = artifact.manifest["name"], "`mlc-amd embed`, `mlc-amd rerank` or `mlc-amd serve`"
            raise UserError(f"{name} is an embedding model: it generates no text; use {others}")
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
        self._limits = limits
        encoder = ImageEncoder(artifact, device) if "vision" in artifact.manifest else None
        self.features = Features(encoder)  # of images
        self._open()

    def _open(self) -> None:
        """An empty cache, and what works with it."""
        manifest = self.artifact.manifest
        self.cache = KvCache(pages_of(self.device, manifest), self.context, images=manifest.get("images"))
        self._runner = Runner(self.artifact, self.device, self.cache, self.features)
        functions = self._runner.functions
        rows = functions.single_rows, functions.chunk_rows, functions.mixed_rows, self._runner.scored
        limits = self._limits or SchedulerLimits(*rows, sizes=functions.chunk_sizes)
        self._loop = StepLoop(self._runner, self.cache, limits)
        self._stored: StoredPages | None = None
        self._storing = threading.Lock()
        self._own = self._loop.private = self.cache.sequence()
        self._own_lock = threading.Lock()  # of the own sequence, also between the steps of `score`

    def __repr__(self) -> str:
        name, state = self.artifact.manifest["name"], f"{self.position} of {self.context} tokens"
        return f"<{type(self).__name__} {name} on {self.device.name}, {'closed' if self._loop.closed else state}>"

    def close(self) -> None:
        """Ends all generations, and releases the device and all memory."""
        if not self._loop.closed:
            if self._stored:
                self._loop.end_all()
                self._stored.close()
            self._loop.close()
            self.device.close()
            self.artifact.close()

    @property
    def longest(self) -> int:
        """Tokens that a sequence may have."""
        return self.cache.longest

    @property
    def kv_usage(self) -> KvUsage:
        """How full the KV cache is."""
        return self.cache.usage

    # ---- the cache on disk

    def keep_on_disk(self, limit: int) -> None:
        """From now on the cache is also written to the user's cache folder, and read from there: up to `limit` bytes of
        all models (runtime/cache/page_files.py). `close` writes what is not written yet."""
        self.stored.keep_on_disk(limit)

    @property
    def keeps_on_disk(self) -> bool:
        """Whether `keep_on_disk` was called."""
        return self._stored is not None and self._stored.on_disk

    @property
    def stored(self) -> StoredPages:
        """What is kept of the cache outside of memory."""
        with self._storing:
            self._stored = self._stored or StoredPages(self.artifact, self.device, self.cache, self._loop)
            return self._stored

    # ---- speculation

    def own_draft(self) -> OwnDraft:
        """Guesses by what was trained for the model and compiled with it. UserError if there is nothing."""
        return OwnDraft(self._runner, self.artifact.manifest["name"], self.config["draft"])

    def speculate(self, drafter: Drafter | None) -> None:
        """From now on steps verify that drafter's guesses (closed with the engine), and what grammars force; with None
        that alone, but where several steps are in progress at a time. Answers are the same."""
        with self._loop.exclusive():
            before, rows = self._loop.speculation, self._loop.scheduler.limits.step_rows
            used = drafter or (NoDrafts() if self._runner.stages == 1 else None)
            self._loop.speculation = Speculation(used, rows) if used else None
        if before:
            before.drafter.close()

    @property
    def guesses(self) -> Counts:
        """Guesses that were verified so far, and how many of them were right."""
        return self._loop.speculation.counts if self._loop.speculation else Counts(0, 0)

    # ---- the engine's own sequence

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """The own sequence and the device for the caller alone."""
        with self._own_lock, self._loop.exclusive():
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
        """Empties the own sequence, and the cache unless generations are using it. What is on disk stays."""
        with self._exclusive():
            self._own.truncate(0)
            if not self._loop.busy:
                self._own.free()
                self.cache.index.clear()

    def truncate(self, n: int) -> None:
        """Keeps the first `n` tokens; later steps overwrite the rest. Up to a page of tokens is computed again by the
        next step, more where layers with a window have lost keys that it needs."""
        with self._exclusive():
            self._own.truncate(n)

    def match(self, ids: Sequence[int]) -> int:
        """Keeps the longest common prefix with `ids`, leaving one id to compute at least; returns its length."""
        with self._exclusive():
            limit = min(self.position, len(ids) - 1)
            n = max(next((i for i in range(limit) if self.tokens[i] != ids[i]), limit), 0)
            self._own.truncate(n)
            return n

    def advance(self, ids: Ids) -> np.ndarray:
        """Appends `ids`. Returns the logits of the last one, float32 [vocab], in memory that the next step overwrites.
        ContextFull leaves the sequence unchanged."""
        with self._exclusive():
            checked, before = self._check(ids, self.position), self.position
            self._own.append(checked)
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
        meanwhile: the scheduler treats the chunks as requests of one more client."""
        with self._own_lock:
            checked, before = self._check(ids, self.position, images=False), self.position
            with self._loop.exclusive():
                self._own.append(checked)
            scoring = Scoring(self._own, before, self.vocab)
            try:
                self._loop.score(scoring)
            except BaseException:
                with self._loop.exclusive():
                    self._own.truncate(before)
                raise
            return scoring.logits

    def time(self, ids: Ids) -> tuple[str, int, list[tuple[str, float, float]]]:
        """Times the kernels of the first step of `prefill(ids)`, or of half of it where the device computes halves at
        the same time: (function, tokens, [(kernel, seconds, gap before)]). The sequence is unchanged. UserError if the
        device cannot time kernels."""
        with self._exclusive():
            checked = self._check(ids, self.position)
            if not hasattr(self.device, "time"):
                raise UserError(f"the device of target '{self.device.kind}' cannot time single kernels")
            compute(self.cache, self._runner, self._own)
            before = self.position
            functions = self._runner.functions
            self._own.append(checked[: functions.largest] if functions.beside else checked)
            try:
                chunk = next_chunk(self.cache, self._runner, self._own)
                function = self._runner.prepare_chunk(chunk)
                return function, len(chunk[0]), self.device.time(function)
            finally:
                self._own.truncate(before)

    def _check(self, ids: Ids, kept: int, images: bool = True) -> list[int]:
        """The ids, with the images of a Prompt. images: whether it may have any. UserError for ids outside the
        vocabulary, and for images that the model does not take; ContextFull beyond the context after `kept`."""
        checked = check_ids(ids)
        found = ids.images if isinstance(ids, Prompt) and images else {}
        if found:
            self._check_images(found.values())
        lowest = np.iinfo(np.int32).min if found else 0
        if checked.min() < lowest or checked.max() >= self.vocab:
            bad = checked[(checked < lowest) | (checked >= self.vocab)][0]
            raise UserError(f"token id {bad} is outside the vocabulary of {self.vocab}")
        if kept + len(checked) > self.context:
            raise ContextFull(
                f"{kept + len(checked)} tokens do not fit the context of {self.context}",
                "shorten the prompt, or load the model with a larger context",
            )
        return Prompt(checked.tolist(), found)

    def _check_images(self, images: Iterable[PreparedImage]) -> None:
        """UserError unless the model takes them."""
        if "images" not in self.artifact.manifest:
            raise UserError(f"{self.artifact.manifest['name']} takes no images: it was compiled without an encoder")
        rows, most = max(image.rows for image in images), self._runner.functions.chunk_rows
        if self.cache.together and rows > most:
            raise UserError(f"an image of {rows} tokens is too large: this model takes images of up to {most}")

    @contextmanager
    def batch(self, count: int) -> Iterator[Batch]:
        """`count` sequences that advance together, for measurements. All other callers wait meanwhile."""
        with self._loop.exclusive():
            found = Batch(self.cache, self._runner, count)
            try:
                yield found
            finally:
                found.close()
