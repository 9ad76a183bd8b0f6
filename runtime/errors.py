"""The exception for users: every module raises `UserError`, one line with the problem and its solution, for errors that
they can fix. `tools/cli.py` prints it and exits with 1, or 2 for a `UsageError`; any other exception is a bug and has a
traceback with `--debug`."""

QUOTED = 240  # characters of another program's message in an error message
_JOINERS = "\u200c\u200d"  # parts of words and emojis, although not printable alone


class UserError(Exception):
    """A one-line message: the problem, then its solution. `one_line` replaces line ends and control characters."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class MachineError(UserError):
    """The model, its device or the installation fails, whatever was asked of it: a server's client cannot fix it."""


class UsageError(UserError):
    """A command line with an unknown command or flag, or an invalid value."""


def one_line(text: str, most: int | None = None) -> str:
    """An untrusted text as one line: blanks for white space of any kind, U+FFFD for unprintable characters (control
    characters, direction marks, unpaired surrogates), at most `most` characters."""
    line = " ".join(text.split())
    if not line.isprintable():
        line = "".join(char if char.isprintable() or char in _JOINERS else "\ufffd" for char in line)
    return line if most is None or len(line) <= most else line[: most - 3] + "..."


def shorten(value: object) -> str:
    """A value of unknown size, for a one-line message."""
    try:
        return one_line(repr(value), 60)
    except (ValueError, RecursionError):  # a number of thousands of digits, deep nesting
        return f"a {type(value).__name__} that is too large"
