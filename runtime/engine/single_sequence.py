"""Steps of one sequence alone, without scheduler: for logits, and for measurements. Callers hold the step lock."""

import numpy as np

from mlc_amd.runtime.cache.kv_cache import KvCache
from mlc_amd.runtime.cache.sequence import ChunkRows, Sequence
from mlc_amd.runtime.engine.functions import chunk_size
from mlc_amd.runtime.engine.generation import ContextFull
from mlc_amd.runtime.engine.runner import Runner


def reserve(sequence: Sequence, count: int, guesses: int = 0) -> None:
    """Pages for the next `count` tokens, and for guesses. ContextFull where the cache has none."""
    if not sequence.reserve(count, guesses):
        raise ContextFull(
            f"the KV cache has no room for {count + guesses} more tokens beside those of other sequences",
            "wait until they are complete, or load the model with a larger cache (--kv-memory)",
        )


def next_chunk(cache: KvCache, runner: Runner, sequence: Sequence) -> ChunkRows:
    """The next pending tokens of a sequence, which then has pages for them and a slot."""
    functions = runner.functions
    count = sequence.step_size(chunk_size(sequence.pending, functions.chunk_sizes, functions.chunk_rows))
    reserve(sequence, count)
    cache.assign_slots([sequence])
    return sequence.chunk(count)


def compute(cache: KvCache, runner: Runner, sequence: Sequence) -> np.ndarray | None:
    """Computes the pending tokens of a sequence, in chunks. Returns the logits of the last one, float32 [vocab], in
    memory that the next step overwrites; None if there are none."""
    logits = None
    while sequence.pending:
        chunk = next_chunk(cache, runner, sequence)
        logits = runner.run(chunk)
        sequence.advance(len(chunk[0]))
    return logits
