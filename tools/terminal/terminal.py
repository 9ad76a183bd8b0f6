"""Writes to a terminal, or to files and pipes in its place: a model's text, dimmed text, a status line.

A model's text and tables go to stdout; everything else goes to stderr. Names and texts of models and files may contain
control characters. These must not control the terminal, even one at the end of a pipe, so `clean_output` removes them
from all output. The exception is a model's text to a stdout that is no terminal: it is written unchanged. This
program's own escape sequences bypass the filter. They are written only to terminals that support them (not TERM=dumb)
and if the user wants them (https://no-color.org).
"""

import os
import re
import shutil
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from mlc_amd.runtime import leftovers

# Everything below space except tab and newline; DEL; the C1 codes.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class _Clean:
    """A stream that removes control characters."""

    def __init__(self, stream: TextIO) -> None:
        self.unclean = stream

    def write(self, text: str) -> int:
        self.unclean.write(clean(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unclean, name)


@contextmanager
def clean_output() -> Iterator[None]:
    """Within the block, control characters are removed from stderr and stdout; see the module's docstring for the
    exception."""
    stdout, stderr = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = cast(TextIO, _Clean(stdout)), cast(TextIO, _Clean(stderr))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = stdout, stderr


def clean_process() -> None:
    """Removes control characters from this process's streams from now on. For processes that the command line did not
    start, but whose output is shown on a terminal."""
    sys.stdout, sys.stderr = (cast(TextIO, _Clean(unclean(stream))) for stream in (sys.stdout, sys.stderr))


def clean(text: str) -> str:
    """The text without control characters."""
    return _CONTROL.sub("", text)


def unclean(stream: TextIO) -> TextIO:
    """The standard stream for escape sequences, without the filter. Texts from elsewhere must pass through `clean`."""
    return stream.unclean if isinstance(stream, _Clean) else stream


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a standard stream is a terminal. A closed stream is None."""
    return stream is not None and stream.isatty()


def dumb() -> bool:
    """Whether the terminal can only print lines."""
    return os.environ.get("TERM", "dumb") in ("dumb", "unknown")


def _dim(text: str) -> str:
    """Text for stderr, dimmed if possible."""
    plain = not is_terminal(sys.stderr) or dumb() or os.environ.get("NO_COLOR")
    return text if plain else f"{_DIM}{text}{_PLAIN}"


def width() -> int:
    """The number of columns of the terminal."""
    return shutil.get_terminal_size((80, 24)).columns


def stream(text: str) -> None:
    """Writes a piece of an answer to stdout, and flushes."""
    (sys.stdout if is_terminal(sys.stdout) else unclean(sys.stdout)).write(text)
    sys.stdout.flush()


def aside(text: str) -> None:
    """Writes a piece of a model's thinking to stderr, dimmed on a terminal, and flushes."""
    unclean(sys.stderr).write(_dim(clean(text)))
    sys.stderr.flush()


class Status:
    """A status line on stderr, which can be replaced. Does nothing if stderr is no terminal with such lines. It must be
    cleared before anything else is written. Thread-safe."""

    def __init__(self) -> None:
        self._shown, self._lock = 0, threading.Lock()

    @property
    def possible(self) -> bool:
        return is_terminal(sys.stderr) and not dumb()

    def show(self, text: str) -> None:
        """Replaces the line by `text`, cut to the terminal's width."""
        if self.possible:
            with self._lock:
                text = clean(text)[: width() - 1]
                # The line is erased by blanks, without an escape sequence.
                unclean(sys.stderr).write(f"\r{' ' * self._shown}\r{_dim(text)}")
                sys.stderr.flush()
                self._shown = len(text)

    def clear(self) -> None:
        """Removes the line, if there is one."""
        with self._lock:
            if self._shown:
                unclean(sys.stderr).write(f"\r{' ' * self._shown}\r")
                sys.stderr.flush()
                self._shown = 0


@contextmanager
def silent_keyboard() -> Iterator[None]:
    """Within the block, the terminal does not show what is typed. It is kept for the next reader."""
    if not _has_keyboard():
        yield
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def restore() -> None:
        if _has_keyboard():
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)

    restored = leftovers.note(restore)
    termios.tcsetattr(keyboard, termios.TCSADRAIN, [*before[:3], before[3] & ~termios.ECHO, *before[4:]])
    try:
        yield
    finally:
        restore()
        restored()


def _has_keyboard() -> bool:
    """Whether this process receives what is typed on a terminal. The system stops a background job of a shell that
    changes its terminal."""
    if not is_terminal(sys.stdin):
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:  # it is not the controlling terminal of this process
        return True
