"""Schemas of tools that no program should send: a grammar or an error, in every format of calls, within seconds."""

import time

import pytest
from call_snippets import TEMPLATES
from vocabularies import build_tokenizer, byte_level_metadata

pytest.importorskip("llguidance")
from mlc_amd.runtime.calls.tools import ALL_TYPES, Tool, read_tools
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.grammars.grammars import Grammars
from tests.runtime.text.test_tool_calls import found_format

SELF = {"$ref": "#/$defs/a"}
MANY = {str(i): SELF for i in range(12)}
SCHEMAS = (
    {"type": [[1], {}], "required": [{}, 1], "properties": {"a": {"type": [[]], "enum": [[1], {}]}}},
    {"properties": {"a": 5, "b": [], "c": {"const": {}}}, "required": {"a": 1}},
    {"properties": {"a": {"type": "number", "not": {}}}},
    {"properties": {"a": {"type": "integer", "$ref": "#/nowhere"}, "\ud800": {}}},
    {"properties": {"a": SELF}, "$defs": {"a": {"anyOf": [SELF, SELF]}}},
    {"properties": {"a": SELF}, "$defs": {"a": {"anyOf": [{"anyOf": [SELF] * 12}] * 12}}},
    {"properties": {"a": SELF}, "$defs": {"a": {"type": "object", "properties": MANY}}},
    {"properties": {"a": SELF}, "$defs": {"a": {"type": "array", "items": {"anyOf": [SELF, {"items": SELF}] * 9}}}},
)


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    tokenizer = build_tokenizer(byte_level_metadata(), tmp_path_factory.mktemp("vocabulary"))
    made = Grammars(tokenizer, tokenizer.vocab_size)
    yield made
    made.close()


@pytest.mark.parametrize("schema", SCHEMAS)
def test_schemas_of_tools_in_all_formats(grammars, schema):
    tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    for family in TEMPLATES:
        begun = time.monotonic()
        try:
            assert grammars.tool_calls(found_format(family), tools, "required")
        except UserError as error:
            assert "cannot be used" in str(error)
        assert tools[0].types("a") <= ALL_TYPES
        assert time.monotonic() - begun < 60


def test_types_of_schemas_that_go_round():
    several = {"anyOf": [SELF, {"type": "string"}, {"oneOf": [SELF, {"enum": [1]}]}]}
    of = {"a": SELF, "b": {"anyOf": [SELF, {"type": "null"}]}}
    tool = Tool("f", {"properties": of, "$defs": {"a": several}})
    assert tool.types("a") == {"string", "number"} and tool.types("b") == {"string", "number", "null"}
    assert Tool("f", {"properties": of, "$defs": {"a": {"anyOf": [SELF]}}}).types("a") == ALL_TYPES
