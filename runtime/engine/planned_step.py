"""The scheduler's result: the rows of a step, by request."""

from dataclasses import dataclass, field

from mlc_amd.runtime.cache.sequence import Sequence
from mlc_amd.runtime.engine.requests import Request


@dataclass(frozen=True)
class PlannedChunk:
    """The tokens start .. start+count-1 of a sequence. answers: a token is sampled after the last one, which is the
    last known token. scored: the logits of all are wanted, and the step has no single rows."""

    request: Request
    sequence: Sequence
    start: int
    count: int
    answers: bool
    scored: bool = False


@dataclass(frozen=True)
class PlannedStep:
    """Rows: for each of `singles` the token sequence.tokens[sequence.computed], followed by its drafts, then the chunk.
    All sequences have slots and pages. drafts: of each of `singles`, guesses of its next tokens."""

    singles: list[tuple[Request, Sequence]]
    chunk: PlannedChunk | None = None
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
