"""Decides which tokens of which requests the next step computes: continuous batching with chunked prefill.

The driver (steps.py) calls `plan`, runs the step on the device, and calls `complete` with the sampled tokens; it calls
`finish` for each request that has ended. All methods but `cancel` must be called by one thread. If the next step will
have the same rows as the step in progress, `plan_ahead` plans it before the tokens of the step in progress are known.

The rows of a step:

- Each running answer has one row in every step. If there are more answers than rows, clients alternate, and within a
  client its requests. Remaining rows may verify guesses of further tokens (`draft`).
- A step also has at most one chunk of a prompt. Clients take turns with chunks.
- Two kinds of chunk are a step of their own, followed by a step of answers: one whose logits are all needed
  (`Request.scored`), and one with an image that leaves no room for other rows. A chunk waits for the features of
  images.

Which requests run:

- If the maximum number of requests is running, a client without a running request replaces a request of the client with
  the most.
- The pages of a step are reserved before it runs. If there are too few, the youngest running request is preempted: it
  releases its pages and waits. When it runs again, only pages that the index has lost are computed again. So the oldest
  running request always proceeds.

With several GPUs that have layers each (`groups`), several steps are in progress, in the order in which they were
planned. Answers are divided into as many groups, each with steps of its own; further chunks of a prompt are planned
before the first is done.

The scheduler assumes that sequences of others hold pages only for a short time: requests wait for these pages.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from mlc_amd.runtime.cache.kv_cache import KvCache
from mlc_amd.runtime.cache.sequence import Sequence
from mlc_amd.runtime.engine.admission import Admission, SchedulerLimits, sequence_of
from mlc_amd.runtime.engine.generation import ContextFull
from mlc_amd.runtime.engine.requests import PlannedStep, Request
from mlc_amd.runtime.errors import UserError


class QueueFull(UserError):
    """The queue is full: the maximum number of requests is waiting."""


class RequestCounts(NamedTuple):
    """The number of waiting requests, and of running ones."""

    waiting: int
    running: int


class Scheduler:
    """The scheduler of one cache. running: the running requests, in the order in which they were added."""

    def __init__(self, cache: KvCache, limits: SchedulerLimits | None = None, groups: int = 1) -> None:
        """groups: number of steps that the device computes at the same time. If there are several, one more step may be
        planned, so that the device never waits for the host."""
        self.cache, self.limits, self.groups = cache, limits or SchedulerLimits(), groups
        self._most = groups + 1 if groups > 1 else 1  # upper limit of the steps in progress, without `plan_ahead`
        self.admission = Admission(cache, self.limits, groups)
        self.running = self.admission.running
        self._number = 0
        self._in_progress: deque[PlannedStep] = deque()  # planned and not completed, in order
        self._steps = 0
        self._cancels: deque[Request] = deque()
        self._ended: list[Sequence] = []  # sequences of requests that are done, which a step in progress may still use
        self._alone = False  # whether the last step was a chunk alone

    @property
    def unfinished(self) -> int:
        """Number of requests that are waiting or running."""
        return self.waiting + len(self.running)

    @property
    def waiting(self) -> int:
        """Number of requests that are waiting."""
        return self.admission.queues.waiting

    # ---- requests

    def add(self, request: Request) -> None:
        """Queues a request. Raises QueueFull, ContextFull if the cache cannot hold it, UserError without tokens."""
        if not request.prompt:
            raise UserError("nothing to evaluate: the prompt has no tokens")
        if self.waiting >= self.limits.queue:
            raise QueueFull(f"{self.waiting} requests are waiting already: try again later")
        longest, tokens = self.cache.longest, len(request.prompt)
        most = longest - tokens + 1  # the last token is not computed
        if most < max(wanted := 1 if request.max_tokens is None else request.max_tokens, 1):
            raise ContextFull(
                f"{tokens} tokens of prompt and {wanted} to generate do not fit the KV cache, which "
                f"holds {longest} tokens of one sequence",
                "shorten the prompt, ask for fewer tokens, or load the model with a larger context",
            )
        request.limit = most if request.max_tokens is None else request.max_tokens
        if request.sequence is None:
            request.sequence = self.cache.sequence(request.prompt)
        request.number, self._number = self._number, self._number + 1
        self.admission.queues.add(request)
        if request.cancelled:
            self._cancels.append(request)

    def cancel(self, request: Request) -> None:
        """Makes the next `plan` finish the request as "cancelled", unless it is done. May be called by any thread, and
        even before `add`."""
        request.cancelled = True
        self._cancels.append(request)

    def finish(self, request: Request, reason: str) -> None:
        """Ends a request, if it is not done, and releases its pages: at once, or after the steps in progress."""
        if request.state == "done" or request.sequence is None:
            return
        if request.state == "running":
            self.running.remove(request)
        else:
            self.admission.queues.dequeue(request)
        self.admission.queues.finish(request)
        request.state, request.finish = "done", reason
        if request.scored is not None:
            pass  # the sequence is the caller's, and keeps its pages
        elif not self._in_progress:
            request.sequence.free()
        else:
            self._ended.append(request.sequence)
        self.admission.blocked = False

    # ---- steps

    @property
    def may_plan(self) -> bool:
        """Whether `plan` may be called."""
        return len(self._in_progress) < self._most

    @property
    def _busy(self) -> set[Request]:
        """The requests that will get a token from a step in progress."""
        return {request for step in self._in_progress for request in step.answers}

    def plan(self) -> PlannedStep | None:
        """Plans the next step; None if there is nothing to compute now. Steps must be completed in this order."""
        if not self.may_plan:
            raise RuntimeError("the last step is neither completed nor abandoned")
        while self._cancels:
            self.finish(self._cancels.popleft(), "cancelled")
        singles, prefilling, busy = [], {}, self._busy
        self.admission.busy, self.admission.missing = busy, {}
        for request in self.running:
            pending = sequence_of(request).pending
            if len(request.generated) >= max(request.limit, 1) or not pending or request in busy:
                continue  # the driver has not called `finish` yet, or its newest token is not known yet
            if pending == 1 and request.scored is None and request.limit and sequence_of(request).tokens[-1] >= 0:
                singles.append(request)
            else:
                prefilling.setdefault(request.client, request)
        most = min(self.limits.step_rows, self.cache.slots)
        if self.groups > 1:
            size = -(-(len(singles) + len(busy)) // self.groups)
            most = min(most, max(size, 1) + bool(prefilling or self.waiting))
            if sum(bool(step.singles) for step in self._in_progress) >= self.groups:
                singles = []
        planned = self.admission.reserve_rows(singles, max(most - bool(prefilling or self.waiting), 1))
        room = len(planned) < most
        chunk = self.admission.plan_chunk(planned, prefilling, self._alone) if room else None
        self._alone = chunk is not None and chunk.alone
        if self._alone:
            planned = []
        elif chunk and chunk.answers and chunk.count == 1 and chunk.sequence.tokens[-1] >= 0:
            planned.append(chunk.request)
            chunk = None
        if not planned and not chunk:
            return None
        self._steps += 1
        rows = []
        for request in planned:
            request.last_step = self._steps
            rows.append((request, request.sequence))
        step = PlannedStep(rows, chunk)
        self._in_progress.append(step)
        self.cache.assign_slots(step.sequences)
        return step

    @staticmethod
    def started(step: PlannedStep) -> None:
        """To be called when the device has the inputs of a planned step. Its chunk then counts as computed, because the
        device computes later steps after it; but not a chunk after which a token is sampled."""
        if step.chunk and not step.chunk.answers:
            step.chunk.count_as_computed()

    def plan_ahead(self, step: PlannedStep) -> PlannedStep | None:
        """Plans the step after `step`, the oldest in progress, before its tokens are known: the same rows, each with
        the token that `step` samples. Returns None if the next step may have other rows, or if there are no pages for
        it. A request that `step` ends still has a row."""
        running = [request for request, _ in step.singles]
        may_start = self.waiting and not self.admission.blocked
        if not self._in_progress or step is not self._in_progress[0] or len(self._in_progress) > self._most:
            return None
        if step.chunk or any(step.drafts) or may_start or self._cancels or self._busy != set(self.running):
            return None
        for request, sequence in step.singles:
            if len(request.generated) + 2 > request.limit or not sequence.reserve(1, 1):
                return None
        self._steps += 1
        for request in running:
            request.last_step = self._steps
        ahead = PlannedStep(step.singles)
        self._in_progress.append(ahead)
        self.cache.assign_slots(ahead.sequences)
        return ahead

    def guesses(self, step: PlannedStep) -> dict[Request, int]:
        """For each request of a step without a chunk: how many drafts it may have if no other request has any."""
        return {request: self._guesses(request, sequence) for request, sequence in step.singles}

    @staticmethod
    def _guesses(request: Request, sequence: Sequence) -> int:
        return min(request.limit - len(request.generated) - 1, sequence.guess_room)

    def draft(self, step: PlannedStep, drafts: Mapping[Request, list[int]]) -> PlannedStep:
        """Replaces the planned step, which must have no chunk, by one with drafts: as many as there are rows and pages
        for. Preempts no request."""
        if [*self._in_progress] != [step] or step.chunk:
            raise RuntimeError("this is no step in progress without a chunk")
        rows = self.limits.step_rows - len(step.singles)
        found = []
        for request, sequence in step.singles:
            count = min(len(drafts.get(request, ())), rows, self._guesses(request, sequence))
            found.append(drafts[request][:count] if count else [])
            sequence.reserve(1, count)
            rows -= count
        step = PlannedStep(step.singles, None, found)
        self._in_progress[0] = step
        self.cache.assign_slots(step.sequences)
        return step

    def complete(self, step: PlannedStep, tokens: Iterable[SequenceOf[int]]) -> None:
        """To be called when the oldest step has run. tokens: for each of step.answers the drafts that were right, and
        one more token; ignored for requests that are done. Raises ValueError for another number of answers."""
        tokens, answers = list(tokens), step.answers
        if len(tokens) != len(answers) or not all(tokens):
            raise ValueError(f"tokens {tokens} for a step with {len(answers)} answers")
        self._end(step)
        for request, found in zip(answers, tokens, strict=True):
            if request.state != "done":
                sequence_of(request).tokens.extend(found)
                request.generated.extend(found)
        for (request, sequence), drafts, found in zip(step.singles, step.drafts, tokens, strict=False):
            kept = min(sequence.pending, 1) if request.state == "done" else len(found)
            sequence.advance(kept, len(drafts) + 1 - kept)
        if step.chunk:
            step.chunk.count_as_computed()
        self._free_ended()

    def abandon(self) -> None:
        """To be called when the steps in progress have failed. Their results do not count, but for chunks that counted
        as computed before."""
        if not self._in_progress:
            raise RuntimeError("no step is in progress")
        sequences = {id(sequence): sequence for step in self._in_progress for sequence in step.sequences}
        self._in_progress.clear()
        for sequence in sequences.values():
            sequence.abandon()
        self._free_ended()

    def _end(self, step: PlannedStep) -> None:
        if not self._in_progress or step is not self._in_progress[0]:
            raise RuntimeError("this is not the step in progress")
        self._in_progress.popleft()

    def _free_ended(self) -> None:
        """Frees the sequences of ended requests that no step in progress uses."""
        used = [sequence for step in self._in_progress for sequence in step.sequences]
        for sequence in self._ended:
            if sequence not in used:
                sequence.free()
        self._ended = [sequence for sequence in self._ended if sequence in used]
