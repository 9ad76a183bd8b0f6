"""Work that must not harm this process, done by another one that has limits of processor time and memory.

In:  the name of a module with a function `open_work`; what that is called with, and requests: JSON values.
Out: `LimitedProcess.ask`, the answer to a request; `TooMuch` for one that exceeds the limits or crashes the process,
     which is then started again for the next request.

It is for what others wrote and no library bounds: grammars, chat templates. The process answers one request after
another, so that a request costs no more than its JSON. Its processor time is limited, not the time that passes, so that
a busy machine refuses nothing; the system ends it at the limit, whatever code it executes then.
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

# How much longer than its limit of processor time a request may take on a machine that is busy with other work, and
# how long the process may take to start there.
_PATIENCE, _START_SECONDS = 10.0, 30.0
_PROGRAM = "from mlc_amd.runtime.limited_process import main; main()"


class TooMuch(Exception):
    """A request took too much time or memory, or crashed the process."""


class LimitedProcess:
    """The other process. It is started when it is needed, and when it has ended. Thread-safe.

    module: its `open_work(opening)` returns an answer to the opening, and the function that answers requests.
    seconds: of processor time for one request, opening_seconds: for the opening. memory: bytes that it may take besides
    what Python and its modules do.
    """

    def __init__(self, module: str, opening: object, seconds: float, memory: int, opening_seconds: float = 0) -> None:
        self._module, self._opening = module, json.dumps(opening)
        self._limits = opening_seconds or seconds, seconds, memory
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._opened: Any = None
        self._opening_sent = False  # and not answered
        self._ended: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Starts the process, without waiting for it."""
        with self._lock:
            self._start()

    def open(self) -> Any:
        """The answer to the opening."""
        with self._lock, self._whole():
            self._open()
            return self._opened

    def ask(self, request: object) -> Any:
        """The answer to a request."""
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
        """The process ends where the block does not, as by Ctrl-C: its answer would be taken for that to the next
        request."""
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
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, self._module, *map(str, self._limits)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
            start_new_session=True,  # Ctrl-C is for this process
        )  # fmt: skip
        self._ended = weakref.finalize(self, _end, self._process)
        self._send(self._opening)
        self._opening_sent = True

    def _send(self, line: str) -> None:
        process = self._process
        assert process is not None and process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: then there is no answer
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()

    def _receive(self, seconds: float) -> Any:
        """The next answer. TooMuch if there is none."""
        process = self._process
        assert process is not None and process.stdout is not None
        waiting = select.poll()
        waiting.register(process.stdout, select.POLLIN)
        answer = process.stdout.readline() if waiting.poll(seconds * 1000) else b""
        if not answer.endswith(b"\n"):
            raise TooMuch
        return json.loads(answer)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


# ---- the other process


def main() -> None:
    """The program of the other process. Arguments: the module, seconds for the opening and for a request, bytes."""
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
    made, work = _limited(open_work, requests.readline(), float(opening_seconds))
    _write(answers, made)
    for line in requests:
        _write(answers, _limited(work, line, float(seconds)))


def _limited(work: Callable[[Any], Any], line: str, seconds: float) -> Any:
    """What `work` makes of a request. At the limit of time the timer's signal ends the process."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return work(json.loads(line))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _write(answers: IO[str], made: object) -> None:
    answers.write(json.dumps(made) + "\n")
    answers.flush()
