"""Who computes: one thread at a time has the *turn*. Threads get it in the order in which they asked for it.

A background thread may wait until there is something for it to do (`wait_for_work`).
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mlc_amd.runtime.errors import UserError

CLOSED = "this engine is closed: load the model again"


@dataclass(eq=False)
class _Waiting:
    """A thread in the line for the turn. ready: it does not need it any more; wake: tells it to look."""

    wake: threading.Condition
    ready: Callable[[], bool]


class Turn:
    """closed: nobody gets it any more; set by whoever has it."""

    def __init__(self) -> None:
        self.closed = False
        self._lock = threading.RLock()  # a signal's handler may `try_take` while its thread holds it
        self._taken = False
        self._line: deque[_Waiting] = deque()
        self._work = threading.Condition(self._lock)

    def take(self, ready: Callable[[], bool] = lambda: False) -> bool:
        """Waits in line for the turn, and takes it. False if `ready` is true first. UserError once it is closed."""
        with self._lock:
            mine = _Waiting(threading.Condition(self._lock), ready)
            self._line.append(mine)
            try:
                while not ready() and not self.closed and (self._taken or self._line[0] is not mine):
                    mine.wake.wait()
                if ready():
                    return False
                if self.closed:
                    raise UserError(CLOSED)
                self._taken = True
                return True
            finally:
                self._line.remove(mine)
                self._wake()

    def try_take(self) -> bool:
        """Takes it if nobody has it, without waiting in line."""
        with self._lock:
            if self._taken:
                return False
            self._taken = True
            return True

    def give(self) -> None:
        """Whoever has it has it no longer."""
        with self._lock:
            self._taken = False
            self._wake()
            self._work.notify()

    def wait_for_work(self, some: Callable[[], object]) -> None:
        """Returns when there is `some`, or it is closed; looks whenever the turn is given."""
        with self._lock:
            while not self.closed and not some():
                self._work.wait()

    def _wake(self) -> None:
        """With the lock: wakes those who wait in line no longer."""
        for place, waiting in enumerate(self._line):
            if self.closed or (not place and not self._taken) or waiting.ready():
                waiting.wake.notify()
