"""Writes pages of the KV cache to disk, in a background thread: complete pages, last pages of sequences, and states.

The contents of an indexed page never change. So the thread can copy a page some time after it was indexed, between two
steps, unless the page was evicted meanwhile. While answers are being generated, the thread uses at most SHARE of the
steps' time; if the device computes on the host's cores, at most SHARE of the cores' time.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from mlc_amd.runtime.cache.kv_cache import KvCache
from mlc_amd.runtime.cache.page_files import PageFiles, PageKeys
from mlc_amd.runtime.cache.prefixes import PrefixDigest
from mlc_amd.runtime.engine.step_loop import StepLoop
from mlc_amd.runtime.errors import MachineError

SHARE = 1 / 48
_ROUND = 0.001  # seconds: a round of copying between two steps starts no further page after this time
_MOST = 16  # upper limit of the pages of a round on a GPU
_LEAST = 0.002  # seconds that a round counts at least, as it also ends the overlap of steps on a GPU
_LEAST_ON_HOST = 0.00025  # the same on the host, where a round is one page, so that it delays a short answer little

log = logging.getLogger("mlc_amd")


class PageWriter:
    """The thread, and the `IndexListener` that tells it about pages; the index calls it with the step lock held."""

    def __init__(self, loop: StepLoop, cache: KvCache, device, keys: PageKeys, files: PageFiles) -> None:
        self._loop, self._cache, self._device, self._keys, self._files = loop, cache, device, keys, files
        self._spans = [*cache.page_tables]
        self._most, self._least = (1, _LEAST_ON_HOST) if device.on_host else (_MOST, _LEAST)
        self._changed = threading.Condition()
        self._added: deque[tuple[PrefixDigest, int, int]] = deque()  # pages to write, in order: (digest, span, page)
        self._used: deque[list[PrefixDigest]] = deque()  # chains of complete pages that were used
        self._closing = self._failed = False
        self._thread = threading.Thread(target=self._run, name="mlc-amd pages", daemon=True)
        self._thread.start()
        cache.index.listener = self

    def added(self, known: PrefixDigest, span: int, page: int) -> None:
        with self._changed:
            self._added.append((known, span, page))
            self._changed.notify()

    def used(self, chain: Sequence[PrefixDigest]) -> None:
        with self._changed:
            self._used.append(list(chain))
            self._changed.notify()

    def close(self) -> None:
        """Writes all remaining pages, at full speed, and ends the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._wait():
            try:
                spent = max(self._write(), self._least)
            except MachineError:  # the device is gone
                return
            except OSError as error:
                if not self._failed:
                    log.warning("cannot write the KV cache to %s: %s", self._files.folder, error.strerror)
                self._failed = True  # so that there is one warning; later pages are tried again
                self._added.clear()
                continue
            if self._loop.busy:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, spent / SHARE - spent)

    def _wait(self) -> bool:
        """Waits for work. Returns False when the thread must end."""
        with self._changed:
            self._changed.wait_for(lambda: self._added or self._used or self._closing)
            return bool(self._added or self._used)

    def _write(self) -> float:
        """Writes some pages, or if there are none, marks files as used. Returns the seconds that count for SHARE."""
        begun = time.perf_counter()
        if not self._added:
            # The first page is marked last, so that it is deleted last: later pages are useless without it.
            chain = reversed(self._used.popleft())
            self._files.touch(self._keys.of(known, span) for known in chain for span in self._spans)
            return time.perf_counter() - begun if self._device.on_host else 0.0
        copied: list[tuple[bytes, np.ndarray]] = []
        with self._loop.exclusive():
            begun = time.perf_counter()
            while self._added and len(copied) < self._most and time.perf_counter() - begun < _ROUND:
                known, span, page = self._added.popleft()
                key = self._keys.of(known, span)
                if self._cache.index.contents(span, page) == known and key not in self._files:
                    copied.append((key, self._device.read_pages(span, [page])[0]))
        held = time.perf_counter() - begun
        for one in copied:
            self._files.write(*one)
        return time.perf_counter() - begun if self._device.on_host else held
