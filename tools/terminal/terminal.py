"""What is written to a terminal, and to files and pipes in its place: text of a model, dimmed text, a line of progress.

Text of a model goes to stdout, as do tables; all else goes to stderr. Names and texts of models and files may hold
control characters, which must not control the terminal, nor one behind a pipe: `clean_output` leaves them out of all
that is written but the text of a model to a stdout that is no terminal, which is given as it is. Our own escape
sequences are written past it, only to terminals that have them (not TERM=dumb) and whose user wants them
(https://no-color.org).
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

# Everything below space but tab and newline, and DEL, and the C1 codes.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class _Clean:
    """A stream whose control characters are left out."""

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
    """Within the block no control characters go to stderr and stdout, but as the module's docstring says."""
    stdout, stderr = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = cast(TextIO, _Clean(stdout)), cast(TextIO, _Clean(stderr))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = stdout, stderr


def clean_process() -> None:
    """From now on no control characters go to this process's streams: of one that the command line did not start, whose
    output others bring to a terminal."""
    sys.stdout, sys.stderr = (cast(TextIO, _Clean(unclean(stream))) for stream in (sys.stdout, sys.stderr))


def clean(text: str) -> str:
    """The text without control characters."""
    return _CONTROL.sub("", text)


def unclean(stream: TextIO) -> TextIO:
    """The standard stream for escape sequences. Texts that are not ours must pass through `clean`."""
    return stream.unclean if isinstance(stream, _Clean) else stream


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a standard stream is a terminal; one that is closed is None."""
    return stream is not None and stream.isatty()


def dumb() -> bool:
    """Whether the terminal can do nothing but print lines."""
    return os.environ.get("TERM", "dumb") in ("dumb", "unknown")


def _dim(text: str) -> str:
    """Text for stderr, dimmed where that is possible."""
    plain = not is_terminal(sys.stderr) or dumb() or os.environ.get("NO_COLOR")
    return text if plain else f"{_DIM}{text}{_PLAIN}"


def width() -> int:
    """Columns of the terminal."""
    return shutil.get_terminal_size((80, 24)).columns


def stream(text: str) -> None:
    """Writes a piece of an answer to stdout at once."""
    (sys.stdout if is_terminal(sys.stdout) else unclean(sys.stdout)).write(text)
    sys.stdout.flush()


def aside(text: str) -> None:
    """Writes a piece of what a model thinks to stderr at once, dimmed on a terminal."""
    unclean(sys.stderr).write(_dim(clean(text)))
    sys.stderr.flush()


class Status:
    """A line on stderr that is replaced, for what happens at the moment; nothing happens without a terminal that has
    such lines. It must be cleared before anything else is written. Threads may share it."""

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
                # No escape sequence is needed to erase it.
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
    """Within the block the terminal does not show what is typed, which is kept for whoever reads next."""
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
    """Whether what is typed on a terminal goes to this process: the system stops a job in a shell's background that
    changes its terminal."""
    if not is_terminal(sys.stdin):
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:  # not the terminal that controls this process
        return True
