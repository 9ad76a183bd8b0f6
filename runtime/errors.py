"""The exceptions for errors that the user can fix. Every module raises `UserError` for these: one line with the problem
and its solution. `tools/cli.py` prints it and exits with 1, or with 2 for a `UsageError`. Any other exception is a bug;
`--debug` shows its traceback."""

QUOTED = 240  # characters of another program's message in an error message
_JOINERS = "\u200c\u200d"  # zero-width (non-)joiners: not printable, but parts of words and emojis


class UserError(Exception):
    """A one-line message: the problem, then its solution. `one_line` replaces line ends and control characters."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class MachineError(UserError):
    """The model, its device or the installation fails, whatever the request was: a client of a server cannot fix it."""


class UsageError(UserError):
    """A command line with an unknown command or flag, or an invalid value."""


def one_line(text: str, most: int | None = None) -> str:
    """Returns an untrusted text as one line of at most `most` characters. White space of any kind becomes single
    blanks; unprintable characters (control characters, direction marks, unpaired surrogates) become U+FFFD."""
    line = " ".join(text.split())
    if not line.isprintable():
        line = "".join(char if char.isprintable() or char in _JOINERS else "\ufffd" for char in line)
    return line if most is None or len(line) <= most else line[: most - 3] + "..."


def shorten(value: object) -> str:
    """Returns a value of unknown size as text for a one-line message."""
    try:
        return one_line(repr(value), 60)
    except (ValueError, RecursionError):  # a number of thousands of digits, deep nesting
        return f"a {type(value).__name__} that is too large"
