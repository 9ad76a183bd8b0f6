"""A server for the chat page whose answers the test writes: what no small model says on demand.

`ScriptedServer` has the real page with its real headers, a list of two models, of which the first takes images, and
`answers`, which are given in turn.
"""

import json
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from threading import Event, Thread
from typing import Any

from mlc_amd.tools.server.app import PAGE_HEADERS

PAGE = resources.files("mlc_amd.tools.server").joinpath("page")
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "txt": "text/plain"}
TOKEN = re.compile(r"\s*\S{1,4}|\s+")  # pieces about as long as tokens
WAIT = 30.0  # seconds that an answer waits for an Event: then its test has failed


@dataclass
class ScriptedAnswer:
    """thinking, text: what the model says; at an Event it waits until that is set. rate: tokens per second, 0: all at
    once. status, error, code: of a refusal. cut: the connection ends before the answer does. finish, prompt_tokens: of
    its end."""

    text: str | Sequence[str | Event] = ""
    thinking: str = ""
    rate: float = 0
    status: int = 200
    error: str = ""
    cut: bool = False
    code: str | None = None
    finish: str = "stop"
    prompt_tokens: int = 20


class ScriptedServer:
    def __init__(self) -> None:
        self.answers: deque[ScriptedAnswer] = deque()
        self.requests: list[dict[str, Any]] = []
        self.loading = 0  # so many requests for the list of models are too early
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._http.daemon_threads = True
        self._http.script = self  # type: ignore[attr-defined]
        self.address = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> "ScriptedServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        script: ScriptedServer = self.server.script  # type: ignore[attr-defined]
        if self.path == "/v1/models" and script.loading:
            script.loading -= 1
            return self._refuse(503, "loading model: try again later", "loading_model")
        if self.path == "/v1/models":
            takes = {"one": ["text", "image"], "two": ["text"]}
            models = [
                {"id": name, "object": "model", "meta": {"n_ctx": 8192}, "architecture": {"input_modalities": found}}
                for name, found in takes.items()
            ]
            return self._whole(200, "application/json", json.dumps({"object": "list", "data": models}).encode())
        file = PAGE.joinpath(self.path.strip("/").split("?")[0] or "index.html")
        if not file.is_file():
            return self._whole(404, "text/plain", b"")
        self._whole(200, TYPES[file.name.rpartition(".")[2]], file.read_bytes())

    def do_POST(self) -> None:
        script: ScriptedServer = self.server.script  # type: ignore[attr-defined]
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            ids = list(range(len(body["content"].split())))
            return self._whole(200, "application/json", json.dumps({"tokens": ids}).encode())
        script.requests.append(body)
        answer = script.answers.popleft()
        if answer.status != 200:
            return self._refuse(answer.status, answer.error, answer.code)
        self._begin(200, "text/event-stream")
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):  # the page stopped the answer
            self._stream(answer)

    def _stream(self, answer: ScriptedAnswer) -> None:
        begin, count = time.monotonic(), 0
        parts = [answer.text] if isinstance(answer.text, str) else answer.text
        for kind, part in [("reasoning_content", answer.thinking), *(("content", part) for part in parts)]:
            if isinstance(part, Event):
                part.wait(WAIT)
                continue
            for piece in TOKEN.findall(part):
                if answer.rate and (wait := begin + count / answer.rate - time.monotonic()) > 0:
                    time.sleep(wait)
                self._event({"choices": [{"index": 0, "delta": {kind: piece}, "finish_reason": None}]})
                count += 1
        if answer.cut:
            return
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish}]})
        usage = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": count}
        rate = count / max(time.monotonic() - begin, 1e-3)
        self._event({"choices": [], "usage": usage, "timings": {"predicted_per_second": rate}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, body: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(body).encode() + b"\n\n")
        self.wfile.flush()

    def _begin(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        for name, value in PAGE_HEADERS.items():
            self.send_header(name, value)

    def _refuse(self, status: int, message: str, code: str | None) -> None:
        body = json.dumps({"error": {"message": message, "code": code}}).encode()
        self._whole(status, "application/json", body, {"retry-after": "1"} if status == 503 else {})

    def _whole(self, status: int, kind: str, body: bytes, headers: Mapping[str, str] = {}) -> None:
        self._begin(status, kind)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
