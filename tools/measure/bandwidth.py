"""Measures how fast this machine reads memory. This limits decoding, which reads every weight once per token.

The measurement is a plain read of arrays much larger than the last-level cache, with one thread per core. Each thread
has its own array, which it touches first. numpy's maximum of float64 is one vector load and one vector operation per 64
bytes and releases the GIL, so its time is that of memory.
"""

import os
import threading
import time

import numpy as np

from mlc_amd.runtime.host import last_level_cache

_LEAST_BYTES = 64 << 20  # per thread
_ROUNDS = 5


def of_device(device) -> tuple[float, str] | None:
    """(bytes per second, how measured) for the memory with a device's weights; None if it cannot be measured. "read":
    `measure`, with as many threads as the cpu device has. "copy": a GPU's own copy, bytes read plus written."""
    if device.kind == "cpu":
        return measure(device.threads), "read"
    copied = device.copy_bandwidth() if hasattr(device, "copy_bandwidth") else 0.0
    return (copied, "copy") if copied else None


def measure(threads: int | None = None) -> float:
    """The best of several reads, in bytes per second. threads: number of threads (default: the CPUs that this process
    may use)."""
    threads = threads or len(os.sched_getaffinity(0))
    count = max(_LEAST_BYTES, 4 * last_level_cache() // threads) // 8
    barrier = threading.Barrier(threads)
    spans: list[list[tuple[float, float]]] = [[] for _ in range(_ROUNDS)]

    def read() -> None:
        array = np.ones(count)
        for rounds in spans:
            barrier.wait()
            # Each thread takes its own times: another thread's clock would miss what happens before the thread is
            # scheduled.
            start = time.perf_counter()
            array.max()
            rounds.append((start, time.perf_counter()))

    workers = [threading.Thread(target=read, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = min(max(end for _, end in rounds) - min(start for start, _ in rounds) for rounds in spans)
    return threads * count * 8 / seconds
