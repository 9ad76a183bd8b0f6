"""Places the weights in memory. All weights are one block of bytes. `cut` divides it into ranges, each of which becomes
one allocation, in device memory or in host memory; `chunks` divides ranges into reads of CHUNK bytes.

Where the host can write to the memory that kernels read (an APU), `read_in_place` reads the file into that memory, so
that there is only one copy of the weights. Kernels cannot read the mapped file itself: Linux's driver for AMD GPUs does
not import pages of files.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from mlc_amd.runtime.artifact.weight_block import ALIGN, WeightBlock

CHUNK = 16 << 20  # bytes of one read
READERS = 4  # threads: disks are faster with several requests, copies from the page cache with several cores


@dataclass(frozen=True)
class Range:
    """Bytes begin .. end-1 of the block. host: whether they stay in host memory."""

    begin: int
    end: int
    host: bool = False

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def cut(tensors: dict[str, tuple[int, int]], limit: int, host: Collection[str] = ()) -> list[Range]:
    """Ranges that contain exactly these tensors (and padding between them), in ascending order. No tensor is divided
    between ranges. A range has at most `limit` bytes, or more if it is a single tensor. tensors: {name: (offset,
    bytes)}. host: names of the tensors that stay in host memory."""
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
    """(range, first, last): the chunks of the ranges, in ascending order: bytes first .. last-1 of the block."""
    for one in ranges:
        for first in range(one.begin, one.end, CHUNK):
            yield one, first, min(first + CHUNK, one.end)


def read_in_place(weights: WeightBlock, targets: Iterable[tuple[int, np.ndarray]]) -> None:
    """Fills arrays with weights. targets: (offset in the block, array of bytes). The file's pages are dropped from the
    page cache after reading, so that memory that GPU and host share holds one copy."""
    with ThreadPoolExecutor(READERS) as threads:
        for _ in threads.map(lambda target: weights.read(*target, keep=False), targets):
            pass


def parts(ranges: Sequence[Range], at: int, nbytes: int) -> Iterator[tuple[Range, int, int]]:
    """(range, first, last): the bytes first .. last-1 of the block that a range has of at .. at+nbytes-1, for each
    range that has any."""
    for one in ranges:
        first, last = max(at, one.begin), min(at + nbytes, one.end)
        if first < last:
            yield one, first, last
