"""A loaded model and its KV cache. In: token ids. Out: logits. An engine has one sequence of its own, `tokens`, on
which `prefill`, `decode`, `score`, `truncate` and `match` work. For measurements there are several sequences (`batch`),
and times of kernels (`time`)."""

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
        """device: from `open_device`. limits: of steps and of the queue; None for what the functions can compute.
        Raises UserError for an embedding model."""
        if artifact.manifest["model"]["encoder"]:
            name, others = artifact.manifest["name"], "`mlc-amd embed`, `mlc-amd rerank` or `mlc-amd serve`"
            raise UserError(f"{name} is an embedding model: it generates no text; use {others}")
        self.artifact, self.device = artifact, device
        self.config = artifact.manifest["model"]
        self.context: int = artifact.manifest["context"]
        self.vocab: int = self.config["vocab"]
        self.tokenizer = Tokenizer.load(artifact.path)
        if self.tokenizer.vocab_size > self.vocab:  # with larger ids, kernels would read beyond their tables
            raise UserError(
                f"{artifact.path} has a tokenizer of {self.tokenizer.vocab_size} tokens for a model of {self.vocab}; "
                "compile the model again"
            )
        self._limits = limits
        encoder = ImageEncoder(artifact, device) if "vision" in artifact.manifest else None
        self.features = Features(encoder)  # encoded images
        self._open()

    def _open(self) -> None:
        """Makes an empty cache, and the objects that use it."""
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
        self._own_lock = threading.Lock()  # for the engine's own sequence; `score` holds it for several steps

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
        """The largest number of tokens of a sequence."""
        return self.cache.longest

    @property
    def kv_usage(self) -> KvUsage:
        """How full the KV cache is."""
        return self.cache.usage

    # ---- the cache on disk

    def keep_on_disk(self, limit: int) -> None:
        """Keeps the cache also on disk, in the user's cache folder (runtime/cache/page_files.py). limit: bytes of the
        files of all models. `close` writes pages that are not written yet."""
        self.stored.keep_on_disk(limit)

    @property
    def keeps_on_disk(self) -> bool:
        """Whether `keep_on_disk` was called."""
        return self._stored is not None and self._stored.on_disk

    @property
    def stored(self) -> StoredPages:
        """The parts of the cache that are kept on disk."""
        with self._storing:
            self._stored = self._stored or StoredPages(self.artifact, self.device, self.cache, self._loop)
            return self._stored

    # ---- speculation

    def own_draft(self) -> OwnDraft:
        """The drafter that was compiled with the model (such as MTP layers). Raises UserError if there is none."""
        return OwnDraft(self._runner, self.artifact.manifest["name"], self.config["draft"])

    def speculate(self, drafter: Drafter | None) -> None:
        """Sets what guesses tokens, for later steps to verify. Answers stay the same. drafter: is closed with the
        engine. None: only tokens that a grammar forces are guessed, and none if several steps are in progress."""
        with self._loop.exclusive():
            before, rows = self._loop.speculation, self._loop.scheduler.limits.step_rows
            used = drafter or (NoDrafts() if self._runner.stages == 1 else None)
            self._loop.speculation = Speculation(used, rows) if used else None
        if before:
            before.drafter.close()

    @property
    def guesses(self) -> Counts:
        """The number of guesses that were verified so far, and of those that were right."""
        return self._loop.speculation.counts if self._loop.speculation else Counts(0, 0)

    # ---- the engine's own sequence

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Reserves the engine's own sequence and the device for the caller."""
        with self._own_lock, self._loop.exclusive():
            yield

    @property
    def tokens(self) -> list[int]:
        """The tokens of the engine's own sequence."""
        return self._own.tokens

    @property
    def position(self) -> int:
        """The number of tokens of the engine's own sequence."""
        return len(self._own.tokens)

    def reset(self) -> None:
        """Empties the own sequence, and the cache unless generations are using it. Files on disk stay."""
        with self._exclusive():
            self._own.truncate(0)
            if not self._loop.busy:
                self._own.free()
                self.cache.index.clear()

    def truncate(self, n: int) -> None:
        """Keeps the first `n` tokens of the own sequence. The next step computes some of them again: up to a page of
        tokens, or more if layers with a sliding window have dropped keys that it needs."""
        with self._exclusive():
            self._own.truncate(n)

    def match(self, ids: Sequence[int]) -> int:
        """Keeps the longest common prefix of the own sequence and `ids`, but at most len(ids) - 1 tokens, so that there
        is a token to compute. Returns its length."""
        with self._exclusive():
            limit = min(self.position, len(ids) - 1)
            n = max(next((i for i in range(limit) if self.tokens[i] != ids[i]), limit), 0)
            self._own.truncate(n)
            return n

    def advance(self, ids: Ids) -> np.ndarray:
        """Appends `ids` to the own sequence. Returns the logits of the last one, float32 [vocab], in memory that the
        next step overwrites. Raises UserError for invalid ids, ContextFull if they do not fit; the sequence is then
        unchanged."""
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
        """`advance`, but returns a copy of the logits. (The copy takes longer than greedy sampling.)"""
        return self.advance(ids).copy()

    def decode(self, token: int) -> np.ndarray:
        """`prefill` of one token."""
        return self.prefill([token])

    def score(self, ids: Ids) -> np.ndarray:
        """Appends `ids` to the own sequence. Returns the logits of all of them, float32 [len(ids), vocab]. Answers in
        progress continue meanwhile: the scheduler treats this call as one more client."""
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
        """Times the kernels of the first step of `prefill(ids)`. If the device would compute the two halves of this
        step at the same time, times one half. Returns (function, tokens, [(kernel, seconds, seconds of the gap before
        it)]). The sequence is unchanged. Raises UserError if the device cannot time kernels."""
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
        """Checks token ids; returns them as a Prompt, with its images. kept: number of tokens before them. images:
        whether images are allowed. Raises UserError for ids outside the vocabulary and for images that the model does
        not take, ContextFull if kept + len(ids) exceeds the context."""
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
        """Raises UserError if the model does not take these images."""
        if "images" not in self.artifact.manifest:
            raise UserError(f"{self.artifact.manifest['name']} takes no images: it was compiled without an encoder")
        rows, most = max(image.rows for image in images), self._runner.functions.chunk_rows
        if self.cache.together and rows > most:
            raise UserError(f"an image of {rows} tokens is too large: this model takes images of up to {most}")

    @contextmanager
    def batch(self, count: int) -> Iterator[Batch]:
        """`count` sequences that advance together, for measurements. All other callers wait until the block ends."""
        with self._loop.exclusive():
            found = Batch(self.cache, self._runner, count)
            try:
                yield found
            finally:
                found.close()
