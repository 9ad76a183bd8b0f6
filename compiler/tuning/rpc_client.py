"""One server of a tuning run, from the run's side.

In: requests as rpc_server.py has them. Out: (what, client, message) in a queue: "awake" when it can connect, "ready"
once it has, then for each request its "facts" and "result"s, at last "done", "refused" or "lost".

TVM's RPC waits forever for a machine that is gone, so a process that can be ended talks with the server: this module,
run as a program.
"""

import json
import threading
import time
from queue import SimpleQueue

import tvm
from tvm import rpc

from mlc_amd.compiler.tuning.rpc_server import PREFIX, pack
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.measure.child import Child, Died, serve

MODULE = "mlc_amd.compiler.tuning.rpc_client"
WAKE, CONNECT, SILENT = (
    60.0,
    30.0,
    30.0,
)  # seconds: to start; to reach a server; until one that says nothing counts as lost
ENDS = ("awake", "ready", "done", "refused", "lost")


class Client:
    """Wakes at once: a server's password is good for some seconds only, less than a busy machine takes to start a
    process with TVM.

    name: the server's, once it connects. After "refused" and "lost" it is of no more use.
    """

    def __init__(self, events: SimpleQueue):
        self.name, self.since, self._events = "", time.monotonic(), events
        self._child, self._lock, self._dropped, self._running = Child(MODULE), threading.Lock(), False, False
        self.begin({"wake": True})

    def connect(self, place: tuple[str, int, str]) -> None:
        """place: (host, port, password) from the tracker."""
        self.name, self.since = f"{place[0]}:{place[1]}", time.monotonic()
        self.begin({"connect": place})

    def begin(self, request: dict) -> None:
        """{"work": request, "folders": candidates}; the next one when this one has ended."""
        self._running = True
        threading.Thread(target=self._follow, args=(request,), daemon=True).start()

    def drop(self) -> None:
        """Releases the server, also while it works."""
        with self._lock:
            self._dropped = True
            if not self._running:
                self._child.close()

    def _follow(self, request: dict) -> None:
        what, message = "", {}
        patience = WAKE if "wake" in request else CONNECT if "connect" in request else SILENT
        while what not in ENDS:
            if what:
                self._events.put((what, self, message))
            try:
                if not message:
                    self._child.send(request)
                message = self._child.receive(patience)
                what = message["what"]
            except (Died, UserError) as e:
                what, message = "lost", {"why": str(e)}
            if self._dropped:
                break
        with self._lock:
            self._running = False
            if self._dropped or what in ("refused", "lost"):
                self._child.close()
        self._events.put((what, self, message))


# ---- the process


class _Connection:
    def handle(self, request: dict, answer) -> None:
        try:
            if "wake" in request:
                answer({"what": "awake"})
            elif "connect" in request:
                self._connect(*request["connect"], answer)
            else:
                self._work(request["work"], request["folders"], answer)
        except RuntimeError as e:  # all that TVM's RPC raises, when the connection breaks and when a function fails
            lines = [line.strip() for line in str(e).splitlines() if line.strip()]
            raise UserError(lines[-1] if lines else type(e).__name__) from e

    def _connect(self, host: str, port: int, password: str, answer) -> None:
        session = rpc.connect(host, port, password)
        self.call = {name: session.get_function(PREFIX + name) for name in ("hello", "work", "news")}
        hello = json.loads(str(self.call["hello"]()))
        if hello["tvm"] == tvm.__version__:
            answer({"what": "ready", "hello": hello})
        else:
            answer({"what": "refused", "why": f"it has TVM {hello['tvm']}, this machine {tvm.__version__}"})

    def _work(self, request: dict, folders: list[str], answer) -> None:
        self.call["work"](json.dumps(request), pack(folders))
        what = ""
        while what not in ENDS:
            for message in json.loads(str(self.call["news"]())) or [{"what": "alive"}]:
                what = message["what"]
                answer(message)


if __name__ == "__main__":
    serve(_Connection().handle)
