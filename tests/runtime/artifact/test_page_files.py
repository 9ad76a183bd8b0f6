"""Records of pages on disk: what is read is what was written, or nothing; who may read them; which ones are removed."""

import os
import random
import resource
import time
from pathlib import Path

import numpy as np
import pytest

from mlc_amd.runtime.cache import page_files
from mlc_amd.runtime.cache.page_files import ABOUT, HEADER, PageFiles, PageSource, header_of
from mlc_amd.runtime.cache.saved_pages import SavedPages, write_saved
from mlc_amd.runtime.errors import UserError
from tests.dev.fuzz import mutations

MODEL, SIZE = bytes(range(16)), 5000
ABOUT_IT = {"name": "a model", "path": "/nowhere"}


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def contents(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SIZE).astype(np.uint8)


@pytest.fixture
def files(tmp_path, monkeypatch) -> PageFiles:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return PageFiles(MODEL, ABOUT_IT, 1 << 20)


def read(source: PageSource, number: int, nbytes: int = SIZE) -> np.ndarray | None:
    target = np.empty(nbytes, np.uint8)
    return target if source.read(key(number), target) else None


def file_of(files: PageFiles, number: int) -> Path:
    return files.folder / key(number).hex()


def test_what_is_written_is_read_and_only_by_its_owner(files):
    assert read(files, 1) is None and key(1) not in files
    os.umask(before := os.umask(0))
    try:
        os.umask(0)
        files.write(key(1), contents(1))
    finally:
        os.umask(before)
    assert key(1) in files and (read(files, 1) == contents(1)).all()
    assert [path.stat().st_mode & 0o777 for path in (files.folder.parent, files.folder)] == [0o700] * 2
    assert {path.stat().st_mode & 0o777 for path in files.folder.iterdir()} == {0o600}
    assert sorted(path.name for path in files.folder.iterdir()) == sorted([key(1).hex(), ABOUT])


def foreign(path: Path, kind: str) -> None:
    """Puts something else in the place of a record."""
    path.unlink()
    if kind == "another":  # a whole record of another page
        path.write_bytes(header_of(key(2), contents(2)) + contents(2).tobytes())
    elif kind == "link":
        path.symlink_to(path.with_name(key(2).hex()))
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()


@pytest.mark.parametrize("kind", ["another", "link", "pipe", "folder"])
def test_what_is_no_record_of_the_page_is_not_there(files, kind):
    for number in (1, 2):
        files.write(key(number), contents(number))
    foreign(file_of(files, 1), kind)
    assert read(files, 1) is None
    assert (read(files, 2) == contents(2)).all()
    assert read(files, 2, SIZE - 1) is None  # of a page of another size
    if kind != "folder":
        files.write(key(1), contents(1))
        assert (read(files, 1) == contents(1)).all()


def test_damage_is_found(files, tmp_path):
    files.write(key(1), contents(1))
    whole, draw, found = file_of(files, 1).read_bytes(), random.Random(3), 0
    saved = tmp_path / "saved"
    write_saved(saved, MODEL, 7, [(key(i), SIZE) for i in range(3)], map(contents, range(3)))
    table = saved.read_bytes()
    for _ in range(300):
        changed, _ = mutations.bytes_changed(whole, draw)
        file_of(files, 1).write_bytes(changed)
        assert (read(files, 1) is None) == (changed != whole)
        changed, _ = mutations.bytes_changed(table, draw)
        saved.write_bytes(changed)
        try:
            pages = SavedPages(saved, MODEL)
        except UserError:
            continue
        for i in range(3):
            one = read(pages, i)
            found += one is not None
            assert one is None or (one == contents(i)).all()
    assert found  # damage to one page leaves the others


def test_a_saved_file_is_of_one_model(tmp_path):
    size = write_saved(tmp_path / "saved", MODEL, 7, [(key(1), SIZE)], [contents(1)])
    assert SavedPages(tmp_path / "saved", MODEL).size == size
    assert size.tokens == 7 and size.nbytes == (tmp_path / "saved").stat().st_size
    for path, model in ((tmp_path / "saved", bytes(16)), (tmp_path / "none", MODEL), (tmp_path, MODEL)):
        with pytest.raises(UserError):
            SavedPages(path, model)
    with pytest.raises(UserError, match="cannot save the cache"):
        write_saved(tmp_path / "none" / "saved", MODEL, 7, [], [])


def test_the_least_recently_used_go_first(files):
    past = time.time() - 1000
    for number in range(6):
        files.write(key(number), contents(number))
        os.utime(file_of(files, number), (past + number, past + number))
    small = PageFiles(bytes(16), ABOUT_IT, 8 * 8192)  # one page of another model is one too many
    files.touch([key(0)])
    for number in (10, 11, 12):
        small.write(key(number), contents(number))
    assert [number for number in range(6) if key(number) in files] == [0, 2, 3, 4, 5]
    assert all(key(number) in small for number in (10, 11, 12))
    small.write(key(13), np.zeros(9 * 8192, np.uint8))  # more than the limit
    assert key(13) not in small and key(12) in small


def test_a_full_disk_leaves_nothing(files):
    files.write(key(1), contents(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER.size + SIZE - 1, hard))
    try:
        with pytest.raises(OSError, match="large"):
            files.write(key(2), contents(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in files.folder.iterdir()) == sorted([key(1).hex(), ABOUT])
    files.write(key(2), contents(2))
    assert (read(files, 2) == contents(2)).all()


def test_what_killed_processes_left_is_removed(files):
    files.write(key(1), contents(1))
    left = files.folder / "1-1.tmp"
    left.write_bytes(b"half")
    assert len(list(page_files.records(files.folder))) == 2 and left.exists()  # a process may be writing it
    os.utime(left, (1, 1))
    assert [file.path.name for file in page_files.records(files.folder)] == [key(1).hex()]
    assert not left.exists()
