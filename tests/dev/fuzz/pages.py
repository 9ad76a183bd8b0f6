"""Fuzzes the cache on disk: python -m tests.dev.fuzz.pages --count 10000.

Pages are written once, as records in a folder and as a saved sequence. Each case changes the bytes of one of these
files, and reads all pages: each must be what was written, or not there.
"""

import os
import random
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from mlc_amd.runtime.cache.page_files import PageFiles, PageSource
from mlc_amd.runtime.cache.saved_pages import SavedPages, write_saved
from mlc_amd.runtime.errors import UserError
from tests.dev.fuzz import fuzzing, mutations
from tests.dev.fuzz.fuzzing import Case

MODEL, PAGES, SIZE = bytes(range(16)), 4, 3000
CONTENTS = {n.to_bytes(16, "little"): np.random.default_rng(n).integers(0, 256, SIZE, np.uint8) for n in range(PAGES)}


def files() -> PageFiles:
    return PageFiles(MODEL, {}, 1 << 30)


def saved(name: str) -> Path:
    return Path(os.environ["XDG_CACHE_HOME"], name)


def write() -> None:
    records = files()
    for key, contents in CONTENTS.items():
        records.write(key, contents)
    write_saved(saved("whole"), MODEL, 7, [(key, SIZE) for key in CONTENTS], CONTENTS.values())


def read(source: PageSource, least: int) -> bool:
    """UserError where fewer than `least` pages are there."""
    found = {key: np.empty(SIZE, np.uint8) for key in CONTENTS}
    there = {key: one for key, one in found.items() if source.read(key, one)}
    right = all((one == CONTENTS[key]).all() for key, one in there.items())
    if right and len(there) < least:
        raise UserError(f"{len(there)} of {PAGES} pages are there")
    return right


def read_record(key: bytes, data: bytes, source: PageFiles) -> bool:
    (source.folder / key.hex()).write_bytes(data)
    try:
        return read(source, PAGES)
    finally:
        source.write(key, CONTENTS[key])


def read_saved(data: bytes) -> bool:
    saved("changed").write_bytes(data)
    return read(SavedPages(saved("changed"), MODEL), PAGES)


def make(draw: random.Random) -> Case:
    if draw.random() < 0.5:
        data, what = mutations.bytes_changed(saved("whole").read_bytes(), draw)
        return Case("a saved sequence", what, partial(read_saved, data))
    source, key = files(), draw.choice([*CONTENTS])
    data, what = mutations.bytes_changed((source.folder / key.hex()).read_bytes(), draw)
    return Case("a record", what, partial(read_record, key, data, source))


def control() -> Case:
    return Case("nothing", "", lambda: read(files(), PAGES) and read(SavedPages(saved("whole"), MODEL), PAGES))


def main(argv: list[str] | None = None) -> int:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        write()
        return fuzzing.main(__doc__, make, control, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
