"""Writes grammars in llguidance's dialect of Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).

In: texts, which may contain control tokens of the vocabulary, and JSON schemas. Out: expressions, as strings that
callers combine (" " sequence, "|" choice, "?", "*"), and `source`, the whole grammar.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from mlc_amd.runtime.calls.tools import target
from mlc_amd.runtime.errors import shorten

# White space in JSON: that of indented text, as in llama.cpp. Without limits, a model could fill the context with it.
JSON_SPACE = r" |\n{1,2}[ \t]{0,20}"
# no_forcing: without it, where a text must follow, masks would only allow the tokens that the tokenizer encodes it to.
# These are wrong if the tokenizer adds a space before a text.
_END = r"""
%llguidance {"no_forcing": true}
TEXT: /(.|\n)*/
SPACE: /[ \t\r\n]{1,2}/
"""


class ControlTokens:
    """The control tokens of a vocabulary: ids by text."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = ids
        texts = sorted(ids, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, texts)) or '(?!)'})")

    def split(self, text: str) -> list[str]:
        """The text, divided into control tokens and the texts between them."""
        return [part for part in self._pattern.split(text) if part]


class Rules:
    """The rules of one grammar. TEXT is any text without control tokens; `SPACE?` is white space."""

    TEXT, SPACE = "TEXT", "SPACE?"

    def __init__(self, control: ControlTokens) -> None:
        self._control = control
        self._names: dict[str, str] = {}  # names by the definition that follows them

    def rule(self, body: str, options: str = "") -> str:
        """Adds a rule, if it does not exist. Returns its name."""
        return self._names.setdefault(f"{options}: {body}", f"r{len(self._names)}")

    def literal(self, text: str) -> str:
        """The expression for exactly this text, with its control tokens."""
        ids = self._control.ids
        parts = self._control.split(text)
        return " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part, ensure_ascii=False) for part in parts)

    def mark(self, text: str, before: str = "") -> str:
        """The expression for `before`, then the first occurrence of a mark."""
        lazy = not any(part in self._control.ids for part in self._control.split(text))
        return self.rule(f"{before} {self.literal(text)}", "[lazy]" if lazy else "")

    def spelled(self, text: str, before: str = "") -> str:
        """`mark`, but its control tokens may also be written with ordinary tokens. Parsers of answers accept both."""
        ordinary = self.rule(f"{before} {json.dumps(text, ensure_ascii=False)}", "[lazy]")
        return self.choice((self.mark(text, before), ordinary))

    def without(self, text: str) -> str:
        """The expression for any text that does not contain this one."""
        pattern = "".join(f"\\x{{{ord(char):x}}}" for char in text)
        return self._names.setdefault(f": {self.TEXT} & ~/(.|\\n)*{pattern}(.|\\n)*/", f"R{len(self._names)}")

    def until(self, text: str) -> str:
        """The expression for any text up to the first mark, and the mark."""
        return self.mark(text, self.TEXT)

    def choice(self, options: Iterable[str]) -> str:
        return self.rule(" | ".join(dict.fromkeys(options)))

    def json(self, schema: Mapping[str, Any], lenient: bool = False) -> str:
        """The expression for a JSON value of this schema (`closed`). lenient: ignores what cannot be enforced."""
        settings = {"whitespace_pattern": JSON_SPACE, "lenient": lenient}
        possible = _mapped(schema, _possible)
        if possible is False:
            raise ValueError("no value matches it")
        return self.rule("%json " + json.dumps({**closed(possible), "x-guidance": settings}, ensure_ascii=False))

    def source(self, start: str) -> str:
        """The text of the grammar that begins with the expression `start`."""
        return "\n".join([f"start: {start}", *(f"{name}{body}" for body, name in self._names.items()), _END])


# Keywords whose value is a schema, a list of schemas, or schemas by name.
_ONE = ("additionalProperties", "additionalItems", "contains", "else", "if", "items", "not", "propertyNames", "then",
        "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
# Keywords whose schemas apply to the same value.
_SAME = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")
# Keywords that combine schemas, and keywords that do not restrict values.
_COMBINING = ("$ref", "$dynamicRef", "anyOf", "oneOf", "allOf", "if")
_SILENT = {"$defs", "definitions", "$schema", "$id", "$anchor", "$comment", "title", "description", "default",
           "examples", "deprecated", "readOnly", "writeOnly", "nullable", "discriminator", "x-guidance"}  # fmt: skip
# Keywords that allow properties that are not listed, or may require such properties.
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties",
         "dependentSchemas", "dependentRequired", "dependencies")  # fmt: skip


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, with `additionalProperties: false` in each object that lists properties and has no keyword for
    others. Objects in combined schemas do not change, because several schemas may list properties of one object."""
    return dict(schema) if any(map(_combines, _all(schema))) else _mapped(schema, _close)


def check_references(schema: Mapping[str, Any]) -> None:
    """Raises ValueError for a reference that leads back to itself through references and combined schemas only."""
    checked: set[int] = set()  # ids of schemas; those on the path to the current one are in `path`
    for begin in _all(schema):
        path, left = {id(begin): begin}, [_same_value(begin, schema)]
        while left:
            found, reference = next(left[-1], (None, ""))
            if found is None:
                left.pop()
                checked.add(path.popitem()[0])
            elif id(found) in path:
                raise ValueError(f"its reference {shorten(reference)} leads back to itself")
            elif id(found) not in checked:
                path[id(found)] = found
                left.append(_same_value(found, schema, reference))


def _same_value(
    schema: Mapping[str, Any], root: Mapping[str, Any], reference: str = ""
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The schemas that also apply to a value of this schema, and the last reference that led to them."""
    if isinstance(own := schema.get("$ref"), str) and isinstance(found := target(own, root), Mapping):
        yield found, own
    for keyword in _SAME:
        value = schema.get(keyword)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, Mapping):
                yield one, reference


def _combines(schema: Mapping[str, Any]) -> bool:
    found = [keyword for keyword in _COMBINING if keyword in schema]
    return bool(found) and ("allOf" in found or len(schema.keys() - _SILENT) > 1)


def _mapped(schema: Any, change: Callable[[dict[str, Any]], Any]) -> Any:
    """Applies `change` to all schemas within the schema, then to the schema itself."""
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    for keyword in _ONE:
        if isinstance(result.get(keyword), Mapping):
            result[keyword] = _mapped(result[keyword], change)
    for keyword in _LISTS:
        if isinstance(result.get(keyword), list):
            result[keyword] = [_mapped(one, change) for one in result[keyword]]
    for keyword in _NAMED:
        if isinstance(result.get(keyword), Mapping):
            result[keyword] = {name: _mapped(one, change) for name, one in result[keyword].items()}
    return change(result)


def _possible(schema: dict[str, Any]) -> Any:
    """False for a schema that no value matches, such as `not` of any value, which llguidance does not recognize."""
    never = schema.get("not", False)
    return False if never is True or (isinstance(never, Mapping) and not never.keys() - _SILENT) else schema


def _close(result: dict[str, Any]) -> dict[str, Any]:
    listed, required = result.get("properties"), result.get("required", [])
    if not isinstance(listed, Mapping) or not listed or not isinstance(required, list):
        return result
    if not any(k in result for k in _OPEN) and all(isinstance(name, str) and name in listed for name in required):
        result["additionalProperties"] = False
    return result


def _all(schema: Any) -> Iterator[Mapping[str, Any]]:
    """The schema and all schemas within it."""
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
