"""What happens to every request before and after its handler, outermost first:

(CORS)      Starlette's, if origins are allowed
Gate        a request id, a line in the log, 503 while the server is stopping, loads its first model or has too
            many requests, and error bodies for exceptions
Access      API keys; without keys, who may ask from a browser
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
# Paths that are answered also without a key and while the server is stopping: what load balancers and browsers ask for
# before there is a user. The chat page (anything that is no API) asks for a key itself.
_OPEN = ("/health",)
_KEYED = (
    "/v1/", "/v2/", "/api/", "/tokenize", "/detokenize", "/apply-template", "/props", "/completion", "/infill",
    "/models", "/chat/completions", "/responses", "/metrics", "/embedding", "/rerank",
)  # fmt: skip
# What is asked for often and computes nothing: no line in the log.
_SILENT = ("/health", "/metrics")
_SHOWN = 100  # characters of a request's line in an error
# HTTP's unofficial code for "the client closed the connection", in the log alone.
_GONE = 499


class Gate:
    """See the module's docstring. paths: those that are counted by their own names."""

    def __init__(self, app: ASGIApp, service: Service, paths: Sequence[str]) -> None:
        self._app, self._service, self._paths = app, service, frozenset(paths)

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
            if scope["path"].startswith(_KEYED):
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
            if status:  # too late for a body
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
    """In the form of the path's API."""
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
    """Lets requests pass that have one of the keys; without keys, those of programs and of pages of this server, not of
    other web pages: any page that a user of this machine visits can reach a server on it. A browser names the page's
    origin where the page is of another site, but a page whose name was made to point to this machine (DNS rebinding) is
    of the same site: such names are refused, too."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], origins: Sequence[str], hosts: Sequence[str] | None) -> None:
        self._app, self._origins, self._hosts = app, origins, hosts
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            headers = Headers(scope=scope)
            if not self._keys:
                self._check_browser(headers)
            elif scope["path"].startswith(_KEYED):
                scope["state"]["key"] = self._checked_key(headers)
        await self._app(scope, receive, send)

    def _checked_key(self, headers: Headers) -> int:
        """The number of the key that the request has: the keys themselves go no further."""
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")  # Anthropic's header
        # All keys are compared, each in constant time.
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
    """ApiError 400 for what is no address, such as half an IPv6 one."""
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
    """For what Starlette raises itself: 404 for unknown paths, 405 for other methods."""
    status, path = getattr(error, "status_code", 500), one_line(request.url.path, _SHOWN)
    text = {404: f"there is no {path} here", 405: f"{path} does not take {one_line(request.method, _SHOWN)}"}
    known = ApiError(status, text.get(status, str(getattr(error, "detail", error))))
    return Json(errors.body_for(request.url.path, known), status, getattr(error, "headers", None))
