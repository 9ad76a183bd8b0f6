"""Times on an AMD GPU, measured by events on a stream: of launches, and of a copy in its memory.

An event records the time when all work before it is done. Events between launches prevent these from overlapping and
take some microseconds themselves, which count as gaps.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise

from mlc_amd.runtime.devices.hip.api import NO_MEMORY, Hip, HipError
from mlc_amd.runtime.devices.hip.launches import HipLaunch, enqueue

COPY_BYTES = 256 << 20  # of a copy that is timed: beyond the last-level caches of all GPUs together with its source
COPIES = 8  # measured repetitions of a copy; the fastest counts


def events(hip: Hip, held: ExitStack, count: int) -> list:
    """Events with times; they live until `held` closes."""
    return [hip.own(held, "hipEventDestroy", hip("hipEventCreateWithFlags", 0)) for _ in range(count)]


def seconds(hip: Hip, begin, end) -> float:
    """Between two events that have happened."""
    return hip("hipEventElapsedTime", begin, end) * 1e-3


def enqueue_timed(hip: Hip, stream, launches: Sequence[HipLaunch], marks: list) -> None:
    """Enqueues launches with an event before and after each. marks: two events for each launch."""
    for one, begin, end in zip(launches, marks[::2], marks[1::2], strict=True):
        hip("hipEventRecord", begin, stream)
        enqueue(hip, stream, [one])
        hip("hipEventRecord", end, stream)


def spans(hip: Hip, launches: Sequence[HipLaunch], marks: list) -> list[tuple[str, float, float]]:
    """(kernel, seconds, seconds since the end of the launch before) of each launch that `enqueue_timed` enqueued and
    that is done."""
    ends = [marks[0], *marks[1:-1:2]]  # what each launch's gap begins with
    return [
        (one.kernel, seconds(hip, begin, end), seconds(hip, before, begin))
        for one, before, begin, end in zip(launches, ends, marks[::2], marks[1::2], strict=True)
    ]


def copy_bandwidth(hip: Hip, stream) -> float:
    """Bytes per second, reads plus writes, of a copy of COPY_BYTES in the GPU's memory; 0.0 without enough of it."""
    nbytes = COPY_BYTES
    with ExitStack() as held:
        try:
            source, target = (int(hip.own(held, "hipFree", hip("hipMalloc", nbytes))) for _ in range(2))
        except HipError as e:
            if e.code not in NO_MEMORY:
                raise
            return 0.0
        hip("hipMemsetAsync", source, 0, nbytes, stream)  # unwritten pages may not be allocated
        marks = events(hip, held, COPIES + 1)
        kind = hip.names.hipMemcpyKind.hipMemcpyDeviceToDevice
        hip("hipMemcpyAsync", target, source, nbytes, kind, stream)  # a warm-up
        hip("hipEventRecord", marks[0], stream)
        for mark in marks[1:]:
            hip("hipMemcpyAsync", target, source, nbytes, kind, stream)
            hip("hipEventRecord", mark, stream)
        hip("hipStreamSynchronize", stream)
        spent = min(seconds(hip, begin, end) for begin, end in pairwise(marks))
        return 2 * nbytes / max(spent, 1e-9)
