"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's API
(https://docs.anthropic.com/en/api/messages, https://docs.anthropic.com/en/docs/build-with-claude/streaming).

Requests may have these content blocks: text, image, thinking, tool_use, tool_result. Others (documents) are rejected
(400). Redacted thinking is left out. Thinking blocks of answers have an empty signature. If the last message is the
assistant's, the answer continues it.
"""

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlc_amd.tools.server import chat_request as forms
from mlc_amd.tools.server import errors
from mlc_amd.tools.server.answering import Answering
from mlc_amd.tools.server.apis.openai_chat import LEVELS
from mlc_amd.tools.server.apis.openai_fields import checked
from mlc_amd.tools.server.errors import ApiError
from mlc_amd.tools.server.fields import Fields
from mlc_amd.tools.server.formats import answer_format
from mlc_amd.tools.server.prompts import arguments_of, content_of, content_text, joined, part_of
from mlc_amd.tools.server.service import client_of, read_fields, respond, service_of
from mlc_amd.tools.server.streaming import Encoder, Json, sse

# Anthropic's `thinking.type` -> values of ChatRequest.thinking, in order of preference.
_THINKING = {"enabled": ("on", "high"), "adaptive": (), "disabled": ("off", "low")}
# The same for Anthropic's `output_config.effort`, which counts if `thinking` is not given or adaptive.
_EFFORTS = LEVELS | {"max": ("high", "on")}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TEXT = {"type": "text", "text": "", "citations": None}
# Fields of the usage that this server does not have.
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


# ---- requests


def messages_request(fields: Fields, client: str, counting: bool = False) -> forms.ChatRequest:
    """counting: whether the tokens are only counted; then there is no max_tokens."""
    if not counting:
        fields.required("max_tokens")
    output = fields.object("output_config") or Fields({}, "output_config")
    tools = [_tool(tool) for tool in fields.objects("tools")]
    choice, parallel = _tool_choice(fields, [tool["function"]["name"] for tool in tools])
    given = {name: fields.number(name) for name in ("temperature", "top_p")} | {"top_k": fields.whole("top_k")}
    return forms.ChatRequest(
        model=fields.text("model"),
        messages=_messages(fields),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        sampling=checked({name: value for name, value in given.items() if value is not None}),
        max_tokens=fields.whole("max_tokens", 1),
        stop=tuple(text for text in fields.texts("stop_sequences") if text),
        thinking=_thinking(fields, output),
        response_format=answer_format(
            fields, "output_config.format", _format(output.object("format") or fields.object("output_format"))
        ),
        client=client,
    )


def _thinking(fields: Fields, output: Fields) -> tuple[str, ...]:
    thinking = fields.object("thinking")
    if thinking and (found := _THINKING[thinking.choice("type", tuple(_THINKING), "adaptive")]):
        return found
    return _EFFORTS[output.choice("effort", tuple(_EFFORTS), "high")] if output.has("effort") else ()


def _format(given: Fields | None) -> forms.ResponseFormat | None:
    """The format in output_config.format: {"type": "json_schema", "schema": ..}. The older name is output_format."""
    if given is None:
        return None
    given.required("schema")
    given.choice("type", ("json_schema",), "json_schema")
    return forms.ResponseFormat(schema=given.values("schema"))


def _tool(tool: Fields) -> dict[str, Any]:
    tool.required("name")
    if tool.has("type") and tool.text("type") != "custom":
        raise tool.wrong("type", "custom: this server runs no tools itself")
    parameters = tool.values("input_schema") or {"type": "object", "properties": {}}
    function = {"name": tool.text("name"), "description": tool.text("description"), "parameters": parameters}
    return {"type": "function", "function": function}


def _tool_choice(fields: Fields, names: list[str]) -> tuple[Any, bool]:
    """(ChatRequest.tool_choice, parallel_tool_calls) of a request."""
    choice = fields.object("tool_choice")
    if choice is None:
        return "auto", True
    parallel = not choice.flag("disable_parallel_tool_use")
    kind = choice.choice("type", (*_CHOICES, "tool"), "auto")
    if kind != "tool":
        return _CHOICES[kind], parallel
    choice.required("name")
    if choice.text("name") not in names:
        raise choice.wrong("name", "one of the tools")
    return {"name": choice.text("name")}, parallel


def _messages(fields: Fields) -> list[dict[str, Any]]:
    fields.required("messages")
    system = content_text(fields, "system")
    found: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for message in fields.objects("messages"):
        message.required("role")
        role = message.choice("role", ("user", "assistant", "system"), "user")
        if isinstance(message.raw("content") if role == "assistant" else message.required("content"), str):
            found.append({"role": role, "content": message.text("content")})
        else:
            found += (_assistant if role == "assistant" else _user)(message, role)
    if len(found) == bool(system):
        raise fields.wrong("messages", "a list of at least one message")
    return found


def _user(message: Fields, role: str) -> list[dict[str, Any]]:
    """The messages for a user message. Results of tools become separate messages before the text."""
    results, parts = [], []
    for block in message.objects("content"):
        if block.text("type") == "tool_result":
            block.required("tool_use_id")
            content = content_of(block, "content", required=False)
            results.append({"role": "tool", "tool_call_id": block.text("tool_use_id"), **content})
        else:
            parts.append(part_of(block))
    return results + ([{"role": role, **joined(parts)}] if parts or not results else [])


def _assistant(message: Fields, role: str) -> list[dict[str, Any]]:
    texts, thoughts, calls = [], [], []
    for block in message.objects("content"):
        kind = block.text("type")
        if kind == "tool_use":
            block.required("name")
            calls.append(forms.tool_call(block.text("id"), block.text("name"), arguments_of(block, "input")))
        elif kind == "thinking":
            thoughts.append(block.text("thinking"))
        elif kind != "redacted_thinking":
            texts.append(_text_of(block))
    made: dict[str, Any] = {"role": role, "content": "".join(texts)}
    made |= {"tool_calls": calls} if calls else {}
    return [made | ({"reasoning_content": "".join(thoughts)} if thoughts else {})]


def _text_of(block: Fields) -> str:
    if block.text("type") != "text":
        raise block.wrong("type", "text: this server takes text only")
    return block.text("text")


# ---- answers


def _whole(answering: Answering, events: Sequence[forms.Event]) -> dict[str, Any]:
    end = forms.finish_of(events)
    content = [_block(block) for block in forms.blocks_of(events)]
    return {**_message(answering, end.usage), "content": content, **_stop(end)}


def _message(answering: Answering, usage: forms.Usage) -> dict[str, Any]:
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


def _usage(usage: forms.Usage) -> dict[str, Any]:
    """The usage in Anthropic's form, where input tokens are those that were not cached."""
    return {
        **_NO_USAGE,
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


def _stop(end: forms.Finish) -> dict[str, Any]:
    return {"stop_reason": "stop_sequence" if end.stop else _REASONS[end.reason], "stop_sequence": end.stop}


def _block(block: forms.Block) -> dict[str, Any]:
    if block.kind == "text":
        return {**_TEXT, "text": block.text}
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return _tool_use(block.id, block.name, block.arguments)


def _tool_use(id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": arguments, "caller": {"type": "direct"}}


class MessageEvents(Encoder):
    """The encoder of streamed messages."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._place = -1  # number of the open block
        self._open: tuple[str, int] | None = None  # kind of the open block, and the number of the call if it is one

    def begin(self) -> bytes:
        message = _message(self._answering, forms.Usage(prompt=self._answering.prompt_tokens))
        return _event("message_start", message=message) + self.ping()

    def _encoded(self, event: forms.Event) -> bytes:
        if isinstance(event, forms.Text):
            begun = self._begin(("text", 0), _TEXT)
            return begun + self._delta({"type": "text_delta", "text": event.text})
        if isinstance(event, forms.Thinking):
            begun = self._begin(("thinking", 0), {"type": "thinking", "thinking": "", "signature": ""})
            return begun + self._delta({"type": "thinking_delta", "thinking": event.text})
        if isinstance(event, forms.ToolCallBegin):
            return self._begin(("call", event.number), _tool_use(event.id, event.name, {}))
        if isinstance(event, forms.ToolCallArguments):
            return self._delta({"type": "input_json_delta", "partial_json": event.text})
        if isinstance(event, forms.Finish):
            return self._close() + _event("message_delta", delta=_stop(event), usage=_usage(event.usage))
        return b""  # this API does not report the progress of prompts

    def _begin(self, kind: tuple[str, int], block: dict[str, Any]) -> bytes:
        """Opens a block, unless it is open already."""
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
