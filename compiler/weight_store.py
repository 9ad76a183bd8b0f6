"""A store of packed weights, shared by all artifacts that have the same weights. FOLDER/<key>/ holds the weights file
and its facts (FACTS). Artifacts have hard links to this file; a file whose only link is the store's is unused.

In: a key, from `key` of compiler/weights.py. Out: the weights file at a place in an artifact. `stored` and `drop` are
for code that removes unused weights.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlc_amd.runtime.artifact.artifact import WEIGHTS, sha256
from mlc_amd.runtime.folders import scratch

FACTS = "facts.json"  # {"bytes": size, "sha256": digest} of the file, as in a manifest's `files`


@dataclass(frozen=True)
class WeightStore:
    """A store in `folder`. keep: whether `put` adds new weights. verify: whether `take` reads the whole file to find
    damage."""

    folder: Path
    keep: bool = True
    verify: bool = False

    def take(self, key: str, place: Path) -> dict | None:
        """Puts the weights file at `place`: a hard link, or a copy if the folders are on different file systems.
        Returns its facts. Returns None if the store does not have these weights, or if they are damaged; damaged ones
        are removed."""
        home = self.folder / key
        try:
            facts = json.loads((home / FACTS).read_text())
            _link_or_copy(home / WEIGHTS, place)
            good = place.stat().st_size == facts["bytes"]
            if good and (not self.verify or sha256(place) == facts["sha256"]):
                return facts
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):  # the file of facts is damaged
            pass
        drop(home)
        place.unlink(missing_ok=True)
        return None

    def put(self, key: str, place: Path) -> dict:
        """Adds the file at `place` to the store, if the file system has hard links. Returns its facts."""
        facts = {"bytes": place.stat().st_size, "sha256": sha256(place)}
        if self.keep:
            with scratch(self.folder, key) as temporary:
                try:
                    os.link(place, temporary / WEIGHTS)
                    (temporary / FACTS).write_text(json.dumps(facts))
                    temporary.rename(self.folder / key)
                except OSError:  # no hard links, or another process was faster: only the artifact has this file
                    pass
        return facts


def _link_or_copy(source: Path, place: Path) -> None:
    try:
        os.link(source, place)
    except OSError:  # another file system, or no hard links
        shutil.copyfile(source, place)


def stored(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yields, for each key, its folder and the `stat` of its weights file."""
    for home in sorted(folder.glob(f"[!.]*/{WEIGHTS}")):
        try:
            yield home.parent, home.stat()
        except FileNotFoundError:  # removed meanwhile
            continue


def drop(home: Path) -> None:
    """Removes the folder of a key. Artifacts keep the file through their own links."""
    (home / FACTS).unlink(missing_ok=True)  # first: a folder without it is not used
    shutil.rmtree(home, ignore_errors=True)
