"""Ctrl-C ends a command at once, quietly, with exit code 130, and leaves nothing (runtime/leftovers.py); so do SIGTERM
and SIGHUP, with theirs.

An exception is not enough: TVM makes another one of a KeyboardInterrupt that is raised while it calls Python, drivers
may crash where one leaves them in the middle of their work, and Python raises none before a call of LLVM returns. So a
thread reads the file to which Python's own handler writes the signal's number at once, and ends the process; the main
thread does nothing more meanwhile. Who wants to go on after Ctrl-C sets a handler of its own, or uses `raising`.

Imports little: `install` is the first thing that a command does.
"""

import fcntl
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mlc_amd.runtime import leftovers

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE = 5.0  # seconds of tidying up: what the main thread holds, which it waits for in vain, is not released
_write = -1  # of the pipe that the thread reads


def install() -> None:
    """For this process, but not for signals that it was started to ignore."""
    global _write
    ends = os.pipe()
    # never the numbers of standard streams, which may be closed
    read, _write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3) for end in ends)
    for end in ends:
        os.close(end)
    os.set_blocking(_write, False)
    threading.Thread(target=_listen, args=(read,), daemon=True).start()
    for number in _SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _heed)
    signal.set_wakeup_fd(_write, warn_on_full_buffer=False)


@contextmanager
def raising() -> Iterator[None]:
    """Within the block Ctrl-C raises KeyboardInterrupt."""
    ours = signal.getsignal(signal.SIGINT) is _heed
    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, _heed)


def end(code: int) -> None:
    """Ends the process without unwinding or Python's own tidying, which may crash with a device at work."""
    tidying = threading.Thread(target=_tidy, daemon=True)
    tidying.start()
    tidying.join(_PATIENCE)
    os._exit(code)


def _tidy() -> None:
    with suppress(OSError, ValueError):  # of a closed pipe
        sys.stdout.flush()
    leftovers.undo_all()


def _heed(number: int, frame: object) -> None:
    os.write(_write, bytes([number]))  # again: others may have had the file of wakeups replaced
    threading.Event().wait()


def _listen(read: int) -> None:
    while received := os.read(read, 64):
        for number in received:
            if signal.getsignal(number) is _heed:
                end(128 + number)
