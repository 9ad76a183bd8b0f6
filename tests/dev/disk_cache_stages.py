"""GB/s of what reading the cache on disk is made of: python -m tests.dev.disk_cache_stages ARTIFACT --tokens 100000.

The pages of a prompt are written to a folder, with numbers that mean nothing, so that none must be computed. Then: the
files read past the system's file cache (O_DIRECT) and from it, their checksums, records as readers read them, and the
device's `write_pages`, each alone; at last all of it together, after the files were dropped from the file cache, and
once more. Needs no compiler: a copy of this file runs beside a bundle's `lib`.
"""

import argparse
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from mlc_amd.runtime.cache import page_files
from mlc_amd.runtime.cache.page_files import PageFiles, PageKeys
from mlc_amd.runtime.cache.pages import PAGE
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.engine.requests import Request
from mlc_amd.runtime.images.rows import Prompt
from mlc_amd.runtime.options import RunOptions

LIMIT = "400G"
THREADS = 1, 4, 8, 16
FINITE = 0x33  # the bits of bytes that make small numbers of any type


def speed(name: str, nbytes: int, work: Callable[[], object]) -> None:
    begun, used = time.perf_counter(), time.process_time()
    work()
    seconds, used = time.perf_counter() - begun, time.process_time() - used
    print(f"{name:<44} {nbytes / seconds / 1e9:7.2f} GB/s {seconds:7.2f} s {used:7.2f} s of a core", flush=True)


def threaded(
    threads: int, size: int, work: Callable[[Path, np.ndarray], object], paths: Sequence[Path]
) -> Callable[[], object]:
    """`work` for all paths, by so many threads, each with memory of its own of `size` bytes."""
    own = threading.local()

    def with_memory(path: Path) -> None:
        if not hasattr(own, "memory"):
            own.memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)  # at a page's beginning, as O_DIRECT wants it
            own.memory[:] = 0
        work(path, own.memory)

    def all_of() -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(with_memory, paths))

    return all_of


def drop(paths: Sequence[Path]) -> None:
    """From the system's file cache."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def read_file(path: Path, memory: np.ndarray, flags: int = 0) -> None:
    file = os.open(path, os.O_RDONLY | flags)
    while os.readv(file, [memory.data]) == memory.nbytes:
        pass
    os.close(file)


def restore(engine: Engine, request: Request) -> None:
    """Reads what the request's sequence lacks, as for an answer that begins."""
    restoring = engine.stored._restoring
    assert restoring.begin(request), "there is nothing to be read"
    while restoring.waits:
        restoring.piece()
    assert request.sequence and request.sequence.match() >= 0
    assert request.sequence.computed == (len(request.sequence.tokens) - 1) // PAGE * PAGE, "pages were not read"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("artifact")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--folder", help="where the files are written: on the disk that is to be measured")
    parser.add_argument("--answer", action="store_true", help="also the prompt's first token, with one page computed")
    given = parser.parse_args()
    draw = np.random.default_rng(1)
    ids = draw.integers(0, 900, given.tokens).tolist()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        with Engine.load(given.artifact, RunOptions(cache_disk=LIMIT)) as engine:
            device, cache = engine.device, engine.cache
            keys = PageKeys(engine.artifact.manifest, device, cache.page_tables)
            sizes = {span: sum(nbytes for _, nbytes in device.page_parts(span)) for span in cache.page_tables}
            files = PageFiles(keys.model, {"name": "", "path": ""}, 400 << 30)
            chain = cache.sequence(Prompt(ids)).chain((len(ids) - 1) // PAGE)
            contents = {span: draw.integers(0, 256, size).astype(np.uint8) & FINITE for span, size in sizes.items()}
            for known in chain:
                for span, one in contents.items():
                    files.write(keys.of(known, span), one)
            paths = sorted(path for path in files.folder.iterdir() if path.name != page_files.ABOUT)
            nbytes = sum(path.stat().st_size for path in paths)
            print(f"{device.name}, {os.cpu_count()} cores: {len(paths)} pages, {nbytes / 1e6:.0f} MB, of {sizes}")
            span, size = max(sizes.items(), key=lambda one: one[1])
            wanted = {files._path(keys.of(known, span)): keys.of(known, span) for known in chain}

            def stage(name: str, work: Callable[[Path, np.ndarray], object], nbytes: int, dropped=False) -> None:
                for threads in THREADS:
                    if dropped:
                        drop(paths)
                    every = threaded(threads, nbytes, work, [*wanted])
                    speed(f"{name}, {threads} threads", nbytes * len(wanted), every)

            def read_record(path: Path, memory: np.ndarray) -> None:
                assert files.read(wanted[path], memory)

            whole = -(-(size + page_files.HEADER.size) // 4096) * 4096
            stage("disk, O_DIRECT", lambda path, memory: read_file(path, memory, os.O_DIRECT), whole, dropped=True)
            stage("disk", read_file, whole, dropped=True)
            stage("file cache", read_file, whole)
            stage("checksum", lambda _, memory: page_files.header_of(bytes(16), memory), size)
            stage("records, read and checked", read_record, size)
            for name, memory in (("any memory", np.empty((8, size), np.uint8)), ("its", device.page_memory(span, 8))):
                memory[:] = contents[span]
                for count in (1, 8):

                    def write(many=memory[:count]) -> None:
                        for _ in range(0, len(chain), len(many)):
                            device.write_pages(span, range(len(many)), many)

                    write()
                    speed(f"write_pages, {count} pages, {name}", -(-len(chain) // count) * count * size, write)
        for name, dropped in (("disk", True), ("file cache", False), ("file cache", False)):
            if dropped:
                drop(paths)
            with Engine.load(given.artifact, RunOptions(cache_disk=LIMIT)) as engine:
                request = Request(ids, 1, "")
                request.sequence = engine.cache.sequence(Prompt(ids))
                speed(f"all pages into the cache, {name}", nbytes, lambda of=(engine, request): restore(*of))
            if given.answer:
                with Engine.load(given.artifact, RunOptions(cache_disk=LIMIT)) as engine:
                    for _ in engine.generate(ids[:10], max_tokens=2):  # what the first step of a process takes
                        pass
                    answer = engine.generate(ids, max_tokens=1)
                    speed(f"first token of the prompt, {name}", nbytes, lambda answer=answer: list(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
