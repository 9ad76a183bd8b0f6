"""A line and exit code 1 where a mapped file is cut off, or cannot be read any more, while a command uses it.

Target cpu maps weights: to touch a page that the file no longer has raises SIGBUS in the thread that does so. No
exception can come of it, and Python's own handlers of signals run only once that thread goes on. So the handler is a
function that the system calls at once: it writes and ends the process. It may run Python's code, because what touches
mapped weights (kernels, copies by NumPy) holds no lock that it needs.
"""

import ctypes
import os
import signal
import threading

_LINE = (
    b"error: a file that is in use was cut off, or its disk cannot be read: restore it (download or compile it again), "
    b"and replace files of models by renaming, not by writing into them\n"
)


_first = threading.Lock()  # of the threads that touch such pages, which may be several; the others wait for the end


def _end(number: int) -> None:
    _first.acquire()
    os.write(2, _LINE)
    os._exit(1)


_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(_end)  # kept as long as the process


def install() -> None:
    """For this process, where nothing else handles the signal (as PYTHONFAULTHANDLER does)."""
    system_call = ctypes.CDLL(None).signal
    system_call.argtypes, system_call.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    address = ctypes.cast(_handler, ctypes.c_void_p)
    if before := system_call(signal.SIGBUS, address):  # another handler than the default one, which is 0
        system_call(signal.SIGBUS, before)
