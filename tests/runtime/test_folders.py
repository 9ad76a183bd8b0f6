"""Temporary folders: those of killed processes are removed, those of living ones stay."""

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from mlc_amd.runtime import folders
from mlc_amd.runtime.errors import UserError

HOLD = (
    "import sys; from pathlib import Path; from mlc_amd.runtime.folders import scratch\n"
    "with scratch(Path(sys.argv[1]), 'work') as folder: print(folder, flush=True); sys.stdin.read()"
)


@pytest.fixture
def other(tmp_path):
    """A process that holds a temporary folder, and that folder's name."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], **pipes) as process:
        yield process, process.stdout.readline().strip()
        process.kill()


def names(place) -> list[str]:
    return [str(path) for path in place.iterdir()]


def test_folders_of_living_processes_stay(tmp_path, other):
    process, folder = other
    with folders.scratch(tmp_path, "mine") as mine:
        assert sorted(names(tmp_path)) == sorted([folder, str(mine)])
    assert folders.sweep(tmp_path) == 0 and names(tmp_path) == [folder]
    process.stdin.close()
    process.wait()
    assert names(tmp_path) == []


def test_folders_of_killed_processes_are_removed(tmp_path, other):
    process, folder = other
    process.kill()
    process.wait()
    assert names(tmp_path) == [folder]
    with folders.scratch(tmp_path, "mine") as mine:
        assert names(tmp_path) == [str(mine)]


def test_locks_are_shared_or_exclusive(tmp_path):
    first, second = folders.lock(tmp_path), folders.lock(tmp_path)
    assert first and second and folders.lock(tmp_path, exclusive=True) is None
    first.close()
    del second
    alone = folders.lock(tmp_path, exclusive=True)
    assert alone
    alone.close()
    assert folders.lock(tmp_path / "nothing") is None


def test_a_full_temporary_disk_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UserError, match=r"cannot write temporary files to .*TMPDIR"), folders.temporary("work"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError), folders.temporary("work"):
        raise OSError(errno.ENOSPC, "No space left on device", "/elsewhere/model")
    assert names(tmp_path) == []


def test_a_lock_of_a_folder_that_was_removed_is_none(tmp_path):
    folder, errors = tmp_path / "folder", []
    folder.mkdir()
    held = folders.Lock(folder, fcntl.LOCK_EX)

    def wait():
        try:
            folders.Lock(folder, fcntl.LOCK_EX)
        except OSError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    begun, blocked = time.monotonic(), f" -> FLOCK  ADVISORY  WRITE {os.getpid()} "
    while blocked not in Path("/proc/locks").read_text() and time.monotonic() < begun + 60:
        time.sleep(0.001)
    folder.rmdir()
    held.close()
    waiting.join()
    assert [type(error) for error in errors] == [FileNotFoundError]


@pytest.mark.parametrize(
    ("code", "room"), [(errno.ENOSPC, "free some space or "), (errno.EROFS, ""), (errno.ENOENT, "")]
)
def test_space_is_asked_for_where_it_is_missing(code, room):
    error = OSError(code, os.strerror(code))
    expected = f"cannot write model: {os.strerror(code)}; {room}choose another output with -o"
    assert folders.unwritable(Path("model"), error, "choose another output with -o") == expected
