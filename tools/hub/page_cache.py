"""The KV caches on disk (runtime/cache/page_files.py) of all models: lists them, and finds what nobody needs."""

import json
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mlc_amd.runtime.cache import page_files
from mlc_amd.runtime.cache.page_files import ABOUT, RecordFile


@dataclass(frozen=True)
class StoredCache:
    """The cache of one artifact on one kind of device. name, path: of the artifact, "" if unknown."""

    folder: Path
    name: str
    path: str
    files: tuple[RecordFile, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(file.nbytes for file in self.files)

    @property
    def used(self) -> float:
        """Time of the last use, in seconds since the epoch."""
        return max((file.used for file in self.files), default=0.0)


def stored() -> list[StoredCache]:
    """All caches, the last used first."""
    return sorted((_stored(folder) for folder in page_files.folders()), key=lambda cache: -cache.used)


def _stored(folder: Path) -> StoredCache:
    try:
        about = json.loads((folder / ABOUT).read_text())
        name, path = str(about["name"]), str(about["path"])
    except (OSError, ValueError, LookupError, TypeError):
        name, path = "", ""
    return StoredCache(folder, name, path, tuple(page_files.records(folder)))


def unneeded(removed: Iterable[Path], age: float | None = None) -> list[RecordFile]:
    """The files that `prune` removes: those of artifacts that do not exist or are in `removed`, and those not used for
    `age` seconds."""
    paths, now = {str(path.resolve()) for path in removed}, time.time()
    found = []
    for cache in stored():
        gone = not cache.path or cache.path in paths or not Path(cache.path).exists()
        found += [file for file in cache.files if gone or (age is not None and now - file.used > age)]
    return found


def drop(files: Iterable[RecordFile]) -> None:
    """Removes files, and folders that have no files left."""
    page_files.remove_oldest(files, 1 << 62)
    for cache in stored():
        if not cache.files:
            shutil.rmtree(cache.folder, ignore_errors=True)


def total() -> int:
    """Bytes of all caches on disk."""
    return sum(cache.nbytes for cache in stored())
