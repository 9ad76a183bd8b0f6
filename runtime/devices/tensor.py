"""Several GPUs as one device: each computes a part of every product (artifact/ranks.py), all at the same time.

Each GPU has a thread, which computes a function segment by segment and waits after each for the other GPUs: what all of
them computed goes to each of them through host memory. So all hold the same rows, bit by bit.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from mlc_amd.runtime.artifact.ranks import segments
from mlc_amd.runtime.devices.staged import AFTER_FAILURE, StagedDevice, _Step, _wait
from mlc_amd.runtime.errors import MachineError

Result = TypeVar("Result")


class _Meeting:
    """Where the threads of all GPUs meet between the segments of one step. done: as many as have finished the step."""

    def __init__(self, gpus: int, cuts: int):
        self.barrier = threading.Barrier(gpus)
        self.parts = [[np.zeros(0, np.uint8)] * gpus for _ in range(cuts)]
        self.lock, self.done = threading.Lock(), 0

    def exchange(self, cut: int, rank: int, own: np.ndarray) -> np.ndarray:
        """What all GPUs have sent at a cut, in their order. BrokenBarrierError once another one has failed."""
        self.parts[cut][rank] = own
        self.barrier.wait()
        return np.concatenate(self.parts[cut])


class TensorDevice(StagedDevice):
    """See runtime/devices/__init__.py for the protocol; openers: of the GPUs' devices; artifact: the whole one.

    stages: the devices.
    """

    def __init__(self, artifact, openers):
        super().__init__(artifact, openers)
        self._segments = {name: segments(artifact.manifest, name) for name in artifact.manifest["functions"]}

    @property
    def in_flight(self) -> int:
        return 2

    def time(self, function: str) -> list[tuple[str, float, float]]:
        """Of the first GPU. See the protocol. UserError where a GPU cannot."""
        return [one for found in self._in_turn(function, lambda device, name: device.time(name)) for one in found]

    def run_plain(self, function: str) -> None:
        self._in_turn(function, lambda device, name: device.run_plain(name))

    def _in_turn(self, function: str, compute: Callable[[Any, str], Result]) -> list[Result]:
        """A step whose segments are computed like this; the first GPU's results."""
        self.discard()
        step, found = _Step(function, self._taken()), []
        step.complete.set()

        def call(device, name: str) -> None:
            result = compute(device, name)
            if device is self.stages[0]:
                found.append(result)

        self._submit(step, call)
        _wait(step.done)
        self._finished = step
        if step.error:
            raise step.error
        return found

    def _first(self, function: str) -> int:
        return 0

    def _pass_on(self, step: _Step, stage: int) -> None:
        self._submit(step, lambda device, name: device.run(name))

    def _submit(self, step: _Step, compute: Callable[[Any, str], None]) -> None:
        meeting = _Meeting(len(self.stages), len(self._segments[step.function]) - 1)
        for rank, worker in enumerate(self._workers):
            worker.submit(lambda rank=rank: self._compute_part(step, rank, meeting, compute))

    # ---- the GPUs' threads

    def _compute_part(self, step: _Step, rank: int, meeting: _Meeting, compute: Callable[[Any, str], None]) -> None:
        device = self.stages[rank]
        try:
            if self._failed:
                raise MachineError(AFTER_FAILURE) from self._failed
            self._write_all(step, device)
            names = self._segments[step.function]
            for cut, name in enumerate(names):
                compute(device, name)
                if cut + 1 < len(names):
                    device.receive(meeting.exchange(cut, rank, device.sent(name).copy()))
            if rank + 1 == len(self.stages):
                self._hand_over(step, rank)
        except threading.BrokenBarrierError:
            pass  # another GPU's error is the step's
        except BaseException as error:
            meeting.barrier.abort()
            step.error, self._failed = step.error or error, self._failed or error
        with meeting.lock:
            meeting.done += 1
            if meeting.done == len(self.stages):
                step.done.set()

    def _write_all(self, step: _Step, device) -> None:
        """All inputs; waits for those that are not known yet."""
        tokens: list[tuple[str, np.ndarray]] = []
        if step.source:
            _wait(step.source.done)
            tokens = [("tokens", step.source.outputs.get("sampled", np.zeros(0, np.int32)))]
        _wait(step.complete)
        for name, values in [*step.inputs, *tokens, *step.late]:
            if name in self.manifest["io"]:
                device.write(name, values)
