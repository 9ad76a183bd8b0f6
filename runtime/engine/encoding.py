"""Encodes the images that requests wait for, in pieces between the steps of other answers."""

import time
from collections.abc import Iterable, Iterator
from typing import Protocol

from mlc_amd.runtime.engine.requests import Request
from mlc_amd.runtime.engine.scheduler import Scheduler
from mlc_amd.runtime.images.features import Features


class PiecewiseWork(Protocol):
    """Work that requests wait for, and that is done in pieces between steps. waits: whether there is such work.
    takes_turn, piece: see `Encoding`."""

    @property
    def waits(self) -> bool: ...

    def takes_turn(self) -> bool: ...

    def piece(self) -> Iterable[tuple[Request, Exception]]: ...


class Encoding:
    """Encodes the images that the scheduler's last plan lacked (`Admission.missing`). While other answers are being
    generated, it encodes the images of one request at a time, and alternates with steps: in each turn it computes as
    many pieces as take no longer than a step, but at least one."""

    def __init__(self, scheduler: Scheduler, features: Features) -> None:
        self._scheduler, self._features = scheduler, features
        self._pieces: Iterator[None] | None = None
        self._requests: list[Request] = []  # the requests whose images are being encoded
        self._turn = False  # whether the last turn computed pieces
        self._ended = 0.0  # time at which the last pieces were done
        self._step = 0.0  # seconds of the shortest step between pieces; 0 before the first step

    @property
    def waits(self) -> bool:
        """Whether there is something to encode."""
        return self._pieces is not None or bool(self._scheduler.admission.missing)

    def takes_turn(self) -> bool:
        """Whether pieces come before the next step."""
        if self._turn and self._answering():
            step = time.perf_counter() - self._ended
            self._step = min(self._step or step, step)
        self._turn = self.waits and not self._turn
        return self._turn

    def _answering(self) -> bool:
        """Whether answers are being generated."""
        return any(request.generated for request in self._scheduler.running)

    def piece(self) -> Iterable[tuple[Request, Exception]]:
        """Computes some pieces. Returns the requests whose images could not be encoded, with the error."""
        missing, busy = self._scheduler.admission.missing, self._answering()
        if self._pieces is None or all(request.state == "done" for request in self._requests):
            waiting = [request for request in missing if request.state != "done"]
            self._requests, self._step = waiting[: 1 if busy else None], 0.0
            images = (image for request in self._requests for image in missing[request])
            self._pieces = self._features.encode(images, self._answering)
        begin = now = time.perf_counter()
        last = 0.0  # seconds of the last piece
        try:
            while not last or (busy and now + last - begin <= self._step):
                next(self._pieces)
                last, now = time.perf_counter() - now, time.perf_counter()
        except StopIteration:
            self._pieces, self._scheduler.admission.missing = None, {}
        except Exception as error:
            self._pieces, self._scheduler.admission.missing = None, {}
            return [(request, error) for request in self._requests]
        self._ended = time.perf_counter()
        return ()
