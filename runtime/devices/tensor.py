"""Several GPUs as one device: each computes a part of every product (artifact/ranks.py), all at the same time, and all
hold the same rows, bit by bit.

What they computed crosses between the segments of a function through host memory, which all GPUs read and write
themselves (handover.py). One thread serves all GPUs: it begins a segment on each of them once all have finished the
one before.

Once a step has failed, what the cache holds is unknown: all later ones fail, too.
"""

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from mlc_amd.runtime.artifact.ranks import segments
from mlc_amd.runtime.devices.handover import PARTS, Handover
from mlc_amd.runtime.devices.several import Opener, close_all, common_kv_types, open_all
from mlc_amd.runtime.devices.staged import AFTER_FAILURE, PAUSE, POLL
from mlc_amd.runtime.errors import MachineError

Result = TypeVar("Result")


class TensorDevice:
    """See runtime/devices/__init__.py for the protocol. openers: of the GPUs' devices, in the order of their parts;
    artifact: the whole one.

    stages: the devices.
    """

    def __init__(self, artifact, openers: Sequence[Opener]):
        self.artifact, self.manifest = artifact, artifact.manifest
        self.stages: list[Any] = []
        self.close = weakref.finalize(self, close_all, self.stages)
        open_all(openers, self.stages, _connect)
        first = self.stages[0]
        self.kind, self.threads, self.gpu, self.code_arch = first.kind, 1, first.gpu, first.code_arch
        self.name = " + ".join(device.name for device in self.stages)
        self.kv_types = common_kv_types(self.manifest, self.stages)
        self.waited = 0.0
        self._segments = {name: segments(self.manifest, name) for name in self.manifest["functions"]}
        self._failed: BaseException | None = None

    def write(self, name: str, values) -> None:
        self._alive()
        for device in self.stages:
            device.write(name, values)

    def can_start_ahead(self, function: str, late: bool = False) -> bool:
        return False

    def run(self, function: str, meanwhile: Callable[[], None] | None = None) -> None:
        if meanwhile:
            meanwhile()

        def compute(name: str) -> None:
            for device in self.stages:
                device.begin(name)
            self._finish()

        self._in_turn(function, compute)

    def run_plain(self, function: str) -> None:
        self._in_turn(function, lambda name: [device.run_plain(name) for device in self.stages])

    def time(self, function: str) -> list[tuple[str, float, float]]:
        """Of the first GPU. See the protocol. UserError where a GPU cannot."""
        found = self._in_turn(function, lambda name: [device.time(name) for device in self.stages])
        return [one for first, *_ in found for one in first]

    def read(self, name: str, rows: int) -> np.ndarray:
        self._alive()
        return self.stages[-1].read(name, rows)

    def clear(self) -> None:
        self._alive()
        for device in self.stages:
            device.clear()

    def copy_bandwidth(self) -> float:
        """Of the slowest GPU."""
        return min(device.copy_bandwidth() for device in self.stages)

    def _in_turn(self, function: str, compute: Callable[[str], Result]) -> list[Result]:
        """Computes the segments of a function like this."""
        found = []
        with self._working():
            for number, name in enumerate(self._segments[function]):
                for device in self.stages:
                    device.hand_over((number - 1) % PARTS, number % PARTS)
                found.append(compute(name))
        return found

    def _finish(self) -> None:
        """Waits for all GPUs."""
        begun = news = time.perf_counter()
        busy = [*self.stages]
        while busy:
            left, now = [device for device in busy if not device.finished()], time.perf_counter()
            if len(left) < len(busy):
                busy, news = left, now
            elif now - news > POLL:
                time.sleep(PAUSE)
        self.waited += time.perf_counter() - begun

    @contextmanager
    def _working(self) -> Iterator[None]:
        self._alive()
        if self._failed:
            raise MachineError(AFTER_FAILURE) from self._failed
        try:
            yield
        except BaseException as error:  # Ctrl-C, too: where it came is unknown
            self._failed = error
            raise

    def _alive(self) -> None:
        if not self.close.alive:
            raise MachineError("this device is closed; load the model again")


def _connect(devices: Sequence[Any]) -> None:
    functions = [function for device in devices for function in device.manifest["functions"].values()]
    most = max(sum(end - first for first, end in function["receives"]) for function in functions)
    shared = Handover(most)
    for device in devices:
        device.connect(shared, shared)
