"""A loaded embedding or ranking model. In: texts. Out: vectors or scores. The texts of all callers share steps; texts
are computed in the order in which they came."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.cache.kv_cache import KvUsage
from mlc_amd.runtime.closing import Closing
from mlc_amd.runtime.devices.opening import open_device
from mlc_amd.runtime.engine.scheduler import RequestCounts
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import RunOptions
from mlc_amd.runtime.text.tokenizer import Tokenizer

Ids = Sequence[int | str] | np.ndarray  # token ids; a string stands for its ids


class _Job:
    """A text. ids: int32 [tokens]. rows: its results, float32 [answers, features]. error: why there are none."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids
        self.rows: np.ndarray | None = None
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self.rows is not None or self.error is not None


class Encoder(Closing):
    """A loaded embedding or ranking model on a device, a context manager that closes it. Several threads may use it.
    context: largest number of tokens of a text. features: length of a vector. sizes: (rows, function), ascending."""

    kv_usage = KvUsage(0, 0)

    def __init__(self, artifact: Artifact, device) -> None:
        """device: from `open_device`. Raises UserError for a model that generates text."""
        manifest = artifact.manifest
        if not manifest["model"]["encoder"]:
            name = manifest["name"]
            raise UserError(f"{name} generates text: for embeddings give an embedding model, or --pooling mean or last")
        self.artifact, self.device, self.config = artifact, device, manifest["model"]
        self.encoder = manifest["model"]["encoder"]
        self.context = min(manifest["context"], self.config["context"])
        self.features: int = self.encoder["features"]
        self.vocab: int = self.config["vocab"]
        self.tokenizer = Tokenizer.load(artifact.path)
        self.sizes = sorted((f["rows"], name) for name, f in manifest["functions"].items())
        self._waiting: deque[_Job] = deque()
        self._guard, self._step = threading.Lock(), threading.Lock()  # for the queue; for the device
        self._running, self._closed = 0, False

    @classmethod
    def load(cls, path: str | Path, options: RunOptions | None = None) -> "Encoder":
        """Loads an artifact. Raises UserError if it cannot run on this machine."""
        options = options or RunOptions()
        artifact = Artifact.open(path, options.verify)
        return cls(artifact, open_device(artifact, options.device, options.threads))

    def __repr__(self) -> str:
        return f"<Encoder {self.artifact.manifest['name']} on {self.device.name}>"

    @property
    def queue(self) -> RequestCounts:
        """The number of texts that wait, and of those that are being computed."""
        return RequestCounts(len(self._waiting), self._running)

    @property
    def longest(self) -> int:
        """The largest number of tokens of a text."""
        return self.context

    @property
    def ranks(self) -> bool:
        """Whether it scores pairs of texts instead of making vectors."""
        return self.encoder["pooling"] == "rank"

    def close(self) -> None:
        with self._step:
            if not self._closed:
                self._closed = True
                self.device.close()
                self.artifact.close()

    # ---- vectors and scores

    def embed(
        self, texts: str | Sequence[str | Ids], normalize: bool = True, truncate: bool = False, dimensions: int = 0
    ) -> np.ndarray | list[np.ndarray]:
        """The vectors of texts, or of lists of token ids: float32 [n, features]. For a model without pooling: a list of
        float32 [tokens, features], one for each text.

        normalize: scales each vector to length 1. truncate: cuts texts that are too long; otherwise they raise
        UserError. dimensions: returns only the first so many numbers of each vector, for models that were trained for
        this; 0 for all. Raises UserError for a ranking model."""
        if self.ranks:
            raise UserError(f"{self.artifact.manifest['name']} is a ranking model: use `rerank`, or another --pooling")
        if not 0 <= dimensions <= self.features:
            raise UserError(f"the model's vectors have {self.features} numbers, not {dimensions}")
        found = self.encode(self.ids([texts] if isinstance(texts, str) else texts, truncate))
        vectors = [rows[:, : dimensions or None] for rows in found]
        vectors = [normalized(rows) for rows in vectors] if normalize else vectors
        if self.encoder["pooling"] == "none":
            return vectors
        return np.concatenate(vectors) if vectors else np.empty((0, dimensions or self.features), np.float32)

    def rerank(self, query: str, texts: Sequence[str], truncate: bool = False) -> np.ndarray:
        """How well each text answers the query, float32 [n]: larger is better. truncate: see `embed`. Raises UserError
        if this is not a ranking model."""
        self.check_ranks()
        pairs = [self.tokenizer.encode_pair(query, text) for text in texts]
        return self.scores(self.ids(pairs, truncate))

    def check_ranks(self) -> None:
        """Raises UserError if this is not a ranking model."""
        if not self.ranks:
            raise UserError(f"{self.artifact.manifest['name']} makes vectors: give a ranking model (reranker)")

    def scores(self, ids: Sequence[np.ndarray]) -> np.ndarray:
        """The scores of pairs of query and text, which are given as token ids: float32 [n]."""
        found = [rows[0] for rows in self.encode(ids)]
        numbers = np.stack(found) if found else np.empty((0, self.features), np.float32)
        if self.encoder["softmax"]:
            weights = np.exp(numbers - numbers.max(-1, keepdims=True, initial=-np.inf))
            numbers = weights / weights.sum(-1, keepdims=True)
        return numbers[:, 0]

    def ids(self, texts: Sequence[str | Ids], truncate: bool = False) -> list[np.ndarray]:
        """The token ids of each text, int32. truncate: see `embed`. Raises UserError for a text without tokens, with
        too many, or with unknown ids."""
        found = []
        for number, text in enumerate(texts):
            if not isinstance(text, np.ndarray):
                text = self.tokenizer.encode_parts([text] if isinstance(text, str) else text)
            ids = np.asarray(text)  # an array of objects if an id is too large for int64
            if len(ids) > self.context and truncate:  # the last token stays: it may be an end token
                ids = np.concatenate([ids[: self.context - 1], ids[-1:]])
            if ids.ndim != 1 or not 0 < len(ids) <= self.context:
                what = f"text {number + 1} is too {'large' if len(ids) else 'short'}: it has {len(ids)} tokens"
                raise UserError(f"{what}, this model takes 1 to {self.context}; let it be truncated, or split it")
            if ids.min() < 0 or ids.max() >= self.vocab:
                raise UserError(f"text {number + 1} has token ids outside the vocabulary of {self.vocab}")
            found.append(ids.astype(np.int32))
        return found

    # ---- steps

    def encode(self, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The model's results for the token ids of each text: float32 [answers, features]. A calling thread that finds
        the device free computes a step of the oldest texts, also those of other threads, until its own are done."""
        jobs = [_Job(ids) for ids in texts]
        with self._guard:
            self._waiting.extend(jobs)
        for job in jobs:
            while not job.done:
                with self._step:
                    if not job.done:
                        self._compute()
        errors = [job.error for job in jobs if job.error]
        if errors:
            raise errors[0]
        return [job.rows for job in jobs if job.rows is not None]

    def _compute(self) -> None:
        """Computes one step of the oldest texts."""
        batch, rows = [], 0
        with self._guard:
            while self._waiting and rows + len(self._waiting[0].ids) <= self.sizes[-1][0]:
                batch.append(self._waiting.popleft())
                rows += len(batch[-1].ids)
            self._running = len(batch)
        try:
            if self._closed:
                raise UserError("the model was closed")
            for job, found in zip(batch, self.step([job.ids for job in batch]), strict=True):
                job.rows = found
        except BaseException as error:
            for job in batch:
                job.error = error
            if not isinstance(error, Exception):
                raise
        finally:
            self._running = 0

    def step(
        self, texts: Sequence[np.ndarray], function: str = "", run: Callable[[str], None] | None = None
    ) -> list[np.ndarray]:
        """Computes one step of these texts, without a lock. function: by default the smallest with enough rows. run:
        the device's `run` or `run_plain`."""
        rows = sum(map(len, texts))
        ends = np.cumsum([len(ids) for ids in texts])
        begins = np.concatenate([[0], ends[:-1]])
        spans = np.stack([begins, ends], 1)
        segments = np.repeat(spans, ends - begins, 0)
        positions = np.arange(rows) - segments[:, 0]
        pooling = self.encoder["ranked"] if self.ranks else self.encoder["pooling"]
        if pooling == "none":
            counts, pooled = ends - begins, np.stack([np.arange(rows), np.arange(rows) + 1], 1)
        else:
            first, last = (pooling == "cls", pooling == "last")
            pooled = np.stack([ends - 1 if last else begins, begins + 1 if first else ends], 1)
            counts = np.ones(len(texts), np.int64)
        inputs = {
            "state": [0, rows, 0, 0], "answers": [len(pooled), len(pooled), 0, 0], "tokens": np.concatenate(texts),
            "rows": np.stack([positions, np.zeros(rows)], 1), "segments": segments, "pooled": pooled,
        }  # fmt: skip
        for name, values in inputs.items():
            self.device.write(name, np.asarray(values, np.int32))
        (run or self.device.run)(function or next(name for size, name in self.sizes if size >= rows))
        found = self.device.read("logits", len(pooled))[:, : self.features].copy()
        return np.split(found, np.cumsum(counts)[:-1])


def normalized(rows: np.ndarray, p: int = 2) -> np.ndarray:
    """Rows divided by their norm. p > 0: the p-norm (2: Euclidean length). p = 0: the largest magnitude becomes 32760.
    p < 0: rows are unchanged. These are the values of llama.cpp's common_embd_normalize."""
    if p < 0:
        return rows
    if p == 0:
        norm = np.abs(rows).max(-1, keepdims=True) / 32760
    else:
        norm = (np.abs(rows.astype(np.float64)) ** p).sum(-1, keepdims=True) ** (1 / p)
    return np.divide(rows, norm, out=np.zeros_like(rows), where=norm > 0, casting="unsafe")
