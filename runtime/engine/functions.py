"""The functions of an artifact's plan, and the smallest one for a step of so many single rows and rows of a chunk."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from mlc_amd.runtime.artifact.manifest import BLOCK, CHAIN, decoders, is_draft

# Reading the weights takes as long as computing so many rows: by the times of functions of 1 to 512 rows on an H200
# (llama3-8b:q4_0: 1 row 1.8 ms, 64 4.3, 128 7.0, 512 22.8), which this describes within a tenth.
READING = 48


def chunk_size(pending: int, sizes: tuple[int, ...], most: int) -> int:
    """How many of a sequence's pending tokens the next step computes, at most `most`, with functions of so many rows
    (ascending). A function costs the time of all its rows: instead of a large one that would be mostly empty, several
    steps of smaller ones are computed."""
    count = min(pending, most)
    found = _cheapest(sizes)
    return found[count][1] if count < len(found) else count


@cache
def rows_at_once(tokens: int, sizes: tuple[int, ...], gpus: int) -> int:
    """How many rows a chunk of a prompt of so many tokens has, at most, while nothing else is computed on several GPUs
    that have some of the layers each: a chunk passes one after the other, so small ones keep more of them busy."""

    def cost(size: int) -> int:
        rest = _cheapest(tuple(one for one in sizes if one <= size))[tokens % size][0]
        return (tokens // size + gpus - 1) * (READING + size) + rest

    return min(reversed(sizes), key=cost)


@cache
def _cheapest(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """By a number of tokens of one sequence: what they cost, and how many of them the first step computes."""
    found = [(0, 0)]
    for count in range(1, max(sizes, default=0) + 1):
        at = bisect_left(sizes, count)
        whole, smaller = READING + sizes[at], sizes[at - 1]
        first = READING + smaller + found[count - smaller][0] if at else whole
        found.append((first, smaller) if first < whole else (whole, count))
    return found


@dataclass(frozen=True)
class StepFunction:
    """rows: of a step; single: how many of them may be of different sequences; logits: rows with logits."""

    name: str
    rows: int
    single: int
    logits: int

    @property
    def steps(self) -> bool:
        """All rows may be of different sequences, and each has logits."""
        return self.single == self.rows

    @property
    def scores(self) -> bool:
        """All rows are of one sequence, and each has logits."""
        return not self.single and self.logits == self.rows

    @property
    def mixes(self) -> bool:
        """There may be single rows, followed by a chunk."""
        return 0 < self.single < self.rows

    def holds(self, singles: int, chunk: int, images: bool) -> bool:
        """Whether it computes so many single rows and rows of a chunk, which may stand where single ones may, unless
        there are images among them."""
        if singles + chunk > self.rows or self.scores:
            return False
        return not images if self.steps else singles <= self.single


class Functions:
    """See the module's docstring. beside: whether a device computes a chunk of that function beside the next one: then
    chunks are twice as long, and are computed by halves (runner.py)."""

    def __init__(self, manifest: Mapping, beside: Callable[[str], bool] | None = None) -> None:
        entries = [StepFunction(name, f["rows"], f["single"], f["logits"]) for name, f in decoders(manifest).items()]
        found = [function for function in entries if not is_draft(function.name)]
        self._chains = [function for function in entries if function.name.startswith(CHAIN)]
        # of a draft that guesses blocks
        self.block = next((function for function in entries if function.name == BLOCK), None)
        self.drafts = len(found) < len(entries)  # there are functions that guess tokens
        self.score = next(f for f in found if f.scores)  # computes the logits of all rows of a chunk
        # The smallest first; of the same size the one that computes fewest logits.
        self._steps = sorted((f for f in found if not f.scores), key=lambda f: (f.rows, f.logits))
        self._chosen: dict[tuple[int, int, bool], StepFunction] = {}
        # For `chunk_size`: rows of the functions for a chunk without single rows, ascending. The CPU's kernels compute
        # the rows that are live, whatever the function holds.
        sizes = tuple(dict.fromkeys(f.rows for f in self._steps if not f.mixes))
        self.largest = sizes[-1]  # rows of a chunk that one function computes
        # halves of a chunk have no rows of images, nor inputs of layers for drafts
        self.beside = None if self.drafts or manifest.get("images") else beside
        if self.beside and self.beside(self.of(0, sizes[-1]).name):
            sizes += (2 * sizes[-1],)
        self.chunk_sizes = sizes[-1:] if manifest["target"]["kind"] == "cpu" else sizes
        self.chunk_rows = self.chunk_sizes[-1]
        self.mixed_rows = max(f.rows for f in self._steps if f.single)  # of a step with single rows and a chunk
        self.single_rows = max(f.single for f in self._steps)

    def chain(self, rows: int) -> StepFunction:
        """The function for guesses after so many guesses, at most `single_rows`."""
        return min((f for f in self._chains if f.single >= rows), key=lambda function: function.rows)

    def of(self, singles: int, chunk: int, images: bool = False) -> StepFunction:
        """The function for such a step. StopIteration beyond `chunk_rows` and `mixed_rows`."""
        key = singles, chunk, images
        if key not in self._chosen:
            self._chosen[key] = next(f for f in self._steps if f.holds(*key))
        return self._chosen[key]
