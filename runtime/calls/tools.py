"""The tools that a model may call: their names and the types of their arguments, from OpenAI's form
(https://platform.openai.com/docs/api-reference/chat/create): {"type": "function", "function": {"name", "description",
"parameters": JSON schema, "strict"}}."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlc_amd.runtime.errors import UserError, shorten

# Valid names: longer than OpenAI allows, but without characters that have a meaning in a format of calls.
NAME = re.compile(r"[A-Za-z0-9_.:/-]+")
_MAX_NAME = 128  # characters
# The types of JSON values.
ALL_TYPES = frozenset({"string", "number", "boolean", "null", "array", "object"})
_MAX_REFERENCES = 32  # limit of references that are followed from one schema


@dataclass(frozen=True)
class Tool:
    """parameters: the JSON schema of the arguments, an object. strict: whether these must match the whole schema."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of the arguments by name."""
        found = resolved(self.parameters, self.parameters).get("properties")
        return found if isinstance(found, Mapping) else {}

    @property
    def required(self) -> Sequence[str]:
        found = resolved(self.parameters, self.parameters).get("required")
        return [name for name in found if isinstance(name, str)] if isinstance(found, list | tuple) else []

    def types(self, argument: str) -> frozenset[str]:
        """The JSON types that an argument may have; "integer" becomes "number". All if the schema does not say."""
        return _types(self.properties.get(argument), self.parameters, 0, {}) or ALL_TYPES


def read_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """The tools of a request. Raises UserError, with the place in the list, for an entry that is not a function."""
    found = tuple(_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools))
    names = [tool.name for tool in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"two tools are called {twice[0]}: give each a name of its own")
    return found


def _tool(tool: object, where: str) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise UserError(f'{where} is {shorten(tool)}: it must be {{"type": "function", "function": {{"name": ..}}}}')
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name) or len(name) > _MAX_NAME:
        raise UserError(
            f"{where} has the name {shorten(name)}: it must be 1 to {_MAX_NAME} of the characters A-Z a-z 0-9 _ . : / -"
        )
    if parameters is not None and not isinstance(parameters, Mapping):
        raise UserError(f"{where} has the parameters {shorten(parameters)}: they must be a JSON schema")
    return Tool(name, parameters or {}, function.get("strict") is True)


def resolved(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema, or the one to which it refers within `root`; {} for invalid schemas and references elsewhere."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = target(reference, root)
    return {}


def target(reference: str, root: Mapping[str, Any]) -> object:
    """The target of a reference within a schema (JSON pointer, RFC 6901)."""
    if not reference.startswith("#"):
        return {}
    found: Any = root
    for step in reference[1:].split("/")[1:]:
        if isinstance(found, list | tuple) and step.isdecimal() and len(step) < 9:
            found = found[int(step)] if int(step) < len(found) else {}
        else:
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else {}
    return found


def _types(schema: object, root: Mapping[str, Any], depth: int, known: dict[int, frozenset[str]]) -> frozenset[str]:
    """The types that a schema allows. known: types by the id of a schema, as many references may lead to the same one.
    Schemas that are being evaluated (recursion) add nothing."""
    schema = resolved(schema, root)
    if depth > _MAX_REFERENCES:
        return ALL_TYPES
    if id(schema) not in known:
        known[id(schema)] = frozenset()
        options = next(
            (listed for key in ("anyOf", "oneOf") if isinstance(listed := schema.get(key), list | tuple)), ()
        )
        found = _named_types(schema)
        if found is None:
            found = frozenset[str]().union(*(_types(one, root, depth + 1, known) for one in options))
            found = found if options else ALL_TYPES
        known[id(schema)] = found
    return known[id(schema)]


def _named_types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """The types that the schema's own keywords allow; None if it has no such keyword."""
    if kinds := schema.get("type"):
        names = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list | tuple) else []
        return frozenset("number" if of == "integer" else of for of in names if isinstance(of, str)) or ALL_TYPES
    if "const" in schema or isinstance(schema.get("enum"), list | tuple):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(map(json_type, values)) or ALL_TYPES
    return None


def json_type(value: object) -> str:
    """The type of a JSON value: one of ALL_TYPES."""
    kinds = ((str, "string"), (bool, "boolean"), (int | float, "number"), (list, "array"), (Mapping, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")
