"""Threads of the host that copy words from the outbox of each GPU to the inboxes of the others, while kernels run.

The threads run machine code from the artifact without Python's lock (compiler/codegen/relay.ll documents its
arguments). They poll outboxes during a step, and sleep otherwise. In: addresses of outboxes and inboxes, and the number
of words of each round.
"""

import ctypes
import mmap
import platform
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mlc_amd.runtime.exchange_layout import LINE, WORD, outbox_words, row
from mlc_amd.runtime.host import available_threads

PATIENCE = 200000  # polls without a new word or round after which the machine code returns: some milliseconds
SLEEP = 0.02  # seconds without a round after which a thread sleeps
WAYS = 8  # upper limit of the threads that share an outbox; a round of 16 x 4096 values: 30 us; 38 with 4, 32 with 16
# log2 of the consecutive cache lines that a thread copies; a round of 16 x 8192 values: 17 us; 40 with single lines, as
# a CPU prefetches the lines next to the one that it reads
STRIPE = 5
RING = 4096  # upper limit of the rounds that are requested and not done
HEADER, ENTRY = 11, 9  # int64 elements of a job's header, and of each of its outboxes
ASKED_AT, DONE, AT_LINE, AT_OUTBOX, OUTBOXES, MOST_IDLE, SLOT, RING_AT, WAY, OF_WAYS, STRIPE_BITS = range(HEADER)


class RelayCode:
    """The machine code of the relay, mapped from its file."""

    def __init__(self, file: Path):
        with open(file, "rb") as opened:
            self._map = mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
        self._code = np.frombuffer(self._map, np.uint8)
        self.call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(self._code.ctypes.data)


def runs_here() -> bool:
    """Whether this host can run the machine code."""
    return platform.machine() in ("x86_64", "AMD64")


class Relay:
    """Starts the threads. outboxes, inboxes: their addresses in this process, in the order of ranks. capacity: words in
    a slot. threads: approximate number of threads; default: half of the CPUs that this process may use."""

    def __init__(
        self,
        code: RelayCode,
        outboxes: Sequence[int],
        inboxes: Sequence[int],
        capacity: int,
        threads: int | None = None,
    ):
        self.code, self.closed = code, False
        threads = threads or max(1, available_threads() // 2)
        groups, ways = min(len(outboxes), threads), max(1, min(WAYS, threads // len(outboxes)))
        boxes = [(outbox, _targets(rank, inboxes, capacity)) for rank, outbox in enumerate(outboxes)]
        self.asked, self.lines = np.zeros(1, np.int64), np.zeros(RING, np.int64)  # lines: of a round modulo RING
        self._shares = [(boxes[group::groups], capacity, way, ways) for group in range(groups) for way in range(ways)]
        self._movers = [_Mover(self, *share) for share in self._shares]

    def begin(self, rounds: int, words: int) -> None:
        """Requests that `rounds` more rounds of `words` words each are copied. Returns immediately."""
        assert rounds <= RING // 2, "rounds of earlier calls may not be done"
        asked = int(self.asked[0])
        self.lines[np.arange(asked, asked + rounds) % RING] = words // LINE
        self.asked[0] = asked + rounds  # after `lines`, which threads read when they see this
        for mover in self._movers:
            if mover.asleep:
                mover.wake.set()

    def stop(self) -> None:
        """Ends all rounds, also those whose words have not arrived. The next round is numbered as the first."""
        self.close()
        self.closed, self.asked[0] = False, 0
        self._movers = [_Mover(self, *share) for share in self._shares]

    def close(self) -> None:
        self.closed = True
        for mover in self._movers:
            mover.wake.set()
        for mover in self._movers:
            mover.thread.join()


class _Mover:
    """A thread. share: the arguments of `job` from `outboxes` on."""

    def __init__(self, relay: Relay, *share):
        self._relay, self.asleep, self.wake = relay, False, threading.Event()
        self.job = job(relay.asked, relay.lines, *share)
        self.thread = threading.Thread(target=self._work, name="mlc-amd relay", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        relay, since = self._relay, time.monotonic()
        while not relay.closed:
            if relay.code.call(self.job.ctypes.data):
                time.sleep(0)
                since = time.monotonic()
            elif time.monotonic() - since > SLEEP:
                self.asleep = True  # before `asked` is read again: `begin` writes `asked` before it reads `asleep`
                if relay.asked[0] <= self.job[DONE]:
                    self.wake.wait()
                self.asleep = False
                self.wake.clear()
                since = time.monotonic()


def job(
    asked: np.ndarray,
    lines: np.ndarray,
    outboxes: Sequence[tuple[int, list[int]]],
    capacity: int,
    way: int,
    ways: int,
    stripe: int = STRIPE,
) -> np.ndarray:
    """The argument of the machine code: a job that copies stripe `way` of the lines, and every `ways`th stripe after
    it, beginning with the next round that is requested. outboxes: (address, addresses of the inboxes that receive its
    words) of each. stripe: see STRIPE."""
    made = np.zeros(HEADER + ENTRY * len(outboxes), np.int64)
    made[[ASKED_AT, RING_AT, DONE]] = asked.ctypes.data, lines.ctypes.data, asked[0]
    made[[OUTBOXES, MOST_IDLE, SLOT]] = len(outboxes), PATIENCE, capacity * WORD
    made[[WAY, OF_WAYS, STRIPE_BITS]] = way, ways, stripe
    for i, (source, targets) in enumerate(outboxes):
        at = HEADER + ENTRY * i
        made[at : at + 2 + len(targets)] = source, len(targets), *targets
    return made


def _targets(sender: int, inboxes: Sequence[int], capacity: int) -> list[int]:
    """Addresses in the inboxes of the other ranks that receive the words of `sender`."""
    return [
        inbox + row(sender, receiver) * outbox_words(capacity) * WORD
        for receiver, inbox in enumerate(inboxes)
        if receiver != sender
    ]
