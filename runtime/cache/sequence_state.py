"""The state of fixed size that some layers keep for a sequence: its cell, and the cells that the next step writes.

A step reads the state after the computed tokens, and writes the state after the tokens of the step. It writes to the
same cell, unless the index of prefixes refers to this cell: the contents of an indexed cell must not change. So
snapshots of states need no copies. If a step that writes to the same cell fails, the state is lost.

If rows of a step are guesses, each row writes its state to a different cell. The cell of the last right row is kept.
"""

from mlc_amd.runtime.cache.pages import KEPT, PagePool


class SequenceState:
    """The state of one sequence. cell: the cell with the state after the computed tokens; None if nothing is computed.
    passing: whether its snapshot is less useful than others, because the sequence continues."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.cell: int | None = None
        self.passing = False
        self._next: list[int] = []  # cells that the reserved step writes; the last one may be `cell`
        self._begun = False  # whether the reserved step may be in progress

    @property
    def _writable(self) -> bool:
        return self.cell is not None and not self._pool.indexed(self.cell)

    @property
    def available(self) -> int:
        """The number of cells that the next step may have, including those that are reserved already."""
        return (len(self._next) or int(self._writable)) + self._pool.available

    def reserve(self, guesses: int = 0) -> None:
        """Reserves the cells that the next step writes: 1 + guesses. Raises IndexError if there are too few."""
        assert guesses < KEPT, "more rows than a table of cells has columns for"
        if not self._next:
            self._next = [self.cell if self.cell is not None and self._writable else self._pool.allocate()]
        while len(self._next) <= guesses:
            self._next.insert(0, self._pool.allocate())

    def begin(self) -> None:
        """Called before the reserved step is computed."""
        assert self._next, "a step is reserved before it begins"
        self._begun = True

    @property
    def guesses(self) -> int:
        """The number of guesses of the reserved step."""
        return max(len(self._next) - 1, 0)

    @property
    def held(self) -> set[int]:
        """All its cells."""
        return {*self._next, *([] if self.cell is None else [self.cell])}

    @property
    def places(self) -> list[int]:
        """The cell that the reserved step reads (ignored at position 0), then the cells that its rows write."""
        assert self._next, "a step is reserved before it begins"
        return [self._next[0] if self.cell is None else self.cell, *self._next]

    def advance(self, wrong: int = 0) -> None:
        """Called when the reserved step is computed. wrong: how many of its guesses were wrong."""
        kept = self._next[len(self._next) - 1 - wrong]
        for cell in self.held - {kept}:
            self._pool.release(cell, soon=self.passing and cell == self.cell)
        self.cell, self.passing, self._next, self._begun = kept, False, [], False

    def abandon(self) -> bool:
        """Cancels the reserved step. Returns False if it may have overwritten the state."""
        intact = not self._begun or self.cell not in self._next
        for cell in self._next:
            if cell != self.cell:
                self._pool.release(cell)
        self._next, self._begun = [], False
        return intact

    def take(self, cell: int) -> None:
        """Sets the cell with the state. Takes over the caller's hold of it."""
        self.drop()
        self.cell = cell

    def drop(self) -> None:
        """Releases the state: nothing is computed."""
        self.abandon()
        if self.cell is not None:
            self._pool.release(self.cell)
        self.cell, self.passing = None, False
