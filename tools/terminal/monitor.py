"""Watches a generation: reports the progress of a long prompt, and handles Ctrl-C.

In: an engine, and the progress that its `generate` reports to `Monitor.progress`. Out: lines for the user on stderr;
whether the user stopped it.
"""

import os
import signal
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from mlc_amd.tools.terminal import display, terminal

if TYPE_CHECKING:
    from mlc_amd.runtime.engine.text_engine import TextEngine

_PATIENCE = 1.0  # seconds after which the progress of a prompt is shown


class Monitor:
    """Within its `with` block, the first Ctrl-C is acknowledged immediately. It ends the generation after its current
    step: a token, or a chunk of the prompt, which may take seconds. The next Ctrl-C raises KeyboardInterrupt. stopped:
    whether Ctrl-C was pressed. Python handles signals only between two steps, when the computing call returns. So a
    thread reads the file to which Python's own handler writes immediately (`signal.set_wakeup_fd`)."""

    def __init__(self, engine: "TextEngine") -> None:
        self.stopped = False
        self._engine, self._held, self._status = engine, ExitStack(), terminal.Status()
        self._writing = False  # whether text is being written, so that there is no status line
        self._lock = threading.Lock()
        self._prompt, self._begun = (0, 0), 0.0
        self._timer = threading.Timer(_PATIENCE, self._show_prompt)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        here = threading.current_thread() is threading.main_thread()  # only the main thread may set signal handlers
        if here and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._listen_to_signals()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._held.close()
        self._status.clear()

    def progress(self, done: int, total: int) -> None:
        """Called by `generate` between the chunks of a prompt."""
        if not done:
            self._begun = time.monotonic()
            self._timer.start()
        self._prompt = done, total
        if self.stopped:  # even if it was before the generation began
            self._engine.cancel()
        elif time.monotonic() - self._begun > _PATIENCE:
            self._show_prompt()

    def wait(self, text: str) -> None:
        """Shows why no text is written at the moment."""
        self._timer.cancel()
        with self._lock:
            self._writing = False
            if not self.stopped:
                self._status.show(text)

    def begin(self) -> None:
        """Must be called before text is written: removes the status line."""
        self._timer.cancel()
        with self._lock:
            self._writing = True
            self._status.clear()

    def _show_prompt(self) -> None:
        (done, total), took = self._prompt, time.monotonic() - self._begun
        left = f", {display.clock(took * (total - done) / done)} left" if done else ""
        with self._lock:
            if not self._writing and not self.stopped:
                self._status.show(f"reading the prompt: {done} of {total} tokens{left}")

    def _stop(self) -> None:
        with self._lock:
            self.stopped = True
            self._engine.cancel()
            if not self._status.possible:
                display.message("(stopping)")
            elif self._writing:
                terminal.aside(" (stopping)")
            else:
                self._status.show("stopping after this step ...")

    def _listen_to_signals(self) -> None:
        read, write = os.pipe()
        os.set_blocking(write, False)
        listener = threading.Thread(target=self._listen, args=(read,), daemon=True)
        before = signal.signal(signal.SIGINT, self._heed)
        others = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        listener.start()
        # In reverse order: first no more signals, then the end of the file for the thread.
        self._held.callback(os.close, read)
        self._held.callback(listener.join)
        self._held.callback(os.close, write)
        self._held.callback(signal.set_wakeup_fd, others)
        self._held.callback(signal.signal, signal.SIGINT, before)
        self._pressed = 0

    def _listen(self, read: int) -> None:
        while received := os.read(read, 64):
            if signal.SIGINT in received and not self.stopped:
                self._stop()

    def _heed(self, signum: int, frame: object) -> None:
        self._pressed += 1
        if self._pressed > 1:
            raise KeyboardInterrupt
