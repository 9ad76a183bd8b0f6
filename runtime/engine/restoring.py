"""Reads pages of the KV cache from disk for requests that wait for them. Threads read the files to host memory; between
the steps of other answers, the device copies several pages at a time from there.

When a request could start, `begin` searches the disk for pages of its prompt that are not in the cache. If there are
any, the request waits until they are read. Pages that cannot be read are computed.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from mlc_amd.runtime.cache.kv_cache import KvCache
from mlc_amd.runtime.cache.page_files import PageKeys, PageSource
from mlc_amd.runtime.cache.pages import PAGE
from mlc_amd.runtime.cache.prefixes import ROOT, PrefixDigest, digest, first_page
from mlc_amd.runtime.cache.sequence import Sequence as TokenSequence
from mlc_amd.runtime.engine.requests import Request
from mlc_amd.runtime.host import available_threads

READERS = min(8, max(4, available_threads() // 2))  # threads; on a fast disk, the checksum takes longer than the read
_AHEAD = 128 << 20  # upper limit of the bytes that are read, but not in the cache yet
_PIECE = 8  # upper limit of the pages that are copied to the cache between two steps


class _Stored(NamedTuple):
    """A page to read. tail: (digest of the pages before it, its tokens) if it is not complete, otherwise None."""

    known: PrefixDigest
    span: int
    source: PageSource
    tail: tuple[PrefixDigest, list[int]] | None = None


class _Job:
    """The pages of a request. pages: those that no thread reads yet. reading: (page, its row of the memory of its span,
    whether it could be read), in the order of `pages`."""

    def __init__(self, request: Request, pages: Sequence[_Stored]) -> None:
        self.request, self.pages = request, deque(pages)
        self.reading: deque[tuple[_Stored, int, Future[bool]]] = deque()
        self.tail: dict[int, int] = {}  # {span: page of the tail}, held until the pages of all spans are there


class Restoring:
    """See the module's docstring. sources: where to search for pages; the list may be changed with the step lock held.
    All methods must be called with the step lock held."""

    def __init__(self, cache: KvCache, device, keys: PageKeys, sources: Sequence[PageSource]) -> None:
        self._cache, self._device, self._keys, self._sources = cache, device, keys, sources
        self._pools = cache.index.pools
        nbytes = sum(nbytes for span in self._pools for _, nbytes in device.page_parts(span))
        self._ahead = max(min(_AHEAD // nbytes, 8 * _PIECE), 2)
        self._memory: dict[int, np.ndarray] = {}  # {span: uint8 [self._ahead, bytes]}, ring buffers of pages
        self._rows = dict.fromkeys(self._pools, 0)  # {span: next row of the ring buffer}
        self._readers = ThreadPoolExecutor(READERS, "mlc-amd reads")
        self._jobs: deque[_Job] = deque()
        self._was_last = False

    def close(self) -> None:
        self._readers.shutdown(cancel_futures=True)

    def begin(self, request: Request) -> bool:
        """Searches the disk for pages of a request, whose sequence has already matched what is in the cache. Returns
        whether there are any: then the request must wait."""
        sequence = request.sequence
        if request.stored != "unknown" or request.scored is not None or sequence is None:
            return False
        pages = self._find(sequence)
        request.stored = "reading" if pages else "read"
        if pages:
            self._jobs.append(_Job(request, pages))
            self._read_ahead()
        return bool(pages)

    @property
    def waits(self) -> bool:
        """Whether there are requests that wait for pages."""
        return bool(self._jobs)

    def takes_turn(self) -> bool:
        """Whether to call `piece` before the next step: if a page has been read, and the last call returned False."""
        ready = self.waits and all(future.done() for *_, future in [*self._jobs[0].reading][:1])
        self._was_last = ready and not self._was_last
        return self._was_last

    def piece(self) -> Iterable[tuple[Request, Exception]]:
        """Copies pages of one span into the cache: at least one, for which it waits. Returns (): no request fails."""
        job, full = self._jobs[0], False
        taken: list[tuple[_Stored, int, int]] = []  # (page, its row, its place in the cache)
        while job.reading and not full and len(taken) < _PIECE:
            page, row, future = job.reading[0]
            if taken and not (future.done() and (page.span, row) == (taken[-1][0].span, taken[-1][1] + 1)):
                break
            job.reading.popleft()
            if future.result() and not self._is_there(page):
                full = not self._pools[page.span].available
                taken += [] if full else [(page, row, self._pools[page.span].allocate())]
        self._put(job, taken)
        if not (full or job.request.state == "done"):
            self._read_ahead()
            if job.reading:
                return ()
        self._end(job)
        return ()

    # ---- the search

    def _find(self, sequence: TokenSequence) -> list[_Stored]:
        """The stored pages that continue the pages that a sequence has; none if they do not all fit into the cache. The
        last page comes first, as when a sequence is freed, so that it is evicted before the others."""
        known: dict[tuple[PrefixDigest, int], PageSource | None] = {}

        def source(of: PrefixDigest, span: int) -> PageSource | None:
            if (of, span) not in known:
                key = self._keys.of(of, span)
                known[of, span] = next((one for one in self._sources if key in one), None)
            return known[of, span]

        index, limit = self._cache.index, len(sequence.tokens) - 1
        chain = sequence.chain(limit // PAGE)

        def longest(states: bool) -> tuple[int, int, list[int]]:
            """(number of tokens, number of complete pages, tokens of the tail after them) of the longest prefix that is
            in the cache or stored. states: whether it needs a stored state at its end."""
            n = index.usable(chain, states, lambda of, span: source(of, span) is not None)
            tail = self._tail(chain[n - 1] if n else ROOT, sequence.tokens[n * PAGE : limit][: PAGE - 1], source)
            return (n * PAGE + len(tail) if states or tail else 0), n, tail

        tokens, paged, tail = max(longest(states=True), longest(states=False))
        if tokens <= sequence.computed:
            return []
        found, kept = [], []
        for span, pool in self._pools.items():
            if tail:
                parent = chain[paged - 1] if paged else ROOT
                ends = digest(parent, tail)
                if place := source(ends, span):
                    found.append(_Stored(ends, span, place, (parent, tail)))
            for of in reversed(chain[first_page(span, paged) : paged]):
                if (page := index.page(of, span)) is not None:
                    pool.retain(page)  # counted as used: it must not be evicted for pages that are read
                    kept.append((pool, page))
                elif place := source(of, span):
                    found.append(_Stored(of, span, place))
        needed = {span: sum(page.span == span for page in found) for span in self._pools}
        fits = all(pool.available >= needed[span] for span, pool in self._pools.items())
        for pool, page in kept:
            pool.release(page)
        return found if fits else []

    def _tail(
        self, parent: PrefixDigest, rest: list[int], source: Callable[[PrefixDigest, int], PageSource | None]
    ) -> list[int]:
        """The longest prefix of `rest` that is stored as a tail after the digest `parent`."""
        for count in range(len(rest), 0, -1):
            known = digest(parent, rest[:count])
            if all(source(known, span) for span in self._pools):
                return rest[:count]
        return []

    # ---- reading

    def _read_ahead(self) -> None:
        job = self._jobs[0]
        self._memory = self._memory or {span: self._device.page_memory(span, self._ahead) for span in self._pools}
        while job.pages and len(job.reading) < self._ahead:
            page = job.pages.popleft()
            if self._is_there(page):
                continue
            key, row = self._keys.of(page.known, page.span), self._rows[page.span]
            self._rows[page.span] = (row + 1) % self._ahead
            reading = self._readers.submit(page.source.read, key, self._memory[page.span][row])
            job.reading.append((page, row, reading))

    def _is_there(self, page: _Stored) -> bool:
        """Whether a complete page is already in the cache."""
        return page.tail is None and self._cache.index.page(page.known, page.span) is not None

    def _put(self, job: _Job, taken: Sequence[tuple[_Stored, int, int]]) -> None:
        """Copies consecutive rows of a ring buffer to their places in the cache, and indexes these."""
        if not taken:
            return
        (first, begin, _), index, pool = taken[0], self._cache.index, self._pools[taken[0][0].span]
        contents = self._memory[first.span][begin : begin + len(taken)]
        self._device.write_pages(first.span, [place for *_, place in taken], contents)
        for page, _, place in taken:
            if page.tail:
                job.tail[page.span] = place
                if len(job.tail) == len(self._pools):
                    index.add_tail(*page.tail, dict(job.tail))
                    self._release_tail(job)
            else:
                index.add(page.known, page.span, place)
                pool.release(place)

    def _release_tail(self, job: _Job) -> None:
        while job.tail:
            span, place = job.tail.popitem()
            self._pools[span].release(place)

    def _end(self, job: _Job) -> None:
        for *_, future in job.reading:
            if not future.cancel():
                future.result()  # waits, because the next job may use the same row
        self._release_tail(job)
        self._jobs.remove(job)
        job.request.stored = "read"
        if self._jobs:
            self._read_ahead()
