"""A server in this process or in one of its own, on a free port of this machine, and requests to it."""

import http.client
import json
import os
import subprocess
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mlc_amd.tools.commands import serve
from mlc_amd.tools.server.app import make_app
from mlc_amd.tools.server.library import Library
from mlc_amd.tools.server.lifecycle import make_server
from mlc_amd.tools.server.options import ServeOptions
from mlc_amd.tools.server.service import Service


@dataclass
class ServeClient:
    """url: of a server, without a slash at the end."""

    url: str

    def request(self, path: str, body: object = None, headers: Mapping[str, str] = {}) -> tuple[int, Any, Any]:
        """(status, headers, body): POST if there is a body; JSON is parsed."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, dict(headers))
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return answer.status, answer.headers, _parsed(answer)
        except urllib.error.HTTPError as answer:
            return answer.code, answer.headers, _parsed(answer)

    def post(self, path: str, body: object) -> Any:
        """The body of an answer with the status 200."""
        status, _, answer = self.request(path, body)
        assert status == 200, answer
        return answer

    def stream(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """The values of server-sent events, or of lines of JSON; without "[DONE]"."""
        text = self.post(path, {**body, "stream": True})
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith(("data: ", "{"))]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    def begin(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] = {}
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A streamed answer whose first bytes have come."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)
        connection.request("POST", path, json.dumps({**body, "stream": True}), dict(headers))
        answer = connection.getresponse()
        assert answer.status == 200 and answer.readline()
        return connection, answer


@dataclass
class Served(ServeClient):
    """A server in this process."""

    service: Service


@dataclass
class ServeProcess(ServeClient):
    """A server in a process of its own. log: the file of its messages."""

    process: subprocess.Popen
    log: Path


def waiting(condition: Callable[[], object], seconds: float = 120) -> bool:
    """Whether it becomes true in that time."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return bool(found)


@contextmanager
def started(*arguments: str | Path, log: Path, key: str = "") -> Iterator[ServeProcess]:
    """`mlc-amd serve` with these arguments, on a free port unless they say which; killed at the end."""
    port = () if "--port" in arguments else ("--port", "0")
    command = [Path(sys.executable).with_name("mlc-amd"), "serve", *arguments, *port]
    environment = os.environ | {"MLC_AMD_API_KEY": key}
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment) as process,
    ):
        try:
            assert waiting(lambda: "serving " in log.read_text() or process.poll() is not None, 180), log.read_text()
            assert process.poll() is None, log.read_text()
            yield ServeProcess(log.read_text().split(" at ")[-1].split()[0], process, log)
        finally:
            process.kill()


def _parsed(answer) -> Any:
    text = answer.read().decode()
    return json.loads(text) if answer.headers["content-type"] == "application/json" else text


def stacks() -> str:
    """Where each thread is: says what a server that does not end waits for."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "\n".join(f"{names.get(ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames)


@contextmanager
def serving(library: Library, load: Callable[[], object] | None = None, **options: Any) -> Iterator[Served]:
    listener = serve.listen("127.0.0.1", 0, None)
    service = Service(library, ServeOptions(**{"quiet": True, **options}))
    server = make_server(make_app(service), service, lambda: None, load)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        assert waiting(lambda: server.started)
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", service)
    finally:
        server.should_exit = True
        thread.join(120)
        listener.close()
    assert not thread.is_alive(), stacks()
