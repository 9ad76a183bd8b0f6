"""The one exception that a user is meant to read.

Every module raises `UserError` for what the user (not the program) got wrong or must change: the message says in one
line what is wrong and what to do. `tools/cli.py` prints it on stderr and exits with 1, or 2 for a `UsageError`; any
other exception is a bug and keeps its traceback under `--debug`.
"""

QUOTED = 240  # characters of another program's message that a message quotes
_JOINERS = "\u200c\u200d"  # parts of words and emojis, though they have no form of their own


class UserError(Exception):
    """A one-line message: what is wrong, then what to do about it. What it quotes of a file or of a user's text may
    have line ends and control characters: the message has none (`one_line`)."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class UsageError(UserError):
    """A command line with an unknown command or flag, or a value that none can have."""


def one_line(text: str, most: int | None = None) -> str:
    """A text that others wrote, as one line: blanks for white space of any kind, U+FFFD for what cannot be printed
    (control characters, marks of a text's direction, halves of surrogates), at most `most` characters."""
    line = " ".join(text.split())
    if not line.isprintable():
        line = "".join(char if char.isprintable() or char in _JOINERS else "\ufffd" for char in line)
    return line if most is None or len(line) <= most else line[: most - 3] + "..."


def shorten(value: object) -> str:
    """A value of unknown size, for a one-line message."""
    return one_line(repr(value), 60)
