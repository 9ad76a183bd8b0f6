"""Computes steps without the scheduler, for logits and measurements. In: one or several sequences. Out: logits or
tokens. Callers must hold the step lock."""

from collections.abc import Sequence as SequenceOf

import numpy as np

from mlc_amd.runtime.cache.kv_cache import KvCache
from mlc_amd.runtime.cache.sequence import ChunkRows, Sequence
from mlc_amd.runtime.engine.functions import chunk_size, rows_at_once
from mlc_amd.runtime.engine.generation import ContextFull
from mlc_amd.runtime.engine.runner import Runner
from mlc_amd.runtime.engine.sampled_rows import GREEDY


def reserve(sequence: Sequence, count: int, guesses: int = 0) -> None:
    """Reserves pages for the next `count` tokens of a sequence, and for guesses. Raises ContextFull without pages."""
    if not sequence.reserve(count, guesses):
        raise ContextFull(
            f"the KV cache has no room for {count + guesses} more tokens beside those of other sequences",
            "wait until they are complete, or load the model with a larger cache (--kv-memory)",
        )


def next_chunk(cache: KvCache, runner: Runner, sequence: Sequence) -> ChunkRows:
    """The next chunk of a sequence's pending tokens. Reserves their pages, and assigns the sequence a slot."""
    functions = runner.functions
    most = rows_at_once(len(sequence.tokens), functions.chunk_sizes, runner.stages)
    count = sequence.step_size(chunk_size(sequence.pending, functions.chunk_sizes, most))
    parts = [part.image for part in sequence.images.parts(sequence.computed, count)]
    while any(image not in runner.images for image in parts):
        runner.images.require(parts)
    reserve(sequence, count)
    cache.assign_slots([sequence])
    return sequence.chunk(count)


def compute(cache: KvCache, runner: Runner, sequence: Sequence) -> np.ndarray | None:
    """Computes the pending tokens of a sequence, in chunks. Returns the logits of the last token, float32 [vocab], in
    memory that the next step overwrites; None if no tokens are pending."""
    logits = None
    while sequence.pending:
        chunk = next_chunk(cache, runner, sequence)
        if len(chunk[0]) < sequence.pending:
            runner.feed(chunk)
        else:
            logits = runner.run(chunk)
        sequence.advance(len(chunk[0]))
    return logits


class Batch:
    """`count` sequences, for the holder of the engine's step lock (`Engine.batch`)."""

    def __init__(self, cache: KvCache, runner: Runner, count: int) -> None:
        self._cache, self._runner, self.count = cache, runner, count
        self._sequences = [cache.sequence() for _ in range(count)]

    def prefill(self, ids: np.ndarray) -> None:
        """Appends ids, int [count, tokens], to the sequences, and computes them one sequence after the other. Raises
        ContextFull if the cache has no room."""
        for sequence, row in zip(self._sequences, ids.tolist(), strict=True):
            sequence.append(row)
            compute(self._cache, self._runner, sequence)

    @property
    def rows(self) -> int:
        """The largest number of rows of a step."""
        return self._runner.functions.single_rows

    @property
    def guess_room(self) -> int:
        """How many guesses each sequence may have in a step. Sequences with states share the cells."""
        room = min(sequence.guess_room for sequence in self._sequences)
        return room // len(self._sequences) if self._cache.cells else room

    def step(self, ids: SequenceOf[int]) -> list[int]:
        """Appends a token to each sequence. Returns the most likely next token of each."""
        return self.verify([[token] for token in ids], [1] * len(ids))

    @property
    def can_start_ahead(self) -> bool:
        """Whether a step may start while the one before it is in progress."""
        return self._runner.can_start_ahead(len(self._sequences))

    def decode(self, ids: SequenceOf[int], count: int, ahead: bool = True) -> list[list[int]]:
        """Appends `count` tokens to each sequence: the given one, then the most likely one each time. Returns them.

        ahead: steps start as they do for answers: each one while the step before is in progress, if the device can do
        that. With several GPUs that have layers each, as many groups of sequences have steps of their own."""
        runner, sequences = self._runner, self._sequences
        if not (ahead and self.can_start_ahead):
            for _ in range(count):
                ids = self.step(ids)
            return [sequence.tokens[-count:] for sequence in sequences]
        for sequence, token in zip(sequences, ids, strict=True):
            reserve(sequence, 1)
            sequence.append([token])
        self._cache.assign_slots(sequences)
        size = -(-len(sequences) // runner.stages)
        groups = [sequences[first : first + size] for first in range(0, len(sequences), size)]
        for group in groups:
            runner.start([sequence.newest_row() for sequence in group], None, [GREEDY] * len(group))
        for left in reversed(range(count)):
            for group in groups:
                if left:
                    for sequence in group:
                        reserve(sequence, 1, 1)
                    runner.start_ahead([sequence.newest_row(1) for sequence in group], [GREEDY] * len(group))
                for sequence, choice in zip(group, runner.finish(), strict=True):
                    sequence.advance(1)
                    sequence.append([max(choice.token, 0)] if left else [])
        return [sequence.tokens[-count:] for sequence in sequences]

    def verify(self, ids: SequenceOf[SequenceOf[int]], kept: SequenceOf[int]) -> list[int]:
        """Computes several tokens of each sequence in one step, `rows` in total at most, and keeps the first `kept` of
        each, like a step with guesses of which some are right. Returns the most likely token after each row."""
        for sequence, tokens in zip(self._sequences, ids, strict=True):
            reserve(sequence, 1, len(tokens) - 1)
        self._cache.assign_slots(self._sequences)
        rows = [row for sequence, tokens in zip(self._sequences, ids, strict=True) for row in sequence.rows(tokens)]
        chosen = self._runner.sample(rows, None, [GREEDY] * len(rows))
        for sequence, tokens, count in zip(self._sequences, ids, kept, strict=True):
            sequence.append(tokens[:count])
            sequence.advance(count, len(tokens) - count)
        return [choice.token for choice in chosen]

    def truncate(self, n: int) -> None:
        """Keeps the first n tokens of each sequence. Tokens whose keys are lost are computed again."""
        for sequence in self._sequences:
            sequence.truncate(n)
            compute(self._cache, self._runner, sequence)

    def close(self) -> None:
        for sequence in self._sequences:
            sequence.truncate(0)
            sequence.free()
