"""Refuses what would happen at the same time."""

import threading

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.generation import EngineBusy


class Exclusive:
    """The right to use an engine. `with` takes it for its block: EngineBusy where somebody has it, in this thread or
    another one, UserError once the engine is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.closed = False

    def __enter__(self) -> None:
        if self.closed:
            raise UserError("this engine is closed: load the model again")
        if not self._lock.acquire(blocking=False):
            raise EngineBusy(
                "this engine is busy, it serves one caller at a time: finish the other call, close() the iterator of "
                "the answer in progress, or load the model a second time"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()
