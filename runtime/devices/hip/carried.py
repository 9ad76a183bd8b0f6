"""What functions take over from other GPUs, and hand over to them: bytes of the arena, which this GPU copies from and
to memory of the host. Only GPUs that share a model have any (runtime/devices/staged.py, tensor.py)."""

import ctypes
from collections.abc import Mapping
from contextlib import ExitStack

from mlc_amd.runtime.devices.handover import Handover, spans
from mlc_amd.runtime.devices.hip.api import Hip, HipError
from mlc_amd.runtime.devices.hip.memory import HipMemory


class HipCarried:
    """Of the functions of a manifest. parts: of the `Handover`s before and after this stage, which the next run uses.
    Until it is connected it has some of its own. It uses them until `held` closes."""

    def __init__(self, hip: Hip, held: ExitStack, stream, memory: HipMemory, functions: Mapping[str, Mapping]):
        self._hip, self._held, self._stream, self._functions = hip, held, stream, functions
        self._arena = memory.blocks["arena"][0]
        self._memory: dict[str, Handover] = {}
        self.parts: tuple[int, int] = (0, 0)
        for key in ("receives", "sends"):
            if most := max((self._bytes(name, key) for name in functions), default=0):
                self._use(key, Handover(most))

    def _bytes(self, name: str, key: str) -> int:
        return sum(end - first for first, end in self._functions[name].get(key, ()))

    def _use(self, key: str, one: Handover) -> None:
        self._memory[key] = one
        self._held.callback(lambda used: None, one)  # it lives longer than it is pinned
        for address in one.addresses:
            try:
                self._hip("hipHostRegister", address, one.nbytes, self._hip.names.hipHostRegisterPortable)
            except HipError as e:
                if e.code != "hipErrorHostMemoryAlreadyRegistered":  # by the stage on the other side
                    raise
            else:
                self._held.callback(self._hip.names.hipHostUnregister, address)

    def connect(self, before: Handover | None, after: Handover | None) -> None:
        for key, one in (("receives", before), ("sends", after)):
            if one:
                self._use(key, one)

    def enqueue_received(self, name: str) -> None:
        self._enqueue(name, "receives", self.parts[0], self._hip.names.hipMemcpyKind.hipMemcpyHostToDevice)

    def enqueue_sent(self, name: str) -> None:
        self._enqueue(name, "sends", self.parts[1], self._hip.names.hipMemcpyKind.hipMemcpyDeviceToHost)

    def _enqueue(self, name: str, key: str, part: int, kind) -> None:
        function = self._functions[name]
        for first, end, at in spans(function, key):
            host, own = self._memory[key].addresses[part] + at, self._arena + first
            target, source = (own, host) if key == "receives" else (host, own)
            self._hip("hipMemcpyAsync", target, source, end - first, kind, self._stream)
        if key == "receives" and "own" in function:
            source, target, count = function["own"]
            kind = self._hip.names.hipMemcpyKind.hipMemcpyDeviceToDevice
            self._hip("hipMemcpyAsync", self._arena + target, self._arena + source, count, kind, self._stream)

    def sent(self, name: str) -> bytes:
        """What the last run of a function has handed over."""
        count = self._bytes(name, "sends")
        return ctypes.string_at(self._memory["sends"].addresses[self.parts[1]], count) if count else b""
