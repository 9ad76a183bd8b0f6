"""Reads the texts and pictures of commands: from arguments, files and stdin."""

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from mlc_amd.runtime.errors import UsageError, UserError
from mlc_amd.runtime.extras import installed
from mlc_amd.runtime.images.pictures import decode, picture_bytes
from mlc_amd.tools.terminal import terminal


def read_text(path: str) -> str:
    """The UTF-8 text of a file, or of stdin for "-". Raises UserError if it cannot be read or is not UTF-8."""
    if path == "-":
        return stdin().read()
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}): convert it, or give another file") from error


def stdin() -> TextIO:
    """stdin as UTF-8, in which other bytes become U+FFFD; empty if it is closed."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    return io.StringIO() if sys.stdin is None else sys.stdin


def given(prompt: str | None, file: str | None) -> str | None:
    """The text of the flags --prompt and --file, for which "-" is stdin; None if neither is given. A newline at the end
    of stdin or of a file is removed."""
    if prompt is not None and file is not None:
        raise UsageError("give --prompt or --file, not both")
    file = "-" if prompt == "-" else file
    return prompt if file is None else read_text(file).removesuffix("\n")


def picture(path: str) -> bytes:
    """The content of a picture's file. A damaged one raises UserError with its name, before a model is loaded."""
    content = picture_bytes(path)
    if installed("PIL"):  # otherwise the model's engine reports that it is missing
        decode(content, f"the image {path}")
    return content


def pictures(paths: Sequence[str]) -> list[bytes]:
    """The files of the flag --image."""
    return [picture(path) for path in paths]


def required(prompt: str | None, file: str | None) -> str:
    """`given`; if it is None, the text that is piped into the program."""
    text = given(prompt, file)
    if text is None and not terminal.is_terminal(sys.stdin):
        text = given("-", None) or None
    if text is None:
        raise UsageError("--prompt is missing: give --prompt TEXT or --file FILE, or pipe a text into this command")
    return text
