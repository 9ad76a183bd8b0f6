"""Client libraries that speak several APIs: chat, streams, tools, structured output. Those of single APIs are in the
tests of these. Each is skipped where it is not installed (pip install langchain-openai litellm mcp)."""

import json
from typing import Literal

import pytest

pytest.importorskip("llguidance")
pydantic = pytest.importorskip("pydantic")

QUESTION = "What does os.path.join do?"
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["city"],
        },
    },
}


class Trip(pydantic.BaseModel):
    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2]


@pytest.fixture(scope="module")
def expected(served) -> str:
    """The answer to QUESTION."""
    answer = served.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 12})
    return answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langchain(served, expected, responses):
    langchain = pytest.importorskip("langchain_openai")
    messages = pytest.importorskip("langchain_core.messages")

    def make(limit: int):
        return langchain.ChatOpenAI(
            base_url=f"{served.url}/v1", api_key="-", model="demo", max_tokens=limit, use_responses_api=responses
        )

    short, long = make(12), make(200)
    answer = short.invoke(QUESTION)
    assert answer.text == expected and answer.usage_metadata["output_tokens"] == 12
    assert "".join(part.text for part in short.stream(QUESTION)) == expected

    tools = long.bind_tools([TOOL], tool_choice="weather", parallel_tool_calls=False)
    called = tools.invoke(QUESTION)
    (call,) = called.tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Rome", "Oslo")
    parts = list(tools.stream(QUESTION))
    streamed = sum(parts[1:], parts[0])
    assert [one["args"] for one in streamed.tool_calls] == [call["args"]]
    result = messages.ToolMessage("sunny", tool_call_id=call["id"])
    assert short.bind_tools([TOOL]).invoke([messages.HumanMessage(QUESTION), called, result]).usage_metadata

    for method in ("json_schema", "function_calling"):
        assert isinstance(long.with_structured_output(Trip, method=method).invoke(QUESTION), Trip)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "lm_studio", "llamafile", "anthropic", "ollama_chat"])
def test_litellm(served, expected, provider, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it looks for prices in the network
    litellm = pytest.importorskip("litellm")
    url = served.url if provider in ("anthropic", "ollama_chat") else f"{served.url}/v1"

    def ask(limit: int, **options):
        return litellm.completion(
            model=f"{provider}/demo", messages=MESSAGES, api_base=url, api_key="-", max_tokens=limit, **options
        )

    assert ask(12).choices[0].message.content == expected
    chunks = list(ask(12, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    Trip.model_validate_json(ask(200, response_format=Trip).choices[0].message.content)

    pytest.importorskip("mcp")  # LiteLLM needs it for tools
    if provider != "ollama_chat":  # ollama's API has no choice of tools
        options = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
        called = ask(200, **options)
        assert called.choices[0].finish_reason == "tool_calls"
        for answer in (called, litellm.stream_chunk_builder(list(ask(200, stream=True, **options)))):
            (call,) = answer.choices[0].message.tool_calls
            assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
