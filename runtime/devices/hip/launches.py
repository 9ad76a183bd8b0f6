"""Kernel launches on a stream: prepared once, enqueued one by one or captured in a graph, and timed by events.

A launch from Python takes longer than a small kernel; a graph replays any number of launches with one call. Events
between launches prevent these from overlapping, and take some microseconds themselves, which count as gaps.
"""

import ctypes
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise

from mlc_amd.runtime.devices.hip.api import NO_MEMORY, Hip, HipError


@dataclass(frozen=True)
class HipLaunch:
    """A prepared launch. kernel: its name. function: HIP's handle. values: the arguments, which are addresses; params:
    the address of each value. Both arrays must stay alive during the launch."""

    kernel: str
    function: object
    grid: tuple[int, ...]
    block: tuple[int, ...]
    values: ctypes.Array
    params: ctypes.Array


def prepare(kernel: str, function, step: dict, addresses: Sequence[int]) -> HipLaunch:
    """The launch of an entry of the manifest's `steps`. function: HIP's handle of its symbol. addresses: of the call's
    arguments, then of its scratch buffers."""
    values = (ctypes.c_uint64 * len(step["args"]))(*(addresses[i] for i in step["args"]))
    params = (ctypes.c_void_p * len(values))(*(ctypes.addressof(values) + 8 * i for i in range(len(values))))
    return HipLaunch(kernel, function, tuple(step["grid"]), tuple(step["block"]), values, params)


def enqueue(hip: Hip, stream, launches: Iterable[HipLaunch]) -> None:
    for one in launches:
        params = ctypes.addressof(one.params)
        hip("hipModuleLaunchKernel", one.function, *one.grid, *one.block, 0, stream, params, None)


def capture(hip: Hip, stream, launches: Iterable[HipLaunch], held: ExitStack):
    """A graph of these launches, for hipGraphLaunch. It is destroyed when `held` closes."""
    # The only capture mode that works on all drivers (Relaxed faults on RDNA2).
    hip("hipStreamBeginCapture", stream, hip.names.hipStreamCaptureMode.hipStreamCaptureModeThreadLocal)
    try:
        enqueue(hip, stream, launches)
    finally:  # a stream that stays in capture mode is unusable
        graph = hip.own(held, "hipGraphDestroy", hip("hipStreamEndCapture", stream))
    return hip.own(held, "hipGraphExecDestroy", hip("hipGraphInstantiate", graph, 0)[0])


COPY_BYTES = 256 << 20  # of a timed copy: source and target exceed the last-level cache of any GPU
COPIES = 8  # repetitions of the copy, of which the fastest counts


def events(hip: Hip, held: ExitStack, count: int) -> list:
    """New events with time stamps. They are destroyed when `held` closes."""
    return [hip.own(held, "hipEventDestroy", hip("hipEventCreateWithFlags", 0)) for _ in range(count)]


def seconds(hip: Hip, begin, end) -> float:
    """The seconds between two events that have happened."""
    return hip("hipEventElapsedTime", begin, end) * 1e-3


def enqueue_timed(hip: Hip, stream, launches: Sequence[HipLaunch], marks: list) -> None:
    """Enqueues launches with an event before and after each. marks: two events for each launch."""
    for one, begin, end in zip(launches, marks[::2], marks[1::2], strict=True):
        hip("hipEventRecord", begin, stream)
        enqueue(hip, stream, [one])
        hip("hipEventRecord", end, stream)


def spans(hip: Hip, launches: Sequence[HipLaunch], marks: list) -> list[tuple[str, float, float]]:
    """(kernel, seconds, seconds since the end of the launch before) of each launch, after `enqueue_timed`."""
    ends = [marks[0], *marks[1:-1:2]]  # the event at which the gap before each launch begins
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
