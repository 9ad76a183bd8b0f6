"""What the scheduler plans: the rows of a step, by request."""

from dataclasses import dataclass, field

from mlc_amd.runtime.cache.sequence import Sequence
from mlc_amd.runtime.engine.requests import Request


@dataclass(frozen=True)
class Chunk:
    """The tokens start .. start+count-1 of a sequence. answers: the row of the last one gives a token, as no further
    one is known. scored: the logits of all are wanted, and the step has no single rows."""

    request: Request
    sequence: Sequence
    start: int
    count: int
    answers: bool
    scored: bool = False


@dataclass(frozen=True)
class Step:
    """Rows: for each of `singles` the token sequence.tokens[sequence.computed], and behind it its drafts, then the
    chunk. All sequences have slots and pages. drafts: of each of `singles`, guesses of its next tokens."""

    singles: list[tuple[Request, Sequence]]
    chunk: Chunk | None = None
    drafts: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.drafts.extend([] for _ in self.singles[len(self.drafts) :])

    @property
    def computed(self) -> list[tuple[Request, Sequence]]:
        """All that have rows, in their order."""
        return self.singles + ([(self.chunk.request, self.chunk.sequence)] if self.chunk else [])

    @property
    def sequences(self) -> list[Sequence]:
        return [sequence for _, sequence in self.computed]

    @property
    def answers(self) -> list[Request]:
        """The requests that get a token of the step, in the order of its rows."""
        last = [self.chunk.request] if self.chunk and self.chunk.answers else []
        return [request for request, _ in self.singles] + last
