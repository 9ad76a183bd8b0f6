"""Threads that move words from each GPU's outbox, in host memory, to the inboxes of the others, while kernels run.

They run machine code from the artifact (compiler/codegen/relay.ll has its table of arguments) without Python's lock,
poll while a step is in progress, and sleep otherwise.
"""

import ctypes
import mmap
import platform
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mlc_amd.runtime.exchange_layout import LINE, ROUNDS, WORD, outbox_words, row
from mlc_amd.runtime.host import available_threads

PATIENCE = 20000  # polls without a word before Python's side has a look: about a millisecond
WAYS = 4  # threads that share an outbox, at most; more gained nothing
HEADER, ENTRY = 8, 9  # int64 of a job, and of each of its outboxes
LEFT, NUMBER, AT_LINE, AT_OUTBOX, OUTBOXES, LINES, MOST_IDLE, SLOT = range(HEADER)


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
        self._code, self._stopping = code, False
        threads = threads or max(1, available_threads() // 2)
        groups, ways = min(len(outboxes), threads), max(1, min(WAYS, threads // len(outboxes)))
        boxes = [(outbox, _targets(rank, inboxes, capacity)) for rank, outbox in enumerate(outboxes)]
        self._movers = [
            _Mover(self, boxes[group::groups], capacity, way, ways) for group in range(groups) for way in range(ways)
        ]

    def begin(self, rounds: int, words: int) -> None:
        """Moves the words of so many more rounds; returns at once."""
        for mover in self._movers:
            mover.tasks.put((rounds, words))

    def stop(self) -> None:
        """Ends all rounds, also those whose words did not come; the next ones begin anew, with number 1."""
        self._stopping = True
        for mover in self._movers:
            mover.tasks.join()
            mover.job[NUMBER] = 1
        self._stopping = False

    def close(self) -> None:
        self.stop()
        for mover in self._movers:
            mover.tasks.put(None)
            mover.thread.join()

    def move(self, job: np.ndarray) -> None:
        """Until all is done or `stop` is called."""
        while not self._stopping and self._code.call(job.ctypes.data):
            time.sleep(0)


class _Mover:
    """One thread: part `way` out of `ways` of the lines of some outboxes (address, addresses of inboxes)."""

    def __init__(self, relay: Relay, outboxes: list[tuple[int, list[int]]], capacity: int, way: int, ways: int):
        self._relay, self._outboxes, self._way, self._ways = relay, outboxes, way, ways
        self.job = np.zeros(HEADER + ENTRY * len(outboxes), np.int64)
        self.job[[NUMBER, OUTBOXES, MOST_IDLE, SLOT]] = 1, len(outboxes), PATIENCE, capacity * WORD
        self.tasks: queue.Queue[tuple[int, int] | None] = queue.Queue()
        self.thread = threading.Thread(target=self._work, name="mlc-amd relay", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (task := self.tasks.get()) is not None:
            rounds, words = task
            lines = words // LINE
            first, end = lines * self._way // self._ways, lines * (self._way + 1) // self._ways
            if first < end:
                self._aim(first, end - first)
                self.job[[LEFT, AT_LINE, AT_OUTBOX]] = rounds, 0, 0
                self._relay.move(self.job)
            else:  # others move all of them
                self.job[NUMBER] = (self.job[NUMBER] - 1 + rounds) % ROUNDS + 1
            self.tasks.task_done()
        self.tasks.task_done()

    def _aim(self, first: int, lines: int) -> None:
        self.job[LINES] = lines
        for i, (source, targets) in enumerate(self._outboxes):
            at = HEADER + ENTRY * i
            places = [address + first * LINE * WORD for address in (source, *targets)]
            self.job[at : at + 2 + len(targets)] = places[0], len(targets), *places[1:]


def _targets(sender: int, inboxes: Sequence[int], capacity: int) -> list[int]:
    """Where the words of a rank go."""
    return [
        inbox + row(sender, receiver) * outbox_words(capacity) * WORD
        for receiver, inbox in enumerate(inboxes)
        if receiver != sender
    ]
