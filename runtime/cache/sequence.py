"""A sequence of tokens, and which of them have their keys and values in the paged cache.

Pages are never copied. A complete page is indexed as soon as it is computed, and may be shared. An incomplete page
belongs to one sequence, which writes to it. So a sequence that is truncated inside a complete page continues at the
beginning of this page, and computes up to PAGE - 1 tokens again.

In a windowed group, rows attend to the last keys only. A sequence holds the pages that rows after its last complete
page attend to, and releases older pages.

A recurrent state exists only after the last computed token, and as snapshots: at the last page boundary of a prompt, at
every SNAPSHOTS tokens, and at a sequence's end. A truncated sequence with states continues at the last snapshot.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Protocol

import numpy as np

from mlc_amd.runtime.cache.pages import KEPT, PAGE, STATE, PagePool
from mlc_amd.runtime.cache.prefixes import ROOT, PrefixDigest, PrefixIndex, digest, first_page
from mlc_amd.runtime.cache.sequence_state import SequenceState
from mlc_amd.runtime.images.rows import ImagePart, ImageRows, Prompt

# of a step: token, position, slot; and the position in the grid (for RoPE) if images have grid positions
SingleRow = tuple[int, ...]
SNAPSHOT_PART = 2  # 1 / SNAPSHOT_PART of the cells is reserved for snapshots; guesses may not use them
SNAPSHOTS = 512  # tokens between the snapshots of a state while its sequence continues
RELEASED = -1  # stands for a page that was released because no later row attends to it


class ChunkRows(NamedTuple):
    """The chunk of a step. position: of the first token. places: see ImageRows. images: parts among the tokens.
    together: how many rows at the beginning attend to one another."""

    tokens: SequenceOf[int] | np.ndarray
    position: int
    slot: int
    places: np.ndarray | None = None
    images: tuple[ImagePart, ...] = ()
    together: int = 0


class PageStore(Protocol):
    """The parts of the cache (kv_cache.py) that a sequence uses."""

    context: int
    pools: dict[int, PagePool]
    cells: PagePool | None
    index: PrefixIndex
    grid: bool
    together: bool

    def write_table(self, sequence: "Sequence", span: int, at: int) -> None: ...

    def release_slot(self, sequence: "Sequence") -> None: ...


class Sequence:
    """A step for the next `count` tokens: call `reserve(count)` and `KvCache.assign_slots`; the device writes their
    keys to the positions from `computed` on; call `advance(count)`. Rows after the newest token may be guesses."""

    def __init__(self, cache: PageStore, tokens: Iterable[int] = ()) -> None:
        self.cache = cache
        self.tokens: list[int] = []
        self.images = ImageRows(cache.grid, cache.together)
        self.append(tokens)
        self.computed = 0  # the number of first tokens whose keys are in the cache
        # by span, the page of each block of PAGE positions, or RELEASED; pages beyond `computed` are reserved
        self.pages: dict[int, list[int]] = {span: [] for span in cache.pools}
        self.state = SequenceState(cache.cells) if cache.cells else None  # None without layers that keep a state
        self.slot: int | None = None  # its row of the page tables, while it has one
        self._capacity = 0  # positions that have pages
        self._complete = 0  # complete pages, all of them indexed: computed // PAGE
        self._matched = 0  # how many of these were found in the index
        self._released = dict.fromkeys(cache.pools, 0)  # the number of first pages that are released
        self._digests: list[PrefixDigest] = []  # of complete pages of `tokens`, as far as they were needed

    @property
    def pending(self) -> int:
        """The number of tokens that have no keys yet."""
        return len(self.tokens) - self.computed

    @property
    def table_row(self) -> int:
        """Its slot; only valid in a step."""
        assert self.slot is not None, "sequences of a step have slots: see `Cache.assign_slots`"
        return self.slot

    def rows(self, tokens: Iterable[int]) -> list[SingleRow]:
        """Single rows of a step for these tokens; the first one is at position `computed`."""
        return [self.row(token, self.computed + i) for i, token in enumerate(tokens)]

    def row(self, token: int, position: int) -> SingleRow:
        """A single row of a step."""
        place = (self.images.place(position),) if self.images.grid else ()
        return token, position, self.table_row, *place

    def newest_row(self, offset: int = 0) -> SingleRow:
        """The single row of its only pending token. offset: for a later token, which is not known yet, its distance."""
        return self.row(self.tokens[-1], self.computed + offset)

    def chunk(self, count: int) -> ChunkRows:
        """The next `count` tokens, as the chunk of a step."""
        first, images = self.computed, self.images
        places, parts = images.places(first, count), tuple(images.parts(first, count))
        tokens = self.tokens[first : first + count]
        return ChunkRows(tokens, first, self.table_row, places, parts, images.whole(first))

    @property
    def capacity(self) -> int:
        """The number of positions that have pages."""
        return self._capacity

    @property
    def stateless(self) -> bool:
        """Whether it needs a cell for its state and has none."""
        return self.state is not None and self.state.cell is None

    def append(self, ids: Iterable[int]) -> None:
        """Appends tokens, which are to be computed. The tokens of a `Prompt` may include images."""
        ids = ids if isinstance(ids, list) else list(ids)
        if isinstance(ids, Prompt):
            self.images.add(len(self.tokens), ids, ids.images)
        self.tokens.extend(ids)

    # ---- a step

    def reserve(self, count: int, guesses: int = 0) -> bool:
        """Allocates cells, and pages in every group, for the next `count` positions and the guesses after them. Returns
        False and changes nothing if the pools have too few. Raises ValueError for positions beyond the context."""
        end = self.computed + count + guesses
        if count and self.state and self.state.available <= guesses:
            return False
        if end > self._capacity and not self._reserve_pages(end):
            return False
        if count and self.state:
            self.state.reserve(guesses)
        return True

    def _reserve_pages(self, end: int) -> bool:
        """Allocates pages for all positions below `end` that have none."""
        if end > self.cache.context:
            raise ValueError(f"position {end - 1} is beyond the context of {self.cache.context}")
        more = -(-(end - self._capacity) // PAGE)
        if any(pool.available < more for pool in self.cache.pools.values()):
            return False
        for span, pool in self.cache.pools.items():
            self._set(span, [pool.allocate() for _ in range(more)])
        self._capacity += more * PAGE
        return True

    @property
    def room(self) -> int:
        """The largest `count` for which `reserve` succeeds."""
        if self.state and not self.state.available:
            return 0
        more = min((pool.available for pool in self.cache.pools.values()), default=self.cache.context) * PAGE
        return min(self._capacity + more, self.cache.context) - self.computed

    @property
    def guess_room(self) -> int:
        """The number of guesses that the next step may verify after one token. They need pages, and cells that are not
        reserved for snapshots; and they must not skip a snapshot."""
        room = self.room - 1
        if self.state and self.cache.cells:
            cells = self.state.available - 1 - self.cache.cells.pages // SNAPSHOT_PART
            room = min(room, cells, KEPT - 1, SNAPSHOTS - 1 - self.computed % SNAPSHOTS)
        return max(room, 0)

    def step_size(self, most: int) -> int:
        """The number of pending tokens that the next step computes, at most `most`. A step ends at the next snapshot of
        a state, or before an image that must be computed as a whole."""
        count = self.images.cut(self.computed, min(self.pending, most))
        if self.state is None or count <= 1:
            return count
        end, last = self.computed + count, self._last_edge
        if self.computed < last < end:
            return last - self.computed
        edge = end // PAGE * PAGE
        return edge - self.computed if self.computed < edge < last else count

    @property
    def _last_edge(self) -> int:
        """The last page boundary before the last token."""
        return (len(self.tokens) - 1) // PAGE * PAGE

    def advance(self, count: int, wrong: int = 0) -> None:
        """Called when the keys of the next `count` tokens are in the cache. wrong: how many guesses were wrong."""
        before, guessed = self.computed, False
        self.computed += count
        if self.state:
            guessed = self.state.guesses > 0
            self.state.advance(wrong)
        if self.computed // PAGE > self._complete:
            self._share()
        if self.state and self.computed % PAGE == 0:
            prompt = count > 1 and not guessed and self.computed == self._last_edge
            if prompt or self.computed // SNAPSHOTS > before // SNAPSHOTS:
                self._snapshot(self.state)
                self.state.passing = not prompt

    def _snapshot(self, state: SequenceState) -> None:
        """Indexes the state, at a page boundary. If one is indexed there already, takes that cell instead."""
        known, index = self.chain(self._complete)[-1], self.cache.index
        other = index.page(known, STATE)
        if other is None:
            assert state.cell is not None, "a state follows a step"
            index.add(known, STATE, state.cell)
        elif self.cache.cells and other != state.cell:
            self.cache.cells.retain(other)
            state.take(other)

    def abandon(self) -> None:
        """Called when a step of this sequence has failed."""
        if self.state and not self.state.abandon():
            self._begin_again(self.computed)

    def _begin_again(self, limit: int) -> None:
        """Discards what is computed, and takes what the index has of the first `limit` tokens."""
        self._cut(0)
        self._match(limit)

    def _share(self) -> None:
        """Indexes newly complete pages, or replaces them by pages with the same contents that are indexed already."""
        complete, index = self.computed // PAGE, self.cache.index
        for i in range(self._complete, complete):
            known = self.chain(i + 1)[i]
            for span, pages in self.pages.items():
                other = index.page(known, span)
                if other is None:
                    index.add(known, span, pages[i])
                else:
                    pool = self.cache.pools[span]
                    pool.retain(other)
                    pool.release(pages[i])
                    self._set(span, [other], i)
        self._complete = complete
        for span, pages in self.pages.items():
            first = first_page(span, complete)
            for i in range(self._released[span], first):
                # Later sequences may need a page that several sequences began with, so it is kept longer than others.
                self.cache.pools[span].release(pages[i], soon=i >= self._matched)
                pages[i] = RELEASED
            self._released[span] = first

    # ---- prefixes

    def match(self, limit: int | None = None) -> int:
        """Takes the indexed pages of the longest known prefix, of at most `limit` tokens, if it is longer than
        `computed`. At least one token is left to compute, as only computed rows have logits. Returns `computed`. May be
        called at any time outside a step: other sequences may have computed the next tokens meanwhile."""
        limit = len(self.tokens) - 1 if limit is None else min(limit, len(self.tokens) - 1)
        self._match(limit)
        self._begin_images()
        return self.computed

    def _begin_images(self) -> None:
        """If only a part of an image that must be computed as a whole is computed, computes the image again."""
        while (begin := self.images.begin(self.computed)) < self.computed:
            self._begin_again(begin)

    @property
    def least(self) -> int:
        """The least number of tokens of its next step: 1, or all of an image that must be computed as a whole."""
        return self.images.whole(self.computed) or 1

    def _match(self, limit: int) -> None:
        """`match`, for at most `limit` tokens."""
        chain, index = self.chain(max(limit, 0) // PAGE), self.cache.index
        if self._complete == 0 or (len(chain) > self._complete and chain[self._complete] in index):
            if self.state and self._take_tail(chain, index.usable(chain, states=False), limit):
                return
            self._take(chain, index.usable(chain))
        self._take_tail(chain, self._complete, limit)

    def _take_tail(self, chain: list[PrefixDigest], n: int, limit: int) -> bool:
        """Takes the indexed pages of chain[:n], and a tail after them. Returns False if there is no useful tail."""
        end = n * PAGE
        if limit <= end or n < self._complete or (n == self._complete and self.computed != end):
            return False
        parent = self._digests[n - 1] if n else ROOT
        count, pages = self.cache.index.take_tail(parent, self.tokens[end : min(limit, end + PAGE)])
        if not count:
            return False
        self._take(chain, n, state=False)
        self._cut(self._complete)
        for span, page in pages.items():
            if span != STATE:
                self._set(span, [page])
            elif self.state:
                self.state.take(page)
        self._capacity += PAGE
        self.computed += count
        return True

    def _take(self, chain: list[PrefixDigest], n: int, state: bool = True) -> None:
        """If chain[:n] is longer than what is held, takes its indexed pages instead. state: also takes the state."""
        if n <= self._complete:
            return
        cell = self.cache.index.page(chain[n - 1], STATE) if state else None
        if cell is not None and self.cache.cells:
            self.cache.cells.retain(cell)
        pages = {}
        for span, pool in self.cache.pools.items():
            first = first_page(span, n)
            found = [self.cache.index.page(known, span) for known in chain[first:n]]
            pages[span] = [page for page in found if page is not None]
            for page in pages[span]:
                pool.retain(page)
        self._cut(0)
        if cell is not None and self.state:
            self.state.take(cell)
        for span, found in pages.items():
            self._released[span] = n - len(found)
            self._set(span, [RELEASED] * self._released[span] + found)
        self._complete = self._matched = n
        self.computed = self._capacity = n * PAGE

    # ---- truncation

    def truncate(self, n: int) -> None:
        """Keeps the first `n` tokens. `computed` is reduced to what is still complete: to the beginning of a page if
        `n` is inside a complete page; to less if pages that the next row attends to were released; or to the last
        snapshot."""
        if not 0 <= n <= len(self.tokens):
            raise ValueError(f"cannot keep {n} of {len(self.tokens)} tokens")
        del self.tokens[n:]
        self.images.truncate(n)
        del self._digests[n // PAGE :]
        if self.state and (not self.state.abandon() or n < self.computed):
            self._begin_again(min(n, self.computed))
            return
        if n >= self.computed:
            self._cut(-(-self.computed // PAGE))
            return
        kept = n if n >= self._complete * PAGE else n // PAGE * PAGE
        complete = kept // PAGE
        whole = all(self._released[span] <= first_page(span, complete) for span in self.pages)
        self._cut(-(-kept // PAGE) if whole else 0)
        if whole:
            self.computed, self._complete, self._matched = kept, complete, min(self._matched, complete)
        else:
            self._match(kept)
        self._begin_images()

    def free(self) -> None:
        """Releases all pages and the slot. The indexed pages can be found by `match` until they are allocated again."""
        if self.state is None or self.state.abandon():
            self._index_end()
        if self._complete and self.cache.index.listener:
            self.cache.index.listener.used(self.chain(self._complete))
        self._cut(0)
        self.cache.release_slot(self)

    def _index_end(self) -> None:
        """Indexes what is not indexed yet: the incomplete page, and the state."""
        begin = self._complete * PAGE
        if self.computed > begin:
            parent = self.chain(self._complete)[-1] if self._complete else ROOT
            tail = {span: pages[self._complete] for span, pages in self.pages.items()}
            if self.state and self.state.cell is not None:
                tail[STATE] = self.state.cell
            self.cache.index.add_tail(parent, self.tokens[begin : self.computed], tail)
        elif self.state and self.computed:
            self._snapshot(self.state)

    def _cut(self, n: int) -> None:
        """Releases all pages except the first n. With n = 0, nothing is computed any more."""
        for span, pages in self.pages.items():
            pool = self.cache.pools[span]
            # The last page first: a page is useless without those before it, so it must be allocated before them.
            for i in range(len(pages) - 1, max(n, self._released[span]) - 1, -1):
                pool.release(pages[i])
            del pages[n:]
        self._capacity = min(self._capacity, n * PAGE)
        if n == 0:
            if self.state:
                self.state.drop()
            self.computed = self._complete = self._matched = 0
            self._released = dict.fromkeys(self._released, 0)

    # ---- helpers

    def chain(self, n: int) -> list[PrefixDigest]:
        """The digests of the first n pages of tokens, which must be complete."""
        known = self._digests
        for i in range(len(known), n):
            known.append(digest(known[-1] if known else ROOT, self.tokens[i * PAGE : (i + 1) * PAGE]))
        return known[:n]

    def _set(self, span: int, pages: list[int], at: int | None = None) -> None:
        """Sets the pages from number `at` on; None: appends them."""
        own = self.pages[span]
        at = len(own) if at is None else at
        own[at : at + len(pages)] = pages
        if self.slot is not None:
            self.cache.write_table(self, span, at)
