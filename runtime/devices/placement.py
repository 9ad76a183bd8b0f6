"""The placement of the weights: the block of all weights, cut into ranges that are allocated and uploaded as one; some
of them stay in host memory."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass


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
    """Ranges of at most `limit` bytes (more if one tensor alone is larger) that cut no tensor, in ascending order.
    tensors: {name: (offset, bytes)}; host: names of those that stay in host memory."""
    ranges: list[Range] = []
    for name, (begin, nbytes) in sorted(tensors.items(), key=lambda item: item[1]):
        last = ranges[-1] if ranges else None
        if last and last.host == (name in host) and begin + nbytes - last.begin <= limit:
            ranges[-1] = Range(last.begin, begin + nbytes, last.host)
        else:
            ranges.append(Range(begin, begin + nbytes, name in host))
    return ranges


def parts(ranges: Sequence[Range], at: int, nbytes: int) -> Iterator[tuple[Range, int, int]]:
    """(range, first, last): the bytes of the piece at .. at+nbytes-1 that belong to it, as offsets in the block."""
    for one in ranges:
        first, last = max(at, one.begin), min(at + nbytes, one.end)
        if first < last:
            yield one, first, last
