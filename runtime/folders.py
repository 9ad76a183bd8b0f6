"""The user's cache folder, locks of folders, and temporary folders, each of which belongs to a running process. A lock
is on the folder itself (flock(2)): it needs no other file, and the system releases the lock of a killed process."""

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

SUFFIX = ".mlc-amd-tmp"  # suffix of the names of temporary folders
FULL = errno.ENOSPC, errno.EDQUOT
_TRIES = 100  # attempts to remove a folder to which threads still write, 10 ms apart


def cache_directory() -> Path:
    """The folder of everything that is cached for the user: `$XDG_CACHE_HOME/mlc-amd` (`~/.cache/mlc-amd`)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mlc-amd"


def unwritable(path: Path, error: OSError, elsewhere: str) -> str:
    """The message for an error while writing to `path`. elsewhere: the advice; a full disk adds "free some space"."""
    room = "free some space or " if error.errno in FULL else ""
    return f"cannot write {path}: {error.strerror or error}; {room}{elsewhere}"


class Lock:
    """The lock of a folder, held until `close` is called or the object is deleted. kind: the operation of flock(2).
    Raises OSError if the lock is not available, and FileNotFoundError if the folder has been removed."""

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
    """Locks a folder. exclusive: returns None if another process has a lock of it; otherwise a shared lock, which waits
    while another process has an exclusive one. Also returns None if the folder is gone or the file system has no
    locks."""
    try:
        return Lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)
    except OSError:
        return None


@contextmanager
def scratch(parent: Path, name: str) -> Iterator[Path]:
    """A new hidden folder in `parent`, which is made if missing. The folder is removed at the end unless it was
    renamed. Also sweeps `parent`."""
    parent.mkdir(parents=True, exist_ok=True)
    sweep(parent)
    folder, held = _owned(parent, name)
    with _removed_after(folder, held):
        yield folder


@contextmanager
def _removed_after(folder: Path, held: Lock | None) -> Iterator[None]:
    """Removes the folder and releases its lock after the block, or when the process ends within the block."""
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
    """A new folder, which is locked before another process can sweep it."""
    while True:
        folder = parent / f".{name}.{uuid.uuid4().hex[:8]}{SUFFIX}"
        folder.mkdir()
        try:
            return folder, Lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, FileNotFoundError):
            continue  # another process swept it between the two calls
        except OSError:
            return folder, None  # a file system without locks: `sweep` leaves its folders


def sweep(parent: Path) -> int:
    """Removes the temporary folders in `parent` whose processes have ended. Returns how many it removed."""
    removed = 0
    for folder in parent.glob(f".*{SUFFIX}"):
        if held := lock(folder, exclusive=True):
            shutil.rmtree(folder, ignore_errors=True)
            held.close()
            removed += not folder.exists()  # a folder of another user cannot be removed
    return removed


@contextmanager
def alone(parent: Path, name: str, wait: Callable[[], object]) -> Iterator[None]:
    """Runs the block in one process, and in one of its threads, at a time. If another one runs it, calls `wait` and
    then blocks until that one has finished. On file systems without locks, nothing blocks."""
    folder = parent / f".{name}{SUFFIX}"
    held = None
    while held is None:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            held = Lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            wait()
            with suppress(FileNotFoundError):
                Lock(folder, fcntl.LOCK_EX).close()  # blocks until the lock is released; by then the folder is removed
        except FileNotFoundError:  # another process swept it between the two calls
            continue
        except OSError:
            break
    with _removed_after(folder, held):
        yield


@contextmanager
def temporary(name: str) -> Iterator[Path]:
    """`scratch` in the system's folder for temporary files. Raises UserError if the disk is full."""
    try:
        parent = Path(tempfile.gettempdir())
    except FileNotFoundError as error:  # gettempdir tests folders by writing, and raises this if the disk is full
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
    """Whether the file of an OSError is below a folder. Errors of writes name no file, and count as within."""
    return file is None or Path(str(file)).is_relative_to(parent)
