"""`chat` and `generate` with answers that follow a grammar or a schema, by the bundled model."""

import io
import json

import pytest

from mlc_amd.tools import cli

pytest.importorskip("llguidance")
YES = 'root ::= "yes" | "no"'
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["n"]}
CASES = {"grammar": (YES, lambda text: text in ("yes", "no"))}
CASES["json-schema"] = (json.dumps(SCHEMA), lambda text: 1 <= json.loads(text)["n"] <= 9)


@pytest.mark.parametrize("command", ["chat", "generate"])
@pytest.mark.parametrize("option", ["grammar", "grammar-file", "json-schema", "json-schema-file"])
def test_answers_follow_it(demo_artifact, tmp_path, capsys, command, option):
    text, follows = CASES[option.removesuffix("-file")]
    (tmp_path / "file").write_text(text)
    value = str(tmp_path / "file") if option.endswith("-file") else text
    assert cli.main([command, str(demo_artifact), "--prompt", "Is it so?", f"--{option}", value]) == 0
    assert follows(capsys.readouterr().out.strip())


def test_all_answers_of_a_conversation_follow_it(demo_artifact, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Hello\nAnd now?\n")))
    assert cli.main(["chat", str(demo_artifact), "--grammar", YES]) == 0
    assert set(capsys.readouterr().out.split()) <= {"yes", "no"}


@pytest.mark.parametrize("command", ["chat", "generate"])
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("grammar", 'root ::= "a" | "b', "error: the grammar cannot be used: line 1: "),
        ("grammar", 'root ::= "a" | b', "error: the grammar cannot be used: line 1: there is no rule named 'b'"),
        ("grammar", "", "error: the grammar cannot be used: there is no rule named root"),
        ("json-schema", '{"type": "number of things"}', "error: the JSON schema cannot be used: "),
        ("json-schema", "[]", "error: the JSON schema cannot be used: it must be an object"),
        ("grammar-file", "/no/such/file", "error: /no/such/file: no such file or directory"),
    ],
)
def test_a_bad_one_is_one_line(demo_artifact, capsys, command, option, value, message):
    assert cli.main([command, str(demo_artifact), "--prompt", "x", f"--{option}={value}"]) == 1
    shown = capsys.readouterr()
    assert shown.out.strip() == "" and shown.err.startswith(message) and shown.err.count("\n") == 1
