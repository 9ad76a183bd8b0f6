"""Threads that put parts of images, and of what an encoder made of them, where they belong."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

_THREADS = ThreadPoolExecutor(8, "images")  # memory that is written first is slow for a single thread
_PART = 2 << 20  # bytes that a thread copies


def parts(rows: np.ndarray) -> list[np.ndarray]:
    """Some rows each, as many as a thread copies."""
    return np.array_split(rows, max(1, rows.nbytes // _PART))


def begin(call: Callable[..., object], *arguments: Any) -> Future:
    """Calls it in another thread."""
    return _THREADS.submit(call, *arguments)


def share(call: Callable[..., object], arguments: Sequence[Sequence[Any]]) -> None:
    """Calls it with each of these arguments, of which there are some: this thread with the first, others with the
    rest."""
    others = [begin(call, *each) for each in arguments[1:]]
    call(*arguments[0])
    wait(others)


def wait(work: Sequence[Future]) -> None:
    """Until it is done; raises its errors."""
    for one in work:
        one.result()
