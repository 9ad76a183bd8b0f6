"""ollama's API, with the bundled model."""

import json

import pytest

QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]
LIMIT = {"options": {"num_predict": 12}}


def test_chat(served):
    lines = served.stream("/api/chat", {"messages": QUESTION, **LIMIT})
    whole = served.post("/api/chat", {"messages": QUESTION, "stream": False, **LIMIT})
    assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"]
    assert [line["done"] for line in lines[:-1]] == [False] * (len(lines) - 1)
    assert lines[-1]["done_reason"] == whole["done_reason"] == "length" and whole["eval_count"] == 12
    assert whole["total_duration"] >= whole["eval_duration"] > 0


def test_generate(served):
    whole = served.post("/api/generate", {"prompt": QUESTION[0]["content"], "stream": False, **LIMIT})
    chat = served.post("/api/chat", {"messages": QUESTION, "stream": False, **LIMIT})
    assert whole["response"] == chat["message"]["content"]
    raw = served.post("/api/generate", {"prompt": "def f(", "raw": True, "stream": False, **LIMIT})
    text = served.post("/v1/completions", {"prompt": "def f(", "max_tokens": 12})
    assert raw["response"] == text["choices"][0]["text"]
    assert served.post("/api/generate", {"model": "demo"})["done_reason"] == "load"


def test_format_and_tools(served):
    tool = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome"]}}}}
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    body = {"messages": QUESTION, "stream": False, "options": {"num_predict": 200, "seed": 1, "temperature": 1}}
    assert json.loads(served.post("/api/chat", body | {"format": schema})["message"]["content"]) == {"a": 1}
    answer = served.post("/api/chat", body | {"tools": [{"type": "function", "function": tool}]})
    assert answer["done"]


def test_models_and_errors(served):
    assert served.request("/api/tags")[2]["models"][0]["name"] == "demo"
    assert served.post("/api/show", {"model": "demo:latest"})["details"]["family"] == "llama"
    details = served.post("/api/show", {"model": "demo"})["details"]
    assert details["parameter_size"].endswith("M") and details["quantization_level"] == "Q4_K_M"
    assert served.request("/api/version")[2]["version"]
    assert served.request("/api/ps")[2]["models"][0]["context_length"] == 2048
    status, _, answer = served.request("/api/chat", {"model": "none", "messages": QUESTION})
    assert status == 404 and "none" in answer["error"]
    assert served.request("/api/chat", {"messages": [{**QUESTION[0], "images": ["x"]}]})[0] == 400
    assert served.request("/api/generate", {"prompt": "x", "options": {"top_p": "x"}})[0] == 400


def test_contexts(served):
    body = {"messages": QUESTION, "stream": False}
    whole = served.post("/api/chat", body | {"options": {"num_ctx": 40}})
    assert whole["prompt_eval_count"] + whole["eval_count"] == 40 and whole["done_reason"] == "length"
    large = served.post("/api/chat", body | {"options": {"num_ctx": 1 << 20, "num_predict": 4}})
    assert large["eval_count"] == 4  # clients send what other models have
    status, _, answer = served.request("/api/chat", body | {"options": {"num_ctx": 2}})
    assert status == 400 and "num_ctx" in answer["error"]


def test_models_that_are_not_here(served):
    assert served.post("/api/pull", {"model": "demo", "stream": False})["status"] == "success"
    status, _, answer = served.request("/api/pull", {"model": "llama3.2:3b"})
    assert status == 404 and "mlc-amd serve" in answer["error"]


def test_client_library(served):
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=served.url)
    options = {"num_predict": 8}
    answer = client.chat("demo", QUESTION, options=options)
    parts = client.chat("demo", QUESTION, options=options, stream=True)
    assert "".join(part.message.content or "" for part in parts) == answer.message.content
    assert client.generate("demo", QUESTION[0]["content"], options=options).response == answer.message.content
    assert [model.model for model in client.list().models] == ["demo"]
    assert client.show("demo").details.family == "llama"
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    shaped = client.chat("demo", QUESTION, format=schema, options={"num_predict": 60})
    assert json.loads(shaped.message.content)["city"] in ("Rome", "Oslo")
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    assert client.chat("demo", QUESTION, tools=[tool], options=options).done
    with pytest.raises(ollama.ResponseError):
        client.chat("none", QUESTION)
