"""Answers with thinking, text and calls in the formats of further families, in all APIs of chats: a model with random
weights says what the test wants."""

import json

import numpy as np
import pytest
from call_snippets import TEMPLATES, written
from samples import sample

pytest.importorskip("starlette")
pytest.importorskip("llguidance")
from servers.serving import serving

from mlc_amd import Engine
from mlc_amd.compiler.gguf.synthetic import synthetic
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.options import CompileOptions, RunOptions
from mlc_amd.tools.server.library import Library
from tests.runtime.text.test_grammars import bytes_with

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% if message.tool_calls %}CALLS{% endif %}\n{% endfor %}{# tools #}"
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTIONS = [{"name": "weather", "parameters": PARAMETERS}, {"name": "clock", "parameters": {"type": "object"}}]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
CALLS = [("weather", {"city": "7 <b>", "days": 2}), ("clock", {})]
QUESTION = [{"role": "user", "content": "Where?"}]
# Of a family, tokens of its vocabulary, and what stands before the calls.
FAMILIES = {
    "deepseek-v3.2": (("<think>", "</think>"), "<think>Hm.</think>I look.\n\n"),
    "deepseek-v4": (("<think>", "</think>"), "<think>Hm.</think>I look.\n\n"),
    "hunyuan-3": (
        ("<think:opensource>", "</think:opensource>"), "<think:opensource>Hm.</think:opensource>I look.\n",
    ),
    "kimi-k3": (
        ("<|open|>", "<|sep|>", "<|close|>"),
        "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|>",
    ),
    "minimax-m3": (("<mm:think>", "</mm:think>", "]<]minimax[>["), "<mm:think>Hm.</mm:think>I look.\n"),
    "muse": (("<think>", "</think>"), "<think>Hm.</think>I look.\n"),
}  # fmt: skip


class Said:
    """The constraint of an answer that is these tokens."""

    def __init__(self, ids, vocab: int):
        self.ids, self.place, self.vocab = ids, 0, vocab

    def allowed(self):
        mask = np.zeros(-(-self.vocab // 32), np.uint32)
        token = self.ids[self.place]
        mask[token // 32] = 1 << token % 32
        return mask.view(np.int32)

    def accept(self, token: int):
        assert token == self.ids[self.place]
        self.place += 1

    @property
    def complete(self) -> bool:
        return self.place == len(self.ids)


@pytest.fixture(scope="module", params=sample(FAMILIES, ("deepseek-v4", "kimi-k3", "minimax-m3")))
def served(once, request):
    tokens, before = FAMILIES[request.param]
    calls = TEMPLATES[request.param][0]
    keys = bytes_with(tokens) | {"tokenizer.chat_template": TEMPLATE.replace("CALLS", calls), "block_count": 1}

    def make(out):
        with synthetic("tiny-qwen2:q4_0", keys=keys) as model:
            compile_model(model, out, CompileOptions(target="cpu", ctx=1024))

    artifact = once(f"calls-{request.param}", make)
    with serving(Library({"model": lambda: Engine.load(artifact, RunOptions(threads=2))})) as found:
        found.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
        model = found.service.library.loaded["model"]
        ids = model.engine.tokenizer.encode(before + written(calls, CALLS))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.grammars, "tool_calls", lambda *_: lambda: Said(ids, model.engine.vocab))
            yield found


def chat(served):
    message = served.post("/v1/chat/completions", {"messages": QUESTION, "tools": TOOLS})["choices"][0]["message"]
    calls = [call["function"] for call in message["tool_calls"]]
    return message["reasoning_content"], message["content"], [(one["name"], one["arguments"]) for one in calls]


def streamed_chat(served):
    chunks = served.stream("/v1/chat/completions", {"messages": QUESTION, "tools": TOOLS})
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    calls: dict[int, list[str]] = {}
    for one in (call for delta in deltas for call in delta.get("tool_calls", ())):
        kept = calls.setdefault(one["index"], ["", ""])
        for i, name in enumerate(("name", "arguments")):
            kept[i] += one["function"].get(name) or ""
    texts = ("".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning_content", "content"))
    return *texts, [(name, arguments) for name, arguments in calls.values()]


def anthropic(served):
    tools = [{"name": one["name"], "input_schema": one["parameters"]} for one in FUNCTIONS]
    body = {"model": "model", "messages": QUESTION, "tools": tools, "max_tokens": 900}
    return _of_blocks(served.post("/v1/messages", body)["content"])


def streamed_anthropic(served):
    tools = [{"name": one["name"], "input_schema": one["parameters"]} for one in FUNCTIONS]
    body = {"model": "model", "messages": QUESTION, "tools": tools, "max_tokens": 900}
    blocks: list[dict] = []
    for event in served.stream("/v1/messages", body):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"input": ""})
        if event["type"] == "content_block_delta":
            kind = event["delta"]["type"].removesuffix("_delta")
            name = {"input_json": "input"}.get(kind, kind)
            if kind != "signature":
                blocks[-1][name] = blocks[-1].get(name, "") + event["delta"].get(
                    "partial_json", event["delta"].get(kind)
                )
    return _of_blocks([one | {"input": json.loads(one["input"] or "{}")} for one in blocks])


def _of_blocks(blocks):
    texts = ("".join(one.get(kind, "") for one in blocks) for kind in ("thinking", "text"))
    return *texts, [(one["name"], json.dumps(one["input"])) for one in blocks if one["type"] == "tool_use"]


def ollama(served):
    body = {"model": "model", "messages": QUESTION, "tools": TOOLS, "think": True}
    return _of_messages([served.post("/api/chat", body | {"stream": False})])


def streamed_ollama(served):
    body = {"model": "model", "messages": QUESTION, "tools": TOOLS, "think": True}
    return _of_messages(served.stream("/api/chat", body))


def _of_messages(answers):
    messages = [one["message"] for one in answers]
    calls = [call["function"] for one in messages for call in one.get("tool_calls", ())]
    texts = ("".join(one.get(name) or "" for one in messages) for name in ("thinking", "content"))
    return *texts, [(one["name"], json.dumps(one["arguments"])) for one in calls]


@pytest.mark.parametrize("ask", [chat, streamed_chat, anthropic, streamed_anthropic, ollama, streamed_ollama])
def test_thinking_text_and_calls(served, ask):
    thought, text, calls = ask(served)
    assert (thought, text.strip()) == ("Hm.", "I look.")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == CALLS
