"""A child process (`python -m module`) that answers requests, one JSON line each. It may crash, hang or exhaust memory
without harm to its parent. Output of libraries goes to standard error; if the child dies, the last line of it becomes
part of the error message."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import IO

from mlc_amd.runtime import leftovers
from mlc_amd.runtime.closing import Closing
from mlc_amd.runtime.errors import UserError

STDERR = 400  # bytes of standard error that an error message quotes


class ChildDied(RuntimeError):
    """The child has ended, or was ended: after a crash or a timeout. The message has the reason."""


class Child:
    """The child process. It is started at the first request, and again after it died."""

    def __init__(self, module: str, arguments: tuple[str, ...] = (), environment: dict[str, str] | None = None):
        self.command = [sys.executable, "-m", module, *arguments]
        self.environment = os.environ | (environment or {})
        self._process: subprocess.Popen | None = None
        self._errors: IO[bytes] | None = None
        self._rest = b""

    def start(self) -> subprocess.Popen:
        """Starts the process unless it is running."""
        process = self._process
        return self._start() if process is None or process.poll() is not None else process

    def send(self, request: dict) -> None:
        process = self.start()
        assert process.stdin is not None  # a pipe
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise ChildDied(self._why()) from None

    def receive(self, timeout: float) -> dict:
        """The next answer. Raises ChildDied if none arrives in `timeout` seconds; the child has then been ended. Raises
        UserError if the child has sent one."""
        end, process = time.monotonic() + timeout, self._process
        assert process is not None and process.stdout is not None  # a request was sent
        while b"\n" not in self._rest:
            left = end - time.monotonic()
            if left <= 0 or not self._selector.select(left):
                self.close()
                raise ChildDied(f"took more than {timeout:.0f} s")
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                raise ChildDied(self._why())
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        answer = json.loads(line)
        if "user_error" in answer:
            raise UserError(answer["user_error"])
        return answer

    def _start(self) -> subprocess.Popen:
        self.close()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the child)
        # a process group of its own: Ctrl-C only reaches the parent, and the child's own processes end with it
        process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=self.environment,
            start_new_session=True,
        )
        self._selector = selectors.DefaultSelector()
        assert process.stdout is not None  # a pipe
        self._selector.register(process.stdout, selectors.EVENT_READ)
        self._process = process
        self._ended = leftovers.note(partial(os.killpg, process.pid, signal.SIGKILL))
        return process

    def _why(self) -> str:
        process, errors = self._process, self._errors
        assert process is not None and errors is not None  # only called for a child that was started
        code = process.wait()
        errors.seek(max(errors.seek(0, os.SEEK_END) - STDERR, 0))
        lines = errors.read().decode(errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        self.close()
        return f"{how}: {last}" if last else how

    def close(self) -> None:
        """Ends the child, whatever its state."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._ended()
        for file in (self._process.stdin, self._process.stdout, self._errors, self._selector):
            with contextlib.suppress(BrokenPipeError):
                if file is not None:
                    file.close()
        self._process, self._rest = None, b""


class Children(Closing):
    """Several children with the same module. Each request goes to an idle one."""

    def __init__(self, module: str, count: int, arguments: tuple[str, ...] = ()):
        one = {"TVM_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._children = [Child(module, arguments, one) for _ in range(count)]
        self._idle: SimpleQueue[Child] = SimpleQueue()
        for child in self._children:
            self._idle.put(child)
        self._threads = ThreadPoolExecutor(count)

    def start(self) -> None:
        for child in self._children:
            child.start()

    def ask(self, request: dict, timeout: float) -> "Future[dict]":
        """Sends a request. The future has the answer, or an error of `Child.receive`."""
        return self._threads.submit(self._ask, request, timeout)

    def _ask(self, request: dict, timeout: float) -> dict:
        child = self._idle.get()
        try:
            child.send(request)
            return child.receive(timeout)
        finally:
            self._idle.put(child)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for child in self._children:
            child.close()


def serve(handle: Callable[[dict, Callable[[dict], None]], None]) -> None:
    """The child's main loop, until the parent ends: handle(request, answer) for each request; answer(dict) sends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    follow_parent()

    def answer(message: dict) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    for line in sys.stdin:
        try:
            handle(json.loads(line), answer)
        except UserError as e:
            answer({"user_error": str(e)})


def follow_parent() -> None:
    """Ends this process when its parent has ended, even while it is busy."""
    parent = os.getppid()

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
