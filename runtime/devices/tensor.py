"""Several GPUs as one device, in tensor parallelism: each GPU is a rank, which computes a part of every product
(artifact/ranks.py). All ranks compute at the same time, and hold the same rows, bit for bit.

Ranks exchange parts while kernels run (exchange/), or between *segments*: a function is then cut at each exchange, and
the parts go through host memory, which all GPUs read and write themselves (handover.py). One thread serves all GPUs: it
begins a segment on each of them when all have finished the segment before.

A chunk of a prompt may be computed beside the next step if both functions are cut at the same layers. Their segments
alternate, so that GPUs compute a segment of one function while the rows of the other are exchanged.

After a step has failed, the contents of the KV cache are unknown, so all later steps fail, too.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np

from mlc_amd.runtime.artifact.io_names import BESIDE, OF_STEP
from mlc_amd.runtime.artifact.manifest import boxes_of
from mlc_amd.runtime.artifact.ranks import segments
from mlc_amd.runtime.devices.exchange.choice import boxes_between
from mlc_amd.runtime.devices.exchange.unsuitable import Unsuitable
from mlc_amd.runtime.devices.handover import PARTS, Handover, size
from mlc_amd.runtime.devices.several import PAUSE, Opener, SeveralGpus
from mlc_amd.runtime.errors import MachineError
from mlc_amd.runtime.exchange_layout import kernels_in

Result = TypeVar("Result")


class TensorDevice(SeveralGpus):
    """See the module. openers, stages: in the order of ranks."""

    def __init__(self, artifact, openers: Sequence[Opener]):
        self._boxes: Any = None  # the transport (exchange/) if parts are exchanged while kernels run
        super().__init__(artifact, openers)
        manifest = self.stages[0].manifest
        functions = manifest["functions"]
        twins = [name + BESIDE for name in self.manifest["functions"] if name + BESIDE in functions]
        self._segments = {name: segments(functions, name) for name in [*self.manifest["functions"], *twins]}
        self._rounds = {name: function["rounds"] for name, function in functions.items()}
        self._written: dict[str, np.ndarray] = {}  # the step's inputs, for `run_beside`, whose function has its own
        self._beside = ""  # function that the next run also computes

    def _connect(self, devices: Sequence[Any]) -> None:
        manifest = devices[0].manifest
        if manifest["inline"]:
            self._exchange_inline(devices)
        functions = manifest["functions"].values()
        most = len(devices) * max(size(function, "sends") for function in functions)
        shared = Handover(most, 2 * PARTS)
        for device in devices:
            device.connect(shared, shared)

    def _exchange_inline(self, devices: Sequence[Any]) -> None:
        try:
            self._boxes = boxes = boxes_between(self.artifact, devices)
        except Unsuitable as e:  # the check before loading the model had enough memory
            raise MachineError(f"{e}; a smaller --ctx or cache leaves more of it") from e
        self._held.callback(boxes.close)
        names = boxes_of(self.manifest)
        prepared = [
            device.exchange_through(dict(zip(names, boxes.arguments(rank), strict=True)))
            for rank, device in enumerate(devices)
        ]
        for _ in zip_longest(*prepared):  # each iteration starts one step on all GPUs
            pass
        if boxes.failed():  # a GPU's graph did not work, and the others waited for it
            boxes.reset()

    def write(self, name: str, values) -> None:
        self._alive()
        if name in OF_STEP:
            self._written[name] = np.array(values)
        for device in self.stages:
            device.write(name, values)

    def can_run_beside(self, function: str) -> bool:
        return function + BESIDE in self._segments

    def run_beside(self, function: str) -> None:
        for name, values in self._written.items():
            for device in self.stages:
                device.write(name + BESIDE, values)
        self._beside = function + BESIDE

    def can_start_ahead(self, function: str, late: bool = False) -> bool:
        if len(self._segments[function]) > 1:
            return False
        return all(device.can_start_ahead(function, late) for device in self.stages)

    def start(self, function: str, meanwhile: Callable[[], None] | None = None) -> None:
        """See the protocol. function: must have one segment."""
        with self._working():
            for device in self.stages:  # all before the first start: kernels give up if others start much later
                device.prepare(function, late=meanwhile is not None)
            self._begin_rounds(function)
            self._start(function, [*self.stages], meanwhile)

    def _start(self, function: str, devices: Sequence[Any], meanwhile: Callable[[], None] | None) -> None:
        """Starts the first device; its `meanwhile` starts the others, and the last device's is the caller's. So all
        compute what does not read LATE inputs before the caller writes these."""
        first, *others = devices
        first.start(function, (lambda: self._start(function, others, meanwhile)) if others else meanwhile)

    def start_ahead(self, function: str, late: bool = False) -> None:
        with self._working():
            for device in self.stages:
                device.prepare(function, True, late)
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
        beside, self._beside = self._beside, ""
        if beside and not self._in_step(beside, function):
            self._in_turn(beside)
            beside = ""
        if not beside and self.can_start_ahead(function):
            self.start(function, meanwhile)
            self.wait()
            return
        if meanwhile:
            meanwhile()
        self._in_turn(beside, function)

    def feed(self, function: str) -> None:
        self.run(function)

    def _in_step(self, first: str, second: str) -> bool:
        """Whether the segments of both functions end at the same layers. (Functions of few rows may exchange parts
        while kernels run, and so have fewer segments.)"""

        def inside(names: Sequence[str]) -> list[int]:
            return [sum(count for count, _ in self._rounds[name]) for name in names]

        cut = self._segments[first][:-1]
        return inside(cut) == inside(self._segments[second][: len(cut)])

    def run_plain(self, function: str) -> None:
        """See the protocol. The last GPU computes launch by launch, the others as usual."""
        self._on_last(function, lambda device, name, meanwhile: device.run_plain(name, meanwhile))

    def time(self, function: str) -> list[tuple[str, float, float]]:
        """See the protocol. Times of the last GPU. A joint kernel (a product and its exchange) has the product's name.
        Raises UserError if the GPU cannot measure times."""
        found = self._on_last(function, lambda device, name, meanwhile: device.time(name, meanwhile))
        return [(kernels_in(kernel)[0], *times) for part in found for kernel, *times in part]

    @property
    def waited(self) -> float:
        return self.stages[-1].waited

    def read(self, name: str, rows: int, first: int = 0) -> np.ndarray:
        self._alive()
        return self.stages[-1].read(name, rows, first)

    def _on_last(self, function: str, compute: Callable[[Any, str, Callable[[], None]], Result]) -> list[Result]:
        """Computes the segments of a function, on the last GPU by `compute(device, segment, begin_others)`, which must
        call `begin_others()` once its GPU computes. Returns what `compute` returned for each segment."""
        found, (*others, last) = [], self.stages
        with self._working():
            for number, name in enumerate(self._segments[function]):
                self._hand_over(number, name)
                found.append(compute(last, name, partial(self._begin, name, others)))
                self._finish(others)
                self._check_rounds()
        return found

    def _in_turn(self, *functions: str) -> None:
        """Computes the segments of one or two functions; "" stands for none. In each layer the first function comes
        first, because rows of the second one may attend to rows of the first."""
        cuts = [self._segments[name] for name in functions if name]
        running: set[int] = set()
        with self._working():
            for number in range(max(map(len, cuts), default=-1) + 1):
                for lane, cut in enumerate(cuts):
                    if lane in running:
                        running.remove(lane)
                        self._finish(self.stages)
                        self._check_rounds()
                    if number < len(cut):
                        self._hand_over(number, cut[number], lane)
                        self._begin(cut[number], self.stages)
                        running.add(lane)

    def _hand_over(self, number: int, segment: str, lane: int = 0) -> None:
        """Chooses the parts of the `Handover` for a segment that will begin. lane: 0 or 1, the function whose segment
        it is; each has PARTS parts."""
        for device in self.stages:
            device.hand_over(lane * PARTS + (number - 1) % PARTS, lane * PARTS + number % PARTS)
        self._begin_rounds(segment)

    @staticmethod
    def _begin(segment: str, devices: Sequence[Any]) -> None:
        for device in devices:
            device.begin(segment)

    def _begin_rounds(self, segment: str) -> None:
        if boxes := self._boxes:
            for count, words in self._rounds[segment]:
                boxes.begin(count, words)

    def _check_rounds(self) -> None:
        if self._boxes and (failed := self._boxes.failed()):
            names = ", ".join(f"GPU {i} ({self.stages[i].name})" for i in failed)
            raise MachineError(f"{names} waited in vain for what the others computed; load the model again")

    def _finish(self, busy: Sequence[Any]) -> None:
        """Waits until these GPUs have finished their segment."""
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
        except BaseException as error:  # also Ctrl-C, which may have interrupted any of these lines
            self._failed = error
            raise
