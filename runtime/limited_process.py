"""A child process with limits of processor time and memory, for untrusted input that may take a library unbounded time:
grammars, chat templates. Requests and answers are JSON values.

One process answers many requests, so that a request costs little more than its JSON. The limit is on processor time,
not on elapsed time, so that a busy machine does not make requests fail. At the limit the system ends the process, even
within native code; it is started again for the next request.
"""

import contextlib
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import IO, Any

from mlc_amd.runtime import leftovers

# How long to wait for an answer, as a multiple of the limit of processor time (the machine may be busy); seconds in
# which the process must start.
_PATIENCE, _START_SECONDS = 10.0, 30.0
_PROGRAM = "from mlc_amd.runtime.limited_process import main; main()"


class LimitExceeded(Exception):
    """A request took too much time or memory, or crashed the process."""


class LimitedProcess:
    """The child process. It is started on first use, and again after it has ended. Thread-safe.

    module: its function `open_work(opening)` returns a pair: the answer to the opening, and a function that answers
    requests. seconds: processor time for one request. opening_seconds: the same for the opening; 0: `seconds`. memory:
    bytes, in addition to those of Python and its modules.
    """

    def __init__(self, module: str, opening: object, seconds: float, memory: int, opening_seconds: float = 0) -> None:
        self._module, self._opening = module, json.dumps(opening)
        self._limits = opening_seconds or seconds, seconds, memory
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._opened: Any = None
        self._opening_sent = False  # it is sent, and its answer is not read yet
        self._ended: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Starts the process, without waiting for it."""
        with self._lock:
            self._start()

    def open(self) -> Any:
        """The answer to the opening. Raises LimitExceeded."""
        with self._lock, self._whole():
            self._open()
            return self._opened

    def request(self, request: object) -> Any:
        """The answer to a request. Raises LimitExceeded."""
        line = json.dumps(request)
        with self._lock, self._whole():
            self._open()
            self._send(line)
            return self._receive(self._limits[1] * _PATIENCE)

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._ended()

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Ends the process if the block fails, for example by Ctrl-C. Otherwise the unread answer would be taken for
        the answer to the next request."""
        try:
            yield
        except BaseException:
            self._ended()
            raise

    def _open(self) -> None:
        self._start()
        if self._opening_sent:
            self._opening_sent = False
            self._opened = self._receive(_START_SECONDS + self._limits[0] * _PATIENCE)

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._ended()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        # Bytecode is written where this process writes it, or not at all.
        environment["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix or ""
        environment["PYTHONDONTWRITEBYTECODE"] = "1" if sys.dont_write_bytecode else ""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, self._module, *map(str, self._limits)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
            start_new_session=True,  # Ctrl-C must not reach the child
        )  # fmt: skip
        self._ended = weakref.finalize(self, _end, self._process, leftovers.note(self._process.kill))
        self._send(self._opening)
        self._opening_sent = True

    def _send(self, line: str) -> None:
        process = self._process
        assert process is not None and process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended: `_receive` then finds no answer
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()

    def _receive(self, seconds: float) -> Any:
        """The next answer. Raises LimitExceeded if none arrives."""
        process = self._process
        assert process is not None and process.stdout is not None
        waiting = select.poll()
        waiting.register(process.stdout, select.POLLIN)
        answer = process.stdout.readline() if waiting.poll(seconds * 1000) else b""
        if not answer.endswith(b"\n"):
            raise LimitExceeded
        return json.loads(answer)


def _end(process: subprocess.Popen[bytes], ended: Callable[[], object]) -> None:
    process.kill()
    process.wait()
    ended()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


# ---- the child process


def main() -> None:
    """The program of the child process. Arguments: module, seconds for the opening and for a request, bytes."""
    module, opening_seconds, seconds, memory = sys.argv[1:]
    open_work = importlib.import_module(module).open_work
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    most = used + int(memory)
    if (hard := resource.getrlimit(resource.RLIMIT_AS)[1]) != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    requests, answers = sys.stdin, sys.stdout
    opened, work = _limited(open_work, requests.readline(), float(opening_seconds))
    _write(answers, opened)
    for line in requests:
        _write(answers, _limited(work, line, float(seconds)))


def _limited(work: Callable[[Any], Any], line: str, seconds: float) -> Any:
    """The result of `work` for a request. When the time is up, a signal ends the process."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return work(json.loads(line))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _write(answers: IO[str], answer: object) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
