"""Ctrl-C ends a command immediately and quietly, with exit code 130, and undoes what must not be left
(runtime/leftovers.py). SIGTERM and SIGHUP do the same, with their exit codes.

An exception is not enough: TVM turns a KeyboardInterrupt that is raised while it calls Python into another exception;
drivers may crash if an exception leaves them in the middle of their work; and Python raises none before a call of LLVM
returns. So Python's own handler writes the signal's number to a file immediately, and a thread reads the file and ends
the process. The main thread does nothing meanwhile. Code that must continue after Ctrl-C sets its own handler, or uses
`raising`.

This module imports little, because `install` is the first thing that a command does.
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
_PATIENCE = 5.0  # limit of seconds for undoing: it may wait in vain for something that the main thread holds
_write = -1  # the end of the pipe for writing; the thread reads from it


def install() -> None:
    """Installs the handlers in this process, except for signals that its parent made it ignore."""
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
    """Within the block, Ctrl-C raises KeyboardInterrupt."""
    ours = signal.getsignal(signal.SIGINT) is _heed
    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, _heed)


def end(code: int) -> None:
    """Ends the process without unwinding the stack and without Python's own cleanup, which may crash while a device is
    working."""
    tidying = threading.Thread(target=_tidy, daemon=True)
    tidying.start()
    tidying.join(_PATIENCE)
    os._exit(code)


def _tidy() -> None:
    with suppress(OSError, ValueError):  # the pipe is closed
        sys.stdout.flush()
    leftovers.undo_all()


def _heed(number: int, frame: object) -> None:
    os.write(_write, bytes([number]))  # again, as other code may have replaced the wakeup file
    threading.Event().wait()


def _listen(read: int) -> None:
    while received := os.read(read, 64):
        for number in received:
            if signal.getsignal(number) is _heed:
                end(128 + number)
