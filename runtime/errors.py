"""The one exception that a user is meant to read.

Every module raises `UserError` for what the user (not the program) got wrong or must change: the message says in one
line what is wrong and what to do. `tools/cli.py` prints it on stderr and exits with 1, or 2 for a `UsageError`; any
other exception is a bug and keeps its traceback under `--debug`.
"""

import re

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class UserError(Exception):
    """A one-line message: what is wrong, then what to do about it. What it quotes of a file or of a user's text may
    have line ends and control characters: the message has none."""

    def __init__(self, message: str) -> None:
        super().__init__(_CONTROL.sub("\ufffd", " ".join(message.split())))


class UsageError(UserError):
    """A command line with an unknown command or flag, or a value that none can have."""


def shorten(value: object) -> str:
    """A value of unknown size, for a one-line message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
