"""Calls of tools by a model of gpt-oss's architecture and vocabulary, with random weights, in all APIs of chats."""

import json
from typing import Any

import architectures
import pytest
from call_snippets import HARMONY_TOKENS

pytest.importorskip("starlette")
pytest.importorskip("llguidance")
from servers.serving import serving

from mlc_amd import Engine
from mlc_amd.compiler.gguf.synthetic import synthetic
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.options import CompileOptions, RunOptions
from mlc_amd.tools.server.chat_request import ChatRequest
from mlc_amd.tools.server.library import Library
from tests.runtime.text.test_grammars import bytes_with

# As gpt-oss's own writes messages.
TEMPLATE = """
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.content and m.thinking %}{{ raise_exception('content and thinking') }}{% endif %}
{%- if m.content or m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>
{%- endif %}
{%- set f = m.tool_calls[0].function -%}
<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}{# tools #}"""
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALLS = [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}]
QUESTION = {"role": "user", "content": "Where?"}
BEGUN = {"role": "assistant", "content": "I look"}


@pytest.fixture(scope="module")
def served(once):
    keys, tensors = architectures.MODELS["gpt-oss"]
    own: dict[str, Any] = bytes_with(HARMONY_TOKENS) | {"tokenizer.chat_template": TEMPLATE}
    own["tokenizer.ggml.eos_token_id"] = own["tokenizer.ggml.tokens"].index("<|return|>")

    def make(out):
        every = {"general.architecture": "gpt-oss"} | keys | own
        with synthetic("tiny-qwen2:q4_0", keys=every, tensors=tensors) as model:
            compile_model(model, out, CompileOptions(target="cpu", ctx=1024))

    artifact = once("harmony", make)
    with serving(Library({"oss": lambda: Engine.load(artifact, RunOptions(threads=2))})) as found:
        yield found


def chat(served, choice, messages, seed):
    body = {"messages": messages, "tools": TOOLS, "tool_choice": choice, "temperature": 1, "seed": seed}
    message = served.post("/v1/chat/completions", body | {"max_tokens": 200})["choices"][0]["message"]
    deltas = [chunk["choices"] for chunk in served.stream("/v1/chat/completions", body | {"max_tokens": 200})]
    streamed = [choice[0]["delta"] for choice in deltas if choice]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    pieces = [call["function"]["arguments"] for delta in streamed for call in delta.get("tool_calls", ())]
    assert "".join(pieces) == "".join(call["arguments"] for call in calls)
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in streamed) == (message.get(name) or "")
    return message["content"] or "", message.get("reasoning_content", ""), [call["arguments"] for call in calls]


def responses(served, choice, messages, seed):
    body = {"input": messages, "tools": [{"type": "function", **FUNCTION}], "tool_choice": choice, "temperature": 1}
    found = served.post("/v1/responses", body | {"max_output_tokens": 200})["output"]
    text, thought = (
        "".join(part["text"] for one in found if one["type"] == kind for part in one["content"])
        for kind in ("message", "reasoning")
    )
    return text, thought, [one["arguments"] for one in found if one["type"] == "function_call"]


def anthropic(served, choice, messages, seed):
    tools = [{"name": "weather", "input_schema": PARAMETERS}]
    body = {"messages": messages, "tools": tools, "tool_choice": {"type": {"required": "any"}.get(choice, choice)}}
    found = served.post("/v1/messages", body | {"model": "oss", "max_tokens": 200})["content"]
    text, thought = ("".join(one.get(kind, "") for one in found) for kind in ("text", "thinking"))
    return text, thought, [json.dumps(one["input"]) for one in found if one["type"] == "tool_use"]


def ollama(served, choice, messages, seed):
    body = {"model": "oss", "messages": messages, "tools": TOOLS if choice != "none" else [], "stream": False}
    found = served.post("/api/chat", body | {"options": {"num_predict": 200, "temperature": 1, "seed": seed}})[
        "message"
    ]
    calls = [json.dumps(call["function"]["arguments"]) for call in found.get("tool_calls", ())]
    return found["content"], found.get("thinking", ""), calls


@pytest.mark.parametrize("ask", [chat, responses, anthropic, ollama])
@pytest.mark.parametrize("begun", [False, True])
def test_answers_with_tools_have_no_headers(served, ask, begun):
    called = 0
    messages = [QUESTION, BEGUN] if begun else [QUESTION]
    for choice in ("auto", "required"):
        for seed in range(4):
            text, thought, calls = ask(served, choice, messages, seed)
            assert "functions" not in text and '"city"' not in thought
            assert choice == "auto" or ask is ollama or not text
            assert len(calls) <= 1
            called += bool(calls)
    assert called or ask is not chat  # the others have no seed, or no choice


def test_thinking_before_a_call_is_in_the_next_prompt(served):
    served.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    prompter = served.service.library.loaded["oss"].prompter
    for content, expected in (("", "Hm."), ("I look.", "I look.")):
        called = {"role": "assistant", "content": content, "reasoning_content": "Hm.", "tool_calls": CALLS}
        messages = [QUESTION, called, {"role": "tool", "content": "sunny"}]
        text, _ = prompter.prompt(ChatRequest(messages=messages, tools=TOOLS))
        assert f"<|channel|>analysis<|message|>{expected}<|end|><|start|>assistant to=functions.weather" in text
