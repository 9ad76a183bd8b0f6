"""Tuning on the devices of other machines. Candidates are built here, and sent to all servers that TVM's tracker knows
under a key.

`Remote` has the interface of `Local`. `Servers` has the interface of a `Measurer`, for several devices of one kind.
Work is distributed in small parts. If a server is lost (killed, unplugged, silent), its finished results count, and the
rest of its part goes to other servers, one candidate at a time, so that a candidate that crashes machines is found.
Servers are skipped if they cannot run the candidates, or if their device differs from that of the first server.
"""

import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

from tvm.rpc import base

from mlc_amd.compiler.tuning.database import Checked, Measured
from mlc_amd.compiler.tuning.local import Local
from mlc_amd.compiler.tuning.rpc_client import POLL, Client, name_of
from mlc_amd.compiler.tuning.rpc_server import address, connect
from mlc_amd.runtime.closing import Closing
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.measure.candidate import read

WAIT = 120.0  # seconds without a server after which a run gives up
PATIENCE = 3.0  # seconds without a server after which the user gets a message
HOLD = 60.0  # seconds that a server is held; then it is released between two batches, for other runs
PART = 8  # the largest number of candidates in a part
MAX_LOSSES = 3  # number of servers lost while they had a candidate, after which the candidate has failed


class NoServer(UserError):
    """There is no server, and none has joined in time."""


class Tracker:
    """TVM's tracker at (host, port)."""

    def __init__(self, place: tuple[str, int]):
        self.place = place

    def servers(self, key: str) -> tuple[int, int]:
        """(idle servers with that key, all servers with it). Raises OSError if the tracker does not answer."""
        _, summary = self._ask([base.TrackerCode.SUMMARY])
        free = summary["queue_info"].get(key, {"free": 0})["free"]
        return free, sum(server["key"] == f"server:{key}" for server in summary["server_info"])

    def take(self, key: str) -> tuple[str, int, str]:
        """Reserves a server. Returns its (host, port, password). Raises OSError if none is free, or if the tracker does
        not answer."""
        return tuple(self._ask([base.TrackerCode.REQUEST, key, "", 1])[1])

    def _ask(self, message: list) -> list:
        with connect(self.place) as connection:
            base.sendjson(connection, message)
            answer = base.recvjson(connection)
        if answer[0] != base.TrackerCode.SUCCESS:
            raise OSError(f"the tracker refuses {message}")
        return answer


class _Part(NamedTuple):
    """Work for one server. request: "measure" or "compare", see rpc_server.py. folders: candidates; the first is the
    reference with which the others are timed or compared. wanted: the folders whose results are used."""

    request: str
    folders: list[str]
    wanted: frozenset[str]


class Servers(Closing):
    """Has the interface of `Measurer` (runtime/measure/measurer.py), but for all servers of a key. A context manager.

    tracker: (host, port). wait: seconds without any server until NoServer is raised. say(text): called with messages
    for the user.
    """

    def __init__(self, tracker: tuple[str, int], key: str, wait: float = WAIT, say=lambda text: None):
        self.tracker, self.key, self.wait, self.say, self.facts = Tracker(tracker), key, wait, say, {}
        self.known = 1  # number of servers that the tracker knows; at least 1
        self.refused: dict[str, str] = {}  # server: reason
        self._events, self._looked = SimpleQueue(), -math.inf
        self._joining: set[Client] = set()  # clients that have no server yet
        self._idle: list[Client] = []
        self._busy: dict[Client, _Part] = {}

    def count(self) -> int:
        """The number of servers with the key that the tracker knows; at least 1."""
        self._free()
        return self.known

    def close(self) -> None:
        """Releases all servers."""
        self._release([*self._joining, *self._idle])

    def _release(self, servers: Iterable[Client]) -> None:
        for server in servers:
            server.drop()
        self._joining = {server for server in self._joining if not server.dropped}
        self._idle = [server for server in self._idle if not server.dropped]

    # ---- the interface of `Measurer`

    def measure(self, folders, progress=lambda folder, result: None) -> list[dict | None]:
        """Results in the order of `folders`; progress(folder, result) is called for each result as it arrives. If all
        servers are gone, missing results are None; NoServer is raised if all results are missing.

        The first candidate of a workload is its reference: each server times it together with its part of the others.
        """
        names, groups, results = [str(Path(folder)) for folder in folders], {}, {}
        for name in dict.fromkeys(names):
            groups.setdefault(read(name).group, []).append(name)
        size = min(max(math.ceil(len(names) / (2 * self.count())), 1), PART)
        parts = []
        for reference, *others in groups.values():
            pieces = [others[i : i + size] for i in range(0, len(others), size)] or [[]]
            for i, piece in enumerate(pieces):
                folders = [reference, *piece]
                parts.append(_Part("measure", folders, frozenset(piece if i else folders)))

        def note(folder: str, result: dict) -> None:
            results[folder] = result
            progress(folder, result)

        try:
            self._run(parts, note)
        except NoServer:
            if not results:
                raise
        return [results.get(name) for name in names]

    def compare(self, untuned: Path, tuned: Path) -> dict:
        """See `Measurer.compare`. Raises NoServer if there is no server."""
        found, names = {}, [str(untuned), str(tuned)]
        self._run([_Part("compare", names, frozenset(names[1:]))], found.__setitem__)
        return asdict(Checked("device", False)) | found[names[1]]

    # ---- distributing work

    def _run(self, parts: list[_Part], note) -> None:
        """Runs until all parts are done; note(folder, result) is called for each wanted result."""
        run = _Run(parts, note)
        alone, reported = time.monotonic(), False  # alone: the time since which there is no server
        try:
            while run.waiting or self._busy:
                while run.waiting and self._idle:
                    server, part = self._idle.pop(0), run.waiting.popleft()
                    self._busy[server] = part
                    server.begin(part.request, part.folders)
                if run.waiting:
                    self.recruit()
                now = time.monotonic()
                if self._busy or not all(server.looking for server in self._joining):
                    alone, reported = now, False
                elif now - alone > self.wait:
                    self.wait = min(self.wait, PATIENCE)  # only the first wait is long
                    raise NoServer(self._missing())
                elif now - alone > PATIENCE and not reported:
                    reported = True
                    self.say(f"waiting up to {self.wait:.0f} s: {self._missing()}")
                self._next_event(run)
        finally:
            self._release(self._busy)
            self._busy.clear()
            self._release([server for server in self._joining if server.looking])
            self._release([server for server in self._idle if time.monotonic() - server.since >= HOLD])

    def _next_event(self, run: "_Run") -> None:
        try:
            what, server, message = self._events.get(timeout=POLL / 4)
        except Empty:
            return
        if server.dropped:
            return
        part = self._busy.get(server)
        if what in ("ready", "lost"):
            self._joining.discard(server)
        if what == "ready":
            self._idle.append(server)
            self.say(f"server {server.name} ({message['hello']['host']}) joins")
        elif what == "refused":
            self._refuse(server, message["why"], run)
        elif what == "lost" and not server.name:
            raise NoServer(f"the process that connects to a server does not start: {message['why']}")
        elif what == "lost":
            self.say(f"server {server.name} is lost: {message['why']}")
            if part := self._busy.pop(server, None):
                run.lost(part, message["why"])
        elif what == "facts":
            self.facts = self.facts or message["facts"]
            if message["facts"]["device"] != self.facts["device"]:
                why = (
                    f"its device is {message['facts']['device']}, this run measures on {self.facts['device']}; give it "
                    f"another key"
                )
                self._refuse(server, why, run)
        elif what == "result" and part:
            run.result(part, message)
        elif what == "done":
            del self._busy[server]
            self._idle.append(server)

    def _refuse(self, server: Client, why: str, run: "_Run") -> None:
        self.refused[server.name] = why
        self.say(f"server {server.name} is skipped: {why}")
        self._release([server])
        if part := self._busy.pop(server, None):
            run.waiting.appendleft(part)

    def _free(self) -> int:
        """The number of free servers; 0 if the tracker does not answer."""
        try:
            free, known = self.tracker.servers(self.key)
        except OSError:
            return 0
        self.known = max(known, 1)
        return free

    def recruit(self) -> None:
        """Starts to connect to free servers, at most once every POLL seconds."""
        if time.monotonic() - self._looked >= POLL:
            self._looked = time.monotonic()
            self._joining |= {Client(self._events, self._take) for _ in range(self._free() - len(self._joining))}

    def _take(self) -> tuple[str, int, str] | None:
        """Reserves a server, see `Tracker.take`. None if none is free, or if the server was refused before."""
        with contextlib.suppress(OSError):  # another run was faster
            if self._free():
                place = self.tracker.take(self.key)
                # the tracker offers a skipped server again, with a new password, after nobody has connected
                return None if name_of(place) in self.refused else place
        return None

    def check_tracker(self) -> str:
        """The tracker's address. Raises NoServer if the tracker does not answer: servers may join later, but the
        tracker must run."""
        where = f"{self.tracker.place[0]}:{self.tracker.place[1]}"
        try:
            self.tracker.servers(self.key)
        except OSError as e:
            advice = "check --tracker, or start one: mlc-amd tune-server --tracker-only HOST:PORT"
            raise NoServer(f"no tracker at {where} ({e.strerror or e}); {advice}") from e
        return where

    def _missing(self) -> str:
        """The reason why there is no server. Raises NoServer as `check_tracker` does."""
        where = self.check_tracker()
        if self.refused:
            return f"no server with key '{self.key}' can do this: " + "; ".join(
                f"{name}: {why}" for name, why in self.refused.items()
            )
        return (
            f"no free server with key '{self.key}' at the tracker {where}; on a machine with that device run: "
            f"mlc-amd tune-server --tracker {where} --key {self.key}"
        )


class _Run:
    """A batch: the parts that wait for a server, and the results so far."""

    def __init__(self, parts: list[_Part], note):
        self.waiting, self._note = deque(parts), note
        self._finished: set[str] = set()
        self._losses = Counter()  # candidate: servers that were lost while they had it

    def result(self, part: _Part, message: dict) -> None:
        folder = part.folders[message["folder"]]
        if folder in part.wanted:
            self._finished.add(folder)
            self._note(folder, message["result"])

    def lost(self, part: _Part, why: str) -> None:
        """Handles the loss of the server that had this part: its unfinished candidates are queued again, one by one."""
        for folder in [folder for folder in part.folders if folder in part.wanted - self._finished]:
            self._losses[folder] += 1
            if self._losses[folder] < MAX_LOSSES:
                alone = list(dict.fromkeys([part.folders[0], folder]))
                self.waiting.appendleft(part._replace(folders=alone, wanted=frozenset([folder])))
            else:
                self._note(folder, {"error": f"{MAX_LOSSES} servers were lost with it: {why}"})


class Remote(Local):
    """`Local`, with the devices of other machines. tracker: HOST:PORT. key: the key of its servers. Other arguments:
    see `Servers` and `Local`.

    Results that are missing when the last server is gone are None.
    """

    runner = "rpc"

    def __init__(
        self, kind: str, arch: str, tracker: str, key: str, workers=None, root=None, wait=WAIT, say=lambda text: None
    ):
        self.measurer = Servers(address(tracker), key, wait, say)
        self.measurer.check_tracker()
        super().__init__(kind, arch, workers=workers, root=root, measurer=self.measurer)

    def batch(self) -> int:
        """See `Local.batch`: enough plans for each known server, including those that work for another run."""
        return max(PART * self.measurer.count(), super().batch())

    def measure(self, jobs, progress=lambda done, total: None) -> list[Measured | None]:
        self.measurer.recruit()  # servers connect while candidates are built
        return super().measure(jobs, progress)

    def _open(self, folder: Path) -> None:
        """Does nothing: `compare` raises NoServer if there is no device, which is not the plan's fault."""
