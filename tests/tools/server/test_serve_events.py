"""Thinking, text and calls of one answer in the form of each API."""

import json

import pytest

pytest.importorskip("starlette")
from mlc_amd.runtime.engine.generation import Piece, Stats
from mlc_amd.tools.server.answering import AnswerEvents, Answering
from mlc_amd.tools.server.apis import anthropic, ollama, openai_chat, response_objects
from mlc_amd.tools.server.chat_request import (
    ChatRequest,
    Finish,
    Text,
    Thinking,
    Timings,
    ToolCallArguments,
    ToolCallBegin,
    Usage,
    blocks_of,
)
from mlc_amd.tools.server.streaming import merged

END = Finish("tool_calls", Usage(9, 8, 4, 2), Timings(0.5, 0.25))
EVENTS = [
    Thinking("hm"),
    Thinking("m"),
    Text("a"),
    Text("b"),
    ToolCallBegin("id0", "f", 0),
    ToolCallArguments('{"x":', 0),
    ToolCallArguments("1}", 0),
    ToolCallBegin("id1", "g", 1),
    ToolCallArguments("{}", 1),
    END,
]


@pytest.fixture
def answering(served) -> Answering:
    """An answer of the bundled model that was not begun."""
    served.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    library = served.service.library
    request = ChatRequest(messages=[{"role": "user", "content": "x"}])
    return Answering(library, library.loaded["demo"], request, lambda model, stats: None)


def sent(text: bytes) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in text.decode().splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_neighbours_are_merged():
    assert merged(EVENTS)[:4] == [Thinking("hmm"), Text("ab"), EVENTS[4], ToolCallArguments('{"x":1}', 0)]
    assert merged([Text("a", 0), Text("b", 1)]) == [Text("a", 0), Text("b", 1)]
    assert [(block.kind, block.text) for block in blocks_of(EVENTS)] == [
        ("thinking", "hmm"),
        ("text", "ab"),
        ("call", '{"x":1}'),
        ("call", "{}"),
    ]


def test_pieces_become_events(answering):
    events = AnswerEvents(answering.model, answering.request, 0, "prompt")
    pieces = ["<thi", "nk>\nhm", "</think>", "\n\n", "yes"]
    found = [event for text in pieces for event in events.feed(Piece(1, text))]
    found += events.finish(Stats(prompt_tokens=3, generated=5, finish="stop"))
    assert found == [Thinking("hm"), Text("yes"), Finish("stop", Usage(3, 5, 0, 1), Timings())]


def test_openai(answering):
    message = openai_chat.choice(EVENTS, END)["message"]
    assert (message["content"], message["reasoning_content"]) == ("ab", "hmm")
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"x":1}', "{}"]
    deltas = [chunk["choices"][0]["delta"] for chunk in sent(openai_chat.ChatChunks(answering, False).events(EVENTS))]
    assert deltas[:2] == [{"reasoning_content": "hmm"}, {"content": "ab"}]
    assert [delta["tool_calls"][0]["index"] for delta in deltas[2:-1]] == [0, 0, 1, 1] and deltas[-1] == {}


def test_anthropic(answering):
    events = sent(anthropic.MessageEvents(answering).events(EVENTS))
    begun = [(event["index"], event["content_block"]["type"]) for event in events if "content_block" in event]
    assert begun == [(0, "thinking"), (1, "text"), (2, "tool_use"), (3, "tool_use")]
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2, 3]
    assert events[-1]["delta"]["stop_reason"] == "tool_use" and events[-1]["usage"]["cache_read_input_tokens"] == 4


def test_ollama(answering):
    said, calls, end = sent(ollama.ChatLines(answering).events(EVENTS))
    assert said["message"] == {"role": "assistant", "content": "ab", "thinking": "hmm"}
    assert [call["function"]["arguments"] for call in calls["message"]["tool_calls"]] == [{"x": 1}, {}]
    assert end["done"] and end["prompt_eval_count"] == 9 and end["eval_duration"] == 250_000_000


def test_responses():
    kept = []
    begun = response_objects.response("resp_1", 0, "demo", {})
    encoder = response_objects.ResponseEvents(begun, lambda body, blocks: kept.append(body))
    events = sent(encoder.begin() + encoder.events(EVENTS) + encoder.end())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call", "function_call"]
    assert events[-1]["type"] == "response.completed" and events[-1]["response"]["output"] == done
    assert kept == [events[-1]["response"]]
