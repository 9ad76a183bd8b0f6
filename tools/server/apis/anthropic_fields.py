"""Anthropic's messages (https://docs.anthropic.com/en/api/messages) -> a `ChatRequest`.

Content blocks: text, thinking, tool_use, tool_result; others (images, documents) are refused (400). Thinking that was
redacted is left out.
"""

from typing import Any

from mlc_amd.tools.server.apis.openai_fields import checked
from mlc_amd.tools.server.chat_request import ChatRequest, ResponseFormat
from mlc_amd.tools.server.errors import invalid
from mlc_amd.tools.server.fields import Fields
from mlc_amd.tools.server.prompts import content_text

# Anthropic's `thinking.type` -> ours, by preference.
_THINKING = {"enabled": ("on", "high"), "adaptive": (), "disabled": ("off", "low")}
# Its `output_config.effort`, likewise, where `thinking` does not say it.
_EFFORTS = {
    "low": ("low", "on"),
    "medium": ("medium", "on"),
    "high": ("high", "on"),
    "xhigh": ("high", "on"),
    "max": ("high", "on"),
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def messages_request(fields: Fields, client: str, counting: bool = False) -> ChatRequest:
    """counting: the tokens are only counted: there is no max_tokens."""
    if not counting:
        fields.required("max_tokens")
    output = fields.object("output_config") or Fields({}, "output_config")
    tools = [_tool(tool) for tool in fields.objects("tools")]
    choice, parallel = _tool_choice(fields, [tool["function"]["name"] for tool in tools])
    given = {name: fields.number(name) for name in ("temperature", "top_p")} | {"top_k": fields.whole("top_k")}
    return ChatRequest(
        model=fields.text("model"),
        messages=_messages(fields),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        sampling=checked({name: value for name, value in given.items() if value is not None}),
        max_tokens=fields.whole("max_tokens", 1),
        stop=tuple(text for text in fields.texts("stop_sequences") if text),
        thinking=_thinking(fields, output),
        response_format=_format(output.object("format") or fields.object("output_format")),
        client=client,
    )


def _thinking(fields: Fields, output: Fields) -> tuple[str, ...]:
    thinking = fields.object("thinking")
    if thinking and (found := _THINKING[thinking.choice("type", tuple(_THINKING), "adaptive")]):
        return found
    return _EFFORTS[output.choice("effort", tuple(_EFFORTS), "high")] if output.has("effort") else ()


def _format(given: Fields | None) -> ResponseFormat | None:
    """output_config.format: {"type": "json_schema", "schema": ..}; its older name is output_format."""
    if given is None:
        return None
    given.required("schema")
    given.choice("type", ("json_schema",), "json_schema")
    return ResponseFormat(schema=given.values("schema"))


def _tool(tool: Fields) -> dict[str, Any]:
    tool.required("name")
    if tool.has("type") and tool.text("type") != "custom":
        raise tool.wrong("type", "custom: this server runs no tools itself")
    parameters = tool.values("input_schema") or {"type": "object", "properties": {}}
    function = {"name": tool.text("name"), "description": tool.text("description"), "parameters": parameters}
    return {"type": "function", "function": function}


def _tool_choice(fields: Fields, names: list[str]) -> tuple[Any, bool]:
    """(ChatRequest.tool_choice, parallel_tool_calls)."""
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
    system = content_text(fields, "system", required=False)
    found: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for message in fields.objects("messages"):
        message.required("role")
        role = message.choice("role", ("user", "assistant", "system"), "user")
        if isinstance(message.required("content"), str):
            found.append({"role": role, "content": message.text("content")})
        else:
            found += (_assistant if role == "assistant" else _user)(message, role)
    if len(found) == bool(system):
        raise fields.wrong("messages", "a list of at least one message")
    return found


def _user(message: Fields, role: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, before the text."""
    results, texts = [], []
    for block in message.objects("content"):
        if block.text("type") == "tool_result":
            block.required("tool_use_id")
            text = content_text(block, "content", required=False)
            results.append({"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": text})
        else:
            texts.append(_text(block))
    return results + ([{"role": role, "content": "".join(texts)}] if texts or not results else [])


def _assistant(message: Fields, role: str) -> list[dict[str, Any]]:
    texts, thoughts, calls = [], [], []
    for block in message.objects("content"):
        kind = block.text("type")
        if kind == "tool_use":
            block.required("name")
            function = {"name": block.text("name"), "arguments": block.values("input")}
            calls.append({"id": block.text("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(block.text("thinking"))
        elif kind != "redacted_thinking":
            texts.append(_text(block))
    made: dict[str, Any] = {"role": role, "content": "".join(texts)}
    made |= {"tool_calls": calls} if calls else {}
    return [made | ({"reasoning_content": "".join(thoughts)} if thoughts else {})]


def _text(block: Fields) -> str:
    if block.text("type") != "text":
        raise invalid(f"{block.path('type')} is {block.raw('type')!r}: this server takes text only", block.path("type"))
    return block.text("text")
