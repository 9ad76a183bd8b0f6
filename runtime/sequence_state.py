"""The state of fixed size that some layers keep of a sequence: which cell has it, and which one the next step writes.

A step reads the state behind the computed tokens and writes the one behind its own: in place, unless the index of
prefixes knows the cell, whose contents then stay. So snapshots of states take no copies. What a step in place has begun
to overwrite is lost if the step fails.
"""

from mlc_amd.runtime.pages import PagePool


class State:
    """Of one sequence. cell: that of the state behind the computed tokens; None where nothing is computed. passing:
    its snapshot is of less use than others, because the sequence goes on."""

    __slots__ = ("_begun", "_next", "_pool", "cell", "passing")

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.cell: int | None = None
        self.passing = False
        self._next: int | None = None  # what the next step writes, if it is reserved
        self._begun = False  # that step may be computing

    @property
    def _writable(self) -> bool:
        return self.cell is not None and not self._pool.indexed(self.cell)

    @property
    def available(self) -> bool:
        """Whether `reserve` succeeds."""
        return self._next is not None or self._writable or self._pool.available > 0

    def reserve(self) -> None:
        """A cell for the next step to write. IndexError if there is none."""
        if self._next is None:
            self._next = self.cell if self._writable else self._pool.allocate()

    def begin(self) -> None:
        """The reserved step is about to be computed."""
        assert self._next is not None, "a step is reserved before it begins"
        self._begun = True

    @property
    def places(self) -> tuple[int, int]:
        """The cells that the reserved step reads and writes; it reads none at position 0."""
        assert self._next is not None, "a step is reserved before it begins"
        return self._next if self.cell is None else self.cell, self._next

    def advance(self) -> None:
        """The step is computed."""
        before, self.cell = self.cell, self._next
        if before is not None and before != self.cell:
            self._pool.release(before, soon=self.passing)
        self.passing, self._next, self._begun = False, None, False

    def abandon(self) -> bool:
        """The reserved step is not computed. False if it may have overwritten the state."""
        intact = not self._begun or self._next != self.cell
        if self._next is not None and self._next != self.cell:
            self._pool.release(self._next)
        self._next, self._begun = None, False
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
