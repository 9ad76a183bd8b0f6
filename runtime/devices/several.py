"""The common part of devices that consist of several GPUs (staged.py, tensor.py): opening and closing all GPUs, and the
methods that do not depend on how the GPUs share the model."""

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
Opener = Callable[[], Any]  # opens the device of one GPU

# If no GPU has finished anything for POLL seconds, the host sleeps PAUSE seconds between two polls.
POLL, PAUSE = 0.01, 1e-4
SLICE = 1.0  # seconds of one wait; Python handles Ctrl-C between two waits


class SeveralGpus(ABC):
    """The methods of the protocol (runtime/devices/__init__.py) that do not depend on how the GPUs share the model.
    artifact: the whole model. openers: one for each GPU; they run at the same time.

    stages: the devices of the GPUs.
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
        """Gives the devices the memory through which they exchange data. Called once, when all are open."""

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
        """See the protocol. Plain memory: `write_pages` of each GPU copies its part of the contents anyway."""
        return np.empty((count, sum(nbytes for _, nbytes in self.page_parts(span))), np.uint8)

    def copy_bandwidth(self) -> float:
        """That of the slowest GPU."""
        return min(device.copy_bandwidth() for device in self.stages)

    def _check_usable(self) -> None:
        """Raises MachineError if the device is closed, or after a failed step: the KV cache's contents are unknown."""
        self._alive()
        if self._failed:
            raise MachineError(AFTER_FAILURE) from self._failed

    def _alive(self) -> None:
        if not self.close.alive:
            raise MachineError("this device is closed; load the model again")


def open_all(openers: Sequence[Opener], devices: list[Any]) -> None:
    """Opens all devices at the same time, and puts them into the list `devices`. If one fails, the list has those that
    did not fail (and None for others), and the error of the first is raised."""
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
    """Seconds for which the host polls without a pause: 0 if a "GPU" computes on the host's cores, which it needs."""
    return 0.0 if any(device.on_host for device in devices) else POLL


def common_kv_types(manifest: Mapping, devices: Sequence[Any]) -> dict[str, tuple]:
    """`kv_types` of all layers. The number of pages of a span is the smallest among the devices."""
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
    """A thread that opens devices, one after the other.

    It never ends: a driver registers code for the end of threads that used it, and may be unloaded by then.
    """

    _idle: ClassVar[list["_Opening"]] = []

    def __init__(self):
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="mlc-amd opens", daemon=True).start()

    @classmethod
    def begin(cls, call: Callable[[], Result]) -> Callable[[], Result]:
        """Starts `call` in an idle thread, or in a new one. Returns a function that waits for the end of `call`, and
        returns its result or raises its error."""
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
            del call  # otherwise this thread would keep alive what the call refers to, such as an open device


def _unless_failed(result: Callable[[], Result]) -> Result | None:
    try:
        return result()
    except BaseException:  # another device's error is reported
        return None
