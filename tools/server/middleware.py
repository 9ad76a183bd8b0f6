"""What happens to every request before and after its handler. From the outside:

(CORS)      Starlette's, if origins are allowed
Gate        a request id; a line in the log; 503 while the server is stopping, loads its first model or has too many
            requests; error bodies for exceptions
Access      API keys; without keys, which browsers' requests are allowed
"""

import hmac
import ipaddress
import re
import sys
import time
import uuid
from collections.abc import Sequence
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlc_amd.runtime.errors import one_line, shorten
from mlc_amd.tools.server import errors
from mlc_amd.tools.server.errors import ApiError
from mlc_amd.tools.server.service import Service
from mlc_amd.tools.server.streaming import ClientGone, Json

_ID = re.compile(r"[\w.:-]{1,128}")
# Answered without a key, and also while the server is stopping: load balancers ask for these. The same holds for the
# chat page (every path that is no API), which asks the user for a key itself.
_OPEN = ("/health",)
# Requested often, and cheap: not logged.
_SILENT = ("/health", "/metrics")
_SHOWN = 100  # limit of a request's line in an error message, in characters
# HTTP's unofficial status for "the client closed the connection"; only used in the log.
_GONE = 499


def keyed(paths: Sequence[str]) -> tuple[str, ...]:
    """The prefixes of paths that need a key: all except _OPEN."""
    return tuple({first[0] for path in paths if path not in _OPEN and (first := re.match(r"/[^/]+/?", path))})


class Gate:
    """See the module's docstring. paths: the paths of the APIs. Metrics count each of them by its own name."""

    def __init__(self, app: ASGIApp, service: Service, paths: Sequence[str]) -> None:
        self._app, self._service, self._paths, self._keyed = app, service, frozenset(paths), keyed(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service, state, status = self._service, scope.setdefault("state", {}), 0
        given = Headers(scope=scope).get("x-request-id", "")
        state["id"] = given if _ID.fullmatch(given) else uuid.uuid4().hex
        begun = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = state["id"]
                if service.stopping:
                    MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        try:
            if scope["path"].startswith(self._keyed):
                self._admit()
            service.running += 1
            try:
                await self._app(scope, receive, send_with_id)
            finally:
                service.running -= 1
                if service.stopping and not service.running and service.on_idle:
                    service.on_idle()
        except ClientGone:
            status = _GONE
        except Exception as error:
            if status:  # the response has begun: too late for an error body
                raise
            await error_response(scope["path"], error)(scope, receive, send_with_id)
        finally:
            service.metrics.responded(scope["path"] if scope["path"] in self._paths else "other", status)
            if not service.options.quiet and scope["path"] not in _SILENT:
                _log(scope, status, time.perf_counter() - begun)

    def _admit(self) -> None:
        if self._service.stopping:
            raise errors.overloaded("this server is stopping")
        if self._service.loading:
            raise errors.loading()
        if (running := self._service.running) >= self._service.options.max_requests:
            raise errors.overloaded(f"{running} requests are being answered already: try again later")


def error_response(path: str, error: Exception) -> Json:
    """An error in the form of the path's API."""
    known = errors.reported(error)
    return Json(errors.body_for(path, known), known.status, known.headers)


def _log(scope: Scope, status: int, seconds: float) -> None:
    path = scope.get("raw_path", scope["path"].encode()).decode("ascii", "backslashreplace")
    note, peer = scope["state"].get("note"), scope.get("client")
    parts = (
        time.strftime("%H:%M:%S"), scope["method"], path, str(status or "-"), f"{seconds:.3f} s",
        peer[0] if peer else "local", scope["state"]["id"], f"({note})" if note else "",
    )  # fmt: skip
    sys.stderr.write(" ".join(part for part in parts if part) + "\n")


class Access:
    """Accepts requests that have one of the keys. Without keys, accepts requests of programs and of this server's own
    pages, but not those of other web pages: any page that a user of this machine visits could send requests to a server
    on it. For a page of another site, the browser sends the page's origin. A page whose name was made to point to this
    machine (DNS rebinding) counts as the same site, so unknown host names are rejected, too. paths: of the APIs."""

    def __init__(
        self, app: ASGIApp, paths: Sequence[str], keys: Sequence[str], origins: Sequence[str],
        hosts: Sequence[str] | None,
    ) -> None:  # fmt: skip
        self._app, self._origins, self._hosts, self._keyed = app, origins, hosts, keyed(paths)
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            headers = Headers(scope=scope)
            if not self._keys:
                self._check_browser(headers)
            elif scope["path"].startswith(self._keyed):
                scope["state"]["key"] = self._checked_key(headers)
        await self._app(scope, receive, send)

    def _checked_key(self, headers: Headers) -> int:
        """The number of the request's key; the key itself is not passed on."""
        kind, _, token = headers.get("authorization", "").partition(" ")
        # the header of Anthropic's API
        given = token.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        # Compares all keys, each in constant time.
        found = [n for n, key in enumerate(self._keys, 1) if hmac.compare_digest(key, given.encode("utf-8", "replace"))]
        if not found:
            what = "is wrong" if given else "is missing: send the header Authorization: Bearer KEY"
            raise ApiError(401, f"the API key {what}", code="invalid_api_key", www_authenticate="Bearer")
        return found[0]

    def _check_browser(self, headers: Headers) -> None:
        host = headers.get("host", "")
        origin = headers.get("origin")
        if self._hosts is not None and not _is_local(host, self._hosts):
            raise ApiError(
                403, f"the host {shorten(host)} is not known here: start the server with an API key to allow any"
            )
        if origin is None or "*" in self._origins or origin in self._origins:
            return
        if _split(origin).netloc != host:
            raise ApiError(403, f"pages of {shorten(origin)} may not use this server: allow it with --cors-origins")


def _split(address: str) -> SplitResult:
    """The parts of an address. Raises ApiError 400 for an invalid one, such as half an IPv6 address."""
    try:
        return urlsplit(address)
    except ValueError:
        raise errors.invalid(f"{shorten(address)} in a header is no address") from None


def _is_local(host: str, names: Sequence[str]) -> bool:
    name = _split(f"//{host}").hostname or ""
    if name in names or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def http_error(request: Request, error: Exception) -> Json:
    """The response for errors of Starlette itself: 404 for unknown paths, 405 for other methods."""
    status, path = getattr(error, "status_code", 500), one_line(request.url.path, _SHOWN)
    text = {404: f"there is no {path} here", 405: f"{path} does not take {one_line(request.method, _SHOWN)}"}
    known = ApiError(status, text.get(status, str(getattr(error, "detail", error))))
    return Json(errors.body_for(request.url.path, known), status, getattr(error, "headers", None))
