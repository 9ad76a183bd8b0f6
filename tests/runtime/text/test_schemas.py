"""Which objects of a schema may have properties that it does not list."""

import pytest

from mlc_amd.runtime.grammars.lark import check_references, closed

CLOSED = {"additionalProperties": False}
OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}}


def test_objects_have_the_listed_properties_wherever_they_are():
    schema = {
        "type": "object",
        "properties": {"list": {"type": "array", "items": OBJECT}, "one": {"anyOf": [OBJECT, {"type": "null"}]}},
        "required": ["list"],
        "$defs": {"x": OBJECT},
    }
    own = OBJECT | CLOSED
    assert closed(schema) == {
        **schema,
        **CLOSED,
        "properties": {"list": {"type": "array", "items": own}, "one": {"anyOf": [own, {"type": "null"}]}},
        "$defs": {"x": own},
    }


def test_names_and_values_are_no_keywords():
    schema = {"properties": {"properties": {"const": {"properties": {"a": 1}}}}}
    assert closed(schema) == schema | CLOSED


def test_references_are_followed_where_nothing_is_beside_them():
    schema = {"properties": {"next": {"$ref": "#", "description": "the next one"}}}
    assert closed(schema) == schema | CLOSED


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        OBJECT | {"additionalProperties": True},
        OBJECT | {"additionalProperties": {"type": "integer"}},
        OBJECT | {"patternProperties": {"^x": {}}},
        OBJECT | {"minProperties": 2},
        OBJECT | {"required": ["a", "b"]},
        {"allOf": [OBJECT, {"properties": {"b": {}}}]},
        OBJECT | {"anyOf": [{"properties": {"b": {}}}, {"properties": {"c": {}}}]},
        {"$ref": "#/$defs/x", "properties": {"b": {}}, "$defs": {"x": OBJECT}},
        {"type": "object", "properties": 5},
        {"type": "object", "properties": {"a": {}}, "required": 5},
        {"items": [5, "x"], "anyOf": 7},
    ],
)
def test_what_stays_as_it_is(schema):
    assert closed(schema) == schema


A, WITHIN = {"$ref": "#/$defs/a"}, {"properties": {"x": {"$ref": "#/$defs/a"}}}


@pytest.mark.parametrize(
    ("schema", "refused"),
    [
        ({"allOf": [A]}, True),
        ({"anyOf": [{"type": "string"}, {"oneOf": [A]}]}, True),
        ({"not": {"if": A}}, True),
        ({"anyOf": [{"$ref": "#/$defs/a/anyOf/0"}]}, True),
        ({"items": {"allOf": [{"$ref": "#/$defs/a/items"}]}}, True),
        ({"anyOf": [{"type": "null"}, WITHIN]}, False),
        ({"allOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/b"}], "items": A}, False),
        ({"anyOf": [{"$ref": "#/$defs/a/anyOf/1"}, {"type": "null"}]}, False),
    ],
)
def test_combined_schemas_that_go_round_are_refused(schema, refused):
    whole = WITHIN | {"$defs": {"a": schema, "b": {"type": "object"}}}
    if refused:
        with pytest.raises(ValueError, match="leads back to itself"):
            check_references(whole)
    else:
        check_references(whole)


@pytest.mark.parametrize("place", [lambda ref: ref, lambda ref: {"properties": {"x": ref}}], ids=["root", "within"])
def test_references_that_go_round_are_refused(place):
    def schema(last: object) -> dict:
        return place({"$ref": "#/$defs/a"}) | {"$defs": {"a": {"$ref": "#/$defs/b~1c"}, "b/c": last}}

    check_references(schema({"type": "object", "properties": {"next": {"$ref": "#/$defs/a"}}}))
    check_references(schema({"$ref": "#/$defs/none"}))
    for reference in ("#/$defs/a", "#/$defs/b~1c"):
        with pytest.raises(ValueError, match="leads back to itself"):
            check_references(schema({"$ref": reference}))
