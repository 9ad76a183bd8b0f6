"""Reads untrusted JSON as a given Python type, usually a TypedDict with limits of numbers (msgspec's `Meta`). Keys that
the type lacks are dropped. For other invalid content raises UserError: one line that names the key."""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from mlc_amd.runtime.errors import QUOTED, UserError, one_line, shorten

T = TypeVar("T")
LARGEST = 256 << 20  # largest size of a file in bytes; a vocabulary of 200,000 tokens takes 20 MB


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a regular file for reading. Raises UserError for other files (a pipe might block) and system errors."""
    try:
        with open(path, "rb", opener=_open) as file:
            yield file
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check its permissions and the disk") from error


def _open(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{path} is not a file")
    return descriptor


def read_bytes(path: Path) -> bytes:
    """The content of a regular file. Raises UserError as `open_file` does, and for more than LARGEST bytes."""
    with open_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > LARGEST:
            raise UserError(f"{path} has {size} bytes, more than the {LARGEST} that such a file may have")
        return file.read(LARGEST)


def read(path: Path, kind: type[T], advice: str) -> T:
    """The content of a JSON file. advice: what the user can do if the file is damaged. Raises UserError."""
    return decode(read_bytes(path), kind, path, advice)


def decode(data: bytes, kind: type[T], path: object, advice: str) -> T:
    """Decodes `data` as a value of that type. path, advice: for the message of the UserError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        why = "it is nested too deeply"
    except msgspec.ValidationError as error:
        why = _explain(error, data, kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = str(error)
    raise UserError(f"{path} is damaged ({one_line(why, QUOTED)}); {advice}") from None


def _explain(error: msgspec.ValidationError, data: bytes, kind: Any) -> str:
    """The message of an error, with its key. msgspec writes "Expected `int`, got `str` - at `$.io[...].shape[1]`"."""
    what, _, place = str(error).replace("at `key` in `$", "at `$").partition(" - at `$")
    what, place = what.replace("`", ""), place.rstrip("`").lstrip(".")
    what = what[:1].lower() + what[1:]
    # the search for the name of [...] may fail
    with suppress(msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        place = _named(msgspec.json.decode(data), kind, place)
    return f"key {place}: {what}" if place else what


def _named(document: Any, kind: Any, place: str) -> str:
    """`place` with the names of keys where msgspec writes [...]. The key is found by trying: with it as the only key,
    the document still has an error."""
    while "[...]" in place:
        before, _, after = place.partition("[...]")
        held = _at(document, before)
        if not isinstance(held, dict):
            break
        for name, value in dict(held).items():
            held.clear()
            held[name] = value
            if _fails(document, kind):
                break
        place = f"{before}[{shorten(next(iter(held)))}]{after}"
    return place


def _fails(document: Any, kind: Any) -> bool:
    try:
        msgspec.convert(document, kind)
    except msgspec.ValidationError:
        return True
    return False


def _at(document: Any, place: str) -> Any:
    """The value at a place such as "functions['decode'].launches[3]"."""
    for key, index, name in re.findall(r"\.?([^.\[\]]+)|\[(\d+)\]|\[('[^']*'|\"[^\"]*\")\]", place):
        document = document[key] if key else document[int(index)] if index else document[name[1:-1]]
    return document
