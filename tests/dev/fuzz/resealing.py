"""Changed manifests whose checksums are right again, as if a compiler had written them: what tests and fuzzing use to
reach the checks after the checksums.

In: an artifact's folder, a manifest. Out: manifest.json with the files' sizes and checksums, and, if asked for, the
digests of interfaces after the kernels (runtime/artifact/interface.py).
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlc_amd.runtime.artifact import artifact, interface, manifest
from mlc_amd.runtime.artifact.json_files import read
from mlc_amd.runtime.errors import UserError


def content(folder: Path) -> dict[str, Any]:
    """The manifest of a good artifact, to be changed."""
    return read(folder / manifest.MANIFEST, dict[str, Any], "")


def reseal(folder: Path, changed: dict[str, Any], interfaces: bool = False) -> None:
    """Writes `changed` as manifest.json. Facts of files that it lists are computed again where these exist."""
    if interfaces:
        for library in changed["libraries"].values():
            place = folder / library
            place.write_bytes(place.read_bytes())  # its own, where it was a link
            os.truncate(place, place.stat().st_size - interface.BYTES)
        artifact.write_interfaces(folder, changed)
    facts = dict(changed["files"]) if isinstance(changed.get("files"), dict) else {}
    for name in facts:
        file = folder / name
        if "/" not in name and file.is_file():
            with suppress(UserError):  # what is to be refused may have no header
                facts[name] = artifact.facts(file)
    (folder / manifest.MANIFEST).unlink(missing_ok=True)  # it may be a link
    (folder / manifest.MANIFEST).write_text(manifest.text(changed, facts))
