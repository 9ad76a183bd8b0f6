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
        self._steps = 2  # calls of `takes_turn` since the last piece

    @property
    def waits(self) -> bool:
        """Whether there is something to encode."""
        return self._pieces is not None or bool(self._scheduler.admission.missing)

    def takes_turn(self) -> bool:
        """Whether a piece comes before the next step. The first step after a piece has no chunk of a prompt if it has
        answers, so that these do not wait for a piece and a chunk at once; a second one, with the chunk, comes then."""
        self._steps = 0 if self.waits and self._steps > self._busy else self._steps + 1
        return not self._steps

    @property
    def _busy(self) -> bool:
        """Whether answers are being generated."""
        return any(request.generated for request in self._scheduler.running)

    def piece(self) -> Iterable[tuple[Request, Exception]]:
        """Computes one, of images that a request still waits for. Returns the requests that cannot have their images,
        and why."""
        missing = self._scheduler.admission.missing
        self._scheduler.chunk_waits = True
        if self._pieces is None or all(request.state == "done" for request in self._requests):
            waiting = [request for request in missing if request.state != "done"]
            self._requests = waiting[: 1 if self._busy else None]
            self._pieces = self._features.encode(image for request in self._requests for image in missing[request])
        try:
            next(self._pieces)
        except StopIteration:
            self._pieces, self._scheduler.admission.missing = None, {}
        except Exception as error:
            self._pieces, self._scheduler.admission.missing = None, {}
            return [(request, error) for request in self._requests]
        return ()
