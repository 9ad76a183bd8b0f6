"""Several sequences that advance together, one token each: steps without scheduler and sampling, for measurements."""

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

import numpy as np

from mlc_amd.runtime.generation import ContextFull

if TYPE_CHECKING:
    from mlc_amd.runtime.kv_cache import Cache
    from mlc_amd.runtime.runner import Runner


class Batch:
    """`count` sequences. Nobody else may use the engine meanwhile (`Engine.batch`)."""

    def __init__(self, cache: "Cache", runner: "Runner", count: int) -> None:
        self._cache, self._runner = cache, runner
        self._sequences = [cache.sequence() for _ in range(count)]

    def prefill(self, ids: np.ndarray) -> None:
        """Appends ids [count, tokens], sequence by sequence. ContextFull where the cache has no room."""
        for sequence, row in zip(self._sequences, ids.tolist(), strict=True):
            sequence.append(row)
            self._compute(sequence)

    def step(self, ids: SequenceOf[int]) -> np.ndarray:
        """Appends a token to each sequence. Returns the logits, float32 [count, vocab]."""
        for sequence, token in zip(self._sequences, ids, strict=True):
            sequence.append((token,))
            self._reserve(sequence, 1)
        self._cache.seat(self._sequences)
        logits = self._runner.run([(s.tokens[-1], s.computed, s.table_row) for s in self._sequences])
        for sequence in self._sequences:
            sequence.advance(1)
        return logits

    def truncate(self, n: int) -> None:
        """Keeps the first n tokens of each, and computes again what that takes."""
        for sequence in self._sequences:
            sequence.truncate(n)
            self._compute(sequence)

    def _compute(self, sequence) -> None:
        """Computes the pending tokens of a sequence, in chunks."""
        while sequence.pending:
            count, start = min(sequence.pending, self._runner.functions.chunk_rows), sequence.computed
            self._reserve(sequence, count)
            self._cache.seat([sequence])
            self._runner.run((), (sequence.tokens[start : start + count], start, sequence.table_row))
            sequence.advance(count)

    def close(self) -> None:
        for sequence in self._sequences:
            sequence.truncate(0)
            sequence.free()

    @staticmethod
    def _reserve(sequence, count: int) -> None:
        if not sequence.reserve(count):
            raise ContextFull(
                "the KV cache has no room for all sequences", "load the model with a larger cache (kv_tokens)"
            )
