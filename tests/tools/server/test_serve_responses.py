"""OpenAI's Responses API, with the bundled model."""

import json
from typing import Literal

import pytest

PATH, QUESTION = "/v1/responses", "What does os.path.join do?"
TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def text_of(response: dict) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def test_whole_and_streamed(served):
    body = {"input": QUESTION, "max_output_tokens": 12}
    whole = served.post(PATH, body)
    assert (whole["object"], whole["status"]) == ("response", "incomplete")
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"} and whole["usage"]["output_tokens"] == 12
    events = served.stream(PATH, body)
    kinds = [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert deltas == text_of(events[-1]["response"]) == text_of(whole)


def test_responses_are_continued(served):
    first = served.post(PATH, {"input": QUESTION, "max_output_tokens": 6})
    second = served.post(PATH, {"input": "And?", "max_output_tokens": 6, "previous_response_id": first["id"]})
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "And?"},
    ]
    chat = served.post("/v1/chat/completions", {"messages": messages, "max_tokens": 6})
    assert text_of(second) == chat["choices"][0]["message"]["content"]
    assert served.request(f"{PATH}/{first['id']}")[2]["id"] == first["id"]
    gone = served.post(PATH, {"input": QUESTION, "max_output_tokens": 1, "store": False})["id"]
    status, _, answer = served.request(PATH, {"input": "And?", "previous_response_id": gone})
    assert (status, answer["error"]["param"]) == (404, "previous_response_id")


def test_tools(served):
    body = {"input": QUESTION, "tools": [TOOL], "tool_choice": "required", "max_output_tokens": 100}
    whole = served.post(PATH, body | {"parallel_tool_calls": False})
    (call,) = whole["output"]
    assert (whole["status"], call["type"], call["name"]) == ("completed", "function_call", "weather")
    assert json.loads(call["arguments"])["city"] in ("Rome", "Oslo")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    later = {"input": [{"role": "user", "content": QUESTION}, call, result], "max_output_tokens": 4}
    assert text_of(served.post(PATH, later | {"tools": [TOOL], "tool_choice": "none"}))
    events = served.stream(PATH, body | {"parallel_tool_calls": False})
    (done,) = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert json.loads(done["arguments"])["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ],
)
def test_errors(served, body, param):
    status, _, answer = served.request(PATH, body)
    assert (status, answer["error"]["param"]) == (400, param)


def test_client_library(served):
    openai, pydantic = pytest.importorskip("openai"), pytest.importorskip("pydantic")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="-") as client:
        answer = client.responses.create(model="demo", input=QUESTION, max_output_tokens=8)
        with client.responses.stream(model="demo", input=QUESTION, max_output_tokens=8) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == answer.output_text
        trip = pydantic.create_model("Trip", city=(Literal["Rome", "Oslo"], ...))
        parsed = client.responses.parse(model="demo", input=QUESTION, text_format=trip, max_output_tokens=60)
        assert isinstance(parsed.output_parsed, trip)
        tools = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        (call,) = client.responses.create(model="demo", input=QUESTION, max_output_tokens=60, **tools).output
        assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
