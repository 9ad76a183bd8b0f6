"""Anthropic's API, with the bundled model."""

import json

import pytest

QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]
MESSAGES = "/v1/messages"
TOOL = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def test_whole_and_streamed(served):
    body = {"messages": QUESTION, "max_tokens": 16, "system": "Be brief."}
    answer = served.post(MESSAGES, body)
    (block,) = answer["content"]
    assert (answer["type"], answer["stop_reason"], block["type"]) == ("message", "max_tokens", "text")
    usage = answer["usage"]
    count = served.post(f"{MESSAGES}/count_tokens", {"messages": QUESTION, "system": "Be brief."})["input_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count and usage["output_tokens"] == 16
    events = served.stream(MESSAGES, body)
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert kinds[:2] == ["message_start", "content_block_start"] and set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert text == block["text"]


def test_stop_sequences(served):
    whole = served.post(MESSAGES, {"messages": QUESTION, "max_tokens": 24})["content"][0]["text"]
    answer = served.post(MESSAGES, {"messages": QUESTION, "max_tokens": 24, "stop_sequences": ["@@", whole[8:12]]})
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", whole[8:12])


def test_tools(served):
    body = {"messages": QUESTION, "max_tokens": 100, "tools": [TOOL], "temperature": 1.2}
    answer = served.post(MESSAGES, body | {"tool_choice": {"type": "tool", "name": "weather"}})
    (call,) = answer["content"]
    assert (answer["stop_reason"], call["type"], call["name"]) == ("tool_use", "tool_use", "weather")
    assert call["input"]["city"] in ("Rome", "Oslo")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "sunny"}]}
    messages = [*QUESTION, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    later = served.post(MESSAGES, body | {"messages": messages, "tool_choice": {"type": "none"}, "max_tokens": 4})
    assert later["content"][0]["type"] == "text"


def test_structured_output(served):
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    form = {"type": "json_schema", "schema": schema}
    for body in ({"output_config": {"format": form, "effort": "low"}}, {"output_format": form}):
        answer = served.post(MESSAGES, {"messages": QUESTION, "max_tokens": 60, **body})
        assert json.loads(answer["content"][0]["text"])["city"] in ("Rome", "Oslo")
    status, _, answer = served.request(
        MESSAGES, {"messages": QUESTION, "max_tokens": 60, "output_config": {"format": {"type": "json_schema"}}}
    )
    assert status == 400 and "output_config.format.schema" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": QUESTION}, "max_tokens"),
        ({"messages": [], "max_tokens": 1}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}], "max_tokens": 1},
            "messages[0].content[0].source.data",
        ),
        ({"messages": QUESTION, "max_tokens": 1, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
    ],
)
def test_errors(served, body, field):
    status, _, answer = served.request(MESSAGES, body)
    assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert answer["error"]["message"].startswith(field)


def test_client_library(served):
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=served.url, api_key="-") as client:
        answer = client.messages.create(model="demo", messages=QUESTION, max_tokens=8)
        with client.messages.stream(model="demo", messages=QUESTION, max_tokens=8) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert answer.content[0].text == text and final.usage.output_tokens == 8
        tokens = client.messages.count_tokens(model="demo", messages=QUESTION).input_tokens
        assert tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
        called = client.messages.create(
            model="demo", messages=QUESTION, max_tokens=100, tools=[TOOL],
            tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        )  # fmt: skip
        (block,) = called.content
        assert called.stop_reason == "tool_use" and block.input["city"] in ("Rome", "Oslo")
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
        history = [*QUESTION, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
        assert client.messages.create(model="demo", messages=history, max_tokens=4, tools=[TOOL]).content
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="none", messages=QUESTION, max_tokens=1)
