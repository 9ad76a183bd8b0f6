"""`POST /v1/messages` and `POST /v1/messages/count_tokens`, Anthropic's API
(https://docs.anthropic.com/en/api/messages, https://docs.anthropic.com/en/docs/build-with-claude/streaming).

Blocks of thinking have an empty signature. The last message may be the assistant's: the answer continues it.
"""

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlc_amd.tools.server import errors
from mlc_amd.tools.server.answering import Answering
from mlc_amd.tools.server.apis.anthropic_fields import messages_request
from mlc_amd.tools.server.blocks import Block, blocks_of, finish_of
from mlc_amd.tools.server.chat_request import Event, Finish, Text, Thinking, ToolCallArguments, ToolCallBegin, Usage
from mlc_amd.tools.server.errors import ApiError
from mlc_amd.tools.server.service import client_of, read_fields, respond, service_of
from mlc_amd.tools.server.streaming import Json, merged, sse

_TEXT = {"type": "text", "text": "", "citations": None}
# Parts of the usage that this server has not.
_NO_USAGE = {"cache_creation": None, "inference_geo": None, "server_tool_use": None, "service_tier": "standard"}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def messages(request: Request) -> Response:
    fields = await read_fields(request)
    asked = messages_request(fields, client_of(request))
    return await respond(request, asked, MessageEvents if fields.flag("stream") else None, _whole)


async def count_tokens(request: Request) -> Response:
    asked = messages_request(await read_fields(request), client_of(request), counting=True)
    async with service_of(request).library.use(asked.model) as model:
        _, ids = await asyncio.to_thread(model.prompter.prompt, asked)
    return Json({"input_tokens": len(ids)})


def _whole(answering: Answering, events: Sequence[Event]) -> dict[str, Any]:
    end = finish_of(events)
    content = [_block(block) for block in blocks_of(events)]
    return {**_message(answering, end.usage), "content": content, **_stop(end)}


def _message(answering: Answering, usage: Usage) -> dict[str, Any]:
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": answering.model.name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": _usage(usage),
    }


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic's input tokens are those that were not cached."""
    return {
        **_NO_USAGE,
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


def _stop(end: Finish) -> dict[str, Any]:
    return {"stop_reason": "stop_sequence" if end.stop else _REASONS[end.reason], "stop_sequence": end.stop}


def _block(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {**_TEXT, "text": block.text}
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return _tool_use(block.id, block.name, block.arguments)


def _tool_use(id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": arguments, "caller": {"type": "direct"}}


class MessageEvents:
    """The encoder of streamed messages (streaming.Encoder)."""

    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._place = -1  # of the block that is open
        self._open: tuple[str, int] | None = None  # its kind, and its number if it is a call

    def begin(self) -> bytes:
        message = _message(self._answering, Usage(prompt=self._answering.prompt_tokens))
        return _event("message_start", message=message) + self.ping()

    def events(self, events: Sequence[Event]) -> bytes:
        return b"".join(self._encoded(event) for event in merged(events))

    def _encoded(self, event: Event) -> bytes:
        if isinstance(event, Text):
            begun = self._begin(("text", 0), _TEXT)
            return begun + self._delta({"type": "text_delta", "text": event.text})
        if isinstance(event, Thinking):
            begun = self._begin(("thinking", 0), {"type": "thinking", "thinking": "", "signature": ""})
            return begun + self._delta({"type": "thinking_delta", "thinking": event.text})
        if isinstance(event, ToolCallBegin):
            return self._begin(("call", event.number), _tool_use(event.id, event.name, {}))
        if isinstance(event, ToolCallArguments):
            return self._delta({"type": "input_json_delta", "partial_json": event.text})
        if isinstance(event, Finish):
            return self._close() + _event("message_delta", delta=_stop(event), usage=_usage(event.usage))
        return b""  # this API has no progress of prompts

    def _begin(self, kind: tuple[str, int], block: dict[str, Any]) -> bytes:
        """Opens a block, unless it is open."""
        if self._open == kind:
            return b""
        closed = self._close()
        self._open, self._place = kind, self._place + 1
        return closed + _event("content_block_start", index=self._place, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._place, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        thought, self._open = self._open[0] == "thinking", None
        signature = self._delta({"type": "signature_delta", "signature": ""}) if thought else b""
        return signature + _event("content_block_stop", index=self._place)

    def end(self) -> bytes:
        return _event("message_stop")

    def error(self, error: ApiError) -> bytes:
        return sse(errors.anthropic_body(error), "error")

    def ping(self) -> bytes:
        return _event("ping")


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)
