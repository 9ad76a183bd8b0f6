"""The cache on disk: the contents of pages as files, found by the tokens that they were computed from. It is in the
folder `pages` of the user's cache.

    MODEL/              files of one artifact on one kind of device. MODEL: `PageKeys.model` in hexadecimal
    MODEL/about.json    the artifact's name and path, for `mlc-amd cache`
    MODEL/KEY           a record: the contents of a page in all caches of its span

A key is a digest of the model's id and of all tokens up to the end of the page (`PageKeys`). A record is HEADER,
followed by the contents. HEADER has the key, the number of bytes of the contents, and a SHA-256 of both and of the
contents. Readers ignore a file that is not exactly such a record, with this key and size.

Files appear complete, by a rename; they never change, and only their owner can read them. Several processes may use a
folder, so files may vanish at any time. The modification time of a file is the time of its last use. When the files of
all models exceed the limit, the least recently used ones are removed.
"""

import hashlib
import json
import os
import stat
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from mlc_amd.runtime.cache.pages import PAGE
from mlc_amd.runtime.cache.prefixes import PrefixDigest
from mlc_amd.runtime.folders import cache_directory

ABOUT = "about.json"
HEADER = struct.Struct("<8s16sQ32s")  # magic, key, number of bytes, checksum
_MAGIC = b"mlcpage1"
_TEMPORARY = ".tmp"
_ABANDONED = 600.0  # seconds after which a temporary file counts as left by a killed process: a write takes far less
_ROOM = 16  # at least 1 / _ROOM of the limit is freed at a time
_BLOCK = 4096  # bytes of a block of the file system


class PageKeys:
    """Makes the keys of records. model: an id of everything that determines which bytes a device computes for given
    tokens, and their layout."""

    def __init__(self, manifest: Mapping, device, spans: Iterable[int]) -> None:
        parts = [[span, device.page_parts(span)] for span in sorted(spans)]
        known = [manifest[name] for name in ("files", "model", "target", "weights", "tensors", "kv")]
        facts = json.dumps([_MAGIC.decode(), PAGE, device.name, parts, known], sort_keys=True)
        self.model = hashlib.blake2b(facts.encode(), digest_size=16).digest()

    def of(self, known: PrefixDigest, span: int) -> bytes:
        """The key of a page. known: the digest of its sequence up to the page's end. span: of its group."""
        content = known + span.to_bytes(8, "little", signed=True)
        return hashlib.blake2b(content, key=self.model, digest_size=16).digest()


class PageSource(Protocol):
    """Something that has records."""

    def __contains__(self, key: bytes) -> bool: ...

    def read(self, key: bytes, target: np.ndarray) -> bool:
        """Reads the contents of a record into `target`, uint8 [their number of bytes]. Returns False if there is no
        such record, or it is damaged."""
        ...


def header_of(key: bytes, contents: np.ndarray) -> bytes:
    """The bytes that precede `contents`, uint8, in a record."""
    return HEADER.pack(_MAGIC, key, contents.nbytes, _checksum(key, contents))


def read_record(file: int, at: int, key: bytes, target: np.ndarray) -> bool:
    """Reads the contents of the record at offset `at` of an open file into `target`, uint8 [their number of bytes].
    Returns False if there is no record with this key and size, or it is damaged."""
    header = bytearray(HEADER.size)
    left = [memoryview(header), target.data]
    while left:
        count = os.preadv(file, left, at)
        if not count:
            return False
        at += count
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if left:
            left[0] = left[0][count:]
    return header == header_of(key, target)


def _checksum(key: bytes, contents: np.ndarray) -> bytes:
    digest = hashlib.sha256(_MAGIC + key + contents.nbytes.to_bytes(8, "little"))
    digest.update(contents.data)
    return digest.digest()


def write_all(file: int, parts: Iterable[bytes | memoryview]) -> None:
    """Writes all parts to an open file. Raises OSError if not all bytes can be written."""
    for part in parts:
        left = memoryview(part)
        while left:
            left = left[os.write(file, left) :]


def pages_directory() -> Path:
    return cache_directory() / "pages"


class PageFiles:
    """The records of one model. Thread-safe except for `write`. about: the content of ABOUT. limit: bytes of all
    models' files."""

    def __init__(self, model: bytes, about: Mapping[str, str], limit: int) -> None:
        self.folder, self._about, self._limit = pages_directory() / model.hex(), about, limit
        self._used: int | None = None  # bytes of the files of all models; None until they are counted
        self._number = 0  # counts temporary files, for their names

    def _path(self, key: bytes) -> Path:
        return self.folder / key.hex()

    def __contains__(self, key: bytes) -> bool:
        return self._path(key).exists()

    def read(self, key: bytes, target: np.ndarray) -> bool:
        """See `PageSource`. Removes a file that is not a valid record."""
        path = self._path(key)
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status = os.fstat(file)
                whole = stat.S_ISREG(status.st_mode) and status.st_size == HEADER.size + target.nbytes
                read = whole and read_record(file, 0, key, target)
            finally:
                os.close(file)
        except FileNotFoundError:
            return False
        except OSError:
            read = False
        if not read:
            with suppress(OSError):
                path.unlink()
        return read

    def write(self, key: bytes, contents: np.ndarray) -> None:
        """Writes a record, if it is not larger than the limit. Must not be called by several threads at the same time.
        Raises OSError if the record cannot be written; then it leaves no file."""
        size = -(-(HEADER.size + contents.nbytes) // _BLOCK) * _BLOCK
        if size > self._limit:
            return
        if self._used is None or self._used + size > self._limit:
            self._make_room(size)
        self._number += 1
        temporary = self.folder / f"{os.getpid()}-{self._number}{_TEMPORARY}"
        try:
            file = self._create(temporary)
            try:
                write_all(file, [header_of(key, contents), contents.data])
            finally:
                os.close(file)
            temporary.rename(self._path(key))
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        self._used = (self._used or 0) + size

    def _create(self, temporary: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(temporary, flags, 0o600)
        except FileNotFoundError:  # the first file of this model, or the folder was removed
            self.folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder.mkdir(exist_ok=True, mode=0o700)
            about = os.open(self.folder / ABOUT, flags, 0o600)
            try:
                write_all(about, [json.dumps(self._about).encode()])
            finally:
                os.close(about)
            return os.open(temporary, flags, 0o600)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Marks records as used now, in this order: the last one is the most recently used."""
        for key in keys:
            with suppress(OSError):
                os.utime(self._path(key))

    def remove(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            with suppress(OSError):
                self._path(key).unlink()

    def _make_room(self, size: int) -> None:
        """Counts the bytes of all files. Removes the least recently used ones if `size` more bytes do not fit."""
        files = [file for folder in folders() for file in records(folder)]
        self._used = sum(file.nbytes for file in files)
        if self._used + size > self._limit:
            self._used -= remove_oldest(files, self._used + max(size, self._limit // _ROOM) - self._limit)


# ---- the files of all models


class RecordFile(NamedTuple):
    """The file of a record. used: time of last use, seconds since the epoch. nbytes: bytes on disk."""

    path: Path
    used: float
    nbytes: int


def folders() -> list[Path]:
    """The folders of all models that have records."""
    try:
        return sorted(entry for entry in pages_directory().iterdir() if entry.is_dir() and not entry.is_symlink())
    except OSError:
        return []


def records(folder: Path) -> Iterator[RecordFile]:
    """The files of the records in a folder. Removes temporary files that killed processes left."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
                if entry.name.endswith(_TEMPORARY) and time.time() - status.st_mtime > _ABANDONED:
                    os.unlink(entry.path)
                elif entry.name != ABOUT:
                    yield RecordFile(Path(entry.path), status.st_mtime, status.st_blocks * 512)
            except OSError:  # another process removed it
                continue


def remove_oldest(files: Iterable[RecordFile], nbytes: int) -> int:
    """Removes the least recently used files until at least `nbytes` bytes are freed. Returns the freed bytes."""
    freed = 0
    for file in sorted(files, key=lambda file: file.used):
        if freed >= nbytes:
            break
        with suppress(OSError):
            file.path.unlink()
        freed += file.nbytes
    return freed
