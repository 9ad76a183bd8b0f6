"""Closes JSON schemas for answers: objects have no other properties than those that are listed.

By the specification `{"properties": {"city": ..}}` allows any others, too, and models write them. Other servers
(llama.cpp, vLLM) forbid them unless the schema has `additionalProperties`. In: a schema. Out: `closed`, a stricter one.
"""

from collections.abc import Iterator, Mapping
from typing import Any

# Keywords that hold a schema, a list of schemas, and schemas by name.
_ONE = ("additionalProperties", "additionalItems", "contains", "else", "if", "items", "not", "propertyNames", "then",
        "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
# Keywords that combine schemas, and keywords that do not restrict values.
_COMBINING = ("$ref", "$dynamicRef", "anyOf", "oneOf", "allOf", "if")
_SILENT = {"$defs", "definitions", "$schema", "$id", "$anchor", "$comment", "title", "description", "default",
           "examples", "deprecated", "readOnly", "writeOnly", "nullable", "discriminator", "x-guidance"}  # fmt: skip
# Keywords that allow properties that are not listed, or may require some.
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties",
         "dependentSchemas", "dependentRequired", "dependencies")  # fmt: skip


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with `additionalProperties: false` in each object that lists properties without a keyword for others.
    Unchanged where schemas are combined: an object's properties may be listed in several."""
    return dict(schema) if any(map(_combines, _all(schema))) else _closed(schema)


def _combines(schema: Mapping[str, Any]) -> bool:
    found = [keyword for keyword in _COMBINING if keyword in schema]
    return bool(found) and ("allOf" in found or len(schema.keys() - _SILENT) > 1)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    for keyword in _ONE:
        if isinstance(result.get(keyword), Mapping):
            result[keyword] = _closed(result[keyword])
    for keyword in _LISTS:
        if isinstance(result.get(keyword), list):
            result[keyword] = [_closed(one) for one in result[keyword]]
    for keyword in _NAMED:
        if isinstance(result.get(keyword), Mapping):
            result[keyword] = {name: _closed(one) for name, one in result[keyword].items()}
    listed, required = result.get("properties"), result.get("required", [])
    if not isinstance(listed, Mapping) or not listed or not isinstance(required, list):
        return result
    if not any(k in result for k in _OPEN) and all(isinstance(name, str) and name in listed for name in required):
        result["additionalProperties"] = False
    return result


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
