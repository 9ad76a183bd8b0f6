"""Reports, in one line and with exit code 1, that a mapped file was truncated or can no longer be read.

Target cpu maps weights. Access to a page that the file no longer has raises SIGBUS in the accessing thread. This cannot
become an exception, and Python's own signal handlers only run when that thread continues. So the handler is a function
that the system calls immediately: it writes a line and ends the process. It may run Python code, because code that
accesses mapped weights (kernels, copies by NumPy) holds no lock that the handler needs.
"""

import ctypes
import os
import signal
import threading

_LINE = (
    b"error: a file that is in use was cut off, or its disk cannot be read: restore it (download or compile it again), "
    b"and replace files of models by renaming, not by writing into them\n"
)


# Several threads may access such pages; the first one reports, the others wait for the end of the process.
_first = threading.Lock()


def _end(number: int) -> None:
    _first.acquire()
    os.write(2, _LINE)
    os._exit(1)


_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(_end)  # kept for the life of the process


def install() -> None:
    """Installs the handler in this process, unless something else (such as PYTHONFAULTHANDLER) handles the signal."""
    system_call = ctypes.CDLL(None).signal
    system_call.argtypes, system_call.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    address = ctypes.cast(_handler, ctypes.c_void_p)
    if before := system_call(signal.SIGBUS, address):  # a handler other than the default one, which is 0
        system_call(signal.SIGBUS, before)
