"""The user's cache folder; locks of folders, and temporary folders, which belong to running processes. Locks are on the
folders themselves (flock(2)): no further files, and the lock of a killed process is released."""

import errno
import fcntl
import os
import shutil
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from mlc_amd.runtime import leftovers
from mlc_amd.runtime.errors import UserError

SUFFIX = ".mlc-amd-tmp"  # of the names of temporary folders
FULL = errno.ENOSPC, errno.EDQUOT
_TRIES = 100  # of removing a folder that threads still write to, 10 ms apart


def cache_directory() -> Path:
    """Where everything of the user's is cached: `$XDG_CACHE_HOME/mlc-amd` (`~/.cache/mlc-amd`)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mlc-amd"


def unwritable(path: Path, error: OSError, elsewhere: str) -> str:
    """The message of an error while writing to `path`: what to do is `elsewhere`, or to free space where that is
    missing."""
    room = "free some space or " if error.errno in FULL else ""
    return f"cannot write {path}: {error.strerror or error}; {room}{elsewhere}"


class Lock:
    """A folder's lock, held until `close` or until it is dropped. kind: of flock(2). OSError if it is not available,
    FileNotFoundError also if the folder was removed before."""

    def __init__(self, folder: Path, kind: int):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, kind)
            if not os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
        except OSError:
            os.close(descriptor)
            raise
        self.close = weakref.finalize(self, os.close, descriptor)


def lock(folder: Path, exclusive: bool = False) -> Lock | None:
    """A lock, shared or exclusive, without waiting: None while another process has one, or without support."""
    try:
        return Lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)
    except OSError:
        return None


@contextmanager
def scratch(parent: Path, name: str) -> Iterator[Path]:
    """A new hidden folder in `parent` (made if missing), removed at the end unless renamed; sweeps `parent`, too."""
    parent.mkdir(parents=True, exist_ok=True)
    sweep(parent)
    folder, held = _owned(parent, name)
    with _removed_after(folder, held):
        yield folder


@contextmanager
def _removed_after(folder: Path, held: Lock | None) -> Iterator[None]:
    """The folder is removed, and its lock released, after the block or where the process ends within it."""
    gone = leftovers.note(partial(_remove, folder))
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        gone()
        if held:
            held.close()


def _remove(folder: Path) -> None:
    """Removes a folder in which other threads may be making files."""
    for _ in range(_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.01)


def _owned(parent: Path, name: str) -> tuple[Path, Lock | None]:
    """A new folder, locked before another process could sweep it away."""
    while True:
        folder = parent / f".{name}.{uuid.uuid4().hex[:8]}{SUFFIX}"
        folder.mkdir()
        try:
            return folder, Lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, FileNotFoundError):
            continue  # swept between the two calls
        except OSError:
            return folder, None  # a file system without locks, which is not swept


def sweep(parent: Path) -> int:
    """Removes the temporary folders in `parent` of processes that have ended; returns their number."""
    removed = 0
    for folder in parent.glob(f".*{SUFFIX}"):
        if held := lock(folder, exclusive=True):
            shutil.rmtree(folder, ignore_errors=True)
            held.close()
            removed += not folder.exists()  # another user's cannot be removed
    return removed


@contextmanager
def alone(parent: Path, name: str, wait: Callable[[], object]) -> Iterator[None]:
    """The block runs in one process, and one of its threads, at a time: the others call `wait`, and wait. On file
    systems without locks they do not."""
    folder = parent / f".{name}{SUFFIX}"
    held = None
    while held is None:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            held = Lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            wait()
            with suppress(FileNotFoundError):
                Lock(folder, fcntl.LOCK_EX).close()  # until it was released, and the folder is gone
        except FileNotFoundError:  # swept between the two calls
            continue
        except OSError:
            break
    with _removed_after(folder, held):
        yield


@contextmanager
def temporary(name: str) -> Iterator[Path]:
    """`scratch` in the system's folder for temporary files. UserError if that is full."""
    try:
        parent = Path(tempfile.gettempdir())
    except FileNotFoundError as error:  # it tries to write, and fails so on a full disk
        raise UserError(f"{error.strerror}; free some space there or set TMPDIR") from error
    try:
        with scratch(parent, name) as folder:
            yield folder
    except OSError as error:
        if error.errno not in FULL or not _within(error.filename, parent):
            raise
        raise UserError(
            f"cannot write temporary files to {parent}: {error.strerror}; free some space there or set TMPDIR"
        ) from error


def _within(file: object, parent: Path) -> bool:
    """Whether an OSError's file is below a folder; errors of writes have none."""
    return file is None or Path(str(file)).is_relative_to(parent)
