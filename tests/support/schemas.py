"""JSON schemas of the kinds that programs send, generated: nested objects, enums, arrays, tuples, patterns, formats,
numbers with bounds, alternatives, references, recursion, maps."""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_WORDS = ("name", "id", "größe", "items", "a b", "x", "created_at", "v2", "é", "unit", "notes", '"q"', "path/to", "$t")
_PATTERNS = ("^[A-Z]{2}[0-9]{3}$", r"^\d{4}-\d{2}$", "^(red|green|blue)$", "[a-f]+", r"^\S+@\S+$", r"^\w{1,8}$")
_FORMATS = ("date-time", "date", "time", "uuid", "ipv4", "email", "hostname", "duration")


def _string(r: random.Random, depth: int) -> Schema:
    kind = r.randrange(4)
    if kind == 0:
        low = r.randrange(4)
        return {"type": "string", "minLength": low, "maxLength": low + r.randrange(8)}
    if kind == 1:
        return {"type": "string", "pattern": r.choice(_PATTERNS)}
    return {"type": "string", "format": r.choice(_FORMATS)} if kind == 2 else {"type": "string"}


def _number(r: random.Random, depth: int) -> Schema:
    kind, low = r.choice(("integer", "number")), r.randrange(-50, 50)
    bounds = (
        {"minimum": low, "maximum": low + r.randrange(1, 100)},
        {"exclusiveMinimum": low, "exclusiveMaximum": low + r.randrange(2, 100)},
        {"minimum": low},
        {"maximum": low + 0.5 if kind == "number" else low},
        {"multipleOf": r.choice((2, 5, 10)), "minimum": 0} if kind == "integer" else {},
        {},
    )
    return {"type": kind, **r.choice(bounds)}


def _enum(r: random.Random, depth: int) -> Schema:
    values = ["a", "b c", 'with "quotes"', "ü\n", 1, -2.5, True, None, ["x", 1], {"k": "v"}]
    chosen = r.sample(values, r.randrange(1, 5))
    return {"const": chosen[0]} if r.random() < 0.3 else {"enum": chosen}


def _simple(r: random.Random, depth: int) -> Schema:
    return r.choice(
        ({"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}, {"type": ["integer", "boolean"]})
    )


def _array(r: random.Random, depth: int) -> Schema:
    low = r.randrange(3)
    items = _schema(r, depth + 1)
    kinds = (
        {"items": items},
        {"items": items, "minItems": low, "maxItems": low + r.randrange(1, 4)},
        {"prefixItems": [_schema(r, depth + 1) for _ in range(r.randrange(1, 4))], "items": False},
        {"prefixItems": [_schema(r, depth + 1)], "items": items, "maxItems": 3},
    )
    return {"type": "array", **r.choice(kinds)}


def _object(r: random.Random, depth: int) -> Schema:
    names = r.sample(_WORDS, r.randrange(0, 5))
    made: Schema = {"type": "object", "properties": {name: _schema(r, depth + 1) for name in names}}
    made["required"] = [name for name in names if r.random() < 0.6]
    extra = r.randrange(4)
    if extra < 2:
        made["additionalProperties"] = False
    elif extra == 2:
        made["additionalProperties"] = _schema(r, depth + 1)
    return made


def _map(r: random.Random, depth: int) -> Schema:
    if r.random() < 0.5:
        return {
            "type": "object",
            "patternProperties": {"^[a-z]{1,4}$": _schema(r, depth + 1)},
            "additionalProperties": False,
        }
    return {"type": "object", "additionalProperties": _schema(r, depth + 1), "minProperties": 1, "maxProperties": 3}


def _any_of(r: random.Random, depth: int) -> Schema:
    return {"anyOf": [_schema(r, depth + 1) for _ in range(r.randrange(2, 4))]}


def _one_of(r: random.Random, depth: int) -> Schema:
    """Distinguished by a constant, as tagged unions."""
    options = [
        {
            "type": "object",
            "properties": {"kind": {"const": f"k{i}"}, "value": _schema(r, depth + 1)},
            "required": ["kind", "value"],
            "additionalProperties": False,
        }
        for i in range(2)
    ]
    return {"oneOf": options}


def _all_of(r: random.Random, depth: int) -> Schema:
    parts = [
        {"type": "object", "properties": {name: _schema(r, depth + 1)}, "required": [name]}
        for name in ("first", "second")
    ]
    return {"allOf": parts}


def _reference(r: random.Random, depth: int) -> Schema:
    return {"$ref": f"#/$defs/{r.choice(('leaf', 'tree', 'list'))}"}


_LEAVES = (_string, _number, _enum, _simple)
_KINDS: tuple[Callable[[random.Random, int], Schema], ...] = (
    *_LEAVES, _object, _object, _array, _map, _any_of, _one_of, _all_of, _reference
)  # fmt: skip


def _schema(r: random.Random, depth: int) -> Schema:
    return r.choice(_LEAVES if depth >= 3 else _KINDS)(r, depth)


def schemas(count: int) -> list[Schema]:
    """The same ones at every call. All have definitions, of which some are recursive."""
    made = []
    for seed in range(count):
        r = random.Random(seed)
        definitions = {
            "leaf": _string(r, 3),
            "tree": {
                "type": "object",
                "properties": {
                    "value": _number(r, 3),
                    "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
                },
                "required": ["value"],
                "additionalProperties": False,
            },
            "list": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/list"}, "maxItems": 2}]},
        }
        root = r.choice((_object, _object, _array, _any_of, _reference))(r, 0)
        made.append({**root, "$defs": definitions})
    return made
