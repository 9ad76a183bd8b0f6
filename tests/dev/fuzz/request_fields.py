"""The fields of requests that the server reads, by route, and values that clients should not send but do.

In: `EXAMPLES`, bodies that are answered, which together lead through all branches of the server's readers; `SEES`,
"emb" and "rank" are models that take images and that make vectors and scores. Out:
`fields()`: every field that a handler looks at, whether an example has it or not: objects note what is read of them
(tools/server/fields.py and all else), so that a new field needs no entry here. `HOSTILE`: JSON texts of all types.
"""

import asyncio
import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

from starlette.types import ASGIApp

from mlc_amd.runtime.errors import UserError
from mlc_amd.tools.server import service
from mlc_amd.tools.server.app import ROUTES, make_app
from mlc_amd.tools.server.fields import parse_json
from mlc_amd.tools.server.library import Library
from mlc_amd.tools.server.options import ServeOptions

Place = tuple[str | int, ...]  # of a value within a body

# ---- bodies that are answered

SEES = "sees"  # the name of a model that takes images

_SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
_FUNCTION = {"name": "f", "description": "d", "parameters": _SCHEMA, "strict": True}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_USER = {"role": "user", "content": [{"type": "text", "text": "x"}]}
_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
_MESSAGES = [
    {"role": "system", "content": "s"},
    _USER,
    {"role": "assistant", "content": "", "reasoning_content": "t", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call00000", "content": "1", "name": "f"},
    {"role": "assistant", "refusal": "no", "function_call": {"name": "f", "arguments": {"a": 1}}},
    _USER,
]
_SAMPLING = {
    "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 0.1, "frequency_penalty": 0.1,
    "repetition_penalty": 1.1, "repetition_window": 16, "seed": 1, "logit_bias": {"5": 1}, "min_tokens": 0,
    "ignore_eos": False, "stop": ["~"], "stop_token_ids": [5], "include_stop_str_in_output": False,
    "skip_special_tokens": True,
}  # fmt: skip
_LLAMA_NAMES = {"repeat_penalty": 1.1, "repeat_last_n": -1, "logit_bias": [[5, 1], ["6", False]], "n_predict": 2}
_FORMATS: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": _SCHEMA}}},
    {"response_format": {"type": "json_object", "schema": _SCHEMA}},
    {"json_schema": _SCHEMA},
    {"grammar": 'root ::= "a" [b-c]{1,3} x\nx ::= "d"?'},
    *({"structured_outputs": {name: value}} for name, value in (
        ("json", _SCHEMA), ("regex", "a+"), ("choice", ["a", "b"]), ("grammar", 'root ::= "a"'), ("json_object", True),
    )),
    {"guided_json": json.dumps(_SCHEMA)}, {"guided_regex": "a|b"}, {"guided_choice": ["a"]},
    {"guided_grammar": 'start: "a"'}, {"guided_json_object": True},
)  # fmt: skip
_TOOLS = {
    "tools": [{"type": "function", "function": _FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": False,
}
_ASKED = {"model": "", "max_tokens": 2, "stream": False}
_OLLAMA_MESSAGES = [_USER, {"role": "assistant", "thinking": "t", "tool_calls": [{"function": _CALL["function"]}]}]
_BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "x"}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "t"}, {"type": "redacted_thinking"}, {"type": "text", "text": "y"},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "1"}]}]},
]  # fmt: skip
_ITEMS = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "1"},
    {"role": "user", "content": "x"},
]
_ANTHROPIC: tuple[dict[str, Any], ...] = (
    _CHAT | _ASKED,
    _ASKED | {
        "messages": _BLOCKS, "system": [{"type": "text", "text": "s"}], "temperature": 0.5, "top_p": 0.9, "top_k": 5,
        "stop_sequences": ["~"], "thinking": {"type": "disabled"},
        "tools": [{"name": "f", "description": "d", "type": "custom", "input_schema": _SCHEMA}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    },
    _CHAT | _ASKED | {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": _SCHEMA}}},
    _CHAT | _ASKED | {"output_format": {"type": "json_schema", "schema": _SCHEMA}},
)  # fmt: skip
# Of a model that sees
_IMAGE = "R0lGODlhAQABAIAAAP8AAAAAACwAAAAAAQABAAACAkQBADs="
_URL = f"data:image/gif;base64,{_IMAGE}"
_SEES = _ASKED | {"model": SEES}
_BASE64 = {"type": "image", "source": {"type": "base64", "media_type": "image/gif", "data": _IMAGE}}
_BY_URL = {"type": "image", "source": {"type": "url", "url": _URL}}
_PARTS = [{"type": "image_url", "image_url": {"url": _URL}}, {"type": "image_url", "image_url": _URL}, _BASE64, _BY_URL]
_RANK = {"model": "rank", "query": "x", "top_n": 1, "truncate": True}
EXAMPLES: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/chat/completions": (
        _CHAT | _ASKED | _SAMPLING | {
            "n": 2, "logprobs": True, "top_logprobs": 2, "reasoning_effort": "low", "timings_per_token": True,
            "stream_options": {"include_usage": True}, "return_progress": True, "chat_template_kwargs": {"k": 1},
        },
        _CHAT | _ASKED | _LLAMA_NAMES,
        _TOOLS | _ASKED | {"messages": _MESSAGES, "max_completion_tokens": 2},
        _CHAT | _ASKED | _TOOLS | {"tool_choice": "required"},
        *(_CHAT | _ASKED | one for one in _FORMATS),
        _SEES | {"messages": [{"role": "user", "content": _PARTS}]},
    ),
    "/v1/completions": (
        _ASKED | _SAMPLING | {
            "prompt": "x", "n": 2, "echo": True, "logprobs": 2, "stream_options": {"include_usage": True}, "suffix": "",
            "best_of": 1, "return_progress": True,
        },
        _ASKED | _LLAMA_NAMES | {"prompt": [[5, 6], "x"], "prompt_logprobs": 1},
        *(_ASKED | {"prompt": "x"} | one for one in _FORMATS),
    ),
    "/v1/responses": (
        _ASKED | _SAMPLING | {
            "input": "x", "max_output_tokens": 2, "instructions": "i", "store": False, "top_logprobs": 2,
            "include": ["message.output_text.logprobs"], "reasoning": {"effort": "low"}, "metadata": {"k": "v"},
            "text": {"format": {"type": "text"}},
        },
        _ASKED | {
            "input": _ITEMS, "max_output_tokens": 2, "tools": [{"type": "function"} | _FUNCTION],
            "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": True,
        },
        _ASKED | {
            "input": "x", "max_output_tokens": 2,
            "text": {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": _SCHEMA}},
        },
        *(_ASKED | {"input": "x", "max_output_tokens": 2} | one for one in _FORMATS),
        _SEES | {
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": _URL}]}],
            "max_output_tokens": 2,
        },
    ),
    "/v1/messages": (
        *_ANTHROPIC,
        _SEES | {"messages": [{"role": "user", "content": [_BASE64, _BY_URL]}]},
        *(_CHAT | _ASKED | one for one in _FORMATS),
    ),
    "/v1/messages/count_tokens": _ANTHROPIC,
    "/api/chat": (
        {
            "model": "", "stream": False, "messages": _OLLAMA_MESSAGES, "think": False, "logprobs": True,
            "top_logprobs": 2, "options": _SAMPLING | {"num_predict": 2, "num_ctx": 512}, "tools": _TOOLS["tools"],
        },
        *(_CHAT | {"stream": False, "options": {"num_predict": 2}, "think": "low", "format": one}
          for one in ("json", _SCHEMA)),
        *(_CHAT | {"stream": False, "options": {"num_predict": 2} | _LLAMA_NAMES} | one for one in _FORMATS),
        {
            "model": SEES, "stream": False, "messages": [{"role": "user", "content": "x", "images": [_IMAGE]}],
            "options": {"num_predict": 2},
        },
    ),
    "/api/generate": (
        {
            "model": "", "stream": False, "prompt": "x", "system": "s", "think": False, "images": [], "suffix": "",
            "context": [], "logprobs": True, "top_logprobs": 2,
            "options": _SAMPLING | {"num_predict": 2, "num_ctx": 512},
        },
        {"stream": False, "prompt": "x", "raw": True, "options": {"num_predict": 2}, "format": _SCHEMA},
    ),
    "/api/show": ({"model": "", "name": ""},),
    "/api/pull": ({"model": "demo", "name": "demo", "stream": False},),
    "/api/delete": ({"model": "none", "name": "none"},),
    "/tokenize": (
        {"model": "", "content": "x", "add_special": True, "parse_special": True, "with_pieces": True},
        {"model": "", "prompt": "x", "add_special_tokens": True},
    ),
    "/detokenize": ({"model": "", "tokens": [5, 6]},),
    "/apply-template": (_TOOLS | {"messages": _MESSAGES},),
    "/completion": (
        _ASKED | _SAMPLING | {
            "prompt": "x", "n_probs": 2, "return_tokens": True, "response_fields": ["content", "a/b"],
            "timings_per_token": True, "return_progress": True,
        },
        _ASKED | _LLAMA_NAMES | {"prompt": [{"prompt_string": "x"}, [5, "y"]]},
        _SEES | {"prompt": {"prompt_string": "x<__media__>", "multimodal_data": [_IMAGE]}, "n_predict": 2},
        *(_ASKED | {"prompt": "x"} | one for one in _FORMATS),
    ),
    "/v1/embeddings": (
        {"model": "emb", "input": "x", "encoding_format": "base64", "dimensions": 8, "truncate": True},
        {"model": "emb", "input": [[5, 6], "x"]},
    ),
    "/embedding": ({"model": "emb", "content": "x", "embd_normalize": -1}, {"model": "emb", "input": "x"}),
    "/api/embed": ({"model": "emb", "input": ["x"], "truncate": True, "dimensions": 8},),
    "/api/embeddings": ({"model": "emb", "prompt": "x"},),
    "/v1/rerank": (
        _RANK | {"documents": ["a", {"text": "b"}], "return_documents": True},
        _RANK | {"texts": ["a"], "return_text": True},
    ),
    "/infill": (
        _ASKED | _SAMPLING | {
            "input_prefix": "x", "input_suffix": "y", "prompt": "z", "input_extra": [{"filename": "f", "text": "t"}],
        },
    ),
}  # fmt: skip
METHODS = {path: method for path, method, _ in ROUTES}

# ---- values

_LONG = 1 << 20
TYPES = (
    "null", "true", "false", "0", "1", "-1", "1.5", '""', '"x"', "[]", "[null]", '["x"]', "[1]", "[[1, [2]]]", "[{}]",
    "{}", '{"a": 1}', '{"type": "x"}',
)  # fmt: skip
HOSTILE = (
    *TYPES, "1e308", "-1e308", "1e400", f"1{'0' * 400}", f"-1{'0' * 400}", f"1{'0' * 5000}", "-0.0", "1e-320",
    str(2**63), str(-(2**63) - 1), str(2**31), str(2**64), "NaN", "Infinity", "-Infinity", "3.0", "0.1e-400",
    *(f"{opened * depth}{inner}{closed * depth}" for depth in (100, 500, 100_000)
      for opened, inner, closed in (("[", "", "]"), ('{"a":', "1", "}"))),
    '"\\ud800"', '"\\udc00\\ud800x"', '"\\u0000"', '"a\\u0000b"', '"\\u202e\\r\\n"', '"\U0010ffff"', '"{{ 7 }}"',
    '["\\ud800"]', '{"\\ud800": "\\ud800"}', '{"": null}', '{"$ref": "#"}', '[[5, 1e400]]', '{"5": 1e308}',
    *('"' + part * times + '"' for part, times in (("x", _LONG), ("\\u0000", 100_000), ("(", 5000), ("a ", 50_000))),
    *("[" + part * times + "1]" for part, times in (("1,", 100_000), ("{},", 20_000), ('"x",', 50_000))),
    "{" + ",".join(f'"k{i}":{i}' for i in range(5000)) + "}",
    '{"type": "object", "properties": {"a": {"$ref": "#"}}}', '{"allOf": [{"$ref": "#"}]}',
    '{"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}', '{"enum": []}', '{"pattern": "("}', '{"type": ["x", 1]}',
    '{"properties": 1, "required": {}}', '{"$ref": 5}', '"<|im_start|>"', '"root ::= root"', '"start: start"',
    '"root ::= \\"a\\"* root*"',
)  # fmt: skip


# ---- the fields


@dataclass(frozen=True)
class Field:
    """A field that a route reads. name: for people, "messages[].role"; example: a body, of which the field is or would
    be at `place`."""

    path: str
    name: str
    example: Mapping[str, Any]
    place: Place

    def body(self, value: str) -> bytes:
        """The example with this JSON text as the field."""
        return changed(self.example, {self.place: value})


def changed(example: Mapping[str, Any], values: Mapping[Place, str]) -> bytes:
    """The body with JSON texts at some places; those within another one that was replaced are left out."""
    made: Any = copy.deepcopy(dict(example))
    marks: dict[str, str] = {}
    for place, text in sorted(values.items(), key=lambda item: len(item[0])):
        mark = f"\x7f{len(marks)}\x7f"
        try:
            holder = made
            for step in place[:-1]:
                holder = holder[step]
            holder[place[-1]] = mark
        except (KeyError, IndexError, TypeError):
            continue
        marks[json.dumps(mark)] = text
    written = json.dumps(made)
    for mark, text in marks.items():
        written = written.replace(mark, text)
    return written.encode()


def fields() -> list[Field]:
    """All fields of all routes that take a body; each once, in an example that has it if there is one."""
    return asyncio.run(_fields())


async def _fields() -> list[Field]:
    found: dict[tuple[str, str], Field] = {}
    app = make_app(service.Service(Library({"none": _no_model}), ServeOptions(quiet=True)))
    for path, examples in EXAMPLES.items():
        for example in examples:
            read: set[Place] = set()
            with mock.patch.object(service, "parse_json", lambda text, read=read: _noting(parse_json(text), (), read)):
                await ask(app, METHODS[path], path, json.dumps(example).encode())
            for place in sorted(read | set(_places(example)), key=str):
                name = "".join("[]" if isinstance(step, int) else f".{step}" for step in place)[1:]
                if (path, name) not in found or (_has(example, place) and not _has(found[path, name].example, place)):
                    found[path, name] = Field(path, name, example, place)
    return list(found.values())


def _no_model() -> Any:
    raise UserError("there is none")


class _Noting(dict):
    """An object that notes the places that are read of it."""

    def __init__(self, values: Mapping[str, Any], place: Place, read: set[Place]) -> None:
        super().__init__(values)
        self._place, self._read = place, read

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add((*self._place, name))
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self._read.add((*self._place, name))
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._read.add((*self._place, str(name)))
        return super().__contains__(name)


def _noting(value: Any, place: Place, read: set[Place]) -> Any:
    if isinstance(value, dict):
        return _Noting({name: _noting(one, (*place, name), read) for name, one in value.items()}, place, read)
    return [_noting(one, (*place, i), read) for i, one in enumerate(value)] if isinstance(value, list) else value


def _places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Of all values in an example."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, one in inside:
        yield (*place, step)
        yield from _places(one, (*place, step))


def _has(value: Any, place: Place) -> bool:
    return place in set(_places(value))


# ---- requests without a socket


async def ask(
    app: ASGIApp, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> tuple[int, str, bytes]:
    """(status, media type, body) of an application's response."""
    raw, _, query = path.partition("?")
    made, status, kind = bytearray(), 0, ""
    sent = iter([{"type": "http.request", "body": body, "more_body": False}])
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": raw, "raw_path": raw.encode(), "query_string": query.encode(), "root_path": "", "client": ("::1", 1),
        "server": ("localhost", 80),
        "headers": [(name.encode(), text.encode()) for name, text in {"host": "localhost", **(headers or {})}.items()],
    }  # fmt: skip

    async def receive() -> Any:
        return next(sent, None) or await asyncio.Event().wait()

    async def send(message: Any) -> None:
        nonlocal status, kind
        if message["type"] == "http.response.start":
            status = message["status"]
            kind = next((text.decode() for name, text in message["headers"] if name == b"content-type"), "")
        else:
            made.extend(message.get("body", b""))

    await app(scope, receive, send)
    return status, kind.partition(";")[0], bytes(made)
