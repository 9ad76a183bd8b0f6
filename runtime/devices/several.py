"""Opens several GPUs that act as one device (staged.py, tensor.py), and what these have in common."""

import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, TypeVar

import numpy as np

from mlc_amd.runtime.errors import MachineError

AFTER_FAILURE = "a step failed on one of the GPUs; load the model again"

Result = TypeVar("Result")
Opener = Callable[[], Any]  # opens one of the devices

# Seconds without news from any GPU after which the host sleeps between questions, and for how long.
POLL, PAUSE = 0.01, 1e-4
SLICE = 1.0  # seconds of one wait: Ctrl-C is noticed between them


class SeveralGpus(ABC):
    """The part of the protocol of runtime/devices/__init__.py that does not depend on how the GPUs share a model.
    openers: of their devices, which are opened at the same time; artifact: the whole one.

    stages: the devices, once `_connect` has connected them.
    """

    def __init__(self, artifact, openers: Sequence[Opener]):
        self.artifact, self.manifest = artifact, artifact.manifest
        self.stages: list[Any] = []
        self._held = ExitStack()  # closed in reverse order
        self._held.callback(close_all, self.stages)
        self.close = weakref.finalize(self, self._held.close)
        try:
            open_all(openers, self.stages)
            self._connect(self.stages)
        except BaseException:
            self.close()
            raise
        first = self.stages[0]
        self.kind, self.threads, self.gpu, self.code_arch = first.kind, 1, first.gpu, first.code_arch
        self.name = " + ".join(device.name for device in self.stages)
        self.on_host = any(device.on_host for device in self.stages)
        self.kv_types, self._patience = common_kv_types(self.manifest, self.stages), patience(self.stages)
        self._failed: BaseException | None = None

    @abstractmethod
    def _connect(self, devices: Sequence[Any]) -> None:
        """Gives the devices what they exchange data through."""

    @abstractmethod
    def write(self, name: str, values) -> None:
        """See the protocol."""

    def fill(self, name: str, rows: int, put: Callable[[np.ndarray], None]) -> None:
        entry = self.manifest["io"][name]
        values = np.zeros((rows, *entry["shape"][1:]), entry["dtype"])
        put(values)
        self.write(name, values)

    def clear(self) -> None:
        self._alive()
        for device in self.stages:
            device.clear()

    def page_parts(self, span: int) -> list[tuple[str, int]]:
        return [part for device in self.stages for part in device.page_parts(span)]

    def read_pages(self, span: int, pages: Sequence[int]) -> np.ndarray:
        self._check_usable()
        return np.concatenate([device.read_pages(span, pages) for device in self.stages], 1)

    def write_pages(self, span: int, pages: Sequence[int], contents: np.ndarray) -> None:
        self._check_usable()
        at = 0
        for device in self.stages:
            count = sum(nbytes for _, nbytes in device.page_parts(span))
            device.write_pages(span, pages, contents[:, at : at + count])
            at += count

    def page_memory(self, span: int, count: int) -> np.ndarray:
        """Each of the GPUs copies its part of the pages to memory of its own."""
        return np.empty((count, sum(nbytes for _, nbytes in self.page_parts(span))), np.uint8)

    def copy_bandwidth(self) -> float:
        """Of the slowest GPU."""
        return min(device.copy_bandwidth() for device in self.stages)

    def _check_usable(self) -> None:
        """MachineError if the device is closed, or after a step that failed: what the cache holds is unknown."""
        self._alive()
        if self._failed:
            raise MachineError(AFTER_FAILURE) from self._failed

    def _alive(self) -> None:
        if not self.close.alive:
            raise MachineError("this device is closed; load the model again")


def open_all(openers: Sequence[Opener], devices: list[Any]) -> None:
    """Opens devices at the same time, into the list `devices`; if one fails, the others."""
    opened = [_Opening.begin(opener) for opener in openers]
    try:
        for result in opened:
            devices.append(None)
            devices[-1] = result()
    except BaseException:
        for i, result in enumerate(opened):
            devices[i:] = [_unless_failed(result)]
        raise


def close_all(devices: Sequence[Any]) -> None:
    for device in devices:
        if device is not None:
            device.close()


def patience(devices: Sequence[Any]) -> float:
    """Seconds that the host asks without a pause: none where a GPU is a CPU, which needs its cores."""
    return 0.0 if any(device.on_host for device in devices) else POLL


def common_kv_types(manifest: Mapping, devices: Sequence[Any]) -> dict[str, tuple]:
    """Of all layers; as many pages of a span as the device has that has fewest."""
    pages: dict[int, int] = {}
    for device in devices:
        for entry in device.manifest["kv"]:
            if "span" in entry:
                count = device.kv_types[entry["name"]][0][0]
                pages[entry["span"]] = min(count, pages.get(entry["span"], count))
    found = {name: of for device in devices for name, of in device.kv_types.items()}
    for entry in manifest["kv"]:
        if "span" in entry:
            (_, *shape), dtype = found[entry["name"]]
            found[entry["name"]] = (pages[entry["span"]], *shape), dtype
    return found


class _Opening:
    """A thread that opens a device.

    It never ends, but waits for the next device: a driver leaves code in threads that used it, which would run at their
    end, when the driver may have been unloaded.
    """

    _idle: ClassVar[list["_Opening"]] = []

    def __init__(self):
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="mlc-amd opens", daemon=True).start()

    @classmethod
    def begin(cls, call: Callable[[], Result]) -> Callable[[], Result]:
        """Starts it; returns a function that waits for its result, or raises its error."""
        thread = cls._idle.pop() if cls._idle else cls()
        done, found, errors = threading.Event(), [], []

        def run() -> None:
            try:
                found.append(call())
            except BaseException as error:
                errors.append(error)
            cls._idle.append(thread)
            done.set()

        def result() -> Result:
            while not done.wait(SLICE):
                pass
            if errors:
                raise errors[0]
            return found[0]

        thread._calls.put(run)
        return result

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            call()
            del call  # it may hold what a `with` block or the garbage collector closes


def _unless_failed(result: Callable[[], Result]) -> Result | None:
    try:
        return result()
    except BaseException:  # another device's error is reported
        return None
