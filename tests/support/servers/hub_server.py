"""A server of the Hugging Face Hub's API on this machine, as far as huggingface_hub uses it to download models, with
the faults of the real one.

What it answers: `/api/models/OWNER/REPO` (the files, their sizes and hashes), and `/OWNER/REPO/resolve/REVISION/PATH`,
which redirects to `/cdn/...` under another host name, as the hub does to its store; that serves ranges of bytes.
"""

import fcntl
import hashlib
import json
import socket
import struct
import sys
import termios
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Hub:
    """repos: OWNER/REPO -> path -> content. stored: content by hash that the store has instead of the announced one.
    plain: paths of files that are in git itself, and whose hash is no SHA-256. gated: repositories that need `token`.
    cuts: of the next answers of the store, after how many bytes the connection is reset. closes: likewise, but closed
    as if all had been sent. status: what the API answers instead. ranges: whether the store serves parts. log: (method,
    path, Range) of each request; tokens: (path, token) of those that had one."""

    repos: dict[str, dict[str, bytes]]
    stored: dict[str, bytes] = field(default_factory=dict)
    plain: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    token: str = "hf_right"
    cuts: list[int] = field(default_factory=list)
    closes: list[int] = field(default_factory=list)
    status: int | None = None
    ranges: bool = True
    log: list[tuple[str, str, str | None]] = field(default_factory=list)
    tokens: list[tuple[str, str]] = field(default_factory=list)
    port: int = 0

    def __enter__(self) -> "Hub":
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def downloads(self) -> list[str | None]:
        """The Range of each request to the store."""
        return [part for method, path, part in self.log if method == "GET" and path.startswith("/cdn/")]


class _Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):  # clients may leave at any time
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._answer()

    def do_HEAD(self):
        self._answer()

    def log_message(self, format, *args):
        pass  # nothing on the test's stderr

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.log.append((self.command, path, self.headers["Range"]))
        token = (self.headers["Authorization"] or "").removeprefix("Bearer ")
        if token:
            self.hub.tokens.append((path, token))
        if path.startswith("/cdn/"):
            self._store(path.removeprefix("/cdn/"))
        elif path.startswith("/api/models/"):
            self._model(path.removeprefix("/api/models/").partition("/revision/")[0], token)
        elif "/resolve/" in path:
            repo, _, rest = path[1:].partition("/resolve/")
            self._resolve(repo, rest.partition("/")[2], token)
        else:
            self._send(404, {})

    def _model(self, repo: str, token: str) -> None:
        if self.hub.status:
            self._send(self.hub.status, {})
        elif token and token != self.hub.token:
            self._send(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif repo not in self.hub.repos:
            self._send(401, {"X-Error-Code": "RepoNotFound"})
        else:
            siblings = [
                {
                    "rfilename": path,
                    "size": len(data),
                    "blobId": "0" * 40,
                }
                | (
                    {}
                    if path in self.hub.plain
                    else {"lfs": {"sha256": sha256(data), "size": len(data), "pointerSize": 134}}
                )
                for path, data in sorted(self.hub.repos[repo].items())
            ]
            body = json.dumps({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings})
            self._send(200, {"Content-Type": "application/json"}, body.encode())

    def _resolve(self, repo: str, path: str, token: str) -> None:
        if repo in self.hub.gated and token != self.hub.token:
            self._send(403 if token else 401, {"X-Error-Code": "GatedRepo"})
        elif path not in self.hub.repos.get(repo, {}):
            self._send(404, {"X-Error-Code": "EntryNotFound"})
        else:
            data = self.hub.repos[repo][path]
            if path in self.hub.plain:
                self._send(200, {"X-Repo-Commit": COMMIT, "ETag": f'"{"0" * 40}"'}, data)
                return
            digest = sha256(data)
            headers = {
                "X-Repo-Commit": COMMIT,
                "X-Linked-Etag": f'"{digest}"',
                "X-Linked-Size": str(len(data)),
                "Location": f"http://localhost:{self.hub.port}/cdn/{digest}",
            }
            self._send(302, headers)

    def _store(self, digest: str) -> None:
        contents = (data for files in self.hub.repos.values() for data in files.values() if sha256(data) == digest)
        data = self.hub.stored.get(digest) or next(contents)
        first, part = 0, self.headers["Range"]
        headers = {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        if part and self.hub.ranges:
            first = int(part.removeprefix("bytes=").rstrip("-"))
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        reset = self.hub.cuts.pop(0) if self.hub.cuts else None
        close = self.hub.closes.pop(0) if reset is None and self.hub.closes else None
        status, body, limit = 206 if first else 200, data[first:], close if reset is None else reset
        self._send(status, headers, body, limit)
        if limit is not None:
            if reset is not None:
                # A reset discards what is not acknowledged yet.
                while struct.unpack("i", fcntl.ioctl(self.connection, termios.TIOCOUTQ, bytes(4)))[0]:
                    time.sleep(0.01)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR) if reset is None else self.connection.close()

    def _send(self, status: int, headers: dict[str, str], body: bytes = b"", limit: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:limit])
            self.wfile.flush()
