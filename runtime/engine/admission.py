"""Decides which requests hold pages of the KV cache: which waiting requests start, which running ones are preempted,
and which request gets the chunk of the next step. It reserves the pages of a step."""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from mlc_amd.runtime.cache.kv_cache import KvCache
from mlc_amd.runtime.cache.sequence import Sequence
from mlc_amd.runtime.engine.client_queues import ClientQueues, fair_order, number
from mlc_amd.runtime.engine.functions import chunk_size, rows_at_once
from mlc_amd.runtime.engine.requests import PlannedChunk, Request
from mlc_amd.runtime.images.prepared import PreparedImage


@dataclass(frozen=True)
class SchedulerLimits:
    """Upper limits."""

    singles: int = 64  # single rows of a step, one for each answer
    chunk: int = 512  # tokens of a chunk
    rows: int = 512  # rows of a step with a chunk and single rows
    scored: int = 64  # tokens of a chunk whose logits are all computed
    running: int = 128  # requests that hold pages
    queue: int = 1024  # waiting requests
    sizes: tuple[int, ...] = ()  # rows of the functions for a chunk without single rows, see `chunk_size`

    @property
    def step_rows(self) -> int:
        """Rows of a step without a chunk."""
        return min(self.singles, self.rows)


class Admission:
    """The requests on one cache. groups: see `Scheduler`.

    running: the running requests, in the order in which they were added. busy: those of them that will get a token from
    a step in progress; they are not preempted before. blocked: no other request can start until pages are released.
    missing: {request: images whose features the last plan needed and that are not encoded yet}. restore: see
    `Restoring.begin`."""

    def __init__(self, cache: KvCache, limits: SchedulerLimits, groups: int) -> None:
        self.cache, self.limits, self._groups = cache, limits, groups
        self.running: list[Request] = []
        self.queues = ClientQueues()
        self.busy: set[Request] = set()
        self.blocked = False
        self.has_features: Callable[[PreparedImage], bool] = lambda image: True
        self.missing: dict[Request, list[PreparedImage]] = {}
        self.restore: Callable[[Request], bool] = lambda request: False

    # ---- single rows

    def reserve_rows(self, ready: list[Request], most: int) -> list[Request]:
        """Reserves pages for a single row of each request, of at most `most` of them. Returns the requests that get a
        row. Preempts younger requests if there are too few pages."""
        if len(ready) > most:
            ready = sorted(fair_order(ready)[:most], key=number)
        rows = []
        for request in ready:
            # The victim is younger than this request, so this loop has not given it a row yet.
            while request.state == "running" and not sequence_of(request).reserve(1):
                if not (victim := self._youngest()):
                    break
                self.preempt(victim)
            else:
                if request.state == "running":
                    rows.append(request)
        return rows

    def _youngest(self) -> Request | None:
        """The youngest running request, which may be preempted; None if it will get a token from a step in progress."""
        return None if self.running[-1] in self.busy else self.running[-1]

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        sequence_of(request).free()
        request.stored = "unknown"
        self.queues.wait(request)
        self.blocked = False

    # ---- the chunk

    def plan_chunk(
        self, singles: list[Request], prefilling: dict[Hashable, Request], alone: bool
    ) -> PlannedChunk | None:
        """Plans a chunk of a prompt, of the first client for whose chunk there is room. Removes requests from `singles`
        if an older request needs their pages. prefilling: {client: its first running request with a prompt to compute}.
        alone: whether the last step was a chunk alone."""
        most = min(self.limits.chunk, self.limits.rows - len(singles))
        for key, queue in self.queues:
            request, waiting = prefilling.get(key), self._first(key, queue)
            if request is None or request.state != "running" or (waiting and waiting.number < request.number):
                request = waiting
            if request is None:
                continue
            if not (self._admit(request, singles) if request is waiting else self._make_room(request, singles)):
                continue
            sizes = () if singles else self.limits.sizes
            if sizes and self._groups > 1 and len(self.running) == 1 and not self.queues.waiting:
                most = min(most, rows_at_once(len(sequence_of(request).tokens), sizes, self._groups))
            chunk = self._chunk(request, most, sizes)
            if chunk is None or (chunk.alone and alone and singles):
                continue
            chunk.sequence.reserve(chunk.count)
            self.queues.served(key)
            return chunk
        return None

    def _chunk(self, request: Request, most: int, sizes: tuple[int, ...]) -> PlannedChunk | None:
        """The next chunk of a request, at most `most` tokens; None if it must wait for the features of an image."""
        sequence, scored = sequence_of(request), request.scored
        count = chunk_size(sequence.pending, sizes, min(sequence.room, most))
        start, count = sequence.computed, sequence.step_size(count)
        parts = sequence.images.parts(start, count)
        if lacking := [part.image for part in parts if not self.has_features(part.image)]:
            self.missing[request] = lacking
        if not (count := sequence.images.known(start, count, self.has_features)):
            return None
        if scored is None:
            answers = count == sequence.pending and request.limit > 0
            return PlannedChunk(request, sequence, start, count, answers, alone=count > most)
        if start < scored:
            return PlannedChunk(request, sequence, start, min(count, scored - start), False, alone=count > most)
        # The step has no single rows, so the chunk may be longer than `most`.
        count = sequence.step_size(min(sequence.room, self.limits.scored))
        return PlannedChunk(request, sequence, start, count, False, scored=True, alone=True)

    def _first(self, key: Hashable, queue: SequenceOf[Request]) -> Request | None:
        """The first waiting request of a client that could start, or None."""
        if not queue or (self.running and self.blocked):
            return None
        if self._full and (any(request.client == key for request in self.running) or self._most_running() is None):
            return None
        return next((request for request in queue if request.ready), None)

    @property
    def _full(self) -> bool:
        return len(self.running) >= self.limits.running

    def _most_running(self) -> Request | None:
        """The youngest running request of the client that has most of them; None if none has two."""
        key, count = Counter(request.client for request in self.running).most_common(1)[0]
        return next(request for request in reversed(self.running) if request.client == key) if count > 1 else None

    def _admit(self, request: Request, singles: list[Request]) -> bool:
        """Starts a waiting request, unless this would soon lead to a preemption. Returns whether it did."""
        sequence = sequence_of(request)
        sequence.match(request.scored)
        if self.restore(request):
            sequence.free()
            return False
        if sequence.room < sequence.least or (
            self.running and not self.cache.has_room([sequence, *map(sequence_of, self.running)])
        ):
            sequence.free()
            self.blocked = True
            return False
        if self._full and (victim := self._most_running()):
            if victim in self.busy:
                sequence.free()
                return False
            self._preempt_with_row(victim, singles)
        if request.cached is None:
            request.cached = sequence.computed
        self.queues.dequeue(request)
        insort(self.running, request, key=number)
        request.state = "running"
        return True

    def _make_room(self, request: Request, singles: list[Request]) -> bool:
        """Makes room for a chunk of a running request, by preempting younger ones. Returns whether there is room."""
        sequence = sequence_of(request)
        sequence.match(request.scored)
        while sequence.room < sequence.least and (victim := self._youngest()) not in (None, request):
            self._preempt_with_row(victim, singles)
        return sequence.room >= sequence.least

    def _preempt_with_row(self, victim: Request, singles: list[Request]) -> None:
        """Preempts a request, and takes its row in the planned step away."""
        self.preempt(victim)
        if victim in singles:
            singles.remove(victim)


def sequence_of(request: Request) -> Sequence:
    """The sequence of a request that was added to the scheduler."""
    assert request.sequence is not None, "the request was never added"
    return request.sequence
