"""The paged KV cache on the host: pools of pages, the index of prefixes, slots and page tables.

The layers of a model form groups by their span: the number of last keys that a row attends to (0: all keys). All caches
of a group use the same page numbers. A slot is a row of the page tables; each sequence of a step has one. Layers that
keep a state of fixed size for each sequence share cells in the same way: see `pages.STATE`.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from mlc_amd.runtime.artifact.manifest import ManifestImages
from mlc_amd.runtime.cache.pages import CELL_COLUMNS, PAGE, STATE, PagePool
from mlc_amd.runtime.cache.prefixes import PrefixIndex
from mlc_amd.runtime.cache.sequence import RELEASED, Sequence


class KvUsage(NamedTuple):
    """The pages that sequences hold, and all pages, of the fullest group."""

    used: int
    pages: int


class KvCache:
    """The cache. groups: number of pages by span. context: the largest length of a sequence. slots: the largest number
    of sequences of a step. images: the manifest's entry, None without images."""

    def __init__(
        self, groups: dict[int, int], context: int, slots: int = 64, images: ManifestImages | None = None
    ) -> None:
        self.context, self.slots = context, slots
        self.grid = images is not None and images["positions"] == "grid"
        self.together = images is not None and images["attention"] == "image"
        pools = {span: PagePool(pages) for span, pages in groups.items()}
        self.pools = {span: pool for span, pool in pools.items() if span != STATE}
        self.cells = pools.get(STATE)  # None for models without states
        self.index = PrefixIndex(pools)
        # Each table is int32 [slots, ceil(context / PAGE)]: [slot, position // PAGE] is the page of a position. Entries
        # that no row reads have any valid page. The table of STATE is int32 [slots, CELL_COLUMNS]: the cell with the
        # slot's state, then the cells for the states after each of the step's rows; the last one is repeated.
        widths = {span: CELL_COLUMNS if span == STATE else -(-context // PAGE) for span in groups}
        self.page_tables = {span: np.zeros((slots, width), np.int32) for span, width in widths.items()}
        self._changed = set(groups)
        self._holders: list[Sequence | None] = [None] * slots
        self._last_step = [0] * slots  # by slot
        self._step = 0

    def sequence(self, tokens: Iterable[int] = ()) -> Sequence:
        """A new sequence that holds no pages. See `Sequence.match`."""
        return Sequence(self, tokens)

    def changed(self) -> set[int]:
        """The spans whose page tables changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def mark_changed(self) -> None:
        """Marks all page tables as changed."""
        self._changed = set(self.page_tables)

    @property
    def usage(self) -> KvUsage:
        """How full the cache is. Pages that only the index of prefixes refers to count as free."""
        pools = list(self.pools.values()) or [self.cells or PagePool(0)]
        found = [KvUsage(pool.pages - pool.available, pool.pages) for pool in pools]
        return max(found, key=lambda usage: usage.used / usage.pages)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence that the cache can hold if there is no other."""
        return min([self.context, *(self._longest(span) for span in self.pools)])

    def _longest(self, span: int) -> int:
        pages = self.pools[span].pages
        return self.context if span and pages >= seen_pages(span) else pages * PAGE

    def holds(self, count: int, tokens: int) -> bool:
        """Whether an empty cache has pages and cells for `count` sequences of `tokens` tokens that decode together."""
        whole = -(-tokens // PAGE)
        needed = {span: min(whole, seen_pages(span) + 1) if span else whole for span in self.pools}
        fits = all(count * needed[span] <= pool.pages for span, pool in self.pools.items())
        return fits and (self.cells is None or count <= self.cells.pages)

    def has_room(self, sequences: SequenceOf[Sequence]) -> bool:
        """Whether the pools have pages for those tokens of `sequences` that have none yet, and one further page for
        each sequence; and a cell for each sequence that needs one. Of a windowed group, only as many pages are counted
        as a sequence needs at a time."""
        if self.cells and self.cells.available < sum(sequence.stateless for sequence in sequences):
            return False
        more = [-(-len(sequence.tokens) // PAGE) for sequence in sequences]
        for span, pool in self.pools.items():
            most = seen_pages(span) if span else max(more)
            held = [len(sequence.pages[span]) for sequence in sequences]
            if pool.available < len(more) + sum(min(n - m, most) for n, m in zip(more, held, strict=True)):
                return False
        return True

    # ---- slots

    def assign_slots(self, sequences: SequenceOf[Sequence]) -> None:
        """Assigns a slot to each sequence of a step; it may be taken from a sequence that is not in the step. Raises
        ValueError if there are more sequences than slots."""
        if len(sequences) > self.slots:
            raise ValueError(f"a step of {len(sequences)} sequences has {self.slots} slots")
        self._step += 1
        waiting = []
        for sequence in sequences:
            if sequence.slot is None:
                waiting.append(sequence)
            else:
                self._last_step[sequence.slot] = self._step
        if waiting:
            self._fill_slots(waiting)
        if self.cells:
            self._write_cells(sequences)

    def _fill_slots(self, sequences: Iterable[Sequence]) -> None:
        order = sorted(range(self.slots), key=lambda slot: (self._holders[slot] is not None, self._last_step[slot]))
        for slot, sequence in zip(order, sequences, strict=False):
            if (other := self._holders[slot]) is not None:
                other.slot = None
            self._holders[slot], sequence.slot = sequence, slot
            self._last_step[slot] = self._step
            for span in self.pools:
                self.write_table(sequence, span, 0)

    def _write_cells(self, sequences: Iterable[Sequence]) -> None:
        table = self.page_tables[STATE]
        for sequence in sequences:
            if state := sequence.state:
                state.begin()
                own, places = table[sequence.slot], state.places
                if own[: len(places)].tolist() != places or (own[len(places) :] != places[-1]).any():
                    own[: len(places)], own[len(places) :] = places, places[-1]
                    self._changed.add(STATE)

    def release_slot(self, sequence: Sequence) -> None:
        """Releases the slot of a sequence that is in no further step."""
        if sequence.slot is not None:
            self._holders[sequence.slot] = sequence.slot = None

    def write_table(self, sequence: Sequence, span: int, at: int) -> None:
        """Writes the sequence's pages, from number `at` on, to its row of the page table."""
        if pages := sequence.pages[span][at:]:
            row = self.page_tables[span][sequence.slot, at : at + len(pages)]
            row[:] = pages
            row[row == RELEASED] = 0
            self._changed.add(span)


def seen_pages(span: int) -> int:
    """The least number of pages of a windowed group that a sequence needs to compute one more token."""
    return -(-(span - 1) // PAGE) + 1
