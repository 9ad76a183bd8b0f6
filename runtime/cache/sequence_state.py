"""The state of fixed size that some layers keep of a sequence: which cell has it, and which ones the next step writes.

A step reads the state behind the computed tokens and writes the one behind its own: in place, unless the index of
prefixes knows the cell, whose contents then stay. So snapshots of states take no copies. What a step in place has begun
to overwrite is lost if the step fails.

Behind the newest token a step's rows may be guesses. Then each row leaves a state in a cell of its own, of which the
last right row's is kept.
"""

from mlc_amd.runtime.cache.pages import KEPT, PagePool


class SequenceState:
    """Of one sequence. cell: that of the state behind the computed tokens; None where nothing is computed. passing:
    its snapshot is of less use than others, because the sequence goes on."""

    __slots__ = ("_begun", "_next", "_pool", "cell", "passing")

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.cell: int | None = None
        self.passing = False
        self._next: list[int] = []  # what the next step writes, if it is reserved: the last of them perhaps `cell`
        self._begun = False  # that step may be computing

    @property
    def _writable(self) -> bool:
        return self.cell is not None and not self._pool.indexed(self.cell)

    @property
    def available(self) -> int:
        """How many cells `reserve` could give the next step, counting those that it has."""
        return (len(self._next) or int(self._writable)) + self._pool.available

    def reserve(self, guesses: int = 0) -> None:
        """Cells for the next step to write: one, and one more for each guess behind its one token. IndexError if there
        are not enough."""
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
        """All cells that it has."""
        return {*self._next, *([] if self.cell is None else [self.cell])}

    @property
    def places(self) -> list[int]:
        """The cell that the reserved step reads, and those that its rows write, further ones the last of them; it reads
        none at position 0."""
        assert self._next, "a step is reserved before it begins"
        return [self._next[0] if self.cell is None else self.cell, *self._next]

    def advance(self, wrong: int = 0) -> None:
        """The step is computed, and so many of its guesses were wrong."""
        kept = self._next[len(self._next) - 1 - wrong]
        for cell in self.held - {kept}:
            self._pool.release(cell, soon=self.passing and cell == self.cell)
        self.cell, self.passing, self._next, self._begun = kept, False, [], False

    def abandon(self) -> bool:
        """The reserved step is not computed. False if it may have overwritten the state."""
        intact = not self._begun or self.cell not in self._next
        for cell in self._next:
            if cell != self.cell:
                self._pool.release(cell)
        self._next, self._begun = [], False
        return intact

    def take(self, cell: int) -> None:
        """The state is in that cell, which is held for it."""
        self.drop()
        self.cell = cell

    def drop(self) -> None:
        """Nothing is computed."""
        self.abandon()
        if self.cell is not None:
            self._pool.release(self.cell)
        self.cell, self.passing = None, False
