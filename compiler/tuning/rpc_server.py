"""The server side of tuning over a network: TVM's RPC server, which measures candidates, and TVM's tracker.

In: folders of candidates, as an archive of `pack`. Out: results as JSON. A client's session calls these functions:

    mlc_amd.tune.hello() -> {"host", "tvm", "devices": {api: arch and name}}
    mlc_amd.tune.work(request, blob)    starts to "measure" the candidates in blob, or to "compare" the second with the
                                        first; returns immediately
    mlc_amd.tune.news() -> [messages]   new messages; waits up to POLL seconds for one. Their "what" is "facts" (of the
                                        device), "result" (of a "folder", its number in the blob), finally "done", or
                                        "refused" with the reason "why"

TVM forks a process for each session. Kernels run in another process, which may crash (runtime/measure/measurer.py).
TVM's RPC has no authentication: any client that reaches a server's port can run any code there.
"""

import asyncio
import io
import json
import logging
import math
import multiprocessing
import os
import platform
import socket
import struct
import sys
import threading
import time
import traceback
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

import tvm
import tvm_ffi
from tvm.rpc import base, server

from mlc_amd.runtime import extras
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.measure.candidate import FILE, Candidate, read
from mlc_amd.runtime.measure.child import follow_parent
from mlc_amd.runtime.measure.measurer import Measurer

PREFIX = "mlc_amd.tune."
TRACKER_PORT = 9190
PORTS = range(9091, 9190)  # ports of servers, the same as TVM's
POLL = 2.0  # seconds that `news` waits
AGAIN = 1.0  # seconds between two attempts to serve, or to reach the tracker
ANSWER = 10.0  # time limit for the tracker's answer, seconds
REMINDER = 60.0  # seconds between two messages that the tracker does not answer
# with these, a peer that disappears silently is noticed after 40 s
KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


# ---- addresses


def address(text: str) -> tuple[str, int]:
    """(host, port) of "host:port", "[::1]:port" or "host". Raises UserError for an invalid address."""
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    host, port = (host, port) if colon else (text, str(TRACKER_PORT))
    try:
        host.strip("[]").encode("idna")
        right = bool(host) and port.isdecimal() and 0 < int(port) < 1 << 16
    except UnicodeError:  # not a valid host name
        right = False
    if not right:
        raise UserError(f"'{text}' is not an address: write HOST:PORT")
    return host.strip("[]"), int(port)


def own_address(peer: tuple[str, int]) -> str:
    """This machine's address as `peer` sees it. Raises UserError if there is no route to the peer."""
    try:
        family, kind, *_, place = socket.getaddrinfo(*peer, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return probe.getsockname()[0]
    except OSError as e:
        raise UserError(f"{peer[0]} cannot be reached: {e.strerror or e}; check the tracker's address") from e


def connect(tracker: tuple[str, int]) -> socket.socket:
    """A connection to TVM's tracker. Raises OSError if nothing answers, UserError if what answers is no tracker."""
    connection = socket.create_connection(tracker, ANSWER)
    try:
        connection.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
        if struct.unpack("<i", base.recvall(connection, 4))[0] != base.RPC_TRACKER_MAGIC:
            raise UserError(f"what answers at {tracker[0]}:{tracker[1]} is not a tracker; check --tracker")
    except BaseException:
        connection.close()
        raise
    return connection


def wait_for_tracker(tracker: tuple[str, int], say: Callable[[str], None]) -> socket.socket:
    """Waits until the tracker answers. Returns a new connection, on which TVM's server then does its handshake. Raises
    UserError as `connect` does."""
    place, told = f"the tracker at {tracker[0]}:{tracker[1]}", -math.inf
    while True:
        try:
            connect(tracker).close()
            found = socket.create_connection(tracker, ANSWER)
        except OSError as e:
            if time.monotonic() - told >= REMINDER:
                say(f"{place} does not answer ({e.strerror or e}): waiting for it; Ctrl-C ends this")
                told = time.monotonic()
            time.sleep(AGAIN)
            continue
        if told > -math.inf:
            say(f"{place} answers")
        return found


def listen(host: str, ports) -> socket.socket:
    """A listening socket on the first free port. Raises UserError if there is none."""
    for port in ports:
        try:
            listening = socket.create_server((host, port), family=socket.getaddrinfo(host, port)[0][0])
        except OSError as e:
            error = e
            continue
        # accepted connections inherit these options
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return listening
    raise UserError(f"cannot listen at {host}:{ports[0]}: {os.strerror(error.errno or 0)}; choose another address")


# ---- transfer of candidates


def pack(folders) -> bytes:
    """An archive of candidates' folders: the files that measuring needs, in a folder by the candidate's number."""
    blob = io.BytesIO()
    with zipfile.ZipFile(blob, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, folder in enumerate(folders):
            candidate = read(folder)
            for path in (candidate.folder / FILE, candidate.code):
                archive.write(path, f"{number}/{path.name}")
    return blob.getvalue()


def unpack(blob: bytes, root: Path) -> list[Path]:
    """Unpacks an archive of `pack` below `root`. Returns the folders."""
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        archive.extractall(root)
        numbers = {int(name.partition("/")[0]) for name in archive.namelist()}
    return [root / str(number) for number in sorted(numbers)]


# ---- a session's functions


def devices(device: str | None) -> dict[str, str]:
    """{api: arch and name} of the devices of this machine that can measure."""
    from mlc_amd.runtime.devices.vulkan import gpu
    from mlc_amd.runtime.host import kfd_gpus
    from mlc_amd.schedules.cpu.base import arch

    found = {"cpu": arch.resolve("native").name}
    if gpus := kfd_gpus():
        found["rocm"] = ", ".join(gpu["arch"] for gpu in gpus)
    with suppress(UserError):  # raised without Vulkan
        best = gpu.preferred(gpu.list_gpus(), device)[0]
        found["vulkan"] = f"{gpu.profile_of(best)} ({best.name})"
    return found


def check_arch(candidate: Candidate, found: dict[str, str]) -> None:
    """Raises UserError if this machine's device has another arch than the candidate. cpu and rocm devices check this
    themselves."""
    if candidate.api not in found:
        raise UserError(f"the candidates are for target {candidate.api}; this machine has {', '.join(found)} only")
    wanted, here = candidate.facts["arch"], found[candidate.api]
    if candidate.api == "vulkan" and wanted not in ("generic", here.partition(" (")[0]):
        raise UserError(f"the candidates are for {wanted}; this machine has {here}")


class Measuring:
    """The functions of a session. device: see `Measurer`. found: the result of `devices`."""

    def __init__(self, device: str | None, found: dict[str, str]):
        self.found = found
        self._measurer, self._news, self._works = Measurer(device), SimpleQueue(), 0

    def hello(self) -> dict:
        follow_parent()
        return {"host": platform.node(), "tvm": tvm.__version__, "devices": self.found}

    def work(self, request: str, blob: bytes) -> None:
        self._works += 1
        root = Path.cwd() / f"work{self._works}"  # the folder that TVM made for this session
        threading.Thread(target=self._work, args=(request, bytes(blob), root), daemon=True).start()

    def _work(self, request: str, blob: bytes, root: Path) -> None:
        try:
            folders = unpack(blob, root)
            candidate = read(folders[0])
            check_arch(candidate, self.found)
            self._news.put({"what": "facts", "facts": self._measurer.start(candidate)})
            if request == "compare":
                self._result(1, self._measurer.compare(*folders))
            else:
                numbers = {str(folder): number for number, folder in enumerate(folders)}
                self._measurer.measure(folders, lambda folder, result: self._result(numbers[folder], result))
            self._news.put({"what": "done"})
        except UserError as e:
            self._news.put({"what": "refused", "why": str(e)})
        except Exception as e:
            traceback.print_exc()  # a bug; the client gets a message, and the server continues
            self._news.put({"what": "refused", "why": f"{type(e).__name__}: {e}"})

    def _result(self, number: int, result: dict) -> None:
        self._news.put({"what": "result", "folder": number, "result": result})

    def news(self) -> list[dict]:
        messages = []
        with suppress(Empty):
            messages.append(self._news.get(timeout=POLL))
            while True:
                messages.append(self._news.get_nowait())
        return messages

    def register(self) -> None:
        """Registers the functions with TVM."""
        functions = {
            "hello": lambda: json.dumps(self.hello()),
            "work": lambda request, blob: self.work(str(request), blob),
            "news": lambda: json.dumps(self.news()),
        }
        for name, function in functions.items():
            tvm_ffi.register_global_func(PREFIX + name, function, override=True)


# ---- the programs


def serve(tracker: tuple[str, int], key: str, device: str | None, host: str | None, say: Callable[[str], None]) -> None:
    """Serves until the process is ended. host: the address to listen at, by default this machine's address on the route
    to the tracker.

    Raises UserError for a key with blanks, if there is no route to the tracker or it is something else, and without a
    free port.
    """
    if not key or len(key.split()) != 1 or key != key.strip():
        raise UserError(f"--key '{key}' must be one word")
    multiprocessing.set_start_method("fork", force=True)  # sessions inherit the functions
    logging.getLogger("RPCServer").setLevel(logging.WARNING)
    host = host or own_address(tracker)
    found = devices(device)
    Measuring(device, found).register()
    listening, home = listen(host, PORTS), os.getcwd()
    port = listening.getsockname()[1]
    say(f"serving at {host}:{port} as '{key}' of the tracker at {tracker[0]}:{tracker[1]}; Ctrl-C ends it")
    for api, what in found.items():
        say(f"  {api:8}{what}")
    # TVM's own function gives up after a minute, and after errors other than a refusal retries at once and silently
    server.base.connect_with_retry = lambda place: wait_for_tracker(place, say)
    while True:
        try:
            # TVM's class would run this loop in another process, where failures could not be handled
            server._listen_loop(listening, port, key, tracker, None, host)
        except UserError:
            raise
        except Exception as e:  # malformed input, or a session that dies, ends TVM's loop
            say(f"a session failed ({e}); the server continues")
            os.chdir(home)
            time.sleep(AGAIN)
        finally:
            for child in multiprocessing.active_children():
                child.kill()


def track(place: tuple[str, int], say: Callable[[str], None]) -> None:
    """Runs a tracker until the process is ended. Raises UserError without the package that TVM's tracker needs, and if
    the address is in use."""
    extras.require("tornado")
    from tvm.rpc import tracker

    listening = listen(place[0], range(place[1], place[1] + 1))
    asyncio.set_event_loop(asyncio.new_event_loop())
    handler = tracker.TrackerServerHandler(listening, tracker.base.random_key("stop"))
    say(f"tracking at {place[0]}:{place[1]}; Ctrl-C ends it")
    sys.stderr.flush()
    handler.run()
