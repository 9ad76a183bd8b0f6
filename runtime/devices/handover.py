"""Host memory through which one GPU passes activations to another (staged.py, tensor.py). The GPUs read and write it
themselves; the host copies nothing.

It is double-buffered: it has PARTS = 2 parts, so that one GPU can write a step's data while the other still reads that
of the step before. Steps that are computed at the same time have PARTS parts each.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

PARTS = 2
APART = 1 << 20  # bytes: copies of at least this size take longer than the synchronization of two queues of a GPU
PAGE = 1 << 16  # bytes: drivers import whole pages of host memory; this is the largest page size among them


class Handover:
    """The memory. nbytes: size of a part, rounded up to PAGE; addresses: of the parts. It must outlive its devices."""

    def __init__(self, nbytes: int, parts: int = PARTS):
        self.nbytes = -(-max(nbytes, 1) // PAGE) * PAGE
        self._memory = np.zeros(parts * self.nbytes + PAGE, np.uint8)
        first = self._memory.ctypes.data
        first += -first % PAGE
        self.addresses = [first + part * self.nbytes for part in range(parts)]


def size(function: Mapping, key: str) -> int:
    """The number of bytes that a function "sends" or "receives" (key). function: an entry of the manifest."""
    return sum(end - first for first, end in function.get(key, ()))


def is_large(function: Mapping, key: str) -> bool:
    """Whether these bytes are copied on a separate queue, if the device has one."""
    return size(function, key) >= APART


def takes_turns(functions: Mapping[str, Mapping]) -> bool:
    """Whether a GPU computes one run while the data of another is copied: with --split tensor, where runs alternate."""
    return any("own" in function for function in functions.values())


def spans(function: Mapping, key: str) -> Iterator[tuple[int, int, int]]:
    """(first, end, place) of each range that a function "sends" or "receives" (key): bytes first .. end-1 of the arena,
    from byte `place` of a part on."""
    at = 0
    places = function.get(f"{key}_at")
    for i, (first, end) in enumerate(function.get(key, ())):
        yield first, end, places[i] if places else at
        at += end - first


def between(functions: Sequence[Mapping]) -> Handover:
    """A `Handover` that is large enough for each of a stage's functions."""
    return Handover(max((size(function, "sends") for function in functions), default=0))
