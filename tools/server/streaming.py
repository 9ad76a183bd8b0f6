"""Answers as HTTP responses, streamed or collected into one body. If the client goes away, the answer ends.

An `Encoder` turns events into the bytes of an API; `AnswerStream` writes them. Events that arrive within a short time
are written together: clients notice no difference, and the event loop has less work with many clients.
"""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from mlc_amd.tools.server import errors
from mlc_amd.tools.server.answering import Answering
from mlc_amd.tools.server.chat_request import Event, Text, Thinking, ToolCallArguments
from mlc_amd.tools.server.errors import ApiError

# Seconds between two writes of an answer: less than a frame of a 60 Hz screen; longer with each further stream, because
# a write takes the event loop longer than everything else for a token (measured: 0.1 to 0.2 ms).
_WRITE_INTERVAL, _INTERVAL_OF_STREAM, _LONGEST_INTERVAL = 0.012, 0.0015, 0.1
_TICKS = 4  # number of common times for writes in an interval
# Seconds without an event after which a comment is sent, because proxies close silent connections (after 30 to 60 s).
PING_INTERVAL = 10.0
# Seconds within which a client must read what was written, if the buffer is full.
WRITE_LIMIT = 60.0


class Encoder:
    """What an API writes for an answer; the methods are called in order. By default: server-sent events, with OpenAI's
    errors."""

    media_type = "text/event-stream; charset=utf-8"

    def begin(self) -> bytes:
        return b""

    def events(self, events: Sequence[Event]) -> bytes:
        return b"".join(self._encoded(event) for event in merged(events))

    def _encoded(self, event: Event) -> bytes:
        raise NotImplementedError

    def end(self) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        """The bytes for an error. Written in place of `end`, at any time."""
        return sse(errors.openai_body(error))

    def ping(self) -> bytes:
        """Bytes that clients ignore."""
        return b": ping\n\n"


class ClientGone(Exception):
    """The client has closed the connection."""


@asynccontextmanager
async def while_connected(receive: Receive, send_ping: Any = None) -> AsyncIterator[None]:
    """Ends its block with ClientGone when the client goes away. send_ping: called every PING_INTERVAL."""
    task, gone = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal gone
        while True:
            try:
                async with asyncio.timeout(PING_INTERVAL if send_ping else None):
                    message = await receive()
            except TimeoutError:
                with suppress(TimeoutError):  # the writer notices the same problem
                    await send_ping()
                continue
            if message["type"] == "http.disconnect":
                gone = True
                task.cancel()
                return

    watcher = asyncio.create_task(watch())
    try:
        yield
        if gone:
            await asyncio.sleep(0)  # the cancellation arrives here
    except asyncio.CancelledError:
        if not gone:
            raise
        task.uncancel()
        raise ClientGone from None
    finally:
        watcher.cancel()


class AnswerStream(Response):
    """Writes an answer while it is made. limit: seconds that it may take. open: number of streams in progress."""

    open = 0

    def __init__(self, answering: Answering, encoder: Encoder, limit: float | None) -> None:
        self._answering, self._encoder, self._limit = answering, encoder, limit
        self._written = time.monotonic()
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self.media_type = encoder.media_type
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        self.raw_headers.append((b"content-type", encoder.media_type.encode()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(body: bytes, more: bool = True) -> None:
            self._written = time.monotonic()
            async with asyncio.timeout(WRITE_LIMIT):
                await send({"type": "http.response.body", "body": body, "more_body": more})

        async def ping() -> None:
            if time.monotonic() - self._written >= PING_INTERVAL / 2:
                await write(self._encoder.ping())

        AnswerStream.open += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with while_connected(receive, ping):
                await write(await self._write_events(write), more=False)
        except ClientGone:
            scope["state"]["note"] = "the client went away"
        except TimeoutError:
            scope["state"]["note"] = "the client reads too slowly"
        finally:
            AnswerStream.open -= 1
            await self._answering.aclose()

    async def _write_events(self, write: Any) -> bytes:
        """Writes everything except the end. Returns the end."""
        encoder = self._encoder
        try:
            async with asyncio.timeout(self._limit):
                if begun := encoder.begin():
                    await write(begun)
                async for events in self._answering:
                    if made := encoder.events(events):
                        await write(made)
                        await self._answering.pause(_pause(asyncio.get_running_loop().time(), AnswerStream.open))
                return encoder.end()
        except Exception as error:
            return encoder.error(errors.reported(error))


def _pause(now: float, streams: int) -> float:
    """Seconds until the next write of a stream. Streams write at common times, several in one round of the event loop,
    because each round interrupts the thread that computes."""
    interval = min(_WRITE_INTERVAL + _INTERVAL_OF_STREAM * streams, _LONGEST_INTERVAL)
    tick = interval / _TICKS
    return math.ceil((now + interval) / tick) * tick - now


async def collect(answering: Answering, receive: Receive, limit: float | None) -> list[Event]:
    """All events of an answer. Raises ClientGone, TimeoutError, and errors of the engine."""
    try:
        async with while_connected(receive), asyncio.timeout(limit):
            return [event async for events in answering for event in events]
    finally:
        await answering.aclose()


def merged(events: Sequence[Event]) -> list[Event]:
    """The events, where adjacent events of the same kind are joined: pieces of one text, or of one call's arguments."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if last is None or type(last) is not type(event) or last.index != event.index:
            found.append(event)
        elif isinstance(event, Text) and isinstance(last, Text):
            found[-1] = Text(last.text + event.text, event.index, last.logprobs + event.logprobs)
        elif isinstance(event, Thinking) and isinstance(last, Thinking):
            found[-1] = Thinking(last.text + event.text, event.index)
        elif (
            isinstance(last, ToolCallArguments) and isinstance(event, ToolCallArguments) and last.number == event.number
        ):
            found[-1] = ToolCallArguments(last.text + event.text, event.number, event.index)
        else:
            found.append(event)
    return found


# ---- writing JSON


def dumps(value: Any) -> bytes:
    """Compact JSON. Lone surrogates, which UTF-8 cannot encode, are escaped like all other characters beyond ASCII."""
    return json.dumps(value, separators=(",", ":")).encode()


def sse(value: Any, event: str | None = None) -> bytes:
    """A server-sent event with this JSON value."""
    head = f"event: {event}\n".encode() if event else b""
    return b"%sdata: %s\n\n" % (head, dumps(value))


class Json(JSONResponse):
    """A response with compact JSON."""

    def render(self, content: Any) -> bytes:
        return dumps(content)
