"""Tools for models whose chat template does not support them: messages become text in the format `tool_calls.GENERIC`
(Hermes'). The system message explains the tools and how to call them. Calls become text of the assistant, and results
become text of the user."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlc_amd.runtime.calls.tool_calls import GENERIC

_INSTRUCTION = """\
You can call functions. These are available, with their parameters as JSON schemas:
{tools}

To call one, write a JSON object with its name and its arguments between <tool_call> and </tool_call>:
<tool_call>
{{"name": "FUNCTION", "arguments": {{"PARAMETER": "VALUE"}}}}
</tool_call>
Write one such block for each call, and nothing after the last one: the results come with the next message, between \
<tool_response> and </tool_response>. Call functions only where they help; otherwise answer directly."""


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as text. With tools, the instruction is added to the system message, which is made if missing."""
    converted: list[dict[str, Any]] = []
    if tools:
        first = messages[0] if messages and messages[0]["role"] == "system" else {}
        described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        texts = (first.get("content"), _INSTRUCTION.format(tools=described))
        converted.append({"role": "system", "content": "\n\n".join(filter(None, texts))})
        messages = messages[1:] if first else messages
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            result = f"<tool_response>\n{content}\n</tool_response>"
            if converted and converted[-1].get("results"):
                converted[-1]["content"] += f"\n{result}"
            else:
                converted.append({"role": "user", "content": result, "results": True})
        else:
            calls = [_written(call["function"]) for call in message.get("tool_calls") or ()]
            text = "\n".join([content, *calls] if content else calls)
            kept = {key: value for key, value in message.items() if key not in ("tool_calls", "content")}
            converted.append({**kept, "content": text})
    return [{key: value for key, value in message.items() if key != "results"} for message in converted]


def _written(function: Mapping[str, Any]) -> str:
    """A call as text. function: its "arguments" are an object, or the JSON text of one."""
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'{GENERIC.opening}\n{{"name": {name}, "arguments": {arguments}}}\n{GENERIC.closing}'
