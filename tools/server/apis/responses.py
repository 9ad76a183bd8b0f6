"""`POST /v1/responses`, and `GET`, `DELETE /v1/responses/{id}`: OpenAI's Responses API
(https://platform.openai.com/docs/api-reference/responses).

The last responses are kept in memory, so that clients can continue them with `previous_response_id`, unless `store` is
false. The input may have messages with text and images, function_call, function_call_output and reasoning items. Not
supported (400): other items, background responses, conversations, and tools that are not functions, as this server runs
no tools itself.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlc_amd.runtime.engine.generation import MOST_LOGPROBS
from mlc_amd.runtime.errors import shorten
from mlc_amd.tools.server import chat_request as forms
from mlc_amd.tools.server.answering import Answering
from mlc_amd.tools.server.apis import openai_fields
from mlc_amd.tools.server.apis import response_objects as objects
from mlc_amd.tools.server.apis.openai_chat import EFFORTS, function_tool, tool_choice
from mlc_amd.tools.server.apis.response_objects import ResponseEvents, ResponseStore
from mlc_amd.tools.server.errors import invalid
from mlc_amd.tools.server.fields import Fields
from mlc_amd.tools.server.formats import answer_format
from mlc_amd.tools.server.prompts import arguments_of, content_of, content_text
from mlc_amd.tools.server.service import client_of, read_fields, respond
from mlc_amd.tools.server.streaming import Json

_ROLES = ("user", "assistant", "system", "developer")
_NUMBERS = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
# Default values of a tool's fields.
_TOOL = {"description": None, "parameters": None, "strict": False}
_LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True)
class Asked:
    """request: for the engine. messages: of the request without the instructions, which later responses do not inherit.
    echo: fields of the request that the response repeats. numbers: fields for which the model has values if the request
    leaves them out. store: whether later requests may continue the response."""

    request: forms.ChatRequest
    messages: list[dict[str, Any]]
    echo: dict[str, Any]
    numbers: dict[str, float | None]
    store: bool


async def create(request: Request) -> Response:
    fields, client = await read_fields(request), client_of(request)
    for name in ("background", "conversation", "prompt"):
        if fields.raw(name):
            raise fields.wrong(name, "left out: this server has no such function")
    earlier, store = [], _store(request)
    if fields.has("previous_response_id"):
        earlier = store.find(fields.text("previous_response_id"), client, "previous_response_id").messages
    asked = asked_of(fields, earlier, client)

    def keep(body: dict[str, Any], blocks: Sequence[forms.Block]) -> None:
        if asked.store:
            store.add(client, body, [*asked.messages, objects.as_message(blocks)])

    def begin(answering: Answering) -> dict[str, Any]:
        """The response before any output. Settings that the request leaves out are the model's."""
        sampling = answering.model.engine.sampling
        echo = {name: getattr(sampling, name) if value is None else value for name, value in asked.numbers.items()}
        id = objects.new_id("resp", store.maker)
        return objects.response(id, int(time.time()), answering.model.name, asked.echo | echo)

    def encoder(answering: Answering) -> ResponseEvents:
        return ResponseEvents(begin(answering), keep)

    def whole(answering: Answering, events: Sequence[forms.Event]) -> dict[str, Any]:
        end, blocks = forms.finish_of(events), forms.blocks_of(events)
        output = [objects.item(block, objects.item_id(block)) for block in blocks]
        body = objects.ended(begin(answering), output, end.usage, end.reason == "length")
        keep(body, blocks)
        return body

    return await respond(request, asked.request, encoder if fields.flag("stream") else None, whole)


def _store(request: Request) -> ResponseStore:
    return request.app.state.responses


async def retrieve(request: Request) -> Response:
    return Json(_store(request).find(request.path_params["id"], client_of(request)).body)


async def delete(request: Request) -> Response:
    id = request.path_params["id"]
    _store(request).remove(id, client_of(request))
    return Json({"id": id, "object": "response", "deleted": True})


# ---- requests


def asked_of(fields: Fields, earlier: Sequence[Mapping[str, Any]], client: str) -> Asked:
    """The parsed request. earlier: the messages of the response that this one continues."""
    reasoning = fields.object("reasoning") or Fields({}, "reasoning")
    effort = reasoning.choice("effort", tuple(EFFORTS), "") if reasoning.has("effort") else ""
    messages = [*map(dict, earlier), *input_messages(fields)]
    instructions = fields.text("instructions")
    text = fields.object("text") or Fields({}, "text")
    wants_logprobs = _LOGPROBS in fields.texts("include") or fields.has("top_logprobs")
    tools = [_tool(tool) for tool in fields.objects("tools")]
    request = forms.ChatRequest(
        model=fields.text("model"),
        messages=[{"role": "system", "content": instructions}, *messages] if instructions else messages,
        tools=tools,
        tool_choice=tool_choice(fields, tools),
        parallel_tool_calls=fields.flag("parallel_tool_calls", True),
        sampling=openai_fields.sampling(fields),
        max_tokens=fields.whole("max_output_tokens", 1),
        **openai_fields.endings(fields),
        logprobs=(fields.whole("top_logprobs", 0, MOST_LOGPROBS) or 0) if wants_logprobs else None,
        response_format=answer_format(fields, "text.format", _format(text)),
        thinking=EFFORTS.get(effort, ()),
        client=client,
    )
    echo = {
        "instructions": fields.raw("instructions"),
        "max_output_tokens": request.max_tokens,
        "metadata": fields.values("metadata"),
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": fields.raw("previous_response_id"),
        "reasoning": {"effort": reasoning.raw("effort"), "summary": None},
        "store": fields.flag("store", True),
        "text": {"format": text.raw("format") or {"type": "text"}},
        "tool_choice": fields.raw("tool_choice") or "auto",
        "tools": [_TOOL | dict(tool) for tool in fields.raw("tools") or []],
        "top_logprobs": request.logprobs or 0,
        "truncation": "disabled",
        "max_tool_calls": fields.raw("max_tool_calls"),
        "prompt_cache_key": fields.raw("prompt_cache_key"),
        "safety_identifier": fields.raw("safety_identifier"),
        "service_tier": "default",
    }
    numbers = {name: fields.number(name) for name in _NUMBERS}
    return Asked(request, messages, echo, numbers, fields.flag("store", True))


def _tool(tool: Fields) -> dict[str, Any]:
    if tool.text("type") != "function":
        raise tool.wrong("type", "function: this server runs no tools itself")
    return function_tool(tool)


def _format(text: Fields) -> forms.ResponseFormat | None:
    given = text.object("format")
    if given is None or given.choice("type", ("text", "json_object", "json_schema"), "text") == "text":
        return None
    if given.text("type") == "json_object":
        return forms.ANY_OBJECT
    given.required("schema")
    return forms.ResponseFormat(schema=given.values("schema"), strict=given.flag("strict"))


def input_messages(fields: Fields) -> list[dict[str, Any]]:
    """The input as messages of a chat. Consecutive thinking, text and calls of the assistant become one message."""
    if isinstance(fields.required("input"), str):
        return [{"role": "user", "content": fields.text("input")}]
    found: list[dict[str, Any]] = []
    for item in fields.objects("input"):
        _add(found, item)
    if not found:
        raise fields.wrong("input", "a string or a list of at least one item")
    return found


def _add(messages: list[dict[str, Any]], item: Fields) -> None:
    kind = item.text("type", "message")
    if kind == "message":
        item.required("role")
        role = item.choice("role", _ROLES, "user")
        if role == "assistant":
            message = _assistant(messages)
            message["content"] += content_text(item, "content")
        else:
            messages.append({"role": "system" if role == "developer" else role, **content_of(item, "content")})
    elif kind == "function_call":
        item.required("name")
        call = forms.tool_call(item.text("call_id"), item.text("name"), arguments_of(item, "arguments"))
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        item.required("call_id")
        content = content_of(item, "output", required=False)
        messages.append({"role": "tool", "tool_call_id": item.text("call_id"), **content})
    elif kind == "reasoning":
        thought = "".join(part.text("text") for part in item.objects("content"))
        _assistant(messages).setdefault("reasoning_content", "")
        messages[-1]["reasoning_content"] += thought
    else:
        path = item.path("type")
        raise invalid(f"{path} is {shorten(kind)}: this server takes messages, function calls and reasoning", path)


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end; a new one is added if there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]
