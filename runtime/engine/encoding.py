"""The encoding of images that requests wait for, piece by piece between the steps of other answers."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from mlc_amd.runtime.engine.requests import Request
from mlc_amd.runtime.engine.scheduler import Scheduler
from mlc_amd.runtime.images.features import Features


class PiecewiseWork(Protocol):
    """What requests wait for, computed between steps. waits: there is some; the others are as of `Encoding`."""

    @property
    def waits(self) -> bool: ...

    def takes_turn(self) -> bool: ...

    def piece(self) -> Iterable[tuple[Request, Exception]]: ...


class Encoding:
    """Of what the last plan of the scheduler lacked. While other answers are being generated, the images of one request
    at a time: a piece takes no longer than they must."""

    def __init__(self, scheduler: Scheduler, features: Features) -> None:
        self._scheduler, self._features = scheduler, features
        self._pieces: Iterator[None] | None = None
        self._requests: list[Request] = []  # that wait for what is encoded
        self._was_last = False  # the last step was a piece

    @property
    def waits(self) -> bool:
        """Whether there is something to encode."""
        return self._pieces is not None or bool(self._scheduler.admission.missing)

    def takes_turn(self) -> bool:
        """Whether a piece comes before the next step of answers, which the following call then says no to."""
        self._was_last = self.waits and not self._was_last
        return self._was_last

    def piece(self) -> Iterable[tuple[Request, Exception]]:
        """Computes one. Returns the requests that cannot have their images, and why."""
        missing = self._scheduler.admission.missing
        if self._pieces is None:
            busy = any(request.generated for request in self._scheduler.running)
            self._requests = list(missing)[: 1 if busy else None]
            self._pieces = self._features.encode(image for request in self._requests for image in missing[request])
        try:
            next(self._pieces)
        except StopIteration:
            self._pieces, self._scheduler.admission.missing = None, {}
        except Exception as error:
            self._pieces, self._scheduler.admission.missing = None, {}
            return [(request, error) for request in self._requests]
        return ()
