"""What a stage's functions take over from the GPU before, and hand over to the next one: bytes of the arena, through
pinned memory of the host. Only devices that are a stage of several have any (runtime/devices/staged.py)."""

import ctypes
from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np

from mlc_amd.runtime.devices.hip.api import Hip
from mlc_amd.runtime.devices.hip.memory import HipMemory, host_block
from mlc_amd.runtime.devices.placement import carried_bytes


class HipCarried:
    """Of the functions of a manifest. What it allocates is released when `held` closes."""

    def __init__(self, hip: Hip, held: ExitStack, stream, memory: HipMemory, functions: Mapping[str, Mapping]):
        self._hip, self._stream, self._functions = hip, stream, functions
        self._arena = memory.blocks["arena"][0]

        def block(key: str) -> int:
            most = max((carried_bytes(function.get(key, ())) for function in functions.values()), default=0)
            return host_block(hip, held, most) if most else 0

        self._received, self._sent = block("receives"), block("sends")

    def enqueue_received(self, name: str) -> None:
        at, kind = self._received, self._hip.names.hipMemcpyKind.hipMemcpyHostToDevice
        for first, end in self._functions[name].get("receives", ()):
            self._hip("hipMemcpyAsync", self._arena + first, at, end - first, kind, self._stream)
            at += end - first

    def enqueue_sent(self, name: str) -> None:
        at, kind = self._sent, self._hip.names.hipMemcpyKind.hipMemcpyDeviceToHost
        for first, end in self._functions[name].get("sends", ()):
            self._hip("hipMemcpyAsync", at, self._arena + first, end - first, kind, self._stream)
            at += end - first

    def receive(self, data: np.ndarray) -> None:
        """uint8: what the next run of a function receives."""
        ctypes.memmove(self._received, data.ctypes.data, data.nbytes)

    def sent(self, name: str) -> np.ndarray:
        """uint8: what the last run of that function has sent; valid until the next run."""
        count = carried_bytes(self._functions[name].get("sends", ()))
        return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(self._sent)) if count else np.empty(0, "u1")
