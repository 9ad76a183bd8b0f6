"""A sequence of tokens, and which of them have their keys and values in the paged cache.

Pages are never copied. Complete pages are indexed as soon as they are computed, and shared; an incomplete page belongs
to one sequence, which writes to it. So a sequence that is truncated inside a complete page continues at the beginning
of that page, and up to PAGE - 1 tokens are computed again.

Rows of a group with a span see the last keys only: a sequence holds the pages that rows after its last complete page
see, and releases older ones.

Of a recurrent state there is only the one after the last computed token, and snapshots: at the last page boundary in a
prompt, at every SNAPSHOTS tokens, and at a sequence's end. So a sequence of a model with states continues at the last
snapshot, and later tokens are computed again.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Protocol

import numpy as np

from mlc_amd.runtime.cache.pages import KEPT, PAGE, STATE, PagePool
from mlc_amd.runtime.cache.prefixes import ROOT, PrefixDigest, PrefixIndex, digest, first_page
from mlc_amd.runtime.cache.sequence_state import SequenceState
from mlc_amd.runtime.images.rows import ImagePart, ImageRows, Prompt

# of a step: token, position, slot, and its place for RoPE where images have positions in a grid
SingleRow = tuple[int, ...]
SNAPSHOT_PART = 2  # of the cells, one of so many is reserved for snapshots, not for guesses
SNAPSHOTS = 512  # tokens between snapshots of the state of a sequence that continues
RELEASED = -1  # instead of a page that was released because no later row sees it


class ChunkRows(NamedTuple):
    """Of a step. position: of the first; places: of ImageRows; images: among the tokens; together: so many rows at the
    beginning see one another."""

    tokens: SequenceOf[int] | np.ndarray
    position: int
    slot: int
    places: np.ndarray | None = None
    images: tuple[ImagePart, ...] = ()
    together: int = 0


class PageStore(Protocol):
    """What a sequence needs of the cache (kv_cache.py)."""

    context: int
    pools: dict[int, PagePool]
    cells: PagePool | None
    index: PrefixIndex
    grid: bool
    together: bool

    def write_table(self, sequence: "Sequence", span: int, at: int) -> None: ...

    def release_slot(self, sequence: "Sequence") -> None: ...


class Sequence:
    """A step for its next `count` tokens: `reserve(count)`, `KvCache.assign_slots`, then the device writes their keys
    to the positions from `computed` on, then `advance(count)`. Rows after the newest token may be guesses."""

    def __init__(self, cache: PageStore, tokens: Iterable[int] = ()) -> None:
        self.cache = cache
        self.tokens: list[int] = []
        self.images = ImageRows(cache.grid, cache.together)
        self.append(tokens)
        self.computed = 0  # so many first tokens have keys in the cache
        # of each block of PAGE positions, by span, or RELEASED; those beyond `computed` are reserved
        self.pages: dict[int, list[int]] = {span: [] for span in cache.pools}
        self.state = SequenceState(cache.cells) if cache.cells else None  # of layers that keep one
        self.slot: int | None = None  # the row of the page tables, while it has one
        self._capacity = 0  # positions that have pages
        self._complete = 0  # complete pages, all of them indexed: computed // PAGE
        self._matched = 0  # of these, found in the index
        self._released = dict.fromkeys(cache.pools, 0)  # number of first pages that are released
        self._digests: list[PrefixDigest] = []  # of the first complete pages of `tokens`, as far as they were needed

    @property
    def pending(self) -> int:
        """Tokens that have no keys yet."""
        return len(self.tokens) - self.computed

    @property
    def table_row(self) -> int:
        """Its slot, in a step."""
        assert self.slot is not None, "sequences of a step have slots: see `Cache.assign_slots`"
        return self.slot

    def rows(self, tokens: Iterable[int]) -> list[SingleRow]:
        """Single rows of a step: these tokens, the first one at position `computed`."""
        return [self.row(token, self.computed + i) for i, token in enumerate(tokens)]

    def row(self, token: int, position: int) -> SingleRow:
        """A single row of a step."""
        place = (self.images.place(position),) if self.images.grid else ()
        return token, position, self.table_row, *place

    def newest_row(self, offset: int = 0) -> SingleRow:
        """The single row of its only pending token; offset: of the one so many positions later, not known yet."""
        return self.row(self.tokens[-1], self.computed + offset)

    def chunk(self, count: int) -> ChunkRows:
        """The next `count` tokens, as the chunk of a step."""
        first, images = self.computed, self.images
        places, parts = images.places(first, count), tuple(images.parts(first, count))
        tokens = self.tokens[first : first + count]
        return ChunkRows(tokens, first, self.table_row, places, parts, images.whole(first))

    @property
    def capacity(self) -> int:
        """Positions that have pages."""
        return self._capacity

    @property
    def stateless(self) -> bool:
        """Whether it needs a cell for a state and has none."""
        return self.state is not None and self.state.cell is None

    def append(self, ids: Iterable[int]) -> None:
        """Further tokens, to be computed; those of a Prompt with its images."""
        ids = ids if isinstance(ids, list) else list(ids)
        if isinstance(ids, Prompt):
            self.images.add(len(self.tokens), ids, ids.images)
        self.tokens.extend(ids)

    # ---- a step

    def reserve(self, count: int, guesses: int = 0) -> bool:
        """Allocates pages for the next `count` positions in every group and for guesses after these, and cells; False,
        without any change, if the pools have too few. ValueError beyond the context."""
        end = self.computed + count + guesses
        if count and self.state and self.state.available <= guesses:
            return False
        if end > self._capacity and not self._reserve_pages(end):
            return False
        if count and self.state:
            self.state.reserve(guesses)
        return True

    def _reserve_pages(self, end: int) -> bool:
        """Allocates pages for all positions below `end`, some of which have none."""
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
        """How many guesses the next step may verify after one token: as many as there are pages for, and cells besides
        those reserved for snapshots of states; none that would skip a snapshot."""
        room = self.room - 1
        if self.state and self.cache.cells:
            cells = self.state.available - 1 - self.cache.cells.pages // SNAPSHOT_PART
            room = min(room, cells, KEPT - 1, SNAPSHOTS - 1 - self.computed % SNAPSHOTS)
        return max(room, 0)

    def step_size(self, most: int) -> int:
        """How many of the pending tokens the next step computes, at most `most`: up to the next snapshot of a state, or
        image that must be computed as a whole."""
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
        """The keys of the next `count` tokens are in the cache, and so many of the step's guesses were wrong."""
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
        """Indexes the state, at a page boundary, or takes the cell that is indexed already."""
        known, index = self.chain(self._complete)[-1], self.cache.index
        other = index.page(known, STATE)
        if other is None:
            assert state.cell is not None, "a state follows a step"
            index.add(known, STATE, state.cell)
        elif self.cache.cells and other != state.cell:
            self.cache.cells.retain(other)
            state.take(other)

    def abandon(self) -> None:
        """The step that had slots has failed."""
        if self.state and not self.state.abandon():
            self._begin_again(self.computed)

    def _begin_again(self, limit: int) -> None:
        """Replaces what is computed by what the index has of the first `limit` tokens."""
        self._cut(0)
        self._match(limit)

    def _share(self) -> None:
        """Indexes the pages that are complete now, or replaces them by indexed ones with the same contents."""
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
                # A page that several sequences began with may be needed again: it is kept longer than others.
                self.cache.pools[span].release(pages[i], soon=i >= self._matched)
                pages[i] = RELEASED
            self._released[span] = first

    # ---- prefixes

    def match(self, limit: int | None = None) -> int:
        """Takes from the index the pages of the longest known prefix, if that is longer than `computed`; of the first
        `limit` tokens at most. Returns `computed`, which leaves at least one token to compute, whose row has logits.
        May be called at any time outside a step: other sequences may have computed the next tokens meanwhile."""
        limit = len(self.tokens) - 1 if limit is None else min(limit, len(self.tokens) - 1)
        self._match(limit)
        self._begin_images()
        return self.computed

    def _begin_images(self) -> None:
        """An image that must be computed as a whole, of which a part is, is computed again."""
        while (begin := self.images.begin(self.computed)) < self.computed:
            self._begin_again(begin)

    @property
    def least(self) -> int:
        """The least number of tokens of its next step: of an image that must be computed as a whole all."""
        return self.images.whole(self.computed) or 1

    def _match(self, limit: int) -> None:
        """`match` of at most `limit` tokens."""
        chain, index = self.chain(max(limit, 0) // PAGE), self.cache.index
        if self._complete == 0 or (len(chain) > self._complete and chain[self._complete] in index):
            if self.state and self._take_tail(chain, index.usable(chain, states=False), limit):
                return
            self._take(chain, index.usable(chain))
        self._take_tail(chain, self._complete, limit)

    def _take_tail(self, chain: list[PrefixDigest], n: int, limit: int) -> bool:
        """Takes the indexed pages of chain[:n] and a tail after them; False if there is none of use."""
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
        """Replaces the held pages by the indexed ones of chain[:n], if these are more; state: and takes the state."""
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
        """Keeps the first `n` tokens. `computed` decreases to what is still complete: to the beginning of a page if `n`
        ends inside a complete one, further where pages that the next row sees were released, or to the last
        snapshot of a state."""
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
        """Releases all pages and the slot. `match` may find them in the index again, until they are needed."""
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
        """Releases all pages but the first n; n = 0 leaves nothing computed."""
        for span, pages in self.pages.items():
            pool = self.cache.pools[span]
            # The last page first: it is useless without those before it, so it must be allocated before them.
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
        """The digests of the first n pages of tokens, which are complete."""
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
