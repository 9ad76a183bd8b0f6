"""The lock that a thread holds while it computes a step. Threads get it in the order in which they asked for it. A
background thread may wait until there is work for it (`wait_for_work`)."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mlc_amd.runtime.errors import MachineError

CLOSED = "this engine is closed: load the model again"


@dataclass(eq=False)
class _Waiter:
    """A thread in the queue for the lock. wake: tells it to check again. ready: whether it needs the lock no more."""

    wake: threading.Condition
    ready: Callable[[], bool]


class StepLock:
    """closed: no thread gets the lock any more. The holder of the lock sets it."""

    def __init__(self) -> None:
        self.closed = False
        self._mutex = threading.RLock()  # reentrant: a signal handler may call `try_acquire` while its thread holds it
        self._held = False
        self._queue: deque[_Waiter] = deque()
        self._work = threading.Condition(self._mutex)

    def acquire(self, ready: Callable[[], bool] = lambda: False) -> bool:
        """Waits for the lock and takes it. Returns False without the lock if `ready()` becomes true first. Raises
        MachineError once the lock is closed."""
        with self._mutex:
            waiter = _Waiter(threading.Condition(self._mutex), ready)
            self._queue.append(waiter)
            try:
                while not ready() and not self.closed and (self._held or self._queue[0] is not waiter):
                    waiter.wake.wait()
                if ready():
                    return False
                if self.closed:
                    raise MachineError(CLOSED)
                self._held = True
                return True
            finally:
                self._queue.remove(waiter)
                self._wake()

    def try_acquire(self) -> bool:
        """Takes the lock if it is free, ignoring the queue. Returns whether it has taken it."""
        with self._mutex:
            if self._held:
                return False
            self._held = True
            return True

    def release(self) -> None:
        with self._mutex:
            self._held = False
            self._wake()
            self._work.notify()

    def wait_for_work(self, has_work: Callable[[], object]) -> None:
        """Returns when there is work, or the lock is closed. Checks whenever the lock is released."""
        with self._mutex:
            while not self.closed and not has_work():
                self._work.wait()

    def _wake(self) -> None:
        """Wakes the threads that need not wait any longer. The caller holds the mutex."""
        for place, waiter in enumerate(self._queue):
            if self.closed or (not place and not self._held) or waiter.ready():
                waiter.wake.notify()
