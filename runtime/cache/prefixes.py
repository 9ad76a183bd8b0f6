"""The index of the pages' contents: finds the pages that a new sequence shares with older ones.

The key of a complete page is the digest of its sequence up to its end, a hash chain: so the digest of a page depends on
the contents of all pages before it, too. Groups (spans) are indexed together: `PrefixDigest` -> page of each group that
has one. Pages of windowed groups are evicted independently, as later rows do not see them.

The last page of a sequence is incomplete. When the sequence ends, it becomes a *tail*: the pages of all groups for the
tokens after a digest. The first sequence that continues a tail removes it from the index, and writes to it.

Cells (`pages.STATE`) are indexed with the pages: a digest's cell has the state after its tokens, a tail's the one after
all of the tail. Most digests have none. A sequence can only begin where there is one.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from hashlib import blake2b
from typing import Protocol

from mlc_amd.runtime.cache.pages import PAGE, STATE, PagePool

PrefixDigest = bytes
ROOT: PrefixDigest = b""  # of no tokens


def digest(parent: PrefixDigest, tokens: SequenceOf[int]) -> PrefixDigest:
    """Of `parent`'s tokens, followed by a page of tokens (int32 each)."""
    return blake2b(parent + array("i", tokens).tobytes(), digest_size=16).digest()


def first_page(span: int, complete: int) -> int:
    """The first page that rows from position complete * PAGE on see. span: 0: all keys; STATE: the last page."""
    if span == STATE:
        return max(complete - 1, 0)
    return max(complete * PAGE - span + 1, 0) // PAGE if span else 0


class IndexListener(Protocol):
    """Who keeps contents elsewhere, too."""

    def added(self, known: PrefixDigest, span: int, page: int) -> None:
        """A page is indexed, a complete one or of a tail: see `PrefixIndex.contents`."""

    def used(self, chain: SequenceOf[PrefixDigest]) -> None:
        """A sequence with these complete pages is freed."""


class PrefixIndex:
    """Pages of `pools` ({span: pool}), cells among them, by contents. The pools call `_evict` before they allocate an
    idle page."""

    listener: IndexListener | None = None

    def __init__(self, pools: dict[int, PagePool]) -> None:
        self.pools = pools
        self._complete: dict[PrefixDigest, dict[int, int]] = {}
        self._digests: dict[int, dict[int, PrefixDigest]] = {span: {} for span in pools}  # of complete pages
        # Tails after a digest in the order of their tokens, none of which begins with another's.
        self._tails: dict[PrefixDigest, list[tuple[int, ...]]] = {}
        self._tail_pages: dict[tuple[PrefixDigest, tuple[int, ...]], dict[int, int]] = {}
        self._tail_of: dict[int, dict[int, tuple[PrefixDigest, tuple[int, ...]]]] = {span: {} for span in pools}
        for span, pool in pools.items():
            pool.evicted = lambda page, span=span: self._evict(span, page)

    def __len__(self) -> int:
        """Number of digests with pages."""
        return len(self._complete)

    def __contains__(self, known: PrefixDigest) -> bool:
        return known in self._complete

    def page(self, known: PrefixDigest, span: int) -> int | None:
        """The complete page of that group that ends at `known`."""
        return self._complete.get(known, {}).get(span)

    def add(self, known: PrefixDigest, span: int, page: int) -> None:
        """Indexes a complete page, which is held; there must be none for that digest."""
        self._complete.setdefault(known, {})[span] = page
        self._digests[span][page] = known
        self.pools[span].index(page)
        if self.listener:
            self.listener.added(known, span, page)

    def contents(self, span: int, page: int) -> PrefixDigest | None:
        """The digest of the sequence up to the end of an indexed page, complete or of a tail; None of others."""
        tail = self._tail_of[span].get(page)
        return digest(*tail) if tail else self._digests[span].get(page)

    def usable(
        self,
        digests: SequenceOf[PrefixDigest],
        states: bool = True,
        elsewhere: Callable[[PrefixDigest, int], bool] = lambda known, span: False,
    ) -> int:
        """The largest n for which a sequence can begin with the pages of digests[:n]: groups that see all keys have all
        of them, windowed groups those that rows after n pages see. states: there is a state after them, too. elsewhere:
        whether a page that is not indexed, of a digest and a span, can be had."""
        groups = self.pools.keys() - (set() if states else {STATE})
        best, runs = 0, dict.fromkeys(groups, 0)  # runs: pages before n without a gap
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
        """Indexes the incomplete pages ({span: page} of all groups) with `tokens` after `parent`, which are held. Does
        nothing if there is a tail that begins with these tokens; replaces one that they begin with."""
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
        """(n, pages): the tail after `parent` that shares the longest prefix, n tokens, with `tokens`; now held and not
        indexed any more. n is 0, and nothing is taken, if that is less than half of the tail, which another sequence
        may need more, or less than all of a tail with a state."""
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
        """Forgets the complete pages of these that no sequence holds."""
        for known in digests:
            pages = self._complete.get(known, {})
            for span in [span for span, page in pages.items() if not self.pools[span].holders(page)]:
                self._forget(span, pages.pop(span))
            if not pages:
                self._complete.pop(known, None)

    def clear(self) -> None:
        """Forgets all pages and tails."""
        for parent, tails in list(self._tails.items()):
            for tail in list(tails):
                self._drop_tail((parent, tail))
        for pages in self._complete.values():
            for span, page in pages.items():
                self._forget(span, page)
        self._complete.clear()

    def _evict(self, span: int, page: int) -> None:
        """Forgets an idle page, and the pages of other groups that are useless without it."""
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
    """Length of the common prefix."""
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)
