"""The placement of the weights: the block of all weights, cut into ranges that are allocated as one and read in chunks;
some of them stay in host memory.

Where the host can write to the memory that kernels read, as that of an APU, `read_in_place` reads the file straight to
there, so that the weights stand in memory once. Kernels do not read the mapped file itself: Linux's driver for AMD GPUs
takes over no pages of files.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from mlc_amd.runtime.artifact.weight_block import ALIGN, WeightBlock

CHUNK = 16 << 20  # bytes of one read
READERS = 4  # threads: disks are fastest with several requests, and copies from the system's cache with several cores


@dataclass(frozen=True)
class Range:
    """Bytes begin .. end-1 of the block. host: they stay in host memory."""

    begin: int
    end: int
    host: bool = False

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def cut(tensors: dict[str, tuple[int, int]], limit: int, host: Collection[str] = ()) -> list[Range]:
    """Ranges of at most `limit` bytes (more if one tensor alone is larger) that cut no tensor, and span no others than
    these, in ascending order. tensors: {name: (offset, bytes)}; host: names of those that stay in host memory."""
    ranges: list[Range] = []
    for name, (begin, nbytes) in sorted(tensors.items(), key=lambda item: item[1]):
        last = ranges[-1] if ranges else None
        near = last and begin - last.end < ALIGN
        if last and near and last.host == (name in host) and begin + nbytes - last.begin <= limit:
            ranges[-1] = Range(last.begin, begin + nbytes, last.host)
        else:
            ranges.append(Range(begin, begin + nbytes, name in host))
    return ranges


def chunks(ranges: Iterable[Range]) -> Iterator[tuple[Range, int, int]]:
    """(range, first, last): chunks in ascending order, as offsets in the block."""
    for one in ranges:
        for first in range(one.begin, one.end, CHUNK):
            yield one, first, min(first + CHUNK, one.end)


def read_in_place(weights: WeightBlock, targets: Iterable[tuple[int, np.ndarray]]) -> None:
    """Fills arrays with the bytes of the weights from an offset on. The file is not kept in memory beside them, so that
    memory which a GPU shares with the host has one copy."""
    with ThreadPoolExecutor(READERS) as threads:
        for _ in threads.map(lambda target: weights.read(*target, keep=False), targets):
            pass


def parts(ranges: Sequence[Range], at: int, nbytes: int) -> Iterator[tuple[Range, int, int]]:
    """(range, first, last): the bytes of the piece at .. at+nbytes-1 that belong to it, as offsets in the block."""
    for one in ranges:
        first, last = max(at, one.begin), min(at + nbytes, one.end)
        if first < last:
            yield one, first, last
