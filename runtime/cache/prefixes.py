"""The index of the contents of pages. It finds the pages that a new sequence can share with older sequences.

The key of a complete page is the digest of its sequence up to the page's end. Digests form a hash chain, so a digest
depends on all tokens before it. All groups (spans) share one index: a `PrefixDigest` leads to a page of each group that
has one. Pages of windowed groups are evicted independently, as later rows do not attend to them.

The last page of a sequence may be incomplete. When the sequence ends, this page becomes a *tail*: the pages of all
groups for the tokens that follow a digest. The first sequence that continues a tail removes it from the index and
writes to its pages.

Cells (`pages.STATE`) are indexed like pages. The cell of a digest has the state after its tokens, the cell of a tail
the state after the whole tail. Most digests have no cell; a sequence can only begin at one that has.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from hashlib import blake2b
from typing import Protocol

from mlc_amd.runtime.cache.pages import PAGE, STATE, PagePool

PrefixDigest = bytes
ROOT: PrefixDigest = b""  # the digest of no tokens


def digest(parent: PrefixDigest, tokens: SequenceOf[int]) -> PrefixDigest:
    """The digest of the tokens of `parent`, followed by a page of `tokens` (int32 each)."""
    return blake2b(parent + array("i", tokens).tobytes(), digest_size=16).digest()


def first_page(span: int, complete: int) -> int:
    """The first page that rows from position complete * PAGE on attend to. span: 0: all keys; STATE: the last page."""
    if span == STATE:
        return max(complete - 1, 0)
    return max(complete * PAGE - span + 1, 0) // PAGE if span else 0


class IndexListener(Protocol):
    """Is notified of what is indexed, to keep the contents elsewhere, too."""

    def added(self, known: PrefixDigest, span: int, page: int) -> None:
        """A page was indexed: a complete one, or one of a tail. See `PrefixIndex.contents`."""

    def used(self, chain: SequenceOf[PrefixDigest]) -> None:
        """A sequence with these complete pages is being freed."""


class PrefixIndex:
    """Finds pages and cells by their contents. pools: by span; they call `_evict` before allocating an idle page."""

    listener: IndexListener | None = None

    def __init__(self, pools: dict[int, PagePool]) -> None:
        self.pools = pools
        self._complete: dict[PrefixDigest, dict[int, int]] = {}
        self._digests: dict[int, dict[int, PrefixDigest]] = {span: {} for span in pools}  # of complete pages
        # The tails after a digest, sorted by their tokens. No tail begins with another one.
        self._tails: dict[PrefixDigest, list[tuple[int, ...]]] = {}
        self._tail_pages: dict[tuple[PrefixDigest, tuple[int, ...]], dict[int, int]] = {}
        self._tail_of: dict[int, dict[int, tuple[PrefixDigest, tuple[int, ...]]]] = {span: {} for span in pools}
        for span, pool in pools.items():
            pool.evicted = lambda page, span=span: self._evict(span, page)

    def __len__(self) -> int:
        """The number of digests with pages."""
        return len(self._complete)

    def __contains__(self, known: PrefixDigest) -> bool:
        return known in self._complete

    def page(self, known: PrefixDigest, span: int) -> int | None:
        """The complete page of a group that ends at `known`, or None."""
        return self._complete.get(known, {}).get(span)

    def add(self, known: PrefixDigest, span: int, page: int) -> None:
        """Indexes a complete page, which is held. There must be no page of this group for the digest."""
        self._complete.setdefault(known, {})[span] = page
        self._digests[span][page] = known
        self.pools[span].index(page)
        if self.listener:
            self.listener.added(known, span, page)

    def contents(self, span: int, page: int) -> PrefixDigest | None:
        """The digest of the sequence up to the end of an indexed page, complete or in a tail; None if not indexed."""
        tail = self._tail_of[span].get(page)
        return digest(*tail) if tail else self._digests[span].get(page)

    def usable(
        self,
        digests: SequenceOf[PrefixDigest],
        states: bool = True,
        elsewhere: Callable[[PrefixDigest, int], bool] = lambda known, span: False,
    ) -> int:
        """The largest n for which a sequence can begin with the pages of digests[:n]: groups with span 0 must have all
        of these pages, windowed groups those that rows after n pages attend to. states: there must also be a state
        after them. elsewhere: whether a page of a digest and a span that is not indexed can be obtained otherwise."""
        groups = self.pools.keys() - (set() if states else {STATE})
        best, runs = 0, dict.fromkeys(groups, 0)  # the number of consecutive pages before n
        for n, known in enumerate(digests, 1):
            pages = self._complete.get(known, {})
            for span in runs:
                runs[span] = runs[span] + 1 if span in pages or elsewhere(known, span) else 0
            if 0 in runs and runs[0] < n:
                break
            if all(run >= n - first_page(span, n) for span, run in runs.items()):
                best = n
        return best

    # ---- tails

    def add_tail(self, parent: PrefixDigest, tokens: SequenceOf[int], pages: dict[int, int]) -> None:
        """Indexes incomplete pages, which are held: `tokens` follow `parent`. pages: {span: page} of all groups. Does
        nothing if a tail begins with these tokens; replaces a tail with which these tokens begin."""
        new = tuple(tokens)
        tails = self._tails.setdefault(parent, [])
        at = bisect_left(tails, new)
        if at < len(tails) and tails[at][: len(new)] == new:
            return
        if at and new[: len(tails[at - 1])] == tails[at - 1]:
            self._drop_tail((parent, tails[at - 1]))
            tails = self._tails.setdefault(parent, [])
        insort(tails, new)
        key = parent, new
        self._tail_pages[key] = pages
        for span, page in pages.items():
            self._tail_of[span][page] = key
            self.pools[span].index(page)
        if self.listener:
            known = digest(parent, new)
            for span, page in pages.items():
                self.listener.added(known, span, page)

    def take_tail(self, parent: PrefixDigest, tokens: SequenceOf[int]) -> tuple[int, dict[int, int]]:
        """Finds the tail after `parent` that shares the longest prefix, n tokens, with `tokens`. Returns (n, {span:
        page}). The pages are now held, and no longer indexed. Returns (0, {}) if n is less than half of the tail,
        because another sequence may need it more; or if the tail has a state and n is not its whole length."""
        wanted, tails = tuple(tokens), self._tails.get(parent, [])
        at = bisect_left(tails, wanted)
        near = [(_common(tail, wanted), tail) for tail in tails[max(at - 1, 0) : at + 1]]
        n, tail = max(near, default=(0, ()))
        if not n or 2 * n < len(tail):
            return 0, {}
        pages = self._tail_pages[parent, tail]
        if STATE in pages and n < len(tail):
            return 0, {}
        for span, page in pages.items():
            self.pools[span].retain(page)
        self._drop_tail((parent, tail))
        return n, pages

    def _drop_tail(self, key: tuple[PrefixDigest, tuple[int, ...]]) -> None:
        parent, tail = key
        tails = self._tails[parent]
        del tails[bisect_left(tails, tail)]
        if not tails:
            del self._tails[parent]
        for span, page in self._tail_pages.pop(key).items():
            del self._tail_of[span][page]
            self.pools[span].forget(page)

    # ---- eviction

    def remove(self, digests: SequenceOf[PrefixDigest]) -> None:
        """Removes the complete pages of these digests that no sequence holds from the index."""
        for known in digests:
            pages = self._complete.get(known, {})
            for span in [span for span, page in pages.items() if not self.pools[span].holders(page)]:
                self._forget(span, pages.pop(span))
            if not pages:
                self._complete.pop(known, None)

    def clear(self) -> None:
        """Removes all pages and tails from the index."""
        for parent, tails in list(self._tails.items()):
            for tail in list(tails):
                self._drop_tail((parent, tail))
        for pages in self._complete.values():
            for span, page in pages.items():
                self._forget(span, page)
        self._complete.clear()

    def _evict(self, span: int, page: int) -> None:
        """Removes an idle page from the index, and the pages of other groups that are useless without it."""
        if page in self._tail_of[span]:
            self._drop_tail(self._tail_of[span][page])
            return
        known = self._digests[span][page]
        pages = self._complete[known]
        for other in list(pages) if span == 0 else [span]:
            self._forget(other, pages.pop(other))
        if not pages:
            del self._complete[known]

    def _forget(self, span: int, page: int) -> None:
        del self._digests[span][page]
        self.pools[span].forget(page)


def _common(a: SequenceOf[int], b: SequenceOf[int]) -> int:
    """The length of the common prefix."""
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)
