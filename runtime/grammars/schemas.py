"""JSON schemas as answers are held to them: objects have no properties beside those that are listed.

By the specification `{"properties": {"city": ..}}` allows any others, too, and a model that may write them does. Other
servers (llama.cpp, vLLM) do not let it, unless the schema says `additionalProperties`. In: a schema. Out: `closed`, one
that allows less.
"""

from collections.abc import Iterator, Mapping
from typing import Any

# Keywords that hold a schema, a list of schemas, and schemas by name.
_ONE = ("additionalProperties", "additionalItems", "contains", "else", "if", "items", "not", "propertyNames", "then",
        "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
# Keywords that add a schema to the one that has them, and keywords beside them that say nothing about a value.
_COMBINING = ("$ref", "$dynamicRef", "anyOf", "oneOf", "allOf", "if")
_SILENT = {"$defs", "definitions", "$schema", "$id", "$anchor", "$comment", "title", "description", "default",
           "examples", "deprecated", "readOnly", "writeOnly", "nullable", "discriminator", "x-guidance"}  # fmt: skip
# Keywords that allow properties that are not listed, or may want some.
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties",
         "dependentSchemas", "dependentRequired", "dependencies")  # fmt: skip


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with `additionalProperties: false` in each object that lists properties and does not say what others
    it may have. The schema itself where parts of it are combined: an object's properties may be those of several."""
    return dict(schema) if any(map(_combines, _all(schema))) else _closed(schema)


def _combines(schema: Mapping[str, Any]) -> bool:
    found = [keyword for keyword in _COMBINING if keyword in schema]
    return bool(found) and ("allOf" in found or len(schema.keys() - _SILENT) > 1)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for keyword in _ONE:
        if isinstance(made.get(keyword), Mapping):
            made[keyword] = _closed(made[keyword])
    for keyword in _LISTS:
        if isinstance(made.get(keyword), list):
            made[keyword] = [_closed(one) for one in made[keyword]]
    for keyword in _NAMED:
        if isinstance(made.get(keyword), Mapping):
            made[keyword] = {name: _closed(one) for name, one in made[keyword].items()}
    listed, required = made.get("properties"), made.get("required", [])
    if not isinstance(listed, Mapping) or not listed or not isinstance(required, list):
        return made
    if not any(k in made for k in _OPEN) and all(isinstance(name, str) and name in listed for name in required):
        made["additionalProperties"] = False
    return made


def _all(schema: Any) -> Iterator[Mapping[str, Any]]:
    """The schema, and those within it."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    for keyword in _ONE:
        yield from _all(schema.get(keyword))
    for keyword in _LISTS:
        if isinstance(schema.get(keyword), list):
            for one in schema[keyword]:
                yield from _all(one)
    for keyword in _NAMED:
        if isinstance(schema.get(keyword), Mapping):
            for one in schema[keyword].values():
                yield from _all(one)
