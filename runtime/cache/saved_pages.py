"""Saves the pages of one sequence in a file: a table, followed by one record (page_files.py) for each page.

    HEADER     of page_files.py; the key is the model's id, the contents are the table
    the table  JSON: {"tokens": length of the sequence, "pages": [[key in hexadecimal, bytes], ..]}
    records

The file has digests of tokens, not the tokens themselves.
"""

import json
import os
import stat
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from mlc_amd.runtime.cache.page_files import HEADER, header_of, read_record, write_all
from mlc_amd.runtime.errors import UserError

_LARGEST = 64 << 20  # largest size of a table in bytes


class _Table(msgspec.Struct):
    tokens: int
    pages: list[tuple[str, int]]


class SavedSize(NamedTuple):
    """tokens: of the sequence. nbytes: of the file."""

    tokens: int
    nbytes: int


def write_saved(
    path: Path, model: bytes, tokens: int, pages: Sequence[tuple[bytes, int]], contents: Iterable[np.ndarray]
) -> SavedSize:
    """Writes a file. pages: (key, bytes) of each page. contents: uint8, in the order of `pages`. Raises UserError if
    the file cannot be written; an existing file then stays unchanged."""
    table = json.dumps({"tokens": tokens, "pages": [(key.hex(), nbytes) for key, nbytes in pages]}).encode()
    head = np.frombuffer(table, np.uint8)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                write_all(file, [header_of(model, head), table])
                for (key, _), one in zip(pages, contents, strict=True):
                    write_all(file, [header_of(key, one), one.data])
                size = os.fstat(file).st_size
            finally:
                os.close(file)
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot save the cache to {path}: {error.strerror}; choose another file") from error
    return SavedSize(tokens, size)


class SavedPages:
    """Reads such a file; a `PageSource`. size: of the whole file. Raises UserError for a file that was not saved for
    this model, or is damaged."""

    def __init__(self, path: Path, model: bytes) -> None:
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; give a file with a saved cache") from error
        self.close = weakref.finalize(self, os.close, self._file)
        status = os.fstat(self._file)
        head = os.pread(self._file, HEADER.size, 0) if stat.S_ISREG(status.st_mode) else b""
        nbytes = HEADER.unpack(head)[2] if len(head) == HEADER.size else _LARGEST + 1
        table = np.empty(nbytes if nbytes <= min(_LARGEST, status.st_size) else 0, np.uint8)
        if table.nbytes != nbytes or not read_record(self._file, 0, model, table):
            raise UserError(f"{path} is not a saved cache of this model, or is damaged; give another file")
        found, at = msgspec.json.decode(table.tobytes(), type=_Table), HEADER.size + nbytes
        self.size = SavedSize(found.tokens, status.st_size)
        self._places: dict[bytes, tuple[int, int]] = {}
        for key, count in found.pages:
            self._places[bytes.fromhex(key)] = at, count
            at += HEADER.size + count

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def read(self, key: bytes, target: np.ndarray) -> bool:
        at, count = self._places.get(key, (0, -1))
        try:
            return count == target.nbytes and read_record(self._file, at, key, target)
        except OSError:
            return False
