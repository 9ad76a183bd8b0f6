"""Copies activations between this GPU's arena and the host memory (`Handover`) through which GPUs that share a model
exchange them (runtime/devices/staged.py, tensor.py). Other devices copy nothing.

With --split tensor, large copies go to separate streams, one for each direction, beside which another run computes."""

import ctypes
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from mlc_amd.runtime.devices.handover import Handover, is_large, size, spans, takes_turns
from mlc_amd.runtime.devices.hip.api import Hip, HipError
from mlc_amd.runtime.devices.hip.memory import HipMemory


class HipCarried:
    """The copies of the functions of a manifest. parts: the parts of the `Handover`s before and after this GPU that the
    next run uses. Before `connect` it uses `Handover`s of its own. It uses `Handover`s until `held` closes."""

    def __init__(self, hip: Hip, held: ExitStack, stream, memory: HipMemory, functions: Mapping[str, Mapping]):
        self._hip, self._held, self._stream, self._functions = hip, held, stream, functions
        self._arena = memory.blocks["arena"][0]
        self._memory: dict[str, Handover] = {}
        self._beside: dict[str, tuple[Any, Any]] = {}  # {direction: (stream for large copies, event)}
        if takes_turns(functions):
            self._beside = {key: (hip.stream(held), hip.event(held)) for key in ("receives", "sends")}
            for other, _ in self._beside.values():
                held.callback(hip.names.hipStreamSynchronize, other)
        self.parts: tuple[int, int] = (0, 0)
        for key in ("receives", "sends"):
            if most := max((size(function, key) for function in functions.values()), default=0):
                self._use(key, Handover(most))

    def _use(self, key: str, one: Handover) -> None:
        self._memory[key] = one
        self._held.callback(lambda used: None, one)  # keeps it alive until it is unpinned
        for address in one.addresses:
            try:
                self._hip("hipHostRegister", address, one.nbytes, self._hip.names.hipHostRegisterPortable)
            except HipError as e:
                if e.code != "hipErrorHostMemoryAlreadyRegistered":  # the GPU at the other end may have pinned it
                    raise
            else:
                self._held.callback(self._hip.names.hipHostUnregister, address)

    def connect(self, before: Handover | None, after: Handover | None) -> None:
        for key, one in (("receives", before), ("sends", after)):
            if one:
                self._use(key, one)

    def enqueue_received(self, name: str) -> None:
        """Enqueues the copies that must precede a function's launches."""
        stream, event = self._stream_of(name, "receives")
        self._enqueue(name, "receives", self.parts[0], self._hip.names.hipMemcpyKind.hipMemcpyHostToDevice, stream)
        if event:
            self._wait_for(event, stream, self._stream)

    def enqueue_sent(self, name: str, part: int | None = None) -> Any:
        """Enqueues the copies that follow a function's launches. part: of the `Handover`, if `parts` has changed since
        the launches. Returns the stream of the copies."""
        stream, event = self._stream_of(name, "sends")
        if event:
            self._wait_for(event, self._stream, stream)
        part = self.parts[1] if part is None else part
        self._enqueue(name, "sends", part, self._hip.names.hipMemcpyKind.hipMemcpyDeviceToHost, stream)
        return stream

    def _stream_of(self, name: str, key: str) -> tuple[Any, Any]:
        large = self._beside and is_large(self._functions[name], key)
        return self._beside[key] if large else (self._stream, None)

    def _wait_for(self, event, earlier, later) -> None:
        """Makes later work on the stream `later` wait for the work that is on the stream `earlier` now."""
        self._hip("hipEventRecord", event, earlier)
        self._hip("hipStreamWaitEvent", later, event, 0)

    def _enqueue(self, name: str, key: str, part: int, kind, stream) -> None:
        function = self._functions[name]
        for first, end, at in spans(function, key):
            host, own = self._memory[key].addresses[part] + at, self._arena + first
            target, source = (own, host) if key == "receives" else (host, own)
            self._hip("hipMemcpyAsync", target, source, end - first, kind, stream)
        if key == "receives" and "own" in function:
            source, target, count = function["own"]
            kind = self._hip.names.hipMemcpyKind.hipMemcpyDeviceToDevice
            self._hip("hipMemcpyAsync", self._arena + target, self._arena + source, count, kind, stream)

    def sent(self, name: str) -> bytes:
        """The bytes that the last run of a function has sent."""
        count = size(self._functions[name], "sends")
        return ctypes.string_at(self._memory["sends"].addresses[self.parts[1]], count) if count else b""
