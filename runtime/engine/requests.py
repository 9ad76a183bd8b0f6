"""The scheduler's data: `Request` (what to generate or score, for which client, and its progress), `PlannedStep` (the
rows of a step, by request), and `Scoring` (a request for logits)."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from mlc_amd.runtime.cache.sequence import ChunkRows, Sequence

RequestState = Literal["waiting", "running", "done"]  # waiting: has no pages; running: takes part in steps

# What is known about pages of a waiting request on disk: not searched for yet, being read, read (or none found).
StoredState = Literal["unknown", "reading", "read"]


@dataclass(eq=False)
class Request:
    """A request. The caller sets the fields up to `sequence`, the scheduler sets the others."""

    prompt: list[int]  # token ids, at least one; a Prompt if there are images among them
    max_tokens: int | None = None  # None: as many as the cache holds; 0: only the prompt is computed
    client: Hashable = None  # the scheduler is fair between clients
    sampling: object = None  # for the driver; the scheduler ignores it
    # A request with the same prompt that was added before. This request waits until the leader's prompt is computed (or
    # the leader is done), and then shares its pages.
    leader: "Request | None" = None
    # Not None for a scoring, which generates nothing: the number of the first token whose logits are not computed yet.
    # The logits of this token and all later ones are needed. The scheduler updates it.
    scored: int | None = None
    # The scheduler makes it if it is None. A scoring may have the caller's own sequence, whose tokens `prompt` is. The
    # sequence of a scoring keeps its pages when the request is done.
    sequence: Sequence | None = None

    state: RequestState = "waiting"
    stored: StoredState = "unknown"
    finish: str | None = None  # why it is done: the argument of `Scheduler.finish`
    generated: list[int] = field(default_factory=list)  # token ids, the end token included
    limit: int = 0  # upper limit of `generated`; the driver must finish the request there
    cached: int | None = None  # tokens of the prompt that were in the cache when it began
    cancelled: bool = False  # whether `Scheduler.cancel` was called
    number: int = -1  # number in the order of `Scheduler.add`
    last_step: int = 0  # number of the last step with a single row of this request

    def fork(self, sampling: object = None) -> "Request":
        """A request for another answer to the same prompt. The prompt is computed once."""
        leader = self.leader or self
        return Request(self.prompt, self.max_tokens, self.client, sampling or self.sampling, leader)

    @property
    def ready(self) -> bool:
        """Whether it could start: it waits neither for its leader's prompt nor for pages from disk."""
        leader = self.leader
        if self.stored == "reading":
            return False
        if leader is None or leader.state == "done":
            return True
        return leader.sequence is not None and leader.sequence.computed >= len(leader.prompt)


@dataclass
class PlannedChunk:
    """A chunk of a step: the tokens start .. start+count-1 of a sequence."""

    request: Request
    sequence: Sequence
    start: int
    count: int
    answers: bool  # whether a token is sampled after its last token; this is then the last known token of the sequence
    scored: bool = False  # whether the logits of all its tokens are needed
    alone: bool = False  # whether the step must have no single rows
    counted: bool = False  # whether its tokens already count as computed

    @property
    def rows(self) -> ChunkRows:
        """The rows for the device. Valid only until the chunk counts as computed."""
        return self.sequence.chunk(self.count)

    def count_as_computed(self) -> None:
        """Counts its tokens as computed, at the first call."""
        if not self.counted:
            self.counted = True
            self.sequence.advance(self.count)
            if self.scored:
                self.request.scored = self.sequence.computed


@dataclass(frozen=True)
class PlannedStep:
    """A step. Its rows: for each of `singles` the token sequence.tokens[sequence.computed], followed by its drafts;
    then the chunk. All its sequences have slots and pages."""

    singles: list[tuple[Request, Sequence]]
    chunk: PlannedChunk | None = None
    drafts: list[list[int]] = field(default_factory=list)  # for each of `singles` the guesses of its next tokens

    def __post_init__(self) -> None:
        self.drafts.extend([] for _ in self.singles[len(self.drafts) :])

    @property
    def computed(self) -> list[tuple[Request, Sequence]]:
        """All requests with rows in the step, in the order of rows."""
        return self.singles + ([(self.chunk.request, self.chunk.sequence)] if self.chunk else [])

    def ends(self, sequence: Sequence) -> bool:
        """Whether the step's chunk ends with the last known token of the sequence."""
        return self.chunk is not None and self.chunk.start + self.chunk.count == len(sequence.tokens)

    @property
    def sequences(self) -> list[Sequence]:
        return [sequence for _, sequence in self.computed]

    @property
    def answers(self) -> list[Request]:
        """The requests that get a token from the step, in the order of rows."""
        last = [self.chunk.request] if self.chunk and self.chunk.answers else []
        return [request for request, _ in self.singles] + last


class Scoring:
    """A request for the logits of a sequence from token number `first` on. logits: float32 [tokens, vocab], complete
    when it is `done` without an `error`."""

    def __init__(self, sequence: Sequence, first: int, vocab: int) -> None:
        # It is a client of its own, so that it delays no chunk of another client.
        self.request = Request(sequence.tokens, client=self, scored=first, sequence=sequence)
        self.logits = np.empty((len(sequence.tokens) - first, vocab), np.float32)
        self.done = False
        self.error: BaseException | None = None
        self._sequence, self._first = sequence, first

    @property
    def ready(self) -> bool:
        return self.done

    def ended(self) -> None:
        """Called when no further step has rows of it. Does nothing to the sequence, which is the caller's."""

    def take(self, start: int, logits: np.ndarray) -> None:
        """Takes the logits of a step: float32 [rows, vocab], of the tokens from number `start` on."""
        self.logits[start - self._first : start - self._first + len(logits)] = logits
        self.done = start + len(logits) == len(self._sequence.tokens)

    def fail(self, error: BaseException) -> None:
        self.done, self.error = True, error
