"""The allocator of the pages of one group of paged caches, with reference counts. Nothing here touches a device.

A group is all attention layers that see the same span of keys; a page id refers to the same page, the keys and values
of PAGE positions, in all of its caches. A page is *free*, *held* by one or more sequences, or *idle*: no sequence holds
it, but the index of prefixes refers to it by its contents. Idle pages are allocated when no free ones are left.
"""

from collections import OrderedDict
from collections.abc import Callable

PAGE = 64  # positions
# Instead of a span: the group of the layers that keep a state of fixed size for each sequence. Its pages are *cells*:
# each has one state of every such layer.
STATE = -1
KEPT = 8  # rows of a sequence in a step with a state after each: its newest token, and guesses after it
CELL_COLUMNS = 1 + KEPT  # of the table of cells: the one that a step reads, and those for the states after its rows


class PagePool:
    """Pages 0 .. pages-1, all of them free at first. evicted: called with an idle page before it is allocated; must
    `forget` the page, and may forget others."""

    def __init__(self, pages: int, evicted: Callable[[int], None] | None = None) -> None:
        self.pages = pages
        self.evicted = evicted
        self._holders = [0] * pages
        self._indexed = [False] * pages
        self._free = list(range(pages - 1, -1, -1))
        # Both in the order of their allocation, `_soon` first.
        self._soon: OrderedDict[int, None] = OrderedDict()
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Number of pages without an owner."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """Number of pages that only the index refers to."""
        return len(self._soon) + len(self._idle)

    @property
    def available(self) -> int:
        """Number of pages that `allocate` can return."""
        return len(self._free) + len(self._soon) + len(self._idle)

    def holders(self, page: int) -> int:
        """Number of sequences that hold the page."""
        return self._holders[page]

    def indexed(self, page: int) -> bool:
        """Whether the index refers to the page."""
        return self._indexed[page]

    def allocate(self) -> int:
        """A page, held once and not indexed: a free one, else the idle one that was released first, those released
        `soon` before others. IndexError if there is none."""
        if not self._free:
            idle = self._soon or self._idle
            if not idle:
                raise IndexError(f"all {self.pages} pages are held")
            page = next(iter(idle))
            if self.evicted:
                self.evicted(page)
            else:
                self.forget(page)
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def retain(self, page: int) -> None:
        """One more holder of a held or idle page."""
        if not self._holders[page]:
            self._wake(page)
        self._holders[page] += 1

    def release(self, page: int, soon: bool = False) -> None:
        """One holder less. Without any it is idle if indexed, else free. `soon`: allocated before other idle ones."""
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if self._indexed[page]:
            (self._soon if soon else self._idle)[page] = None
        else:
            self._free.append(page)

    def index(self, page: int) -> None:
        """The index refers to the page, which is held, and written no more."""
        self._indexed[page] = True

    def forget(self, page: int) -> None:
        """The index does not refer to the page any more."""
        self._indexed[page] = False
        if not self._holders[page]:
            self._wake(page)
            self._free.append(page)

    def _wake(self, page: int) -> None:
        del (self._soon if page in self._soon else self._idle)[page]
