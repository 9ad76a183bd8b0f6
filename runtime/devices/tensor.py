"""Several GPUs as one device: each computes a part of every product (artifact/ranks.py), all at the same time, and all
hold the same rows, bit by bit.

What they computed crosses while kernels run (exchange/), or between the segments of a function through host memory,
which all GPUs read and write themselves (handover.py). One thread serves all GPUs: it begins a segment on each of them
once all have finished the one before.

Once a step has failed, what the cache holds is unknown: all later ones fail, too.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np

from mlc_amd.runtime.artifact.manifest import boxes_of
from mlc_amd.runtime.artifact.ranks import segments
from mlc_amd.runtime.devices.exchange.choice import boxes_between
from mlc_amd.runtime.devices.exchange.unsuitable import Unsuitable
from mlc_amd.runtime.devices.handover import PARTS, Handover
from mlc_amd.runtime.devices.several import PAUSE, Opener, SeveralGpus
from mlc_amd.runtime.errors import MachineError

Result = TypeVar("Result")


class TensorDevice(SeveralGpus):
    """stages: in the order of their parts."""

    def __init__(self, artifact, openers: Sequence[Opener]):
        self._boxes: Any = None  # a transport
        super().__init__(artifact, openers)
        manifest = self.stages[0].manifest
        self._segments = {name: segments(manifest, name) for name in self.manifest["functions"]}
        self._rounds = {name: function["rounds"] for name, function in manifest["functions"].items()}

    def _connect(self, devices: Sequence[Any]) -> None:
        manifest = devices[0].manifest
        if manifest["inline"]:
            self._exchange_inline(devices)
        functions = manifest["functions"].values()
        most = len(devices) * max(sum(end - first for first, end in function["sends"]) for function in functions)
        shared = Handover(most)
        for device in devices:
            device.connect(shared, shared)

    def _exchange_inline(self, devices: Sequence[Any]) -> None:
        try:
            self._boxes = boxes = boxes_between(self.artifact, devices)
        except Unsuitable as e:  # there was memory for it before the model was loaded
            raise MachineError(f"{e}; a smaller --ctx or cache leaves more of it") from e
        self._held.callback(boxes.close)
        names = boxes_of(self.manifest)
        prepared = [
            device.exchange_through(dict(zip(names, boxes.arguments(rank), strict=True)))
            for rank, device in enumerate(devices)
        ]
        for _ in zip_longest(*prepared):  # one after the other: what they compute, they compute at the same time
            pass
        if boxes.failed():  # of a GPU whose graphs do not work
            boxes.reset()

    def write(self, name: str, values) -> None:
        self._alive()
        for device in self.stages:
            device.write(name, values)

    def can_start_ahead(self, function: str, late: bool = False) -> bool:
        if len(self._segments[function]) > 1:
            return False
        return all(device.can_start_ahead(function, late) for device in self.stages)

    def start(self, function: str, meanwhile: Callable[[], None] | None = None) -> None:
        """Only functions of one segment."""
        with self._working():
            self._begin_rounds(function)
            self._start(function, [*self.stages], meanwhile)

    def _start(self, function: str, devices: Sequence[Any], meanwhile: Callable[[], None] | None) -> None:
        """The first device calls what starts the others: all compute what does not read LATE inputs meanwhile."""
        first, *others = devices
        first.start(function, (lambda: self._start(function, others, meanwhile)) if others else meanwhile)

    def start_ahead(self, function: str, late: bool = False) -> None:
        with self._working():
            self._begin_rounds(function)
            for device in self.stages:
                device.start_ahead(function, late)

    def complete_inputs(self, function: str) -> None:
        with self._working():
            for device in self.stages:
                device.complete_inputs(function)

    def wait(self) -> None:
        with self._working():
            for device in self.stages:
                device.wait()
            self._check_rounds()

    def run(self, function: str, meanwhile: Callable[[], None] | None = None) -> None:
        if self.can_start_ahead(function):
            self.start(function, meanwhile)
            self.wait()
            return
        if meanwhile:
            meanwhile()
        self._in_turn(function)

    def run_plain(self, function: str) -> None:
        """Of one of the GPUs; the others compute as usual."""
        self._in_turn(function, lambda device, name: device.run_plain(name))

    def time(self, function: str) -> list[tuple[str, float, float]]:
        """Of one of the GPUs. See the protocol. UserError where it cannot."""
        return [one for found in self._in_turn(function, lambda device, name: device.time(name)) for one in found]

    @property
    def waited(self) -> float:
        return self.stages[-1].waited

    def read(self, name: str, rows: int, first: int = 0) -> np.ndarray:
        self._alive()
        return self.stages[-1].read(name, rows, first)

    def _in_turn(self, function: str, compute: Callable[[Any, str], Result] | None = None) -> list[Result]:
        """Computes the segments of a function, on the last GPU like this, if it is given. Its results."""
        found, last = [], self.stages[-1]
        usual = self.stages[:-1] if compute else self.stages
        with self._working():
            for number, name in enumerate(self._segments[function]):
                for device in self.stages:
                    device.hand_over((number - 1) % PARTS, number % PARTS)
                self._begin_rounds(name)
                for device in usual:
                    device.begin(name)
                if compute:
                    found.append(compute(last, name))
                self._finish(usual)
                self._check_rounds()
        return found

    def _begin_rounds(self, segment: str) -> None:
        if boxes := self._boxes:
            for count, words in self._rounds[segment]:
                boxes.begin(count, words)

    def _check_rounds(self) -> None:
        if self._boxes and (failed := self._boxes.failed()):
            names = ", ".join(f"GPU {i} ({self.stages[i].name})" for i in failed)
            raise MachineError(f"{names} waited in vain for what the others computed; load the model again")

    def _finish(self, busy: Sequence[Any]) -> None:
        """Waits for these GPUs."""
        news = time.perf_counter()
        while busy:
            left, now = [device for device in busy if not device.finished()], time.perf_counter()
            if len(left) < len(busy):
                busy, news = left, now
            elif now - news > self._patience:
                time.sleep(PAUSE)

    @contextmanager
    def _working(self) -> Iterator[None]:
        self._check_usable()
        try:
            yield
        except BaseException as error:  # Ctrl-C, too: where it came is unknown
            self._failed = error
            raise
