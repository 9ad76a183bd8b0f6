"""What constraints allow: random answers, token by token, match their schemas and are calls of tools."""

import json
import random
import re
import time

import numpy as np
import pytest
from call_snippets import HARMONY_TOKENS, TEMPLATES
from schemas import schemas
from vocabularies import build_tokenizer, byte_level_metadata, read_metadata, sentencepiece_metadata

from mlc_amd.runtime.calls.call_arguments import BareCalls, TaggedCalls
from mlc_amd.runtime.calls.call_formats import CallFormat
from mlc_amd.runtime.calls.tool_calls import HERMES
from mlc_amd.runtime.calls.tools import read_tools
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.grammars.grammars import Grammar, Grammars
from mlc_amd.runtime.text.reasoning import AnswerPart
from mlc_amd.runtime.text.tokenizer import Tokenizer
from tests.runtime.text.test_tool_calls import TOOLS, calls_of, found_format, read

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

BEYOND = 70  # logits beyond the vocabulary
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
CITY["additionalProperties"] = False


def bytes_with(control: tuple[str, ...] = (), plain: tuple[str, ...] = ()) -> dict[str, object]:
    """A vocabulary of the bytes, control tokens, and others that are matched as whole texts."""
    metadata = byte_level_metadata()
    tokens = [text.replace("<think>", "<other>") for text in metadata["tokenizer.ggml.tokens"]]
    types = metadata["tokenizer.ggml.token_type"]
    own = [text for text in control if text not in tokens]
    metadata["tokenizer.ggml.tokens"] = [*tokens, *own, *plain]
    metadata["tokenizer.ggml.token_type"] = [*types, *[3] * len(own), *[4] * len(plain)]
    return metadata


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """make(metadata) -> Grammars, and their tokenizer."""
    made = []

    def build(metadata: dict[str, object]) -> tuple[Grammars, Tokenizer]:
        tokenizer = build_tokenizer(metadata, tmp_path_factory.mktemp("vocabulary"))
        made.append(Grammars(tokenizer, tokenizer.vocab_size + BEYOND))
        return made[-1], tokenizer

    yield build
    for grammars in made:
        grammars.close()


@pytest.fixture(scope="module")
def bundled(make, demo_gguf):
    return make(read_metadata(demo_gguf))


@pytest.fixture(scope="module")
def plain(make):
    return make(bytes_with(plain=("</think>", "<tool_call>")))


class Walker:
    """Writes random answers that a constraint allows, and prefers to close strings, lists and objects."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        texts = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.ends = np.zeros(len(texts) + BEYOND, bool)
        self.ends[list(tokenizer.end_ids)] = True
        self.closing = np.array([text in (b'"', b"}", b"]", b"</", b"<") for text in texts] + [False] * BEYOND)
        self.space = np.array([bool(text) and not text.strip() for text in texts] + [False] * BEYOND)

    def write(self, grammar: Grammar, seed: int, limit: int = 300, end: float = 0.5, mark: str = "") -> str | None:
        """The text; None if it does not end within the limit. mark: is written now and then, as far as it is
        allowed."""
        rng, constraint = np.random.default_rng(seed), grammar()
        made: list[int] = []
        planned: list[int] = []
        while not constraint.complete:
            if len(made) == limit:
                return None
            words = constraint.allowed()
            may = np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)[: len(self.ends)]
            assert may.any() and not may[-BEYOND:].any()
            if may[self.ends].any():
                assert may[self.ends].all()  # whichever the model writes
                if rng.random() < end:
                    break
            may &= ~self.ends
            if not may.any():
                break
            if mark and not planned and rng.random() < 0.3:
                planned = self.tokenizer.encode(mark, add_special=False)
            if planned and not may[planned[0]]:
                planned = []
            for wanted, share in ((~self.space, 0.9), (self.closing, 0.5)):
                if not planned and (may & wanted).any() and rng.random() < share:
                    may &= wanted
            made.append(planned.pop(0) if planned else int(rng.choice(np.flatnonzero(may))))
            constraint.accept(made[-1])
        return self.tokenizer.decode(made, skip_special=False, continues=True)


def check_schema(grammars: Grammars, walker: Walker, schema: dict, answers: int) -> int:
    """Random answers match the schema. Returns how many ended."""
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    grammar = grammars.json_schema(schema)
    texts = [text for seed in range(answers) if (text := walker.write(grammar, seed)) is not None]
    for text in texts:
        validator.validate(json.loads(text))
    return len(texts)


def test_random_answers_match_their_schemas(bundled):
    grammars, walker = bundled[0], Walker(bundled[1])
    ended = [check_schema(grammars, walker, schema, 2) for schema in schemas(40)]
    assert sum(ended) > 60  # of 80


@pytest.mark.full
def test_random_answers_match_all_schemas(bundled):
    grammars, walker = bundled[0], Walker(bundled[1])
    ended = [check_schema(grammars, walker, schema, 5) for schema in schemas(300)]
    assert sum(ended) > 1400 and sum(map(bool, ended)) > 285


def test_a_vocabulary_whose_tokenizer_adds_spaces(make):
    grammars, tokenizer = make(sentencepiece_metadata())
    walker = Walker(tokenizer)
    assert sum(check_schema(grammars, walker, schema, 1) for schema in schemas(5)) > 2


def test_json_object_and_the_choice_of_an_end(plain):
    grammars, tokenizer = plain
    constraint = grammars.json_schema({"type": "object"})()
    for token in tokenizer.encode('{"a": [1, 2]', add_special=False):
        assert not constraint.complete
        constraint.accept(token)
    words = constraint.allowed()
    assert words.dtype == np.int32 and words.shape == (-(-(tokenizer.vocab_size + BEYOND) // 32),)
    constraint.accept(tokenizer.encode("}", add_special=False)[0])
    assert constraint.complete
    with pytest.raises(UserError):
        grammars.json_schema({"type": "object"})().accept(tokenizer.encode("x", add_special=False)[0])


def written(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text as tokens; a zero-width space, left out, keeps what is around it from being one."""
    return [token for part in text.split("\u200b") for token in tokenizer.encode(part, add_special=False)]


def accepts(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the text is an answer: each token is allowed, and it may end."""
    constraint = grammar()

    def allowed(token: int) -> bool:
        return bool(constraint.allowed()[token // 32] >> (token % 32) & 1)

    for token in written(tokenizer, text):
        if constraint.complete or not allowed(token):
            return False
        constraint.accept(token)
    return constraint.complete or all(map(allowed, tokenizer.end_ids))


def test_regular_expressions_and_grammars(plain):
    grammars, tokenizer = plain
    for grammar in (grammars.regex("^(yes|no)[.!]?/$"), grammars.lark('start: ("yes" | "no") /[.!]/? "/"')):
        assert accepts(grammar, tokenizer, "yes!/") and accepts(grammar, tokenizer, "no/")
        assert not accepts(grammar, tokenizer, "yes!") and not accepts(grammar, tokenizer, "maybe/")


# (control tokens, other added tokens, end of the prompt, what may be written before the answer, what may not)
THINKING = [
    ((), (), "assistant\n", [""], ["<think>a</think>"]),
    (("<think>", "</think>"), (), "assistant\n", ["", "<think>a {b}</think>\n\n"], ["<think>a", "a"]),
    (("<think>", "</think>"), (), "assistant\n<think>\n", ["a {b}</think>\n\n", "</think>"], ["", "a"]),
    (("<think>", "</think>"), (), "<think>\n\n</think>\n\n", [""], ["<think>a</think>", "a</think>"]),
    ((), ("<think>", "</think>"), "assistant\n", ["", "<think>\na <b></think>\n"], ["<think>a", "a"]),
    ((), ("<think>", "</think>"), "<think>", ["a</thi </think>"], ["", "a</thi"]),
    (("<|channel>", "<channel|>"), (), "model\n", ["", "<|channel>thought\na<channel|>"], ["<|channel>x<channel|>"]),
    (
        HARMONY_TOKENS,
        (),
        "<|start|>assistant",
        [
            "<|channel|>final<|message|>",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>",
        ],
        ["", "<|channel|>analysis<|message|>"],
    ),
]


@pytest.mark.parametrize(("control", "added", "prompt", "right", "wrong"), THINKING)
def test_a_grammar_applies_behind_the_thinking(make, control, added, prompt, right, wrong):
    grammars, tokenizer = make(bytes_with(control, added))
    grammar = grammars.json_schema(CITY, prompt)
    for begin in right:
        assert accepts(grammar, tokenizer, begin + '{"city": "Rome"}'), begin
        assert not accepts(grammar, tokenizer, begin + '{"town": "Rome"}')
    for begin in wrong:
        assert not accepts(grammar, tokenizer, begin + '{"city": "Rome"}'), begin


THINK, SPELLED = ("<think>", "</think>"), ("</think>", "</think\u200b>")  # the latter with ordinary tokens


@pytest.mark.parametrize(
    ("control", "begun", "opening", "closing"),
    [
        (THINK, "<think>\n", "", SPELLED),
        (THINK, "", "<think>", SPELLED),
        (THINK, "", "<think\u200b>", SPELLED),
        ((), "<think>\n", "", SPELLED[:1]),
    ],
)
def test_an_answer_with_tools_may_end_in_its_thinking(make, control, begun, opening, closing):
    grammars, tokenizer = make(bytes_with((*control, "<tool_call>", "</tool_call>")))
    prompt, found = "assistant" + begun, HERMES
    schema, required = grammars.json_schema(CITY, prompt), grammars.tool_calls(found, TOOLS, "required", prompt=prompt)
    auto, either = (grammars.tool_calls(found, TOOLS, prompt=prompt, answer=one) for one in (None, CITY))
    for thought in (opening, opening + "Hm </thi <b>"):
        assert accepts(auto, tokenizer, thought) and accepts(required, tokenizer, thought)
        assert not any(accepts(grammar, tokenizer, thought) for grammar in (schema, either))
        for end in closing:
            call = thought + end + '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
            assert accepts(required, tokenizer, call)
            for answer in (thought + end, thought + end + "It is late.", call):
                assert accepts(auto, tokenizer, answer), answer
                assert not accepts(auto, tokenizer, answer + "<tool_call>")
                assert answer == call or not accepts(required, tokenizer, answer)
            if "\u200b" not in opening:
                assert all(accepts(one, tokenizer, thought + end + '{"city": "Rome"}') for one in (schema, either))


def mark_of(found: CallFormat) -> str:
    """What ends a value that may be any text."""
    if isinstance(found, BareCalls):
        return found.quote
    return found.value_closing if isinstance(found, TaggedCalls) else ""


FAMILIES = [family for family in TEMPLATES if family != "generic"]


@pytest.mark.parametrize("family", FAMILIES)
def test_random_answers_are_calls(bundled, family):
    grammars, tokenizer = bundled
    found, walker = found_format(family), Walker(tokenizer)
    ended = 0
    for seed, (choice, parallel) in enumerate((("required", True), ("required", False), ({"name": "clock"}, True))):
        grammar = grammars.tool_calls(found, TOOLS, choice, parallel)
        text = walker.write(grammar, seed, limit=600, end=0.8, mark=mark_of(found))
        if text is None:
            continue
        ended += 1
        events = read(found, [text])
        calls = calls_of(events)
        assert calls and not [event for event in events if isinstance(event, AnswerPart)], text
        assert len(calls) == 1 or (parallel and choice == "required")
        for name, arguments in calls:
            assert name == "clock" or choice == "required"
            if name == "get_weather" and family not in ("gemma4", "functiongemma"):
                jsonschema.validate(arguments, TOOLS[0].parameters)
    assert ended


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_allows_text_until_a_call_begins(plain, family):
    grammars, tokenizer = plain
    found = found_format(family)
    grammar = grammars.tool_calls(found, TOOLS, "auto")
    assert accepts(grammar, tokenizer, "Any {text} <b>, in JSON: []") and accepts(grammar, tokenizer, "")
    required = grammars.tool_calls(found, TOOLS, {"name": "clock"})
    call = Walker(tokenizer).write(required, 1, limit=2000, mark=mark_of(found))
    assert call is not None
    text = call if found.bare else "I look.\n" + call.lstrip()
    assert accepts(grammar, tokenizer, text), text
    assert not accepts(grammar, tokenizer, text + "And then?")  # the result is not computed yet
    assert not accepts(grammar, tokenizer, text.replace("clock", "other"))


def test_choices(plain):
    grammars, tokenizer = plain
    assert grammars.tool_calls(HERMES, TOOLS, "none") is None
    either = grammars.tool_calls(HERMES, TOOLS, "auto", answer=CITY)
    assert accepts(either, tokenizer, '{"city": "Rome"}') and not accepts(either, tokenizer, "Rome")
    assert accepts(either, tokenizer, '<tool_call>{"name": "clock", "arguments": {}}</tool_call>')
    with pytest.raises(UserError, match="the JSON schema cannot be used"):
        grammars.tool_calls(HERMES, TOOLS, "auto", answer={"not": {}})
    for wrong in ({"name": "other"}, "required"):
        with pytest.raises(UserError, match="tool_choice"):
            grammars.tool_calls(HERMES, TOOLS if wrong != "required" else (), wrong)


def test_schemas_of_tools_are_enforced_as_far_as_they_can_be(plain):
    grammars, tokenizer = plain
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}, "b": {"enum": [1]}}}
    broken = {"$ref": "http://localhost/x.json"}

    def tool(parameters: dict, strict: bool) -> list:
        return [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}]

    call = '<tool_call>{"name": "f", "arguments": {"b": %s}}</tool_call>'
    grammar = grammars.tool_calls(HERMES, read_tools(tool(schema, False)))
    assert accepts(grammar, tokenizer, call % 1) and not accepts(grammar, tokenizer, call % 2)
    assert accepts(grammars.tool_calls(HERMES, read_tools(tool(broken, False))), tokenizer, call % 2)
    for parameters in (schema, broken):
        with pytest.raises(UserError, match="the schema of the tool f cannot be used"):
            grammars.tool_calls(HERMES, read_tools(tool(parameters, True)))


def nested(depth: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "strin"},
        {"not": {"type": "string"}},
        {"if": {}, "then": {}},
        {"type": "array", "uniqueItems": True},
        {"type": "string", "pattern": "(?=a)"},
        {"type": "string", "format": "iri"},
        {"$ref": "#/$defs/none"},
        {"$ref": "file:///etc/passwd"},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"enum": []},
        nested(200),
        {"enum": ["x" * (1 << 20)]},
        {"enum": [float("nan")]},
        [],
        "string",
    ],
)
def test_what_cannot_be_used_is_an_error_of_one_line(plain, schema):
    with pytest.raises(UserError) as error:
        plain[0].json_schema(schema)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    assert str(error.value).startswith("the JSON schema cannot be used: ")


def test_a_schema_that_is_nested_deeper_than_python_follows_is_an_error(plain):
    with pytest.raises(UserError, match="nested too deeply"):
        plain[0].json_schema(nested(100_000))


def test_hostile_grammars_take_no_longer_than_they_may(plain):
    """Minutes of work, and a stack that overflows: the next grammar is compiled as if nothing had happened."""
    grammars, tokenizer = plain
    long = {"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(10, 40)]}
    deep = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(20_000)) + '\nr20000: "a"'
    begun = time.monotonic()
    with pytest.raises(UserError, match="too much time or memory"):
        grammars.json_schema(long)
    with pytest.raises(UserError, match="too much time or memory"):
        grammars.lark(deep)
    assert time.monotonic() - begun < 60
    for wrong in ("(", "a{2,1}", "(?=a)"):
        with pytest.raises(UserError, match=re.escape("the regular expression cannot be used")):
            grammars.regex(wrong)
    number = str(random.Random().randrange(1 << 30))  # not compiled before
    assert accepts(grammars.regex(number), tokenizer, number)
