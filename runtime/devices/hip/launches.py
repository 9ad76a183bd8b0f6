"""Kernel launches on a stream: prepared once, enqueued one by one or captured in a graph.

A launch from Python takes longer than a small kernel runs; a graph replays any number of them with one call.
"""

import ctypes
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from mlc_amd.runtime.devices.hip.api import Hip


@dataclass(frozen=True)
class HipLaunch:
    """One prepared kernel launch. `values` holds the kernel's arguments, `params` the address of each: both must stay
    alive."""

    kernel: str
    function: object
    grid: tuple[int, ...]
    block: tuple[int, ...]
    values: ctypes.Array
    params: ctypes.Array


def prepare(kernel: str, function, step: dict, addresses: Sequence[int]) -> HipLaunch:
    """The launch of a step, as the manifest describes it. addresses: of the call's arguments, then its scratch buffers;
    function: HIP's handle of the step's symbol."""
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
