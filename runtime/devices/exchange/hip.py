"""The transport between AMD GPUs through HIP. Each inbox is in its GPU's memory, and a kernel stores its words directly
into the other GPUs' inboxes (peer access). There is no relay, and there is no memory for outboxes: a rank's "outbox"
for another rank is its pair of slots in that rank's inbox."""

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from mlc_amd.runtime.devices.exchange.unsuitable import Unsuitable
from mlc_amd.runtime.devices.hip.api import Hip, HipError
from mlc_amd.runtime.exchange_layout import CONTROL, EMPTY, FAILED, RANK, WORD, inbox_words, outbox_words, row

ENABLED = "hipErrorPeerAccessAlreadyEnabled"


class PeerBoxes:
    """A transport (see the package's docstring) for kernels that were compiled with `peers`. gpus: HIP's numbers of the
    GPUs, in the order of ranks. capacity: words in a slot. Raises Unsuitable if a GPU cannot write to the memory of
    another one."""

    def __init__(self, hip: Hip, gpus: Sequence[int], capacity: int):
        self._hip, self._gpus, self._held = hip, gpus, ExitStack()
        self._row = outbox_words(capacity) * WORD
        self._inbox_bytes = inbox_words(len(gpus), capacity) * WORD
        try:
            for gpu in gpus:
                self._reach(gpu)
            # Fine-grained memory: a running kernel sees what other GPUs write.
            flags = hip.names.hipDeviceMallocFinegrained
            self._inboxes = [self._own(gpu, "hipExtMallocWithFlags", self._inbox_bytes, flags) for gpu in gpus]
            self._controls = [self._own(gpu, "hipMalloc", CONTROL * 4) for gpu in gpus]
            self._held.callback(self.settle)
            self.reset()
        except HipError as e:
            self.close()
            raise Unsuitable(f"GPUs have no memory that others may write while kernels run ({e})") from e
        except BaseException:
            self.close()
            raise

    def _reach(self, gpu: int) -> None:
        """Enables access of a GPU to the memory of the other GPUs."""
        hip = self._hip
        for other in self._gpus:
            if other == gpu:
                continue
            if not hip("hipDeviceCanAccessPeer", gpu, other):
                raise Unsuitable(f"GPU {gpu} cannot access the memory of GPU {other}; see `rocm-smi --showtopoaccess`")
            hip("hipSetDevice", gpu)
            try:
                hip("hipDeviceEnablePeerAccess", other, 0)
            except HipError as e:
                if e.code != ENABLED:
                    raise

    def _own(self, gpu: int, call: str, *args: int) -> int:
        self._hip("hipSetDevice", gpu)
        return int(self._hip.own(self._held, "hipFree", self._hip(call, *args)))

    def arguments(self, rank: int) -> list[int]:
        others = [other for other in range(len(self._gpus)) if other != rank]
        outboxes = [self._inboxes[other] + row(rank, other) * self._row for other in others]
        return [self._inboxes[rank], *outboxes, self._controls[rank]]

    def begin(self, rounds: int, words: int) -> None:
        """Does nothing: kernels send their words themselves."""

    def failed(self) -> list[int]:
        return [rank for rank in range(len(self._gpus)) if self._control(rank)[FAILED]]

    def reset(self) -> None:
        for rank, gpu in enumerate(self._gpus):
            control = np.zeros(CONTROL, np.int32)
            control[RANK] = rank
            self._copy(gpu, self._controls[rank], control.ctypes.data, control.nbytes, "hipMemcpyHostToDevice")
            self._hip("hipMemset", self._inboxes[rank], EMPTY & 0xFF, self._inbox_bytes)
            self._hip("hipDeviceSynchronize")

    def close(self) -> None:
        self._held.close()

    def settle(self) -> None:
        """Waits for kernels that use the boxes. Ignores HIP's errors: earlier calls have reported them."""
        for gpu in self._gpus:
            self._hip.names.hipSetDevice(gpu)
            self._hip.names.hipDeviceSynchronize()

    def _control(self, rank: int) -> np.ndarray:
        control = np.empty(CONTROL, np.int32)
        self._copy(self._gpus[rank], control.ctypes.data, self._controls[rank], control.nbytes, "hipMemcpyDeviceToHost")
        return control

    def _copy(self, gpu: int, target: int, source: int, nbytes: int, kind: str) -> None:
        self._hip("hipSetDevice", gpu)
        self._hip("hipMemcpy", target, source, nbytes, getattr(self._hip.names.hipMemcpyKind, kind))
