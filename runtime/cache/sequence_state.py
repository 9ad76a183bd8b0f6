"""The state of fixed size that some layers keep of a sequence: its cell, and the cells that the next step writes.

A step reads the state after the computed tokens and writes the one after its own: in place, unless the index of
prefixes refers to the cell, whose contents must not change. So snapshots of states take no copies. A state that a step
overwrites in place is lost if the step fails.

After the newest token a step's rows may be guesses. Then each row writes a state to a cell of its own, and that of the
last right row is kept.
"""

from mlc_amd.runtime.cache.pages import KEPT, PagePool


class SequenceState:
    """Of one sequence. cell: of the state after the computed tokens; None where nothing is computed. passing: its
    snapshot is less useful than others, because the sequence continues."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.cell: int | None = None
        self.passing = False
        self._next: list[int] = []  # cells that the reserved step writes: the last of them perhaps `cell`
        self._begun = False  # that step may be in progress

    @property
    def _writable(self) -> bool:
        return self.cell is not None and not self._pool.indexed(self.cell)

    @property
    def available(self) -> int:
        """Number of cells that `reserve` could reserve for the next step, with those that it has."""
        return (len(self._next) or int(self._writable)) + self._pool.available

    def reserve(self, guesses: int = 0) -> None:
        """Reserves cells that the next step writes: one, and one for each guess. IndexError for too few."""
        assert guesses < KEPT, "more rows than a table of cells has columns for"
        if not self._next:
            self._next = [self.cell if self.cell is not None and self._writable else self._pool.allocate()]
        while len(self._next) <= guesses:
            self._next.insert(0, self._pool.allocate())

    def begin(self) -> None:
        """The reserved step is about to be computed."""
        assert self._next, "a step is reserved before it begins"
        self._begun = True

    @property
    def guesses(self) -> int:
        """Of the reserved step."""
        return max(len(self._next) - 1, 0)

    @property
    def held(self) -> set[int]:
        """All its cells."""
        return {*self._next, *([] if self.cell is None else [self.cell])}

    @property
    def places(self) -> list[int]:
        """The cell that the reserved step reads (ignored at position 0), and those that its rows write."""
        assert self._next, "a step is reserved before it begins"
        return [self._next[0] if self.cell is None else self.cell, *self._next]

    def advance(self, wrong: int = 0) -> None:
        """The reserved step is computed, and so many of its guesses were wrong."""
        kept = self._next[len(self._next) - 1 - wrong]
        for cell in self.held - {kept}:
            self._pool.release(cell, soon=self.passing and cell == self.cell)
        self.cell, self.passing, self._next, self._begun = kept, False, [], False

    def abandon(self) -> bool:
        """Cancels the reserved step. False if it may have overwritten the state."""
        intact = not self._begun or self.cell not in self._next
        for cell in self._next:
            if cell != self.cell:
                self._pool.release(cell)
        self._next, self._begun = [], False
        return intact

    def take(self, cell: int) -> None:
        """The state is in that cell, which it takes over."""
        self.drop()
        self.cell = cell

    def drop(self) -> None:
        """Nothing is computed."""
        self.abandon()
        if self.cell is not None:
            self._pool.release(self.cell)
        self.cell, self.passing = None, False
