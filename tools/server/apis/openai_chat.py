"""`POST /v1/chat/completions`: OpenAI's chat API (https://platform.openai.com/docs/api-reference/chat).

Extensions: `reasoning_content` has the model's thinking, as in DeepSeek's API and llama-server; `chat_template_kwargs`
are variables of the chat template; `timings` are llama-server's, with `timings_per_token` in each chunk of text;
`return_progress` is llama-server's. openai_fields.py has the fields of sampling. Not supported: audio, images as output
(400).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from json.encoder import encode_basestring_ascii
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlc_amd.runtime.engine.generation import MOST_LOGPROBS, PromptProgress
from mlc_amd.runtime.errors import shorten
from mlc_amd.tools.server import chat_request as forms
from mlc_amd.tools.server.answering import Answering
from mlc_amd.tools.server.apis import openai_fields
from mlc_amd.tools.server.apis.openai_fields import logprob_body, progress_body, timings_body
from mlc_amd.tools.server.errors import invalid
from mlc_amd.tools.server.fields import Fields
from mlc_amd.tools.server.prompts import check_messages
from mlc_amd.tools.server.service import client_of, read_fields, respond
from mlc_amd.tools.server.streaming import dumps

# OpenAI's values of how much to think -> values of ChatRequest.thinking, in order of preference.
LEVELS = {"low": ("low", "on"), "medium": ("medium", "on"), "high": ("high", "on"), "xhigh": ("high", "on")}
EFFORTS = dict.fromkeys(("none", "minimal"), ("off", "low")) | LEVELS


async def chat_completions(request: Request) -> Response:
    fields = await read_fields(request)
    asked = chat_request(fields, client_of(request))
    stream, usage = openai_fields.streamed(fields)
    encoder = partial(ChatChunks, usage=usage, timed=fields.flag("timings_per_token")) if stream else None
    whole = partial(openai_fields.whole, "chatcmpl", "chat.completion", choice)
    return await respond(request, asked, encoder, whole)


def chat_request(fields: Fields, client: str) -> forms.ChatRequest:
    for name in ("functions", "function_call"):
        if fields.raw(name):
            raise fields.wrong(name, "left out: tools and tool_choice are the form that replaced it")
    effort = fields.choice("reasoning_effort", tuple(EFFORTS), "") if fields.has("reasoning_effort") else ""
    logprobs = None
    for name in ("echo", "prompt_logprobs"):
        if fields.raw(name) not in (None, False):
            raise fields.wrong(name, "left out: it is for /v1/completions")
    if fields.flag("logprobs"):
        logprobs = fields.whole("top_logprobs", 0, MOST_LOGPROBS) or 0
    tools = check_tools(fields)
    return forms.ChatRequest(
        messages=check_messages(fields),
        tools=tools,
        tool_choice=tool_choice(fields, tools),
        parallel_tool_calls=fields.flag("parallel_tool_calls", True),
        **openai_fields.common(fields, client),
        n=openai_fields.answers(fields),
        logprobs=logprobs,
        thinking=EFFORTS.get(effort, ()),
        template_variables=_variables(fields),
    )


def _variables(fields: Fields) -> dict[str, Any]:
    found = fields.values("chat_template_kwargs")
    if "messages" in found:
        raise invalid("chat_template_kwargs has messages: the request's own are used", "chat_template_kwargs")
    return found


def check_tools(fields: Fields) -> list[dict[str, Any]]:
    """The functions in the field `tools`."""
    found = []
    for tool in fields.objects("tools"):
        if tool.text("type", "function") != "function":
            raise tool.wrong("type", "function")
        tool.required("function")
        found.append(function_tool(tool.object("function") or Fields({})))
    return found


def function_tool(function: Fields) -> dict[str, Any]:
    """A function in the form for chat templates."""
    function.required("name")
    made: dict[str, Any] = {"name": function.text("name"), "description": function.text("description")}
    made["parameters"] = function.values("parameters") or {"type": "object", "properties": {}}
    made |= {"strict": True} if function.flag("strict") else {}
    return {"type": "function", "function": made}


def tool_choice(fields: Fields, tools: Sequence[Mapping[str, Any]]) -> Any:
    """The value of ChatRequest.tool_choice."""
    given = fields.raw("tool_choice")
    if given is None or isinstance(given, str):
        return fields.choice("tool_choice", ("auto", "none", "required"), "auto")
    chosen = fields.object("tool_choice")
    assert chosen is not None, "it is not None"
    function = chosen.object("function") or chosen
    function.required("name")
    name = function.text("name")
    if name not in [tool["function"]["name"] for tool in tools]:
        raise invalid(f"tool_choice names {shorten(name)}, which is not among the tools", "tool_choice")
    return {"name": name}


# ---- answers


def choice(events: Sequence[forms.Event], end: forms.Finish) -> dict[str, Any]:
    """A whole answer, from its events."""
    blocks = forms.blocks_of(events)
    text, thought, called = forms.parts_of(blocks)
    calls = [forms.tool_call(call.id, call.name, call.text) for call in called]
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


class ChatChunks(openai_fields.Chunks):
    """The encoder of streamed answers. timed: whether chunks of text have timings."""

    def __init__(self, answering: Answering, usage: bool, timed: bool = False) -> None:
        super().__init__("chatcmpl", "chat.completion.chunk", answering, usage)
        self._timed = timed

    def begin(self) -> bytes:
        return b"".join(self._with(index, {"role": "assistant", "content": ""}) for index in range(self._n))

    def _encoded(self, event: forms.Event) -> bytes:
        if isinstance(event, forms.Text | forms.Thinking):
            return self._text(event)
        if isinstance(event, forms.ToolCallBegin):
            function = {"name": event.name, "arguments": ""}
            call = {"index": event.number, "id": event.id, "type": "function", "function": function}
            return self._with(event.index, {"tool_calls": [call]})
        if isinstance(event, forms.ToolCallArguments):
            call = {"index": event.number, "function": {"arguments": event.text}}
            return self._with(event.index, {"tool_calls": [call]})
        if isinstance(event, PromptProgress):
            return self._with(event.index, {"role": "assistant", "content": None}, about=progress_body(event))
        assert isinstance(event, forms.Finish), "chat refuses echo"
        self._finishes.append(event)
        return self._with(event.index, {}, event.reason, {"timings": timings_body(event)})

    def _text(self, event: forms.Text | forms.Thinking) -> bytes:
        field, logprobs = ("content", event.logprobs) if isinstance(event, forms.Text) else ("reasoning_content", ())
        about = dumps({"content": [logprob_body(one) for one in logprobs]}).decode() if logprobs else "null"
        choice = (
            f'{{"index":{event.index},"delta":{{"{field}":{encode_basestring_ascii(event.text)}}},'
            f'"logprobs":{about},"finish_reason":null}}'
        )
        timings = {"timings": timings_body(self._answering.progress(event.index))} if self._timed else None
        return self._chunk(choice.encode(), timings)

    def _with(
        self, index: int, delta: dict[str, Any], reason: str | None = None, about: dict[str, Any] | None = None
    ) -> bytes:
        """A chunk with this delta. about: further fields."""
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._chunk(dumps(choice), about)

    def _about_all(self) -> dict[str, Any]:
        timings = {"timings": timings_body(self._finishes[0])} if self._n == 1 else {}
        return super()._about_all() | timings
