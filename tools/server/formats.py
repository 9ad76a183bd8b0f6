"""The required form of an answer, by the names that OpenAI's API and other servers use.

In: the fields of a request. At most one of these may be given:

    response_format             OpenAI: {"type": "text" | "json_object" | "json_schema", "json_schema": {"schema": ..}}
    json_schema, grammar        llama-server: a schema; a grammar in GBNF
    structured_outputs          vLLM: {"json", "regex", "choice", "grammar" or "json_object": ..}
    guided_json, _regex, ..     vLLM before 0.12: the same, as separate fields

Out: `answer_format`. Grammars may be in GBNF or in llguidance's dialect of Lark. All APIs accept these fields; some
also have a field of their own.
"""

import json
from collections.abc import Callable
from typing import Any, NoReturn

from mlc_amd.tools.server.chat_request import ANY_OBJECT, AnswerFormat, Pattern, ResponseFormat
from mlc_amd.tools.server.errors import invalid
from mlc_amd.tools.server.fields import Fields, parse_json


def answer_format(fields: Fields, own: str = "", made: AnswerFormat | None = None) -> AnswerFormat | None:
    """The form of the answer; None: any text. own, made: name of the API's own field, and its value. Raises ApiError
    400 for an invalid form, and if several are given."""
    found = [(own, made)] if made else []
    found += [(name, made) for name, read in _READERS.items() if fields.has(name) and (made := read(fields, name))]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise invalid(f"{names} are given: an answer can have one format", found[1][0])
    return found[0][1] if found else None


def _response_format(fields: Fields, name: str) -> ResponseFormat | None:
    given = fields.object(name)
    assert given is not None, "it is there"
    kind = given.choice("type", ("text", "json_object", "json_schema"), "text")
    if kind == "text":
        return None
    if kind == "json_object" and not given.has("schema"):
        return ANY_OBJECT
    holder = given.object("json_schema") or given  # llama.cpp has the schema next to the type
    holder.required("schema")
    return ResponseFormat(schema=holder.values("schema"), strict=holder.flag("strict"))


def _schema(fields: Fields, name: str) -> ResponseFormat:
    """A schema, from the schema itself or its JSON text."""
    given = fields.raw(name)
    if isinstance(given, str):
        try:
            given = parse_json(given)
        except ValueError as error:
            raise invalid(f"{fields.path(name)} is not JSON: {error}", fields.path(name)) from error
    if not isinstance(given, dict):
        raise fields.wrong(name, "a JSON schema")
    return ResponseFormat(schema=given)


def _grammar(fields: Fields, name: str) -> Pattern:
    if not fields.text(name).strip():
        raise fields.wrong(name, "a grammar")
    return Pattern("grammar", fields.text(name))


def _refused(fields: Fields, name: str) -> NoReturn:
    raise fields.wrong(name, "left out: this server has no such function")


def _choice(fields: Fields, name: str) -> Pattern:
    texts = fields.texts(name)
    if not texts or "" in texts:
        raise fields.wrong(name, "a list of texts")
    return Pattern("grammar", f"start: {' | '.join(map(json.dumps, texts))}")


def _structured(fields: Fields, name: str) -> AnswerFormat | None:
    given = fields.object(name)
    assert given is not None, "it is there"
    found = [one for one in _STRUCTURED if given.has(one)]
    if len(found) != 1:
        raise fields.wrong(name, f"an object with one of {', '.join(_STRUCTURED)}")
    return _STRUCTURED[found[0]](given, found[0])


Reader = Callable[[Fields, str], Any]
_STRUCTURED: dict[str, Reader] = {
    "json": _schema,
    "regex": lambda fields, name: Pattern("regex", fields.text(name)),
    "choice": _choice,
    "grammar": _grammar,
    "json_object": lambda fields, name: ANY_OBJECT if fields.flag(name) else None,
    "structural_tag": _refused,
}
_READERS: dict[str, Reader] = {
    "response_format": _response_format,
    "json_schema": _schema,
    # llama-server sends "" by default
    "grammar": lambda fields, name: _grammar(fields, name) if fields.text(name) else None,
    "structured_outputs": _structured,
    **{f"guided_{name}": read for name, read in _STRUCTURED.items()},
    "guided_whitespace_pattern": _refused,
}
