"""An AMD GPU of a check (check.py) through HIP."""

from contextlib import ExitStack

import numpy as np

from mlc_amd.runtime.devices.exchange.check import Kernel, arguments
from mlc_amd.runtime.devices.exchange.hip import PeerBoxes
from mlc_amd.runtime.devices.hip.api import Hip
from mlc_amd.runtime.devices.hip.launches import enqueue, prepare


class CheckedHipGpu:
    """kernel.code: HIP's function; gpu: its number; parts: of this rank. What it has lives until `held` closes."""

    def __init__(
        self, hip: Hip, held: ExitStack, gpu: int, boxes: PeerBoxes, rank: int, kernel: Kernel, parts: np.ndarray
    ):
        self.name, self._hip, self._gpu, self._values = f"GPU {gpu}", hip, gpu, kernel.values
        hip("hipSetDevice", gpu)
        self._stream = hip.own(
            held, "hipStreamDestroy", hip("hipStreamCreateWithFlags", hip.names.hipStreamNonBlocking)
        )
        frames = int(hip.own(held, "hipFree", hip("hipMalloc", parts.nbytes)))
        self._sums = int(hip.own(held, "hipFree", hip("hipMalloc", 8 * kernel.values)))
        hip("hipMemcpy", frames, parts.ctypes.data, parts.nbytes, hip.names.hipMemcpyKind.hipMemcpyHostToDevice)
        hip("hipMemset", self._sums, 0, 8 * kernel.values)
        hip("hipDeviceSynchronize")
        self._launches = []
        for addresses in arguments(kernel, frames, self._sums, boxes.arguments(rank)):
            step = {"grid": kernel.grid, "block": kernel.block, "args": range(len(addresses))}
            self._launches.append(prepare("exchange", kernel.code, step, addresses))

    def begin(self) -> None:
        self._hip("hipSetDevice", self._gpu)
        enqueue(self._hip, self._stream, self._launches)

    def wait(self) -> None:
        self._hip("hipSetDevice", self._gpu)
        self._hip("hipStreamSynchronize", self._stream)

    def sums(self) -> np.ndarray:
        found = np.empty(self._values, np.float32)
        kind = self._hip.names.hipMemcpyKind.hipMemcpyDeviceToHost
        self._hip("hipMemcpy", found.ctypes.data, self._sums, found.nbytes, kind)
        return found
