"""Chooses the function of an artifact's plan that computes a step, and the size of chunks. A function has a fixed
number of rows, and costs the time of all of them, so the smallest function with enough rows is chosen."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from mlc_amd.runtime.artifact.manifest import BLOCK, CHAIN, decoders, is_draft

# The time of a function is modelled as proportional to READING + rows: reading the weights takes as long as computing
# READING rows. Source: the times of functions of 1 to 512 rows on an H200 (llama3-8b:q4_0: 1 row 1.8 ms, 64 rows 4.3,
# 128 rows 7.0, 512 rows 22.8), which the model describes within 10 %.
READING = 48


def chunk_size(pending: int, sizes: tuple[int, ...], most: int) -> int:
    """How many of a sequence's pending tokens the next step should compute, at most `most`. sizes: the numbers of rows
    of the functions, ascending. The result may be less than what fits: several steps of small functions can take less
    time than one step of a large function that is mostly empty."""
    count = min(pending, most)
    found = _cheapest(sizes)
    return found[count][1] if count < len(found) else count


@cache
def rows_at_once(tokens: int, sizes: tuple[int, ...], gpus: int) -> int:
    """The best size of chunks for a prompt of `tokens` tokens on `gpus` GPUs that have some of the layers each, while
    nothing else is computed. A chunk passes through the GPUs one after the other, so with small chunks more GPUs
    compute at the same time."""

    def cost(size: int) -> int:
        rest = _cheapest(tuple(one for one in sizes if one <= size))[tokens % size][0]
        return (tokens // size + gpus - 1) * (READING + size) + rest

    return min(reversed(sizes), key=cost)


@cache
def _cheapest(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """For each number of tokens of a sequence, from 0 to the largest size: (lowest cost, tokens of the first step)."""
    found = [(0, 0)]
    for count in range(1, max(sizes, default=0) + 1):
        at = bisect_left(sizes, count)
        whole, smaller = READING + sizes[at], sizes[at - 1]
        first = READING + smaller + found[count - smaller][0] if at else whole
        found.append((first, smaller) if first < whole else (whole, count))
    return found


@dataclass(frozen=True)
class StepFunction:
    """A function of the plan. rows: of a step. single: how many of the rows may be single rows (of different
    sequences). logits: rows whose logits it computes."""

    name: str
    rows: int
    single: int
    logits: int

    @property
    def steps(self) -> bool:
        """Whether all rows may be single rows, each with logits."""
        return self.single == self.rows

    @property
    def scores(self) -> bool:
        """Whether all rows are of one sequence, each with logits."""
        return not self.single and self.logits == self.rows

    @property
    def mixes(self) -> bool:
        """Whether a step may have single rows and a chunk."""
        return 0 < self.single < self.rows

    def holds(self, singles: int, chunk: int, images: bool) -> bool:
        """Whether it can compute a step with so many single rows and rows of a chunk. In a function whose rows are all
        single, rows of a chunk can take the place of single rows, unless there are images among them."""
        if singles + chunk > self.rows or self.scores:
            return False
        return not images if self.steps else singles <= self.single


class Functions:
    """The functions of a manifest. beside: the device's `can_run_beside`, or None. If it is true for the largest
    function, chunks may be twice as long, and the device computes both halves at the same time (runner.py)."""

    def __init__(self, manifest: Mapping, beside: Callable[[str], bool] | None = None) -> None:
        entries = [StepFunction(name, f["rows"], f["single"], f["logits"]) for name, f in decoders(manifest).items()]
        found = [function for function in entries if not is_draft(function.name)]
        self._chains = [function for function in entries if function.name.startswith(CHAIN)]
        # The function of a draft that guesses blocks of tokens, or None.
        self.block = next((function for function in entries if function.name == BLOCK), None)
        self.drafts = len(found) < len(entries)  # whether there are functions that guess tokens
        self.score = next(f for f in found if f.scores)  # computes the logits of all rows of a chunk
        # The smallest function first; among functions of the same size the one that computes the fewest logits.
        self._steps = sorted((f for f in found if not f.scores), key=lambda f: (f.rows, f.logits))
        self._chosen: dict[tuple[int, int, bool], StepFunction] = {}
        # The argument `sizes` of `chunk_size`: rows of the functions for a chunk without single rows, ascending. Only
        # the largest matters on the CPU, whose kernels compute only the live rows of a function.
        sizes = tuple(dict.fromkeys(f.rows for f in self._steps if not f.mixes))
        self.largest = sizes[-1]  # rows of a chunk that one function computes
        # A half of a chunk has no buffers for images, nor for the layer inputs that drafts need.
        self.beside = None if self.drafts or manifest.get("images") else beside
        if self.beside and self.beside(self.of(0, sizes[-1]).name):
            sizes += (2 * sizes[-1],)
        self.chunk_sizes = sizes[-1:] if manifest["target"]["kind"] == "cpu" else sizes
        self.chunk_rows = self.chunk_sizes[-1]
        self.mixed_rows = max(f.rows for f in self._steps if f.single)  # largest step with single rows and a chunk
        self.single_rows = max(f.single for f in self._steps)

    def chain(self, rows: int) -> StepFunction:
        """The function that guesses the tokens after `rows` guesses; rows: at most `single_rows`."""
        return min((f for f in self._chains if f.single >= rows), key=lambda function: function.rows)

    def of(self, singles: int, chunk: int, images: bool = False) -> StepFunction:
        """The function for a step with so many single rows and rows of a chunk. Raises StopIteration for more than
        `chunk_rows` or `mixed_rows` rows."""
        key = singles, chunk, images
        if key not in self._chosen:
            self._chosen[key] = next(f for f in self._steps if f.holds(*key))
        return self._chosen[key]
