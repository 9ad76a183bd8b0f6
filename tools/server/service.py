"""What the handlers of all APIs share: the models, the options, and the way from a request's body to its answer."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mlc_amd.tools.server.answering import Answering, answer
from mlc_amd.tools.server.chat_request import AnswerRequest, Event
from mlc_amd.tools.server.errors import ApiError, invalid
from mlc_amd.tools.server.fields import Fields
from mlc_amd.tools.server.library import Library
from mlc_amd.tools.server.metrics import Metrics
from mlc_amd.tools.server.options import ServeOptions
from mlc_amd.tools.server.streaming import AnswerStream, Encoder, Json, collect

# Bodies of more bytes are parsed in a thread.
_LARGE = 1 << 18


@dataclass
class Service:
    """The state of a running server, at `app.state.service`. loading: the default model is not there yet; stopping: it
    takes no new requests; running: requests that are being answered."""

    library: Library
    options: ServeOptions
    loading: bool = False
    stopping: bool = False
    running: int = 0
    on_idle: Callable[[], None] | None = None  # called when it is stopping and the last request ends
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.library)


def service_of(request: Request) -> Service:
    return request.app.state.service


def client_of(request: Request) -> str:
    """Whose request it is, for the scheduler's fairness: the API key, or the address of the peer."""
    key = request.scope["state"].get("key")
    return f"key {key}" if key else f"host {request.client.host if request.client else 'local'}"


async def read_fields(request: Request) -> Fields:
    """The body, a JSON object. ApiError 400, 408 and 413."""
    return Fields(await parse_body(await read_body(request, service_of(request).options)))


async def read_body(request: Request, options: ServeOptions) -> bytearray:
    """ApiError 400, 408 and 413."""
    body = bytearray()
    try:
        async with asyncio.timeout(options.body_timeout):
            async for chunk in request.stream():
                body += chunk
                if len(body) > options.body:
                    raise ApiError(413, f"the body is larger than {options.body} bytes, the limit of this server")
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {options.body_timeout:g} s") from None
    except ClientDisconnect:
        raise invalid("the body is incomplete") from None
    return body


async def parse_body(body: bytes | bytearray) -> Any:
    """The JSON value. ApiError 400."""
    return await asyncio.to_thread(_parse, body) if len(body) > _LARGE else _parse(body)


def _parse(body: bytes | bytearray) -> Any:
    def refused(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON number")

    try:
        return json.loads(body or b"{}", parse_constant=refused)
    except RecursionError:
        raise invalid("the body is nested too deeply") from None
    except ValueError as error:
        raise invalid(f"the body is not JSON: {error}") from None


async def respond(
    request: Request,
    asked: AnswerRequest,
    encoder: Callable[[Answering], Encoder] | None,
    whole: Callable[[Answering, Sequence[Event]], Any],
) -> Response:
    """Answers. encoder: makes what writes a streamed answer, None: it is not streamed; whole: makes the body of all
    events."""
    service = service_of(request)
    answering = await answer(service.library, asked, service.metrics.answered)
    limit = service.options.limit
    if encoder is not None:
        return AnswerStream(answering, encoder(answering), limit)
    events = await collect(answering, request.receive, limit)
    return Json(whole(answering, events))
