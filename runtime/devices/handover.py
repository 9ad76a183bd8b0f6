"""Host memory through which GPUs hand over to others what they computed (staged.py, tensor.py): all read and write it
themselves.

It has PARTS: the one GPU writes a step to one of them while the other may still read the step before. Steps that are
computed at the same time have PARTS each.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

PARTS = 2
APART = 1 << 20  # bytes from which on a copy takes longer than to make one queue of a GPU wait for another
PAGE = 1 << 16  # bytes: drivers import whole pages of host memory, and this is the largest that they use


class Handover:
    """nbytes: of a part; addresses: of the parts. It must live as long as a device uses it."""

    def __init__(self, nbytes: int, parts: int = PARTS):
        self.nbytes = -(-max(nbytes, 1) // PAGE) * PAGE
        self._memory = np.zeros(parts * self.nbytes + PAGE, np.uint8)
        first = self._memory.ctypes.data
        first += -first % PAGE
        self.addresses = [first + part * self.nbytes for part in range(parts)]


def size(function: Mapping, key: str) -> int:
    """Bytes that a function "sends" or "receives"."""
    return sum(end - first for first, end in function.get(key, ()))


def is_large(function: Mapping, key: str) -> bool:
    """Whether these bytes have a queue of their own, where there is one."""
    return size(function, key) >= APART


def takes_turns(functions: Mapping[str, Mapping]) -> bool:
    """Whether runs may compute while others' bytes cross: those of GPUs that compute parts of the same rows."""
    return any("own" in function for function in functions.values())


def spans(function: Mapping, key: str) -> Iterator[tuple[int, int, int]]:
    """(first, end, place in the memory) of the bytes of the arena that a function "sends" or "receives"."""
    at = 0
    places = function.get(f"{key}_at")
    for i, (first, end) in enumerate(function.get(key, ())):
        yield first, end, places[i] if places else at
        at += end - first


def between(functions: Sequence[Mapping]) -> Handover:
    """For what the functions of a stage hand over."""
    return Handover(max((size(function, "sends") for function in functions), default=0))
