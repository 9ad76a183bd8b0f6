"""A request: what is to be generated, or scored, for which client, and its progress."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

from mlc_amd.runtime.cache.sequence import Sequence

RequestState = Literal["waiting", "running", "done"]  # waiting: no pages; running: takes part in steps


@dataclass(eq=False)
class Request:
    """Set by the caller:

    prompt      token ids, at least one
    max_tokens  None: as many as the cache holds
    client      key of the client: the scheduler is fair between clients
    sampling    for the driver; the scheduler ignores it
    leader      a request with the same prompt, added before: this one waits until the leader's prompt is computed, or
                the leader is done, and shares its pages
    scored      None, or for a request that generates nothing: the first token of the prompt whose logits are still to
                be computed, with those of all later ones; the scheduler updates it
    sequence    of a request that generates nothing: the caller's own, of which `prompt` are the tokens. It keeps its
                pages when the request is done. Otherwise the scheduler makes it

    Set by the scheduler:

    state, finish   finish: why it is done: the argument of `Scheduler.finish`
    generated       token ids, the end token included
    limit           tokens that it may generate: the driver finishes it there
    cached          tokens of the prompt that were in the cache when it began
    cancelled       `Scheduler.cancel` was called
    number          in the order of `Scheduler.add`
    """

    prompt: list[int]
    max_tokens: int | None = None
    client: Hashable = None
    sampling: object = None
    leader: "Request | None" = None
    scored: int | None = None
    sequence: Sequence | None = None

    state: RequestState = "waiting"
    finish: str | None = None
    generated: list[int] = field(default_factory=list)
    limit: int = 0
    cached: int | None = None
    cancelled: bool = False
    number: int = -1
    last_step: int = 0  # number of the last step that had a single row of it

    def fork(self, sampling: object = None) -> "Request":
        """A request for one more answer to the same prompt, which is computed once."""
        leader = self.leader or self
        return Request(self.prompt, self.max_tokens, self.client, sampling or self.sampling, leader)

    @property
    def ready(self) -> bool:
        """Whether it does not wait for its leader's prompt."""
        leader = self.leader
        if leader is None or leader.state == "done":
            return True
        return leader.sequence is not None and leader.sequence.computed >= len(leader.prompt)
