"""Requests: what is to be generated, or scored, for which client, and its progress; the rows of a step by request."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from mlc_amd.runtime.cache.sequence import ChunkRows, Sequence

RequestState = Literal["waiting", "running", "done"]  # waiting: no pages; running: takes part in steps

# Of the pages of a waiting request that are on disk: not looked for, being read, in the cache.
StoredState = Literal["unknown", "reading", "read"]


@dataclass(eq=False)
class Request:
    """Fields up to `sequence` are set by the caller, the others by the scheduler."""

    prompt: list[int]  # token ids, at least one; a Prompt if there are images among them
    max_tokens: int | None = None  # None: as many as the cache holds; 0: only the prompt is computed
    client: Hashable = None  # the scheduler is fair between clients
    sampling: object = None  # for the driver; the scheduler ignores it
    # A request with the same prompt, added before: this one waits until the leader's prompt is computed, or the leader
    # is done, and shares its pages.
    leader: "Request | None" = None
    # For a request that generates nothing: the first token of the prompt whose logits are still to be computed, with
    # those of all later ones; the scheduler updates it.
    scored: int | None = None
    # Of a request that generates nothing perhaps the caller's own, of which `prompt` are the tokens. Otherwise the
    # scheduler makes it. That of a request that generates nothing keeps its pages when the request is done.
    sequence: Sequence | None = None

    state: RequestState = "waiting"
    stored: StoredState = "unknown"
    finish: str | None = None  # why it is done: the argument of `Scheduler.finish`
    generated: list[int] = field(default_factory=list)  # token ids, the end token included
    limit: int = 0  # tokens that it may generate: the driver finishes it there
    cached: int | None = None  # tokens of the prompt that were in the cache when it began
    cancelled: bool = False  # `Scheduler.cancel` was called
    number: int = -1  # in the order of `Scheduler.add`
    last_step: int = 0  # number of the last step that had a single row of it

    def fork(self, sampling: object = None) -> "Request":
        """A request for one more answer to the same prompt, which is computed once."""
        leader = self.leader or self
        return Request(self.prompt, self.max_tokens, self.client, sampling or self.sampling, leader)

    @property
    def ready(self) -> bool:
        """Whether it does not wait for its leader's prompt, or for what is read from disk."""
        leader = self.leader
        if self.stored == "reading":
            return False
        if leader is None or leader.state == "done":
            return True
        return leader.sequence is not None and leader.sequence.computed >= len(leader.prompt)


@dataclass
class PlannedChunk:
    """The tokens start .. start+count-1 of a sequence."""

    request: Request
    sequence: Sequence
    start: int
    count: int
    answers: bool  # a token is sampled after the last one, which is the last known token of a request that wants more
    scored: bool = False  # the logits of all are wanted
    alone: bool = False  # the step has no single rows
    counted: bool = False  # its tokens count as computed

    @property
    def rows(self) -> ChunkRows:
        """Until it counts as computed."""
        return self.sequence.chunk(self.count)

    def count_as_computed(self) -> None:
        """Once."""
        if not self.counted:
            self.counted = True
            self.sequence.advance(self.count)
            if self.scored:
                self.request.scored = self.sequence.computed


@dataclass(frozen=True)
class PlannedStep:
    """Rows: for each of `singles` the token sequence.tokens[sequence.computed], followed by its drafts, then the chunk.
    All sequences have slots and pages."""

    singles: list[tuple[Request, Sequence]]
    chunk: PlannedChunk | None = None
    drafts: list[list[int]] = field(default_factory=list)  # of each of `singles`, guesses of its next tokens

    def __post_init__(self) -> None:
        self.drafts.extend([] for _ in self.singles[len(self.drafts) :])

    @property
    def computed(self) -> list[tuple[Request, Sequence]]:
        """All that have rows, in their order."""
        return self.singles + ([(self.chunk.request, self.chunk.sequence)] if self.chunk else [])

    def ends(self, sequence: Sequence) -> bool:
        """Whether its chunk has the last known token of a sequence."""
        return self.chunk is not None and self.chunk.start + self.chunk.count == len(sequence.tokens)

    @property
    def sequences(self) -> list[Sequence]:
        return [sequence for _, sequence in self.computed]

    @property
    def answers(self) -> list[Request]:
        """The requests that get a token of the step, in the order of its rows."""
        last = [self.chunk.request] if self.chunk and self.chunk.answers else []
        return [request for request, _ in self.singles] + last


class Scoring:
    """The logits of `sequence` from token number `first` on: float32 [tokens, vocab], once it is `done`, or `error`."""

    def __init__(self, sequence: Sequence, first: int, vocab: int) -> None:
        # A client of its own: it delays no other client's next chunk.
        self.request = Request(sequence.tokens, client=self, scored=first, sequence=sequence)
        self.logits = np.empty((len(sequence.tokens) - first, vocab), np.float32)
        self.done = False
        self.error: BaseException | None = None
        self._sequence, self._first = sequence, first

    @property
    def ready(self) -> bool:
        return self.done

    def ended(self) -> None:
        """Called once no further step has rows of it. The sequence stays as it is: it is the caller's."""

    def take(self, start: int, logits: np.ndarray) -> None:
        """The rows of the tokens from number `start` on."""
        self.logits[start - self._first : start - self._first + len(logits)] = logits
        self.done = start + len(logits) == len(self._sequence.tokens)

    def fail(self, error: BaseException) -> None:
        self.done, self.error = True, error
