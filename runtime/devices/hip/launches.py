"""Kernel launches on a stream: prepared once, enqueued one by one or captured in a graph, timed by events.

A launch from Python takes longer than a small kernel runs; a graph replays any number with one call. Events between
launches prevent these from overlapping and take some microseconds themselves, which count as gaps.
"""

import ctypes
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise

from mlc_amd.runtime.devices.hip.api import NO_MEMORY, Hip, HipError


@dataclass(frozen=True)
class HipLaunch:
    """A prepared launch. `values`: the kernel's arguments, `params`: the address of each; both must stay alive."""

    kernel: str
    function: object
    grid: tuple[int, ...]
    block: tuple[int, ...]
    values: ctypes.Array
    params: ctypes.Array


def prepare(kernel: str, function, step: dict, addresses: Sequence[int]) -> HipLaunch:
    """A step's launch. addresses: of the call's arguments, then its scratch buffers; function: handle of its symbol."""
    values = (ctypes.c_uint64 * len(step["args"]))(*(addresses[i] for i in step["args"]))
    params = (ctypes.c_void_p * len(values))(*(ctypes.addressof(values) + 8 * i for i in range(len(values))))
    return HipLaunch(kernel, function, tuple(step["grid"]), tuple(step["block"]), values, params)


def enqueue(hip: Hip, stream, launches: Iterable[HipLaunch]) -> None:
    for one in launches:
        params = ctypes.addressof(one.params)
        hip("hipModuleLaunchKernel", one.function, *one.grid, *one.block, 0, stream, params, None)


def capture(hip: Hip, stream, launches: Iterable[HipLaunch], held: ExitStack):
    """A graph of these launches, for hipGraphLaunch. It lives until `held` closes."""
    # Of the capture modes, only this one works on all drivers (Relaxed faults on RDNA2).
    hip("hipStreamBeginCapture", stream, hip.names.hipStreamCaptureMode.hipStreamCaptureModeThreadLocal)
    try:
        enqueue(hip, stream, launches)
    finally:  # a stream left in capture mode would be unusable
        graph = hip.own(held, "hipGraphDestroy", hip("hipStreamEndCapture", stream))
    return hip.own(held, "hipGraphExecDestroy", hip("hipGraphInstantiate", graph, 0)[0])


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
    """(kernel, seconds, seconds since the end of the one before) of each launch that `enqueue_timed` enqueued."""
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
