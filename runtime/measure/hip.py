"""Measures on an AMD GPU, by HIP's events. Calls are captured in a graph, because launches from Python are slow."""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain

import numpy as np

from mlc_amd.runtime.devices.hip import code_objects
from mlc_amd.runtime.devices.hip.api import CANNOT_LOAD, NO_MEMORY, Hip, HipError, open_bindings, runtime_version
from mlc_amd.runtime.devices.hip.gpu import choose
from mlc_amd.runtime.devices.hip.launches import HipLaunch, capture, enqueue, events, prepare, seconds
from mlc_amd.runtime.errors import UserError

ALIGN = 256
CACHE = 512 << 20  # bytes to rotate over: more than the largest last-level cache (256 MiB)
SHARE = 8  # at most 1 / SHARE of the GPU's memory


class HipBackend:
    """The backend for HIP; see `timing.py`. device: a GPU's number or part of its name, or None. bindings: used in
    place of AMD's package."""

    target, noise = 0.004, 0.0  # noise is unknown: other programs on the GPU show as drift

    def __init__(self, device: str | None, candidate, bindings=None):
        # open until the end, until the next group, until the next graph
        self._held, self._group, self._captured = ExitStack(), ExitStack(), ExitStack()
        self.hip = Hip(open_bindings() if bindings is None else bindings)
        self.gpu, _ = choose(self.hip, [candidate.facts["arch"]], device)
        version = ".".join(map(str, runtime_version(self.hip.names)))
        self.name, self.code_arch = f"{self.gpu.name} ({self.gpu.arch})", candidate.facts["arch"]
        self.facts = {"device": self.name, "driver": f"HIP {version}"}
        self.hip("hipSetDevice", self.gpu.index)
        self.stream = self.hip.stream(self._held)
        self._events = events(self.hip, self._held, 2)
        free, _ = self.hip("hipMemGetInfo")
        self.cache = min(CACHE, free // SHARE)

    def open(self, sizes: dict) -> None:
        self._captured.close()
        self._group.close()
        self._captured_of, self._at, end = None, {}, 0
        for key, nbytes in sizes.items():
            self._at[key], end = end, end + -(-max(nbytes, 1) // ALIGN) * ALIGN
        try:
            self._base = int(self.hip("hipMalloc", end))
        except HipError as e:
            if e.code not in NO_MEMORY:
                raise
            raise UserError(
                f"{self.name} has no {end >> 20} MiB free to measure this kernel; close other programs that use it"
            ) from e
        self._group.callback(self.hip, "hipFree", self._base)
        self.hip("hipMemsetAsync", self._base, 0, end, self.stream)
        self.hip("hipStreamSynchronize", self.stream)

    def _copy(self, target: int, source: int, nbytes: int, kind: str) -> None:
        self.hip("hipMemcpyAsync", target, source, nbytes, getattr(self.hip.names.hipMemcpyKind, kind), self.stream)
        self.hip("hipStreamSynchronize", self.stream)

    @contextmanager
    def _staging(self, nbytes: int) -> Iterator[int]:
        """Yields the address of pinned memory."""
        staging = int(self.hip("hipHostMalloc", nbytes, 0))
        try:
            yield staging
        finally:
            self.hip("hipHostFree", staging)

    def put(self, key, array: np.ndarray) -> None:
        with self._staging(array.nbytes) as staging:
            ctypes.memmove(staging, np.ascontiguousarray(array).ctypes.data, array.nbytes)
            self._copy(self._base + self._at[key], staging, array.nbytes, "hipMemcpyHostToDevice")

    def get(self, key, nbytes: int) -> bytes:
        with self._staging(nbytes) as staging:
            self._copy(staging, self._base + self._at[key], nbytes, "hipMemcpyDeviceToHost")
            return ctypes.string_at(staging, nbytes)

    def load(self, candidates) -> list:
        return [self._load(candidate) for candidate in candidates]

    def _load(self, candidate):
        chips = self.code_arch, self.gpu.arch
        try:
            return code_objects.load(self.hip, self._group, candidate.code.read_bytes(), candidate.steps, chips)
        except HipError as e:
            if e.code not in (*CANNOT_LOAD, "hipErrorNotFound", *NO_MEMORY):
                raise
            return e

    def bind(self, handle, candidate, keys) -> list[HipLaunch]:
        addresses = [self._base + self._at[key] for key in keys]
        return [prepare(step["symbol"], handle[1][step["symbol"]], step, addresses) for step in candidate.steps]

    def run(self, calls) -> float:
        if len(calls) > 1 and (ids := [id(call) for call in calls]) != self._captured_of:
            self._captured.close()
            self._graph = capture(self.hip, self.stream, chain.from_iterable(calls), self._captured)
            self._calls = calls  # keeps the calls alive, so that their ids stay unique
            self._captured_of = ids
        begin, end = self._events
        self.hip("hipEventRecord", begin, self.stream)
        if len(calls) > 1:
            self.hip("hipGraphLaunch", self._graph, self.stream)
        else:
            enqueue(self.hip, self.stream, chain.from_iterable(calls))
        self.hip("hipEventRecord", end, self.stream)
        self.hip("hipEventSynchronize", end)
        self.hip("hipStreamSynchronize", self.stream)
        return seconds(self.hip, begin, end)

    def close(self) -> None:
        self._captured.close()
        self._group.close()
        self._held.close()
