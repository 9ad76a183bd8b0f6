"""What an answer must be, by the names that llama-server's and vLLM's clients use: limits, biases, formats."""

import json
import re

import pytest

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
    assert (
        answer(served, CHAT, max_tokens=400, min_tokens=made)["usage"] == answer(served, CHAT, max_tokens=400)["usage"]
    )
    later = answer(served, CHAT, max_tokens=400, min_tokens=made + 2)["usage"]["completion_tokens"]
    assert made + 2 <= later < 400
    endless = answer(served, max_tokens=-1, ignore_eos=True, stop=["zzzz"])["usage"]
    assert endless["total_tokens"] >= 2048  # the context


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
