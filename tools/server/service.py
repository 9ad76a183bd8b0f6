"""What the handlers of all APIs share: the models, the options, and the way from a request's body to its answer."""

import asyncio
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mlc_amd.runtime.errors import shorten
from mlc_amd.tools.server.answering import Answering, answer
from mlc_amd.tools.server.chat_request import AnswerRequest, Event
from mlc_amd.tools.server.errors import ApiError, invalid
from mlc_amd.tools.server.fields import Fields, parse_json
from mlc_amd.tools.server.library import Library
from mlc_amd.tools.server.metrics import Metrics
from mlc_amd.tools.server.options import ServeOptions
from mlc_amd.tools.server.streaming import AnswerStream, Encoder, Json, collect

# Bodies with more bytes are parsed in a thread.
_LARGE = 1 << 18


@dataclass
class Service:
    """The state of a running server, at `app.state.service`. loading: whether the default model is still being loaded.
    stopping: whether new requests are rejected. running: number of requests in progress."""

    library: Library
    options: ServeOptions
    loading: bool = False
    stopping: bool = False
    running: int = 0
    on_idle: Callable[[], None] | None = None  # called when the server is stopping and the last request ends
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.library)


def service_of(request: Request) -> Service:
    return request.app.state.service


def client_of(request: Request) -> str:
    """Identifies the client of a request, for the scheduler's fairness: by the API key, or by the peer's address."""
    key = request.scope["state"].get("key")
    return f"key {key}" if key else f"host {request.client.host if request.client else 'local'}"


async def read_fields(request: Request) -> Fields:
    """The body, which must be a JSON object. Raises ApiError 400, 408 and 413."""
    return Fields(await parse_body(await read_body(request, service_of(request).options)))


async def read_body(request: Request, options: ServeOptions) -> bytearray:
    """The bytes of the body. Raises ApiError 400, 408 and 413."""
    body = bytearray()
    try:
        async with asyncio.timeout(options.body_timeout):
            async for chunk in request.stream():
                body += chunk
                _check_size(body, options)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {options.body_timeout:g} s") from None
    except ClientDisconnect:
        raise invalid("the body is incomplete") from None
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    return body if encoding in ("identity", "") else await asyncio.to_thread(_decoded, body, encoding, options)


def _check_size(body: bytes | bytearray, options: ServeOptions) -> None:
    if len(body) > options.body:
        raise ApiError(413, f"the body is larger than {options.body} bytes, the limit of this server")


def _decoded(body: bytearray, encoding: str, options: ServeOptions) -> bytearray:
    """The decompressed body. Raises ApiError 400, 413, and 415 for encodings other than gzip and deflate."""
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise ApiError(415, f"the body's encoding is {shorten(encoding)}: this server decodes gzip and deflate")
    decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)  # accepts the headers of both
    try:
        decoded = bytearray(decoder.decompress(body, options.body + 1))
    except zlib.error as error:
        raise invalid(f"the body is not {encoding}: {error}") from None
    _check_size(decoded, options)
    if not decoder.eof or decoder.unused_data:
        raise invalid(f"the body is not {encoding}: it ends too early or goes on after its end")
    return decoded


async def parse_body(body: bytes | bytearray) -> Any:
    """The value of a JSON body. Raises ApiError 400."""
    return await asyncio.to_thread(_parse, body) if len(body) > _LARGE else _parse(body)


def _parse(body: bytes | bytearray) -> Any:
    try:
        return parse_json(body or b"{}")
    except ValueError as error:
        raise invalid(f"the body cannot be read as JSON: {error}") from None


async def respond(
    request: Request,
    asked: AnswerRequest,
    encoder: Callable[[Answering], Encoder] | None,
    whole: Callable[[Answering, Sequence[Event]], Any],
) -> Response:
    """Answers a request. encoder: makes the encoder of a streamed answer; None: the answer is not streamed. whole:
    makes the body of a whole answer from all events."""
    service = service_of(request)
    answering = await answer(service.library, asked, service.metrics.answered)
    limit = service.options.limit
    if encoder is not None:
        return AnswerStream(answering, encoder(answering), limit)
    events = await collect(answering, request.receive, limit)
    return Json(whole(answering, events))
