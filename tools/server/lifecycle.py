"""Runs a process that serves an application until it is stopped.

The port is open while the first model is loaded. If this model cannot be loaded, the server stops.

The first SIGINT or SIGTERM stops the server: new requests get 503, answers in progress are finished, then it ends. A
second signal ends the process at once.
"""

import asyncio
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mlc_amd.tools.server.service import Service
from mlc_amd.tools.terminal import display

# Seconds without a request, including before the first one, after which a connection is closed; also the limit within
# which the headers of a request must arrive.
IDLE_CONNECTION = 30
# Files that are open besides connections: the model's, the device's, those of child processes.
_OWN_FILES = 128
# Seconds that a stopping server waits for connections that are about to end.
_LAST_CONNECTIONS = 5


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol. It also closes connections that send no request, or send headers one byte at a time. uvicorn
    itself only measures the time between two requests, and any received byte ends this time."""

    _idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._idle:
            self._idle.cancel()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        if self._idle:
            self._idle.cancel()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        if self._idle:
            self._idle.cancel()
        self._idle = self.loop.call_later(IDLE_CONNECTION, self._close_idle)

    def _close_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()  # otherwise a client that does not read would keep the written data in memory


class Server(uvicorn.Server):
    """uvicorn's server, with the signals described above. load: loads the models that are needed before requests are
    accepted. ready: called afterwards. failure: why `load` failed."""

    failure: BaseException | None = None

    def __init__(
        self, config: uvicorn.Config, service: Service, ready: Callable[[], None], load: Callable[[], object] | None
    ) -> None:
        super().__init__(config)
        self._service, self._ready, self._load = service, ready, load
        service.loading = load is not None
        service.on_idle = self._end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._load is None:
            self._ready()
        else:  # a daemon thread, so that a signal need not wait for it to end
            threading.Thread(target=self._run_load, args=(asyncio.get_running_loop(), self._load), daemon=True).start()

    def _run_load(self, loop: asyncio.AbstractEventLoop, load: Callable[[], object]) -> None:
        try:
            load()
        except BaseException as error:
            self.failure = error
        with suppress(RuntimeError):  # the loop is closed: the server was stopped
            loop.call_soon_threadsafe(self._loaded)

    def _loaded(self) -> None:
        if self.failure:
            self._end()
        else:
            self._service.loading = False
            self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number)
        yield  # the handlers stay until the loop is closed, as models are unloaded meanwhile

    def _stop(self, number: int) -> None:
        service = self._service
        if service.stopping:
            display.message("stopped at once")
            sys.stderr.flush()
            os._exit(128 + number)
        service.stopping = True
        if service.running:
            display.message(f"stopping after {service.running} requests (once more: at once)")
        else:
            self._end()

    def _end(self) -> None:
        self.should_exit = True


def allow_connections(requests: int) -> None:
    """Each connection is an open file: raises the limit of open files to the largest that the system permits; shells
    and services start with 1024. Warns if this is too few for `requests`, the limit of requests that are answered or
    wait at a time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if resource.RLIM_INFINITY != hard < requests + _OWN_FILES:
        display.message(
            f"warning: this process may open {hard} files, too few for {requests} requests: raise the limit "
            "(LimitNOFILE= of a systemd service, ulimit -Hn of a shell) or lower --max-requests"
        )


def make_server(
    app: ASGIApp, service: Service, ready: Callable[[], None], load: Callable[[], object] | None = None
) -> Server:
    """The server. Its `run(sockets=[..])` serves until a signal stops it in the main thread; in another thread, until
    `should_exit` is set."""
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        log_config=None,
        access_log=False,
        log_level="warning",
        lifespan="on",
        timeout_keep_alive=IDLE_CONNECTION,
        timeout_graceful_shutdown=_LAST_CONNECTIONS,
        server_header=False,
    )
    return Server(config, service, ready, load)
