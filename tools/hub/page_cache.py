"""The KV caches on disk (runtime/cache/page_files.py), of all models: what there is, and what nobody needs."""

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
    """Of one artifact on one kind of device. name, path: the artifact's, "" where they are not known."""

    folder: Path
    name: str
    path: str
    files: tuple[RecordFile, ...]

    @property
    def nbytes(self) -> int:
        """On disk."""
        return sum(file.nbytes for file in self.files)

    @property
    def used(self) -> float:
        """When it was used last, seconds since the epoch."""
        return max((file.used for file in self.files), default=0.0)


def stored() -> list[StoredCache]:
    """Those used last first."""
    return sorted((_stored(folder) for folder in page_files.folders()), key=lambda cache: -cache.used)


def _stored(folder: Path) -> StoredCache:
    try:
        about = json.loads((folder / ABOUT).read_text())
        name, path = str(about["name"]), str(about["path"])
    except (OSError, ValueError, LookupError, TypeError):
        name, path = "", ""
    return StoredCache(folder, name, path, tuple(page_files.records(folder)))


def unneeded(removed: Iterable[Path], age: float | None = None) -> list[RecordFile]:
    """What `prune` removes: the files of artifacts that are not there or among those, and those not used for `age`
    seconds."""
    paths, now = {str(path.resolve()) for path in removed}, time.time()
    found = []
    for cache in stored():
        gone = not cache.path or cache.path in paths or not Path(cache.path).exists()
        found += [file for file in cache.files if gone or (age is not None and now - file.used > age)]
    return found


def drop(files: Iterable[RecordFile]) -> None:
    """Removes these, and folders without files."""
    page_files.remove_oldest(files, 1 << 62)
    for cache in stored():
        if not cache.files:
            shutil.rmtree(cache.folder, ignore_errors=True)


def total() -> int:
    """Bytes on disk."""
    return sum(cache.nbytes for cache in stored())
