"""Packed weights, kept once for all artifacts that have the same: FOLDER/<key>/ with the file and what is known of it.
Artifacts have hard links to that file; one whose last link is the store's own is unused.

In: a key of compiler/weights.py. Out: the file at a place in an artifact. `stored` and `drop` are for who tidies up.
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
    """keep: whether `put` adds weights that are not there. verify: whether `take` reads the file to find damage."""

    folder: Path
    keep: bool = True
    verify: bool = False

    def take(self, key: str, place: Path) -> dict | None:
        """Puts the weights at `place`: a link, or a copy on another file system. Returns their facts; None where they
        are not here, or damaged, which removes them."""
        home = self.folder / key
        try:
            facts = json.loads((home / FACTS).read_text())
            _link_or_copy(home / WEIGHTS, place)
            good = place.stat().st_size == facts["bytes"]
            if good and (not self.verify or sha256(place) == facts["sha256"]):
                return facts
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):  # of a damaged file of facts
            pass
        drop(home)
        place.unlink(missing_ok=True)
        return None

    def put(self, key: str, place: Path) -> dict:
        """Adds the file at `place`, if this file system has hard links. Returns its facts."""
        facts = {"bytes": place.stat().st_size, "sha256": sha256(place)}
        if self.keep:
            with scratch(self.folder, key) as temporary:
                try:
                    os.link(place, temporary / WEIGHTS)
                    (temporary / FACTS).write_text(json.dumps(facts))
                    temporary.rename(self.folder / key)
                except OSError:  # no links here, or another process was faster: the artifact has a file of its own
                    pass
        return facts


def _link_or_copy(source: Path, place: Path) -> None:
    try:
        os.link(source, place)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, place)


def stored(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The folder of each key, and its file's state."""
    for home in sorted(folder.glob(f"[!.]*/{WEIGHTS}")):
        try:
            yield home.parent, home.stat()
        except FileNotFoundError:  # removed meanwhile
            continue


def drop(home: Path) -> None:
    """Removes a key's folder; artifacts keep their links."""
    (home / FACTS).unlink(missing_ok=True)  # first: a folder without it is not used
    shutil.rmtree(home, ignore_errors=True)
