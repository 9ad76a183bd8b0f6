"""Threads that move words from each GPU's outbox, in host memory, to the inboxes of the others, while kernels run.

They run machine code from the artifact (compiler/codegen/relay.ll has its table of arguments) without Python's lock,
poll while a step is in progress, and sleep otherwise.
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

PATIENCE = 200000  # polls without a word or a round before Python's side has a look: some milliseconds
SLEEP = 0.02  # seconds without a round after which a thread sleeps
WAYS = 8  # threads that share an outbox, at most: 16 rows of 4096 took 30 us with them, 38 with 4, and 32 with 16
STRIPE = 5  # log2 of the cache lines that a thread copies in a row: 16 rows of 8192 took 17 us, 40 with lines in turn
RING = 4096  # rounds that are asked for and not done, at most
HEADER, ENTRY = 11, 9  # int64 of a job, and of each of its outboxes
ASKED_AT, DONE, AT_LINE, AT_OUTBOX, OUTBOXES, MOST_IDLE, SLOT, RING_AT, WAY, OF_WAYS, STRIPE_BITS = range(HEADER)


class RelayCode:
    """The function, mapped from its file."""

    def __init__(self, file: Path):
        with open(file, "rb") as opened:
            self._map = mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
        self._code = np.frombuffer(self._map, np.uint8)
        self.call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(self._code.ctypes.data)


def runs_here() -> bool:
    """Whether the machine code is for this host."""
    return platform.machine() in ("x86_64", "AMD64")


class Relay:
    """outboxes, inboxes: of each rank, addresses in this process; capacity: words of a slot; threads: about how many,
    by default half of the host's cores."""

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
        """Moves the words of so many more rounds; returns at once."""
        assert rounds <= RING // 2, "rounds of earlier calls may not be done"
        asked = int(self.asked[0])
        self.lines[np.arange(asked, asked + rounds) % RING] = words // LINE
        self.asked[0] = asked + rounds  # the last: threads read what was written before
        for mover in self._movers:
            if mover.asleep:
                mover.wake.set()

    def stop(self) -> None:
        """Ends all rounds, also those whose words did not come. The next one is the first again."""
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
    """One thread; share: the last arguments of `job`."""

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
                self.asleep = True  # before the count is read again: `begin` writes it before it reads this
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
    stripe: int | None = None,
) -> np.ndarray:
    """The code's argument: stripe `way` of lines and each `ways`th after it of some outboxes (address, addresses of
    inboxes), from the next round on that is asked for. stripe: as of STRIPE."""
    made = np.zeros(HEADER + ENTRY * len(outboxes), np.int64)
    made[[ASKED_AT, RING_AT, DONE]] = asked.ctypes.data, lines.ctypes.data, asked[0]
    made[[OUTBOXES, MOST_IDLE, SLOT]] = len(outboxes), PATIENCE, capacity * WORD
    made[[WAY, OF_WAYS, STRIPE_BITS]] = way, ways, STRIPE if stripe is None else stripe
    for i, (source, targets) in enumerate(outboxes):
        at = HEADER + ENTRY * i
        made[at : at + 2 + len(targets)] = source, len(targets), *targets
    return made


def _targets(sender: int, inboxes: Sequence[int], capacity: int) -> list[int]:
    """Where the words of a rank go."""
    return [
        inbox + row(sender, receiver) * outbox_words(capacity) * WORD
        for receiver, inbox in enumerate(inboxes)
        if receiver != sender
    ]
