"""Which requests hold pages: those that start, those that are preempted, and the request that gets the next chunk.

A step's pages are reserved here.
"""

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
    """Maxima."""

    singles: int = 64  # answers of a step
    chunk: int = 512  # tokens of a chunk
    rows: int = 512  # tokens of a step with a chunk and single rows
    scored: int = 64  # tokens of a chunk of which all logits are wanted
    running: int = 128  # requests that hold pages
    queue: int = 1024  # requests that wait
    sizes: tuple[int, ...] = ()  # rows of the functions for a chunk without single rows, see `chunk_size`

    @property
    def step_rows(self) -> int:
        """Rows of a step without a chunk."""
        return min(self.singles, self.rows)


class Admission:
    """Requests on one cache. groups: of the scheduler.

    running: in the order in which they were added. busy: of these, those that get a token of a step in progress, and
    are not preempted before they have it. blocked: no further request can start until pages are released. missing:
    images without features, which the last plan lacked. restore: see `Restoring.begin`."""

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
        """The requests that get a row, at most `most`, with pages for it."""
        if len(ready) > most:
            ready = sorted(fair_order(ready)[:most], key=number)
        rows = []
        for request in ready:
            # A victim is younger than the request that needs its pages: it comes later in this loop, or not at all.
            while request.state == "running" and not sequence_of(request).reserve(1):
                if not (victim := self._youngest()):
                    break
                self.preempt(victim)
            else:
                if request.state == "running":
                    rows.append(request)
        return rows

    def _youngest(self) -> Request | None:
        """The youngest running request, whose pages others may get; None before a step in progress has its token."""
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
        """The chunk of the first client with room. Removes `singles` whose pages an older request needs.
        prefilling: of each client; alone: the last step was that of a chunk alone."""
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
        """None: it waits for an image's features."""
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
        # Without single rows it may be longer than `most`.
        count = sequence.step_size(min(sequence.room, self.limits.scored))
        return PlannedChunk(request, sequence, start, count, False, scored=True, alone=True)

    def _first(self, key: Hashable, queue: SequenceOf[Request]) -> Request | None:
        """The first of a client's waiting requests that could start."""
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
        """Starts a waiting request, unless one would soon be preempted for its pages."""
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
        """Whether there is room for a chunk of a running request, for which younger ones are preempted."""
        sequence = sequence_of(request)
        sequence.match(request.scored)
        while sequence.room < sequence.least and (victim := self._youngest()) not in (None, request):
            self._preempt_with_row(victim, singles)
        return sequence.room >= sequence.least

    def _preempt_with_row(self, victim: Request, singles: list[Request]) -> None:
        """`preempt`; it has no row of this step either."""
        self.preempt(victim)
        if victim in singles:
            singles.remove(victim)


def sequence_of(request: Request) -> Sequence:
    """Of a request that was added."""
    assert request.sequence is not None, "the request was never added"
    return request.sequence
