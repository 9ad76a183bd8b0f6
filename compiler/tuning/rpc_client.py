"""The client of one server in a tuning run.

In: requests, see rpc_server.py. Out: (what, client, message) in a queue: "ready" once the client has connected; then
for each request its "facts", "result"s, and "done"; "refused" or "lost" at any time.

TVM's RPC waits forever for a machine that is gone. So a process, which can be ended, communicates with the server: this
module, run as a program. A thread of the tuning run follows that process.
"""

import json
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import tvm
from tvm import rpc

from mlc_amd.compiler.tuning.rpc_server import PREFIX, pack
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.measure.child import Child, ChildDied, serve

MODULE = "mlc_amd.compiler.tuning.rpc_client"
WAKE = 60.0  # time limit for the process to start, seconds
CONNECT = 30.0  # time limit to connect to a server, seconds
SILENT = 30.0  # seconds without a message after which a server is lost
POLL = 1.0  # seconds between two requests for free servers
ENDS = ("awake", "ready", "done", "refused")

Place = tuple[str, int, str]  # host, port, password


def name_of(place: Place) -> str:
    """A server's name."""
    return f"{place[0]}:{place[1]}"


class Client:
    """First starts its process, then takes a server. In the other order, the server's password, which is valid for a
    few seconds, could expire before a busy machine has started a process with TVM.

    take: returns a free server's place, None if there is none. name: the server's, once it connects; since: the time of
    that. looking: whether the process runs, but no server is free. dropped: whether the server is released. After
    "refused" or "lost" the client cannot be used any more.
    """

    def __init__(self, events: SimpleQueue, take: Callable[[], Place | None]):
        self.name, self.since, self.looking, self.dropped = "", time.monotonic(), False, False
        self._events, self._take, self._child = events, take, Child(MODULE)
        self._requests: SimpleQueue[dict | None] = SimpleQueue()
        threading.Thread(target=self._follow, daemon=True).start()

    def begin(self, request: str, folders: list[str]) -> None:
        """Starts work on these candidates on the server."""
        self._requests.put({"work": request, "folders": folders})

    def drop(self) -> None:
        """Releases the server, even while it works."""
        self.dropped = True
        self._requests.put(None)

    def _follow(self) -> None:
        try:
            self._ask({"wake": True}, WAKE)
            if place := self._find():
                self._ask({"connect": place}, CONNECT)
            while not self.dropped and (request := self._requests.get()):
                self._ask(request, SILENT)
        except (ChildDied, UserError) as e:
            self._events.put(("lost", self, {"why": str(e)}))
        finally:
            self._child.close()

    def _find(self) -> Place | None:
        while not self.dropped:
            if place := self._take():
                self.name, self.since, self.looking = name_of(place), time.monotonic(), False
                return place
            self.looking = True
            time.sleep(POLL)
        return None

    def _ask(self, request: dict, patience: float) -> None:
        """Sends a request, and forwards its answers to the queue."""
        self._child.send(request)
        what = ""
        while what not in ENDS and not self.dropped:
            message = self._child.receive(patience)
            what = message["what"]
            self._events.put((what, self, message))


# ---- the process


class _Connection:
    def handle(self, request: dict, answer) -> None:
        try:
            if "wake" in request:
                answer({"what": "awake"})
            elif "connect" in request:
                self._connect(request["connect"], answer)
            else:
                self._work(request["work"], request["folders"], answer)
        except RuntimeError as e:  # TVM's RPC raises only this, for broken connections and for functions that fail
            lines = [line.strip() for line in str(e).splitlines() if line.strip()]
            raise UserError(lines[-1] if lines else type(e).__name__) from e

    def _connect(self, place: Place, answer) -> None:
        session = rpc.connect(*place)
        self.call = {name: session.get_function(PREFIX + name) for name in ("hello", "work", "news")}
        hello = json.loads(str(self.call["hello"]()))
        if hello["tvm"] == tvm.__version__:
            answer({"what": "ready", "hello": hello})
        else:
            answer({"what": "refused", "why": f"it has TVM {hello['tvm']}, this machine {tvm.__version__}"})

    def _work(self, request: str, folders: list[str], answer) -> None:
        self.call["work"](request, pack(folders))
        what = ""
        while what not in ENDS:
            for message in json.loads(str(self.call["news"]())) or [{"what": "alive"}]:
                what = message["what"]
                answer(message)


if __name__ == "__main__":
    serve(_Connection().handle)
