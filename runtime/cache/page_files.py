"""The cache on disk: what pages hold, found by its contents, in the folder `pages` of the user's cache.

    MODEL/              of one artifact on one kind of device; MODEL: `PageKeys.model` in hexadecimal
    MODEL/about.json    the artifact's name and path, for `mlc-amd cache`
    MODEL/KEY           a record: what a page holds in all caches of its span

Keys are digests of the model's id and of all tokens up to the page's end (`PageKeys`). A record is HEADER, with the
key, the number of bytes, and the SHA-256 of these and of the bytes, which follow. What is not exactly such a record
with that key and of that size is not there for readers. Files appear whole, by a rename, are never changed, and only
their owner can read them. Several processes may use a folder: files may vanish at any time. A file's time of change is
when it was used last; where the files of all models take more than the limit, those used least recently are removed.
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
_ABANDONED = 600.0  # seconds after which a temporary file is nobody's: a write takes far less
_ROOM = 16  # one of so many parts of the limit is freed at a time, and more if need be
_BLOCK = 4096  # bytes of a file system's block


class PageKeys:
    """Names of what pages hold. model: an id of all that decides which bytes a device computes for tokens, and how it
    lays them out."""

    def __init__(self, manifest: Mapping, device, spans: Iterable[int]) -> None:
        parts = [[span, device.page_parts(span)] for span in sorted(spans)]
        known = [manifest[name] for name in ("files", "model", "target", "weights", "tensors", "kv")]
        facts = json.dumps([_MAGIC.decode(), PAGE, device.name, parts, known], sort_keys=True)
        self.model = hashlib.blake2b(facts.encode(), digest_size=16).digest()

    def of(self, known: PrefixDigest, span: int) -> bytes:
        """The key of the page of that span whose sequence has that digest."""
        content = known + span.to_bytes(8, "little", signed=True)
        return hashlib.blake2b(content, key=self.model, digest_size=16).digest()


class PageSource(Protocol):
    """Where records are."""

    def __contains__(self, key: bytes) -> bool: ...

    def read(self, key: bytes, target: np.ndarray) -> bool:
        """Reads the contents into `target`, uint8, of as many bytes; False if there are none, or they are damaged."""
        ...


def header_of(key: bytes, contents: np.ndarray) -> bytes:
    """What precedes contents, uint8, in their record."""
    return HEADER.pack(_MAGIC, key, contents.nbytes, _checksum(key, contents))


def read_record(file: int, at: int, key: bytes, target: np.ndarray) -> bool:
    """Reads the contents of the record of a key at that place of a file into `target`, uint8, of as many bytes; False
    if it is anything else."""
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
    """OSError as of write(2), also for a part that is written in part."""
    for part in parts:
        left = memoryview(part)
        while left:
            left = left[os.write(file, left) :]


def pages_directory() -> Path:
    return cache_directory() / "pages"


class PageFiles:
    """The records of one model; for several threads. about: for ABOUT; limit: bytes of the files of all models."""

    def __init__(self, model: bytes, about: Mapping[str, str], limit: int) -> None:
        self.folder, self._about, self._limit = pages_directory() / model.hex(), about, limit
        self._used: int | None = None  # bytes of the files of all models, once they were counted
        self._number = 0  # of temporary files

    def _path(self, key: bytes) -> Path:
        return self.folder / key.hex()

    def __contains__(self, key: bytes) -> bool:
        return self._path(key).exists()

    def read(self, key: bytes, target: np.ndarray) -> bool:
        """Removes a file that is not what it should be."""
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
        """Of one thread at a time. Does nothing with what is larger than the limit. OSError where it cannot be
        written; then nothing is left of it."""
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
        except FileNotFoundError:  # the first file, or the folder was removed
            self.folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder.mkdir(exist_ok=True, mode=0o700)
            about = os.open(self.folder / ABOUT, flags, 0o600)
            try:
                write_all(about, [json.dumps(self._about).encode()])
            finally:
                os.close(about)
            return os.open(temporary, flags, 0o600)

    def touch(self, keys: Iterable[bytes]) -> None:
        """They are used now, the last ones most recently."""
        for key in keys:
            with suppress(OSError):
                os.utime(self._path(key))

    def remove(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            with suppress(OSError):
                self._path(key).unlink()

    def _make_room(self, size: int) -> None:
        """Counts all files, and removes those used least recently if there is no room for `size` bytes."""
        files = [file for folder in folders() for file in records(folder)]
        self._used = sum(file.nbytes for file in files)
        if self._used + size > self._limit:
            self._used -= remove_oldest(files, self._used + max(size, self._limit // _ROOM) - self._limit)


# ---- of all models


class RecordFile(NamedTuple):
    """used: seconds since the epoch; nbytes: on disk."""

    path: Path
    used: float
    nbytes: int


def folders() -> list[Path]:
    """Of each model that has any."""
    try:
        return sorted(entry for entry in pages_directory().iterdir() if entry.is_dir() and not entry.is_symlink())
    except OSError:
        return []


def records(folder: Path) -> Iterator[RecordFile]:
    """The files of a model. What killed processes left is removed."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
                if entry.name.endswith(_TEMPORARY) and time.time() - status.st_mtime > _ABANDONED:
                    os.unlink(entry.path)
                elif entry.name != ABOUT:
                    yield RecordFile(Path(entry.path), status.st_mtime, status.st_blocks * 512)
            except OSError:  # it was removed meanwhile
                continue


def remove_oldest(files: Iterable[RecordFile], nbytes: int) -> int:
    """Removes the files used least recently, of so many bytes or some more; returns their bytes."""
    freed = 0
    for file in sorted(files, key=lambda file: file.used):
        if freed >= nbytes:
            break
        with suppress(OSError):
            file.path.unlink()
        freed += file.nbytes
    return freed
