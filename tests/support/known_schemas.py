"""JSON schemas as programs have them in use, by hand: of documents that everybody knows, with the keywords that public
collections (JSON-Schema-Test-Suite, JSONSchemaBench) have most of. Of different drafts."""

from typing import Any

_POSITION = {"type": "array", "prefixItems": [{"type": "number"}] * 2, "items": False, "minItems": 2}
_MONEY = {"type": "number", "minimum": 0, "exclusiveMaximum": 100000}
_SHORT = {"type": "string", "maxLength": 20}

SCHEMAS: dict[str, dict[str, Any]] = {
    "point of GeoJSON": {
        "type": "object",
        "properties": {"type": {"const": "Point"}, "coordinates": _POSITION},
        "required": ["type", "coordinates"],
    },
    "call of JSON-RPC": {
        "type": "object",
        "properties": {
            "jsonrpc": {"const": "2.0"},
            "method": {"type": "string", "pattern": "^[a-z]{1,8}/[a-z]{1,8}$"},
            "params": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}},
            "id": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 999}, _SHORT]},
        },
        "required": ["jsonrpc", "method", "id"],
        "additionalProperties": False,
    },
    "user interface": {
        "$ref": "#/$defs/element",
        "$defs": {
            "element": {
                "type": "object",
                "properties": {
                    "type": {"enum": ["div", "button", "field"]},
                    "label": _SHORT,
                    "children": {"type": "array", "items": {"$ref": "#/$defs/element"}, "maxItems": 2},
                    "attributes": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "properties": {"name": _SHORT, "value": _SHORT},
                            "required": ["name", "value"],
                        },
                        "maxItems": 2,
                    },
                },
                "required": ["type", "label"],
            }
        },
    },
    "linked list": {
        "type": "object",
        "properties": {
            "value": {"type": "integer", "minimum": -9, "maximum": 9},
            "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        },
        "required": ["value", "next"],
    },
    "invoice": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Invoice",
        "type": "object",
        "properties": {
            "number": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$", "description": "XX-0000"},
            "date": {"type": "string", "format": "date"},
            "currency": {"enum": ["EUR", "USD", "CHF"]},
            "lines": {"type": "array", "items": {"$ref": "#/definitions/line"}, "minItems": 1, "maxItems": 3},
            "paid": {"type": ["boolean", "null"], "default": None},
        },
        "required": ["number", "date", "currency", "lines"],
        "definitions": {
            "line": {
                "type": "object",
                "properties": {
                    "text": _SHORT,
                    "count": {"type": "integer", "exclusiveMinimum": 0, "maximum": 100},
                    "price": _MONEY,
                },
                "required": ["text", "count", "price"],
            }
        },
    },
    "event, a tagged union": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "click"}, "x": {"type": "integer"}, "y": {"type": "integer"}},
                "required": ["kind", "x", "y"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {"kind": {"const": "key"}, "code": {"type": "string", "minLength": 1, "maxLength": 3}},
                "required": ["kind", "code"],
                "additionalProperties": False,
            },
        ]
    },
    "settings, a map": {
        "type": "object",
        "patternProperties": {"^[a-z]{1,6}$": {"type": ["boolean", "number", "null"]}},
        "additionalProperties": False,
    },
    "person, of two parts": {
        "allOf": [{"$ref": "#/definitions/named"}, {"$ref": "#/definitions/aged"}],
        "definitions": {
            "named": {"type": "object", "properties": {"name": _SHORT}, "required": ["name"]},
            "aged": {
                "type": "object",
                "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 130}},
                "required": ["age"],
            },
        },
    },
    "sentiment": {"type": "string", "enum": ["positive", "neutral", "negative"]},
    "matrix": {
        "type": "array",
        "items": {
            "type": "array", "items": {"type": "integer", "minimum": -99, "maximum": 99}, "minItems": 2, "maxItems": 2
        },
        "minItems": 2,
        "maxItems": 2,
    },
    "account": {
        "type": "object",
        "properties": {
            "id": {"type": "string", "format": "uuid"},
            "mail": {"type": "string", "pattern": "^[a-z]{1,10}@[a-z]{1,10}[.](com|org)$"},
            "created": {"type": "string", "format": "date-time"},
            "roles": {"type": "array", "items": {"enum": ["admin", "user", None]}, "maxItems": 3},
            "address": {"type": "object", "properties": {"ip": {"type": "string", "format": "ipv4"}}},
        },
        "required": ["id", "mail", "created", "roles"],
        "additionalProperties": False,
    },
}  # fmt: skip
