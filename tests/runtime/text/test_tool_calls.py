"""Calls of tools in answers: every format, however the text is divided, and what is no call."""

import itertools
import json
import re

import pytest
from call_snippets import HARMONY, HARMONY_TOKENS, TEMPLATES, written
from hypothesis import given, settings
from hypothesis import strategies as st

from mlc_amd.runtime.calls.call_messages import with_tools
from mlc_amd.runtime.calls.tool_calls import (
    FORMATS,
    GENERIC,
    HERMES,
    CallArguments,
    CallBegin,
    CallEnd,
    CallFormat,
    CallParser,
    Event,
    detect,
)
from mlc_amd.runtime.calls.tools import read_tools
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.text import reasoning
from mlc_amd.runtime.text.reasoning import AnswerPart

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "area": {"$ref": "#/$defs/area"},
        "unit": {"enum": ["C", "F", None]},
        "any": {},
    },
    "$defs": {"area": {"type": "object", "properties": {"x": {"type": "number"}}}},
    "required": ["city"],
}
TOOLS = read_tools(
    [
        {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
        {"type": "function", "function": {"name": "clock"}},
    ]
)
FULL = {
    "any": [{"a": None}],
    "area": {"x": -1.5e3},
    "city": 'Zürich "North" \\ <b>\n2nd line: {a}, [b] 🦙',
    "days": 3,
    "exact": True,
    "tags": ["a", "b, c"],
    "unit": "C",
}
CALLS = [("get_weather", FULL), ("clock", {}), ("get_weather", {"city": "7", "unit": None})]


def found_format(family: str) -> CallFormat:
    template, tokens = TEMPLATES[family]
    return detect(tokens.__contains__, template)


def read(found: CallFormat, pieces: list[str], kind=reasoning.DEFAULT, prompt: str = "") -> list[Event]:
    """The events of an answer; those of one part or call joined."""
    parts, calls = kind.parser(prompt), CallParser(found, TOOLS)
    events = [e for piece in pieces for part in parts.feed(piece) for e in calls.feed(part)]
    events += [event for part in parts.finish() for event in calls.feed(part)] + calls.finish()
    assert all(event.text for event in events if isinstance(event, AnswerPart | CallArguments))
    made: list[Event] = []
    for (kind_of, key), run in itertools.groupby(events, key=lambda e: (type(e), getattr(e, "kind", None))):
        same = list(run)
        if kind_of is AnswerPart:
            made.append(AnswerPart(key, "".join(event.text for event in same)))
        elif kind_of is CallArguments:
            made.append(CallArguments(same[0].number, "".join(event.text for event in same)))
        else:
            made += same
    return made


def calls_of(events: list[Event]) -> list[tuple[str, object]]:
    names = {event.number: event.name for event in events if isinstance(event, CallBegin)}
    assert [event.number for event in events if isinstance(event, CallEnd) and event.complete] == list(names)
    return [(names[event.number], json.loads(event.text)) for event in events if isinstance(event, CallArguments)]


@pytest.mark.parametrize("cut", range(1, len("</tool_call>")))
def test_a_closing_mark_that_is_cut_off_is_no_text(cut):
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n'
    (begin, arguments, end) = read(HERMES, [call + "</tool_call>"[:cut]])
    assert calls_of([begin, arguments, end]) == [("clock", {})]
    assert read(HERMES, [call + "</tool_call>"[:cut] + "!"])[-1] == AnswerPart("final", "</tool_call>"[:cut] + "!")


@pytest.mark.parametrize("family", [family for family in TEMPLATES if family != "generic"])
def test_calls_as_the_templates_write_them_are_read(family):
    found = found_format(family)
    text = written(TEMPLATES[family][0], CALLS)
    events = read(found, [text])
    assert calls_of(events) == CALLS
    assert not [event for event in events if isinstance(event, AnswerPart)]
    assert read(found, list(text)) == events
    assert found is not GENERIC


def test_every_row_of_the_table_is_tested():
    assert {id(row.format) for row in FORMATS} - {id(found_format(family)) for family in TEMPLATES} == {
        id(row.format)
        for row in FORMATS
        if row.tokens in [("<|python_start|>",), ("<|start|>", "<|channel|>", "<|message|>", "<|call|>")]
    }
    assert found_format("generic") is GENERIC


def test_harmony():
    found = detect(HARMONY_TOKENS.__contains__, "")
    text = written(HARMONY, [("get_weather", FULL)])
    kind = reasoning.detect(HARMONY_TOKENS.__contains__)
    events = read(found, [text], kind)
    assert events[0] == AnswerPart("thinking", "Hm.") and calls_of(events) == [("get_weather", FULL)]
    assert read(found, list(text), kind) == events
    other = read(found, [text.replace("get_weather", "python")], kind)
    assert [type(event) for event in other] == [AnswerPart, AnswerPart] and json.loads(other[1].text) == FULL


# The text of the answer around calls, where a call may begin anywhere.
AROUND = [family for family in TEMPLATES if family not in ("llama", "generic")]


@pytest.mark.parametrize("family", AROUND)
def test_text_before_and_behind_calls(family):
    text = "<think>\nHm.\n</think>\n\nI look. <b>\n\n" + written(TEMPLATES[family][0], CALLS[:2]) + "\n Done.\n"
    events = read(found_format(family), list(text))
    assert events[:2] == [AnswerPart("thinking", "Hm."), AnswerPart("final", "I look. <b>")]
    assert calls_of(events) == CALLS[:2] and events[-1] == AnswerPart("final", "Done.\n")


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_division_and_any_damage_give_the_same_events(data):
    """Whatever the text is, nothing raises, no text is lost that is no call, and the pieces do not matter."""
    family = data.draw(st.sampled_from(sorted(TEMPLATES)))
    found = found_format(family)
    text = "Text. " * data.draw(st.integers(0, 1)) + written(TEMPLATES[family][0], CALLS)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(text)))
        text = (
            text[:at]
            + data.draw(st.sampled_from(["", "{", '"', "<", "x", "</", "\\", found.opening]))
            + text[at + data.draw(st.integers(0, 8)) :]
        )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    events = read(found, pieces)
    assert events == read(found, [text])
    begun = [event.number for event in events if isinstance(event, CallBegin)]
    assert begun == [event.number for event in events if isinstance(event, CallEnd)] == list(range(len(begun)))
    for number in [event.number for event in events if isinstance(event, CallEnd) and event.complete]:
        (arguments,) = [e.text for e in events if isinstance(e, CallArguments) and e.number == number]
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "Write <tool_call> like this."),
        ("hermes", "<tool_call>\n{not json}\n</tool_call>"),
        ("hermes", '<tool_call>\n{"name": "no_tool", "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "get_w'),
        ("hermes", "a <tool_ca"),
        ("hermes", '{"name": "clock", "arguments": {}}'),
        ("llama", '{"name": "Bob", "parameters": {}}'),
        ("llama", '{"a": [1, 2, {"b": null}]} and so on '),
        ("llama", 'It is {"name": "clock", "parameters": {}}'),
        ("qwen-coder", "<tool_call>\n<function=other>\n</function>\n</tool_call>"),
        ("glm", "<tool_call>get_wea"),
        ("ministral", "[TOOL_CALLS]clock but [ARGS]"),
        ("deepseek-r1", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>type<｜tool▁sep｜>"),
        ("gemma4", "<|tool_call>call:clock now<tool_call|>"),
    ],
)
def test_what_is_no_call_is_text(family, text):
    assert read(found_format(family), list(text)) == [AnswerPart("final", text)]


def test_a_call_that_breaks_off_is_incomplete():
    begin, piece, end = read(found_format("hermes"), ['<tool_call>{"name": "get_weather", "arguments": {"city": "Ro'])
    assert (begin, end) == (CallBegin(0, "get_weather"), CallEnd(0, complete=False))
    assert piece == CallArguments(0, '{"city": "Ro')
    events = read(
        found_format("hermes"), ['<tool_call>{"name": "clock", "arguments": {"a": oh no} </tool_call> Sorry.']
    )
    assert [type(event) for event in events] == [CallBegin, CallArguments, CallEnd, AnswerPart]
    assert not events[2].complete


def test_what_follows_a_call_and_is_none_is_text():
    """Also where another call might follow."""
    for family, text in (("llama", '{"a": 1} is it'), ("llama", "; and"), ("phi", "oh"), ("kimi", "x")):
        call = written(TEMPLATES[family][0], [("clock", {})])
        for end in ("<|tool_calls_section_end|>", "]<|/tool_call|>"):
            call = call.removesuffix(end)
        events = read(found_format(family), [call + text])
        assert calls_of(events) == [("clock", {})] and events[-1] == AnswerPart("final", text)
    one = written(TEMPLATES["llama"][0], [("clock", {})])
    events = read(found_format("llama"), [f"{one} {one}\n{one}"])
    assert calls_of(events) == [("clock", {})] * 3


def test_control_tokens_of_a_format_are_among_its_marks():
    """They have no text otherwise."""
    for family, (template, _) in TEMPLATES.items():
        control = re.findall(r"<[|｜][^|｜<> ]+[|｜]>|\[[A-Z_]+\]", template)
        assert set(control) <= set(found_format(family).marks) | {"<|tool_call>"}, family


def test_arguments_come_as_they_are_written():
    for family, text in (
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome and'),
        ("qwen-coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome and"),
        ("glm", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome and"),
        ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Rome and'),
    ):
        events = CallParser(found_format(family), TOOLS).feed(AnswerPart("final", text))
        assert events[0] == CallBegin(0, "get_weather") and len(events) == 2
        assert isinstance(events[1], CallArguments) and events[1].text.endswith('"Rome and')


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"arguments": {"days": 1}, "name": "get_weather"}', {"days": 1}),
        ('{"name": "get_weather", "arguments": "{\\"days\\": 1}"}', {"days": 1}),
        ('{"type": "function", "name": "get_weather", "parameters": {"exact": True}}', {"exact": True}),
        ('{"name": "get_weather"}', {}),
        ('{"name": "get_weather", "arguments": null, "id": "x"}', {}),
        ('{"name": "get_weather", "arguments": {"city": "a\nb\tc"}}', {"city": "a\nb\tc"}),
    ],
)
def test_other_ways_to_write_a_call(text, arguments):
    assert calls_of(read(found_format("hermes"), list(f"<tool_call>{text}</tool_call>"))) == [
        ("get_weather", arguments)
    ]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("days", "3", 3),
        ("area", ' {"x": "</arg_value>"}\n', {"x": "</arg_value>"}),
        ("days", "three", "three"),
        ("city", "3", "3"),
        ("city", " a ", " a "),
        ("exact", "True", True),
        ("tags", "['a', \"b\"]", ["a", "b"]),
        ("unit", "null", None),
        ("unit", "3", "3"),
        ("any", '{"a": [1]}', {"a": [1]}),
        ("any", "NaN", "NaN"),
        ("unknown", "text", "text"),
    ],
)
def test_values_between_tags_have_the_types_of_the_schema(name, text, expected):
    answer = f"<tool_call>get_weather\n<arg_key>{name}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    assert calls_of(read(found_format("glm"), [answer])) == [("get_weather", {name: expected})]


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "retrieval"}],
        ["clock"],
        [{"type": "function", "function": {}}],
        [{"type": "function", "function": {"name": "a b"}}],
        [{"type": "function", "function": {"name": "a", "parameters": []}}],
        [{"type": "function", "function": {"name": "a"}}] * 2,
    ],
)
def test_what_is_no_tool_is_an_error(tools):
    with pytest.raises(UserError):
        read_tools(tools)


def test_without_a_template_for_tools_all_is_text():
    """The calls of earlier turns are written as those that are read."""
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]
    call = {"type": "function", "function": {"name": "get_weather", "arguments": FULL}}
    conversation = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "0", "content": "rain"},
        {"role": "tool", "tool_call_id": "1", "content": "sun"},
        {"role": "user", "content": "And?"},
    ]
    made = with_tools(conversation, tools)
    assert [message["role"] for message in made] == ["system", "user", "assistant", "user", "user"]
    assert json.dumps(WEATHER) in made[0]["content"] and made[1] == conversation[0] and made[4] == conversation[4]
    events = read(GENERIC, [made[2]["content"]])
    assert events[0] == AnswerPart("final", "I look.") and calls_of(events) == [("get_weather", FULL)] * 2
    assert made[3]["content"].count("<tool_response>") == 2
    assert [message["role"] for message in with_tools(conversation, [])] == ["user", "assistant", "user", "user"]
    system = with_tools([{"role": "system", "content": "Be brief."}, conversation[0]], tools)
    assert len(system) == 2 and system[0]["content"].startswith("Be brief.\n\nYou can call functions.")
