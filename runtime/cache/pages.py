"""The allocator of the pages of one group of paged caches, with reference counts. It does not touch a device.

A group is all attention layers with the same span of keys. A page number refers to the same page, the keys and values
of PAGE positions, in all caches of the group. A page is *free*, *held* by one or more sequences, or *idle*: no sequence
holds it, but the index of prefixes refers to it by its contents. Idle pages are allocated when no page is free.
"""

from collections import OrderedDict
from collections.abc import Callable

PAGE = 64  # positions
# Stands for a span: the group of the layers that keep a state of fixed size for each sequence. The pages of this group
# are called *cells*. A cell has the state of one sequence for each of these layers.
STATE = -1
# largest number of rows of a sequence in a step that keep the state after each row: its newest token and guesses
KEPT = 8
# columns of the table of cells: the cell that a step reads, and the cells for the states after its rows
CELL_COLUMNS = 1 + KEPT


class PagePool:
    """Pages 0 .. pages-1. At first all are free. evicted: called with an idle page before the page is allocated. It
    must `forget` the page, and may forget other pages."""

    def __init__(self, pages: int, evicted: Callable[[int], None] | None = None) -> None:
        self.pages = pages
        self.evicted = evicted
        self._holders = [0] * pages
        self._indexed = [False] * pages
        self._free = list(range(pages - 1, -1, -1))
        # Idle pages in the order in which they will be allocated, first those in `_soon`.
        self._soon: OrderedDict[int, None] = OrderedDict()
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """The number of idle pages."""
        return len(self._soon) + len(self._idle)

    @property
    def available(self) -> int:
        """The number of pages that `allocate` can return."""
        return len(self._free) + len(self._soon) + len(self._idle)

    def holders(self, page: int) -> int:
        """The number of sequences that hold the page."""
        return self._holders[page]

    def indexed(self, page: int) -> bool:
        """Whether the index refers to the page."""
        return self._indexed[page]

    def allocate(self) -> int:
        """Returns a page that is held once and not indexed. It is a free page, or if there is none, an idle page: first
        those released with `soon`, then those released earliest. Raises IndexError if all pages are held."""
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
        """Adds a holder to a held or idle page."""
        if not self._holders[page]:
            self._wake(page)
        self._holders[page] += 1

    def release(self, page: int, soon: bool = False) -> None:
        """Removes a holder. A page without holders becomes idle if it is indexed, otherwise free. soon: whether it is
        allocated before other idle pages."""
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if self._indexed[page]:
            (self._soon if soon else self._idle)[page] = None
        else:
            self._free.append(page)

    def index(self, page: int) -> None:
        """Marks a held page as indexed. It must not be written any more."""
        self._indexed[page] = True

    def forget(self, page: int) -> None:
        """Marks a page as no longer indexed."""
        self._indexed[page] = False
        if not self._holders[page]:
            self._wake(page)
            self._free.append(page)

    def _wake(self, page: int) -> None:
        del (self._soon if page in self._soon else self._idle)[page]
