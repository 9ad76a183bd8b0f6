"""What an answer must be, by the names that llama-server's and vLLM's clients use: limits, biases, formats."""

import json
import re

import pytest
from servers.serving import waiting

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.grammars.constraints import AnswerConstraint

pytest.importorskip("llguidance")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]


def answer(served, path: str = TEXT, **body) -> dict:
    asked = {"prompt": "def f("} if path == TEXT else {"messages": QUESTION}
    return served.post(path, asked | body)


def said(served, **body) -> str:
    return answer(served, CHAT, max_tokens=60, **body)["choices"][0]["message"]["content"]


def test_answers_that_do_not_end(served):
    ends = answer(served, CHAT, max_tokens=400)
    assert ends["choices"][0]["finish_reason"] == "stop"
    made = ends["usage"]["completion_tokens"]
    for path, limits in ((CHAT, {"ignore_eos": True}), (CHAT, {"min_tokens": made + 50}), (TEXT, {"ignore_eos": True})):
        whole = answer(served, path, max_tokens=made + 40, **limits)
        assert whole["usage"]["completion_tokens"] == made + 40 and whole["choices"][0]["finish_reason"] == "length"
    assert answer(served, CHAT, max_tokens=400, min_tokens=made)["usage"]["completion_tokens"] == made
    later = answer(served, CHAT, max_tokens=400, min_tokens=made + 2)["usage"]["completion_tokens"]
    assert made + 2 <= later < 400
    endless = answer(served, prompt="def f(x):\n" * 400, max_tokens=-1, ignore_eos=True, stop=["zzzz"])["usage"]
    assert endless["completion_tokens"] > 20 and endless["total_tokens"] >= 2048  # the context


def test_an_answer_in_a_format_ends_where_the_format_does(served):
    assert said(served, structured_outputs={"choice": ["maybe"]}, ignore_eos=True) == "maybe"


def test_names_of_limits(served):
    assert answer(served, n_predict=3)["usage"]["completion_tokens"] == 3
    assert answer(served, max_tokens=3, n_predict=4)["usage"]["completion_tokens"] == 3
    assert answer(served)["usage"]["completion_tokens"] == 16
    assert answer(served, CHAT, max_completion_tokens=2, max_tokens=3)["usage"]["completion_tokens"] == 2


def test_biases(served):
    token = served.post("/tokenize", {"content": " path"})["tokens"][0]
    for bias in ([[token, 1000]], {str(token): 1000}):
        assert answer(served, max_tokens=2, logit_bias=bias)["choices"][0]["text"] == " path path"
    first = answer(served, max_tokens=1, logprobs=0)["choices"][0]["logprobs"]["tokens"][0]
    token = served.post("/tokenize", {"content": first})["tokens"][0]
    for bias in ([[token, False]], {str(token): False}):
        assert answer(served, max_tokens=1, logit_bias=bias)["choices"][0]["text"] != first


@pytest.mark.parametrize(
    "form",
    [
        {"json_schema": {"enum": ["red", "blue"]}},
        {"guided_json": json.dumps({"enum": ["red", "blue"]})},
        {"structured_outputs": {"json": {"enum": ["red", "blue"]}}},
        {"structured_outputs": {"regex": '"(red|blue)"'}},
        {"guided_regex": '"(red|blue)"'},
        {"guided_choice": ['"red"', '"blue"']},
        {"grammar": 'root ::= "\\"" color "\\""\ncolor ::= "red" | "blue"'},
        {"grammar": 'start: "\\"red\\"" | "\\"blue\\""'},
        {"grammar": 'root ::= start\nstart ::= 1a\n1a ::= "\\x22" ("red" | [b] "lue"{1}) "\\u0022"'},
    ],
)
def test_formats(served, form):
    assert json.loads(said(served, temperature=1.5, **form)) in ("red", "blue")
    text = answer(served, max_tokens=30, **form)["choices"][0]["text"]
    assert json.loads(text) in ("red", "blue")


def test_a_repetition_in_gbnf(served):
    assert re.fullmatch("[ab]{5}c?", said(served, grammar='root ::= [ab]{5} "c"?', temperature=1.0))


def test_formats_of_the_empty_text_and_of_escaped_letters(served):
    assert said(served, structured_outputs={"regex": ""}) == ""
    assert said(served, grammar='root ::= "\\u00e9a"') == "\u00e9a"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"grammar": "root ::= this is (not valid"}, "grammar"),
        ({"grammar": "root ::= " + "(" * 5000}, "grammar"),
        ({"guided_regex": "("}, "regular expression"),
        ({"guided_choice": []}, "guided_choice"),
        ({"json_schema": 5}, "json_schema"),
        ({"json_schema": {"type": "hiccup"}}, "schema"),
        ({"grammar": "root ::= [a]", "json_schema": {}}, "and grammar"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"grammar": "root ::= [a]", "tools": [TOOL]}, "tools"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"stop": [str(i) for i in range(2000)]}, "stop"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [1 << 20]}, "the vocabulary has"),
        ({"skip_special_tokens": 1}, "skip_special_tokens"),
        ({"logit_bias": [[1]]}, "logit_bias"),
        ({"logit_bias": 5}, "logit_bias"),
        ({"logit_bias": [[1, "x"]]}, "logit_bias"),
        ({"logit_bias": {"5": 10**400}}, "number"),
        ({"logit_bias": [[1.5, 1]]}, "logit_bias"),
        ({"temperature": 10**400}, "number"),
        ({"chat_template_kwargs": {"messages": 5}}, "chat_template_kwargs"),
        ({"grammar": "root ::= foo"}, "line 1: there is no rule named 'foo'"),
        ({"grammar": 'foo ::= "a"'}, "no rule named root"),
        ({"grammar": "# only a comment"}, "no rule named root"),
        ({"grammar": "root ::= [z-a]"}, "ends before it begins"),
        ({"guided_regex": "(a"}, "the regular expression cannot be used: unclosed group"),
        ({"json_schema": {"not": {}}}, "no value matches it"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"guided_grammar": ""}, "guided_grammar"),
        ({"functions": [{"name": "f"}]}, "tools"),
    ],
)
def test_wrong_fields(served, body, named):
    status, _, error = served.request(CHAT, {"messages": QUESTION, "max_tokens": 4, **body})
    assert status == 400 and named in error["error"]["message"]


# An answer of control tokens and text: `x` are the ids of two control tokens.
MARK, END = "<|im_start|>", "<|im_end|>"
SCRIPT = 'start: "ab" <[{0}]> "cd"'
BODIES = [
    (CHAT, {"messages": QUESTION}, lambda made: made["choices"][0]["message"]["content"]),
    (TEXT, {"prompt": "a"}, lambda made: made["choices"][0]["text"]),
    ("/completion", {"prompt": "a"}, lambda made: made["content"]),
]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "abcd"),
        ({"stop": [MARK]}, "ab"),
        ({"stop": ["b" + MARK + "c", "zzz"]}, "a"),
        ({"stop": ["start|>c"]}, "abcd"),
        ({"stop": [MARK + "x"]}, "abcd"),
        ({"stop": [f"{i}" for i in range(200)] + ["c"]}, "ab"),
        ({"stop": ["b"], "include_stop_str_in_output": True}, "ab"),
        ({"stop": ["b" + MARK], "include_stop_str_in_output": True}, "ab" + MARK),
        ({"skip_special_tokens": False}, f"ab{MARK}cd"),
        ({"skip_special_tokens": False, "stop": ["d"]}, f"ab{MARK}c"),
        ({"stop_token_ids": [0]}, "ab"),
        ({"stop_token_ids": [0], "ignore_eos": True}, "ab"),
        ({"stop_token_ids": [0], "skip_special_tokens": False, "include_stop_str_in_output": True}, "ab" + MARK),
    ],
)
def test_what_ends_an_answer(served, fields, expected):
    token = served.post("/tokenize", {"content": MARK})["tokens"][0]
    fields = {**fields, **({"stop_token_ids": [token]} if "stop_token_ids" in fields else {})}
    for path, body, text in BODIES:
        asked = {**body, "grammar": SCRIPT.format(token), "max_tokens": 40, **fields}
        assert text(served.post(path, asked)) == expected, path
        if path != CHAT:
            assert (
                "".join(
                    chunk.get("content") or chunk["choices"][0]["text"] if "choices" in chunk else chunk["content"]
                    for chunk in served.stream(path, asked)
                )
                == expected
            )


def test_stop_texts_of_other_apis_may_name_control_tokens(served):
    token = served.post("/tokenize", {"content": MARK})["tokens"][0]
    bias = {str(token): 1000}
    chat = {"messages": QUESTION, "options": {"stop": [MARK], "logit_bias": bias, "num_predict": 4}, "stream": False}
    made = served.post("/api/chat", chat)
    assert (made["done_reason"], made["eval_count"]) == ("stop", 1)
    asked = {"input": "x", "stop": [MARK], "logit_bias": bias, "max_output_tokens": 4}
    assert served.post("/v1/responses", asked)["status"] == "completed"


SCHEMA = {"type": "object", "properties": {"a": {"enum": ["red"]}}, "required": ["a"]}
FAILING = [
    (CHAT, {"messages": QUESTION, "json_schema": SCHEMA, "n": 2}, lambda last: last["error"]["message"]),
    (TEXT, {"prompt": "a", "json_schema": SCHEMA}, lambda last: last["error"]["message"]),
    ("/completion", {"prompt": "a", "json_schema": SCHEMA}, lambda last: last["error"]["message"]),
    ("/api/chat", {"messages": QUESTION, "format": SCHEMA}, lambda last: last["error"]),
    ("/api/generate", {"prompt": "a", "format": SCHEMA}, lambda last: last["error"]),
    (
        "/v1/messages",
        {"messages": QUESTION, "max_tokens": 40, "output_config": {"format": {"schema": SCHEMA}}},
        lambda last: last["error"]["message"],
    ),
    (
        "/v1/responses",
        {"input": "x", "text": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        lambda last: (last.get("response") or last)["error"]["message"],
    ),
]


@pytest.mark.parametrize(("path", "body", "message"), FAILING, ids=[path for path, *_ in FAILING])
def test_an_answer_that_fails_ends_in_the_form_of_its_api(served, monkeypatch, path, body, message):
    """After its first piece: streamed or whole, and nothing is left of it."""
    accept, calls = AnswerConstraint.accept, []

    def accept_some(constraint, token):
        calls.append(token)
        if len(calls) > 3:
            raise UserError("the grammar fails")
        accept(constraint, token)

    monkeypatch.setattr(AnswerConstraint, "accept", accept_some)
    for _ in range(3):
        calls.clear()
        status, _, whole = served.request(path, {**body, "stream": False})
        assert status == 400 and message(whole) == "the grammar fails"
        calls.clear()
        assert message(served.stream(path, body)[-1]) == "the grammar fails"
    model = served.service.library.loaded["demo"]
    assert waiting(lambda: model.engine.queue == (0, 0) and not model.users)
