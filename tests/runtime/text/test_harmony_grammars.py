"""Calls of tools in Harmony, gpt-oss's format: what their grammars allow."""

import pytest
from call_snippets import HARMONY_TOKENS
from vocabularies import build_tokenizer

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")  # of test_grammars
from mlc_amd.runtime.calls.tool_calls import detect
from mlc_amd.runtime.grammars.grammars import Grammars
from mlc_amd.runtime.text import reasoning
from tests.runtime.text.test_grammars import CITY, accepts, bytes_with
from tests.runtime.text.test_tool_calls import TOOLS, calls_of, read

THOUGHT = "<|channel|>analysis<|message|>Hm."


@pytest.fixture(scope="module")
def harmony(tmp_path_factory):
    """Grammars of a vocabulary with its tokens, their tokenizer, and the format of calls."""
    tokenizer = build_tokenizer(bytes_with(HARMONY_TOKENS), tmp_path_factory.mktemp("vocabulary"))
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    yield grammars, tokenizer, detect(tokenizer.has_token, "")
    grammars.close()


def test_calls_in_harmony(harmony):
    grammars, tokenizer, found = harmony
    analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{"a": 1}'
    other = ' to=functions.clock<|channel|>commentary<|message|>{"a": 1}'
    final = "<|channel|>final<|message|>It is late."
    prompt = "<|start|>assistant"
    auto, required = (grammars.tool_calls(found, TOOLS, choice, prompt=prompt) for choice in ("auto", "required"))
    for grammar, answer, expected in (
        (auto, analysis + call, True),
        (auto, other, True),
        (auto, analysis + final, True),
        (auto, "late", False),
        (auto, analysis, False),
        (auto, THOUGHT, True),
        (required, THOUGHT, True),
        (required, analysis + call, True),
        (required, analysis + final, False),
        (required, call.replace("clock", "python"), False),
    ):
        assert accepts(grammar, tokenizer, answer) is expected, answer
    events = read(found, [analysis + call], reasoning.detect(tokenizer.has_token))
    assert calls_of(events) == [("clock", {"a": 1})]


def test_calls_in_harmony_after_a_begun_answer(harmony):
    """They are messages after the one that was begun."""
    grammars, tokenizer, found = harmony
    call = "<|end|><|start|>assistant to=functions.clock<|channel|>commentary<|message|>{}"
    thought = f"<|end|><|start|>assistant{THOUGHT}"
    auto, required = (grammars.tool_calls(found, TOOLS, choice) for choice in ("auto", "required"))
    either = grammars.tool_calls(found, TOOLS, answer=CITY)
    for grammar, answer, expected in (
        (auto, "", True),
        (auto, " late.", True),
        (auto, " late. I look." + call, True),
        (auto, thought, True),
        (auto, " to=functions.clock<|channel|>commentary<|message|>{}", False),
        (required, call, True),
        (required, thought + call, True),
        (required, "", False),
        (required, " late.", False),
        (either, '{"city": "Rome"}', True),
        (either, call, True),
        (either, " late.", False),
        (either, thought, False),
    ):
        assert accepts(grammar, tokenizer, answer) is expected, answer
