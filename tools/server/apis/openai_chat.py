"""`POST /v1/chat/completions`, OpenAI's chat API (https://platform.openai.com/docs/api-reference/chat).

Beyond it: `reasoning_content` with what the model thinks, as DeepSeek's API and llama-server have it;
`chat_template_kwargs`, variables of the chat template; `timings` as llama-server's, with `timings_per_token` in each
chunk of text, and its `return_progress`. The fields of sampling are in openai_fields.py. Not supported: audio, images
(400).
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from json.encoder import encode_basestring_ascii
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlc_amd.runtime.engine.generation import MOST_LOGPROBS, PromptProgress
from mlc_amd.tools.server import errors
from mlc_amd.tools.server.answering import Answering
from mlc_amd.tools.server.apis import openai_fields
from mlc_amd.tools.server.apis.openai_fields import (
    FINGERPRINT,
    finishes_of,
    progress_body,
    timings_body,
    total_usage,
    usage_body,
)
from mlc_amd.tools.server.apis.response_objects import logprob_body
from mlc_amd.tools.server.blocks import blocks_of
from mlc_amd.tools.server.chat_request import (
    ChatRequest,
    Event,
    Finish,
    Progress,
    Text,
    Thinking,
    ToolCallArguments,
    ToolCallBegin,
)
from mlc_amd.tools.server.errors import ApiError, invalid
from mlc_amd.tools.server.fields import Fields
from mlc_amd.tools.server.formats import answer_format
from mlc_amd.tools.server.prompts import check_messages
from mlc_amd.tools.server.service import client_of, read_fields, respond
from mlc_amd.tools.server.streaming import dumps, merged, sse

# OpenAI's words for how much to think -> ours, by preference (ChatRequest.thinking).
EFFORTS = {
    "none": ("off", "low"),
    "minimal": ("off", "low"),
    "low": ("low", "on"),
    "medium": ("medium", "on"),
    "high": ("high", "on"),
    "xhigh": ("high", "on"),
}
DONE = b"data: [DONE]\n\n"


async def chat_completions(request: Request) -> Response:
    fields = await read_fields(request)
    asked = chat_request(fields, client_of(request))
    stream, usage = openai_fields.streamed(fields)
    encoder = partial(ChatChunks, usage=usage, timed=openai_fields.timed(fields)) if stream else None
    return await respond(request, asked, encoder, whole)


def chat_request(fields: Fields, client: str) -> ChatRequest:
    effort = fields.choice("reasoning_effort", tuple(EFFORTS), "") if fields.has("reasoning_effort") else ""
    logprobs = None
    if fields.flag("logprobs"):
        logprobs = fields.whole("top_logprobs", 0, MOST_LOGPROBS) or 0
    return ChatRequest(
        model=fields.text("model"),
        messages=check_messages(fields),
        tools=check_tools(fields),
        tool_choice=tool_choice(fields),
        parallel_tool_calls=fields.flag("parallel_tool_calls", True),
        sampling=openai_fields.sampling(fields),
        max_tokens=openai_fields.most_tokens(fields),
        min_tokens=openai_fields.least_tokens(fields),
        stop=openai_fields.stops(fields),
        n=openai_fields.answers(fields),
        logprobs=logprobs,
        response_format=answer_format(fields),
        progress=openai_fields.progress_wanted(fields),
        thinking=EFFORTS.get(effort, ()),
        template_variables=fields.values("chat_template_kwargs"),
        client=client,
    )


def check_tools(fields: Fields) -> list[dict[str, Any]]:
    """The functions of `tools`."""
    found = []
    for tool in fields.objects("tools"):
        if tool.text("type", "function") != "function":
            raise tool.wrong("type", "function")
        tool.required("function")
        found.append(function_tool(tool.object("function") or Fields({})))
    return found


def function_tool(function: Fields) -> dict[str, Any]:
    """A function as chat templates take it."""
    function.required("name")
    made: dict[str, Any] = {"name": function.text("name"), "description": function.text("description")}
    made["parameters"] = function.values("parameters") or {"type": "object", "properties": {}}
    made |= {"strict": True} if function.flag("strict") else {}
    return {"type": "function", "function": made}


def tool_choice(fields: Fields) -> Any:
    """See ChatRequest.tool_choice."""
    given = fields.raw("tool_choice")
    if given is None or isinstance(given, str):
        return fields.choice("tool_choice", ("auto", "none", "required"), "auto")
    chosen = fields.object("tool_choice")
    assert chosen is not None, "it is not None"
    function = chosen.object("function") or chosen
    function.required("name")
    name = function.text("name")
    if name not in [tool.get("function", tool).get("name") for tool in fields.raw("tools") or []]:
        raise invalid(f"tool_choice names {name!r}, which is not among the tools", "tool_choice")
    return {"name": name}


# ---- the whole answer


def whole(answering: Answering, events: Sequence[Event]) -> dict[str, Any]:
    finishes = finishes_of(events)
    return {
        "id": _id(),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": answering.model.name,
        **FINGERPRINT,
        "choices": [_choice([event for event in events if event.index == end.index], end) for end in finishes],
        "usage": usage_body(total_usage(finishes, len(finishes))),
        "timings": timings_body(finishes[0]),
    }


def _choice(events: Sequence[Event], end: Finish) -> dict[str, Any]:
    blocks = blocks_of(events)
    text = "".join(block.text for block in blocks if block.kind == "text")
    thought = "".join(block.text for block in blocks if block.kind == "thinking")
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.text}}
        for block in blocks
        if block.kind == "call"
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    message |= {"refusal": None, "annotations": []}
    message |= {"reasoning_content": thought} if thought else {}
    message |= {"tool_calls": calls} if calls else {}
    logprobs = [logprob_body(one) for block in blocks for one in block.logprobs]
    return {
        "index": end.index,
        "message": message,
        "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
        "finish_reason": end.reason,
    }


def _id() -> str:
    return f"chatcmpl-{uuid.uuid4().hex}"


# ---- the answer in chunks


def _timed(stats: Finish | Progress) -> dict[str, Any]:
    return {"timings": timings_body(stats)}


class ChatChunks:
    """The encoder of streamed answers (streaming.Encoder). usage: a last chunk says how many tokens there were. timed:
    chunks of text have timings."""

    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, answering: Answering, usage: bool, timed: bool = False) -> None:
        self._n, self._usage, model = answering.request.n, usage, answering.model.name
        self._answering, self._timed = answering, timed
        head: dict[str, Any] = {"id": _id(), "object": "chat.completion.chunk", "created": int(time.time())}
        head |= {"model": model, **FINGERPRINT}
        # Most chunks differ in their text alone: the rest of them is written once.
        self._open = b"data: " + dumps(head)[:-1] + b',"choices":['
        self._close = (b'],"usage":null}' if usage else b"]}") + b"\n\n"
        self._finishes: list[Finish] = []

    def begin(self) -> bytes:
        return b"".join(self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self._n))

    def events(self, events: Sequence[Event]) -> bytes:
        return b"".join(self._encoded(event) for event in merged(events))

    def _encoded(self, event: Event) -> bytes:
        if isinstance(event, Text | Thinking):
            return self._text(event)
        if isinstance(event, ToolCallBegin):
            function = {"name": event.name, "arguments": ""}
            call = {"index": event.number, "id": event.id, "type": "function", "function": function}
            return self._chunk(event.index, {"tool_calls": [call]})
        if isinstance(event, ToolCallArguments):
            call = {"index": event.number, "function": {"arguments": event.text}}
            return self._chunk(event.index, {"tool_calls": [call]})
        if isinstance(event, PromptProgress):
            return self._chunk(event.index, {"role": "assistant", "content": None}, about=progress_body(event))
        self._finishes.append(event)
        return self._chunk(event.index, {}, event.reason, _timed(event))

    def _text(self, event: Text | Thinking) -> bytes:
        field, logprobs = ("content", event.logprobs) if isinstance(event, Text) else ("reasoning_content", ())
        about = dumps({"content": [logprob_body(one) for one in logprobs]}).decode() if logprobs else "null"
        choice = (
            f'{{"index":{event.index},"delta":{{"{field}":{encode_basestring_ascii(event.text)}}},'
            f'"logprobs":{about},"finish_reason":null}}'
        )
        timings = _timed(self._answering.progress(event.index)) if self._timed else None
        return self._open + choice.encode() + self._closed(timings)

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        reason: str | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> bytes:
        """about: further fields of the chunk."""
        choice = dumps({"index": index, "delta": delta, "logprobs": None, "finish_reason": reason})
        return self._open + choice + self._closed(about)

    def _closed(self, about: Mapping[str, Any] | None) -> bytes:
        return self._close if about is None else b"]," + dumps(about)[1:-1] + self._close[1:]

    def end(self) -> bytes:
        usage = b""
        if self._usage:
            total = usage_body(total_usage(self._finishes, self._n))
            timings = b',"timings":' + dumps(timings_body(self._finishes[0])) if self._n == 1 else b""
            usage = self._open + b'],"usage":' + dumps(total) + timings + b"}\n\n"
        return usage + DONE

    def error(self, error: ApiError) -> bytes:
        return sse(errors.openai_body(error)) + DONE

    def ping(self) -> bytes:
        return b": ping\n\n"
