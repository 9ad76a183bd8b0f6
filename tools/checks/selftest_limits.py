"""The time limit of `mlc-amd selftest`, and the end of the process when a GPU hangs."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlc_amd.tools.terminal import terminal

# seconds without an answer: submissions to a GPU take half a second; drivers reset a hanging GPU after ten seconds
HANG = 60.0


class Budget:
    """A number of seconds from now on; 0: no limit."""

    def __init__(self, seconds: float = 0):
        self._end = time.perf_counter() + seconds if seconds else float("inf")

    @property
    def left(self) -> float:
        """The remaining seconds; 0.0 when the time is up."""
        return max(self._end - time.perf_counter(), 0.0)

    @property
    def over(self) -> bool:
        return self.left == 0


class Watch:
    """Ends the process if a device does not answer. A driver's call that hangs cannot be interrupted, and the device
    cannot be closed then. So the process ends immediately, with a line on stderr and exit code 1. device: its name.
    status: the status line. seconds: time after which a call counts as hanging; None: never (for kernels on the CPU,
    which may take any time)."""

    def __init__(self, device: str, status: terminal.Status, seconds: float | None = HANG):
        self._device, self._status, self._seconds = device, status, seconds

    @contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Within the block, the device works on `what`, such as the name of a kernel."""
        if self._seconds is None:
            yield
            return
        timer = threading.Timer(self._seconds, self._end, (what,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def calls(self, device, names: tuple[str, ...]) -> None:
        """Watches calls of these methods of a device, if it has them. The first argument, if any, is what it works
        on."""

        def watched(call: Callable) -> Callable:
            def run(*arguments, **options):
                with self.over(arguments[0] if arguments else "a step"):
                    return call(*arguments, **options)

            return run

        for name in names:
            if call := getattr(device, name, None):
                setattr(device, name, watched(call))

    def _end(self, what: str) -> None:
        self._status.clear()
        sys.stderr.write(
            f"error: {self._device} does not answer: {what} has been running for {self._seconds:.0f} s; see what the "
            "system's log says of the GPU (dmesg)\n"
        )
        sys.stderr.flush()
        os._exit(1)
