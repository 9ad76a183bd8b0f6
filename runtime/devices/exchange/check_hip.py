"""The check (check.py) for AMD GPUs, through HIP."""

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from mlc_amd.runtime.devices.exchange.check import Kernel, arguments, check, one_arch, parts, probe
from mlc_amd.runtime.devices.exchange.hip import PeerBoxes
from mlc_amd.runtime.devices.exchange.unsuitable import Unsuitable
from mlc_amd.runtime.devices.hip import api, code_objects
from mlc_amd.runtime.devices.hip.api import Hip, HipError
from mlc_amd.runtime.devices.hip.gpu import choose
from mlc_amd.runtime.devices.hip.launches import enqueue, prepare


class CheckedHipGpu:
    """See `CheckedGpu`. held: owns the GPU's memory and stream. gpu: HIP's number of it. kernel.code: HIP's function.
    parts: this rank's, float32 [FRAMES, values]."""

    def __init__(
        self, hip: Hip, held: ExitStack, gpu: int, boxes: PeerBoxes, rank: int, kernel: Kernel, parts: np.ndarray
    ):
        self.name, self._hip, self._gpu, self._values = f"GPU {gpu}", hip, gpu, kernel.values
        hip("hipSetDevice", gpu)
        self._stream = hip.stream(held)
        frames = int(hip.own(held, "hipFree", hip("hipMalloc", parts.nbytes)))
        self._sums = int(hip.own(held, "hipFree", hip("hipMalloc", 8 * kernel.values)))
        hip("hipMemcpy", frames, parts.ctypes.data, parts.nbytes, hip.names.hipMemcpyKind.hipMemcpyHostToDevice)
        hip("hipMemset", self._sums, 0, 8 * kernel.values)
        hip("hipDeviceSynchronize")
        self._launches = []
        for addresses in arguments(kernel, frames, self._sums, boxes.arguments(rank)):
            step = {"grid": kernel.grid, "block": kernel.block, "args": range(len(addresses))}
            self._launches.append(prepare("exchange", kernel.code, step, addresses))
        held.callback(boxes.settle)  # after a failed check kernels may still be waiting for words

    def begin(self) -> None:
        self._hip("hipSetDevice", self._gpu)
        enqueue(self._hip, self._stream, self._launches)

    def wait(self) -> None:
        self._hip("hipSetDevice", self._gpu)
        self._hip("hipStreamSynchronize", self._stream)

    def sums(self) -> np.ndarray:
        self._hip("hipSetDevice", self._gpu)
        found = np.empty(self._values, np.float32)
        kind = self._hip.names.hipMemcpyKind.hipMemcpyDeviceToHost
        self._hip("hipMemcpy", found.ctypes.data, self._sums, found.nbytes, kind)
        return found


def seconds_of_round(artifact, gpus: Sequence[int], rounds: int) -> float:
    """See `check`. gpus: HIP's numbers of the GPUs, in the order of ranks."""
    hip, libraries = Hip(api.open_bindings()), artifact.manifest["libraries"]
    chosen = [choose(hip, libraries, str(gpu)) for gpu in gpus]
    arch = one_arch([code for _, code in chosen])
    file, (step, values) = (artifact.path / libraries[arch]).read_bytes(), probe(artifact, arch)
    given = parts(len(gpus), values)
    try:
        with ExitStack() as held:
            boxes = PeerBoxes(hip, gpus, artifact.manifest["exchange"]["capacity"])
            held.callback(boxes.close)
            ranks, loaded = [], []
            for rank, (gpu, _) in enumerate(chosen):
                hip("hipSetDevice", gpu.index)
                code, functions = code_objects.load(hip, held, file, [step], (arch, gpu.arch))
                loaded.append(code)  # kept: HIP may read it later
                kernel = Kernel(functions[step["symbol"]], step["grid"], step["block"], step["args"], values)
                ranks.append(CheckedHipGpu(hip, held, gpu.index, boxes, rank, kernel, given[rank]))
            return check(ranks, boxes, values, rounds)
    except HipError as e:
        raise Unsuitable(str(e)) from e
