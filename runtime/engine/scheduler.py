"""Which tokens of which requests the next step computes: continuous batching with chunked prefill.

A driver loop calls `plan`, runs the step on the device, calls `complete` with the sampled tokens, and `finish` for each
request that is at its end. All methods but `cancel` are called by one thread. Where the next step will have the same
rows as the one in progress, `plan_behind` plans it before the tokens of that one are known.

Every running answer has a row in every step; if there are more than rows, clients and their requests take turns. Rows
that are left may verify guesses of how answers go on (`draft`). One
chunk of a prompt rides along; clients take turns with chunks. A chunk of which all logits are wanted (`Request.scored`)
is a step by itself, after which the answers have one. Where as many requests run as may, a client that has none running
takes the place of the one that has most. The pages of a step are reserved before it runs. Where
the pools have not enough, the youngest running request is preempted: it gives up its pages and waits; what the index
has lost of it when its turn comes is computed again. So the oldest running request is never kept from going on.

The scheduler assumes that no other sequence of the cache holds pages for long: requests wait for those.
"""

from bisect import insort
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

from mlc_amd.runtime.cache.kv_cache import Cache
from mlc_amd.runtime.cache.sequence import Sequence
from mlc_amd.runtime.engine.functions import chunk_size
from mlc_amd.runtime.engine.generation import ContextFull
from mlc_amd.runtime.engine.planned_step import Chunk, Step
from mlc_amd.runtime.engine.requests import Request
from mlc_amd.runtime.errors import UserError


class QueueFull(UserError):
    """As many requests wait as may wait."""


class Queue(NamedTuple):
    """How many requests wait, and how many are running."""

    waiting: int
    running: int


@dataclass(frozen=True)
class Limits:
    """At most. singles: answers of a step; chunk: tokens of a chunk; rows: tokens of a step with a chunk and single
    rows; scored: tokens of a chunk of which all logits are wanted; running: requests that hold pages; queue: requests
    that wait. sizes: rows of the functions for a chunk without single rows, see `chunk_size`."""

    singles: int = 64
    chunk: int = 512
    rows: int = 512
    scored: int = 64
    running: int = 128
    queue: int = 1024
    sizes: tuple[int, ...] = ()

    @property
    def step_rows(self) -> int:
        """Rows of a step without a chunk."""
        return min(self.singles, self.rows)


@dataclass
class _Client:
    unfinished: int = 0
    waiting: list[Request] = field(default_factory=list)  # in the order of their numbers


class Scheduler:
    """Requests on one cache. `running`: in the order in which they were added."""

    def __init__(self, cache: Cache, limits: Limits | None = None) -> None:
        self.cache, self.limits = cache, limits or Limits()
        self.running: list[Request] = []
        self._clients: OrderedDict[Hashable, _Client] = OrderedDict()  # the one whose turn it is first
        self._waiting = 0
        self._number = 0
        self._step: Step | None = None  # planned, not completed
        self._behind: Step | None = None  # the same of the step behind it
        self._steps = 0
        self._cancels: deque[Request] = deque()
        self._ended: list[Sequence] = []  # which the step in progress may use
        self._blocked = False  # no request fits in besides the running ones until pages are released
        self._scored = False  # the last step was that of a scored chunk

    @property
    def unfinished(self) -> int:
        """Number of requests that are waiting or running."""
        return self._waiting + len(self.running)

    @property
    def waiting(self) -> int:
        """Number of requests that are waiting."""
        return self._waiting

    # ---- requests

    def add(self, request: Request) -> None:
        """Queues a new request. QueueFull; ContextFull if it needs more tokens than the cache could ever hold for it;
        UserError for an empty prompt."""
        if not request.prompt:
            raise UserError("nothing to evaluate: the prompt has no tokens")
        if self._waiting >= self.limits.queue:
            raise QueueFull(f"{self._waiting} requests are waiting already: try again later")
        longest, given = self.cache.longest, len(request.prompt)
        most = longest - given + 1  # the last token is not computed
        if most < (request.max_tokens or 1):
            raise ContextFull(
                f"{given} tokens of prompt and {request.max_tokens or 1} to generate do not fit the KV cache, which "
                f"holds {longest} tokens of one sequence",
                "shorten the prompt, ask for fewer tokens, or load the model with a larger context",
            )
        request.limit = request.max_tokens or most
        if request.sequence is None:
            request.sequence = self.cache.sequence(request.prompt)
        request.number, self._number = self._number, self._number + 1
        client = self._clients.setdefault(request.client, _Client())
        client.unfinished += 1
        self._wait(request)
        if request.cancelled:
            self._cancels.append(request)

    def cancel(self, request: Request) -> None:
        """The next `plan` finishes the request with the reason "cancelled", if it is not done then. Any thread may call
        this, also before `add`."""
        request.cancelled = True
        self._cancels.append(request)

    def finish(self, request: Request, reason: str) -> None:
        """Ends a request: it is computed no further, and its pages are released, after the step in progress if there
        is one. Does nothing if it is done."""
        if request.state == "done" or request.sequence is None:
            return
        client = self._clients[request.client]
        if request.state == "running":
            self.running.remove(request)
        else:
            client.waiting.remove(request)
            self._waiting -= 1
        client.unfinished -= 1
        if not client.unfinished:
            del self._clients[request.client]
        request.state, request.finish = "done", reason
        if request.scored is not None:
            pass  # its sequence is the caller's
        elif self._step is None:
            request.sequence.free()
        else:
            self._ended.append(request.sequence)
        self._blocked = False

    # ---- steps

    def plan(self) -> Step | None:
        """The next step, or None if there is nothing to compute now. Each is completed or abandoned before the next."""
        if self._step is not None:
            raise RuntimeError("the last step is neither completed nor abandoned")
        while self._cancels:
            self.finish(self._cancels.popleft(), "cancelled")
        singles, prefilling = [], {}
        for request in self.running:
            pending = _sequence(request).pending
            if len(request.generated) >= request.limit or not pending:
                continue  # the driver has not finished it
            if pending == 1 and request.scored is None:
                singles.append(request)
            else:
                prefilling.setdefault(request.client, request)
        most = min(self.limits.step_rows, self.cache.slots)
        planned = self._reserve_singles(singles, max(most - bool(prefilling or self._waiting), 1))
        chunk = self._plan_chunk(planned, prefilling) if len(planned) < most else None
        self._scored = chunk is not None and chunk.scored
        if self._scored:
            planned = []
        elif chunk and chunk.answers and chunk.count == 1:
            planned.append(chunk.request)
            chunk = None
        if not planned and not chunk:
            return None
        self._steps += 1
        rows = []
        for request in planned:
            request.last_step = self._steps
            rows.append((request, request.sequence))
        self._step = Step(rows, chunk)
        self.cache.seat(self._step.sequences)
        return self._step

    def plan_behind(self, step: Step) -> Step | None:
        """The step behind the one in progress, if it certainly has the same rows and there are pages for them; of each
        sequence it computes the token that the step in progress gives. A request that is done by then keeps its row."""
        running = [request for request, _ in step.singles]
        waits = self._waiting and not self._blocked
        if step is not self._step or self._behind or step.chunk or any(step.drafts):
            return None
        if waits or self._cancels or running != self.running:
            return None
        for request, sequence in step.singles:
            if len(request.generated) + 2 > request.limit or not sequence.reserve(1, 1):
                return None
        self._steps += 1
        for request in running:
            request.last_step = self._steps
        self._behind = Step(step.singles)
        self.cache.seat(self._behind.sequences)
        return self._behind

    def guesses(self, step: Step) -> dict[Request, int]:
        """How many drafts each request of a step without a chunk may have, if no other has any."""
        return {request: self._guesses(request, sequence) for request, sequence in step.singles}

    @staticmethod
    def _guesses(request: Request, sequence: Sequence) -> int:
        return min(request.limit - len(request.generated) - 1, sequence.guess_room)

    def draft(self, step: Step, drafts: Mapping[Request, list[int]]) -> Step:
        """The planned step without a chunk, with as many of the drafts of its requests as there are rows and pages for.
        Nobody gives way to them."""
        if step is not self._step or step.chunk:
            raise RuntimeError("this is no step in progress without a chunk")
        rows = self.limits.step_rows - len(step.singles)
        found = []
        for request, sequence in step.singles:
            count = min(len(drafts.get(request, ())), rows, self._guesses(request, sequence))
            found.append(drafts[request][:count] if count else [])
            sequence.reserve(1, count)
            rows -= count
        self._step = Step(step.singles, None, found)
        self.cache.seat(self._step.sequences)
        return self._step

    def complete(self, step: Step, tokens: Iterable[SequenceOf[int]]) -> None:
        """The step has run. tokens: for each of step.answers the drafts that were right, and one more; those of
        finished requests are ignored."""
        tokens, answers = list(tokens), step.answers
        if len(tokens) != len(answers) or not all(tokens):
            raise ValueError(f"tokens {tokens} for a step with {len(answers)} answers")
        self._end(step)
        for request, found in zip(answers, tokens, strict=True):
            if request.state != "done":
                _sequence(request).tokens.extend(found)
                request.generated.extend(found)
        for (request, sequence), drafts, found in zip(step.singles, step.drafts, tokens, strict=False):
            kept = min(sequence.pending, 1) if request.state == "done" else len(found)
            sequence.advance(kept, len(drafts) + 1 - kept)
        if step.chunk:
            step.chunk.sequence.advance(step.chunk.count)
            if step.chunk.scored:
                step.chunk.request.scored = step.chunk.sequence.computed
        self._free_ended()

    def abandon(self) -> None:
        """The planned step has failed, and with it the one behind it: nothing of them counts as computed. Their
        requests are as before `plan`."""
        step, self._step, self._behind = self._step, None, None
        if step is None:
            raise RuntimeError("no step is in progress")
        for sequence in step.sequences:
            sequence.abandon()
        self._free_ended()

    def _end(self, step: Step) -> None:
        if step is not self._step:
            raise RuntimeError("this is not the step in progress")
        self._step, self._behind = self._behind, None

    def _free_ended(self) -> None:
        """Those that no step uses."""
        used = self._step.sequences if self._step else []
        for sequence in self._ended:
            if sequence not in used:
                sequence.free()
        self._ended = [sequence for sequence in self._ended if sequence in used]

    # ---- single rows

    def _reserve_singles(self, ready: list[Request], most: int) -> list[Request]:
        """The requests that get a row, at most `most`, with pages for it."""
        if len(ready) > most:
            ready = sorted(_take_turns(ready)[:most], key=_number)
        rows = []
        for request in ready:
            # A victim is younger than the request that needs its pages: it comes later here, or not at all.
            while request.state == "running" and not _sequence(request).reserve(1):
                self._preempt(self.running[-1])
            if request.state == "running":
                rows.append(request)
        return rows

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        _sequence(request).free()
        self._wait(request)
        self._blocked = False

    def _wait(self, request: Request) -> None:
        request.state = "waiting"
        insort(self._clients[request.client].waiting, request, key=_number)
        self._waiting += 1

    # ---- the chunk

    def _plan_chunk(self, singles: list[Request], prefilling: dict[Hashable, Request]) -> Chunk | None:
        """The chunk of the client whose turn it is; of the next one if there is no room for it. Takes requests out of
        `singles` whose pages an older request needs."""
        most = min(self.limits.chunk, self.limits.rows - len(singles))
        for key, client in self._clients.items():
            request, waiting = prefilling.get(key), self._first(key, client)
            if request is None or request.state != "running" or (waiting and waiting.number < request.number):
                request = waiting
            if request is None:
                continue
            if not (self._admit(request, singles) if request is waiting else self._make_room(request, singles)):
                continue
            chunk = self._chunk(request, most, () if singles else self.limits.sizes)
            if chunk.scored and self._scored and singles:
                continue
            chunk.sequence.reserve(chunk.count)
            self._clients.move_to_end(key)
            return chunk
        return None

    def _chunk(self, request: Request, most: int, sizes: tuple[int, ...]) -> Chunk:
        sequence, scored = _sequence(request), request.scored
        count = chunk_size(sequence.pending, sizes, min(sequence.room, most))
        start, count = sequence.computed, sequence.step_size(count)
        if scored is None:
            return Chunk(request, sequence, start, count, count == sequence.pending)
        if start < scored:
            return Chunk(request, sequence, start, min(count, scored - start), False)
        # Without single rows it may be longer than `most`.
        count = sequence.step_size(min(sequence.room, self.limits.scored))
        return Chunk(request, sequence, start, count, False, True)

    def _first(self, key: Hashable, client: _Client) -> Request | None:
        """The client's first request that could begin."""
        if not client.waiting or (self.running and self._blocked):
            return None
        if self._full and (any(request.client == key for request in self.running) or self._most_running() is None):
            return None
        return next((request for request in client.waiting if request.ready), None)

    @property
    def _full(self) -> bool:
        return len(self.running) >= self.limits.running

    def _most_running(self) -> Request | None:
        """The youngest running request of the client that has most of them; None if none has two."""
        key, count = Counter(request.client for request in self.running).most_common(1)[0]
        return next(request for request in reversed(self.running) if request.client == key) if count > 1 else None

    def _admit(self, request: Request, singles: list[Request]) -> bool:
        """Begins a waiting request, unless that would soon mean to preempt one for its pages."""
        sequence = _sequence(request)
        sequence.match(request.scored)
        if sequence.room < 1 or (self.running and not self._fits_too(sequence)):
            sequence.free()
            self._blocked = True
            return False
        if self._full and (victim := self._most_running()):
            self._preempt_with_row(victim, singles)
        if request.cached is None:
            request.cached = sequence.computed
        self._clients[request.client].waiting.remove(request)
        self._waiting -= 1
        insort(self.running, request, key=_number)
        request.state = "running"
        return True

    def _fits_too(self, sequence: Sequence) -> bool:
        return self.cache.has_room([sequence, *map(_sequence, self.running)])

    def _make_room(self, request: Request, singles: list[Request]) -> bool:
        """Room for a chunk of a running request: at the cost of younger ones if there is none."""
        sequence = _sequence(request)
        sequence.match(request.scored)
        while sequence.room < 1 and (victim := self.running[-1]) is not request:
            self._preempt_with_row(victim, singles)
        return sequence.room >= 1

    def _preempt_with_row(self, victim: Request, singles: list[Request]) -> None:
        """`_preempt`; it has no row of this step either."""
        self._preempt(victim)
        if victim in singles:
            singles.remove(victim)


def _number(request: Request) -> int:
    return request.number


def _sequence(request: Request) -> Sequence:
    assert request.sequence is not None, "the request was never added"
    return request.sequence


def _take_turns(requests: list[Request]) -> list[Request]:
    """In the order in which they get a row: clients take turns, and the requests of each client."""
    ranks: dict[Hashable, int] = {}
    order = []
    for request in sorted(requests, key=lambda request: request.last_step):
        rank = ranks[request.client] = ranks.get(request.client, -1) + 1
        order.append((rank, request.last_step, request.number, request))
    order.sort(key=lambda entry: entry[:3])
    return [request for *_, request in order]
