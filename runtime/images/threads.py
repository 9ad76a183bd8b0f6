"""Threads that copy parts of images and of features."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

_THREADS = ThreadPoolExecutor(8, "images")  # several, as the first write to new memory is slow in a single thread
_PART = 2 << 20  # bytes that a thread copies


def parts(rows: np.ndarray) -> list[np.ndarray]:
    """Splits an array into consecutive rows; each part has as many as a thread copies."""
    return np.array_split(rows, max(1, rows.nbytes // _PART))


def begin(call: Callable[..., object], *arguments: Any) -> Future:
    """Calls a function in another thread."""
    return _THREADS.submit(call, *arguments)


def share(call: Callable[..., object], arguments: Sequence[Sequence[Any]]) -> None:
    """Calls a function with each of these arguments (at least one set): this thread with the first set, others with the
    rest. Returns when all are done."""
    others = [begin(call, *each) for each in arguments[1:]]
    call(*arguments[0])
    wait(others)


def wait(work: Sequence[Future]) -> None:
    """Waits until all work is done. Raises its errors."""
    for one in work:
        one.result()
