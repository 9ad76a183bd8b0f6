"""`/api/chat`, `/api/generate`, `/api/tags`, `/api/ps`, `/api/show` and `/api/version`, ollama's API
(https://github.com/ollama/ollama/blob/main/docs/api.md).

Answers are streamed as lines of JSON unless the request says otherwise. `load_duration` is always 0: it is the time of
a request that waits for its model.
"""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import mlc_amd
from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.tools.server import errors
from mlc_amd.tools.server.answering import Answering
from mlc_amd.tools.server.apis.ollama_fields import chat_request, generate_request
from mlc_amd.tools.server.apis.response_objects import logprob_body
from mlc_amd.tools.server.blocks import Block, blocks_of, finish_of
from mlc_amd.tools.server.chat_request import Event, Finish, ToolCallArguments, ToolCallBegin
from mlc_amd.tools.server.errors import ApiError
from mlc_amd.tools.server.service import client_of, read_fields, respond, service_of
from mlc_amd.tools.server.streaming import Json, dumps

_NANOSECONDS = 1_000_000_000


async def chat(request: Request) -> Response:
    fields = await read_fields(request)
    asked = chat_request(fields, client_of(request))
    if asked is None:
        return await _load(request, fields.text("model"), {"message": {"role": "assistant", "content": ""}})
    return await respond(request, asked, ChatLines if fields.flag("stream", True) else None, _whole_chat)


async def generate(request: Request) -> Response:
    fields = await read_fields(request)
    asked = generate_request(fields, client_of(request))
    if asked is None:
        return await _load(request, fields.text("model"), {"response": ""})
    return await respond(request, asked, TextLines if fields.flag("stream", True) else None, _whole_text)


async def _load(request: Request, name: str, answer: dict[str, Any]) -> Response:
    """A request without a prompt loads the model."""
    async with service_of(request).library.use(name) as model:
        return Json({**_head(model.name), **answer, "done": True, "done_reason": "load"})


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


def _end(answering: Answering, end: Finish) -> dict[str, Any]:
    first, later = (int(seconds * _NANOSECONDS) for seconds in (end.timings.ttft, end.timings.decode))
    return {
        "done": True,
        "done_reason": "length" if end.reason == "length" else "stop",
        "total_duration": int((time.perf_counter() - answering.begun) * _NANOSECONDS),
        "load_duration": 0,
        "prompt_eval_count": end.usage.prompt,
        "prompt_eval_duration": first,
        "eval_count": end.usage.completion,
        "eval_duration": later,
    }


def _whole_chat(answering: Answering, events: Sequence[Event]) -> dict[str, Any]:
    made = _said(blocks_of(events), "content")
    logprobs = made.pop("logprobs", None)
    end = _end(answering, finish_of(events))
    return {**_head(answering.model.name), "message": {"role": "assistant", **made}, **end} | (
        {"logprobs": logprobs} if logprobs else {}
    )


def _whole_text(answering: Answering, events: Sequence[Event]) -> dict[str, Any]:
    made = _said(blocks_of(events), "response")
    return {**_head(answering.model.name), **made, **_end(answering, finish_of(events))}


def _said(blocks: Sequence[Block], name: str) -> dict[str, Any]:
    """What blocks hold; the text in the field `name`."""
    found: dict[str, Any] = {name: "".join(block.text for block in blocks if block.kind == "text")}
    if thought := "".join(block.text for block in blocks if block.kind == "thinking"):
        found["thinking"] = thought
    if calls := [block for block in blocks if block.kind == "call"]:
        found["tool_calls"] = [
            {"id": call.id, "function": {"index": number, "name": call.name, "arguments": call.arguments}}
            for number, call in enumerate(calls)
        ]
    if logprobs := [logprob_body(one) for block in blocks for one in block.logprobs]:
        found["logprobs"] = logprobs
    return found


class _Lines:
    """The encoder of streamed answers (streaming.Encoder). Calls are whole: their arguments are objects."""

    media_type = "application/x-ndjson"
    field = ""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._calls: list[Event] = []  # the events of calls, which are written at the end

    def begin(self) -> bytes:
        return b""

    def events(self, events: Sequence[Event]) -> bytes:
        made, end = b"", None
        for event in events:
            if isinstance(event, ToolCallBegin | ToolCallArguments):
                self._calls.append(event)
            elif isinstance(event, Finish):
                end = event
        if blocks := blocks_of(event for event in events if not isinstance(event, ToolCallBegin | ToolCallArguments)):
            made += self._line(_said(blocks, self.field))
        if end is None:
            return made
        if self._calls:
            made += self._line(_said(blocks_of(self._calls), self.field))
        return made + self._line({self.field: ""}, _end(self._answering, end))

    def _line(self, said: dict[str, Any], end: dict[str, Any] | None = None) -> bytes:
        return dumps({**_head(self._answering.model.name), **self._shaped(said), **(end or {"done": False})}) + b"\n"

    def _shaped(self, said: dict[str, Any]) -> dict[str, Any]:
        return said

    def end(self) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return dumps(errors.ollama_body(error)) + b"\n"

    def ping(self) -> bytes:
        return b""


class TextLines(_Lines):
    """Of `/api/generate`."""

    field = "response"


class ChatLines(_Lines):
    """Of `/api/chat`."""

    field = "content"

    def _shaped(self, said: dict[str, Any]) -> dict[str, Any]:
        logprobs = {"logprobs": said.pop("logprobs")} if "logprobs" in said else {}
        return {"message": {"role": "assistant", **said}, **logprobs}


# ---- models


async def tags(request: Request) -> Response:
    library = service_of(request).library
    return Json({"models": [_model(request, name) for name in library.names]})


async def running(request: Request) -> Response:
    library = service_of(request).library
    found = []
    for name, model in library.loaded.items():
        memory = model.engine.artifact.manifest["weight_bytes"]
        found.append({**_model(request, name), "size_vram": memory, "context_length": model.engine.context})
    return Json({"models": found})


def _model(request: Request, name: str) -> dict[str, Any]:
    """What is known without loading the model."""
    library = service_of(request).library
    model = library.loaded.get(name)
    artifact = model.engine.artifact if model else None
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(library.created, UTC).isoformat().replace("+00:00", "Z"),
        "size": artifact.manifest["weight_bytes"] if artifact else 0,
        "digest": artifact.manifest["source"]["id"] if artifact else "",
        "details": _details(artifact),
    }


def _details(artifact: Artifact | None) -> dict[str, Any]:
    family = artifact.manifest["model"]["architecture"] if artifact else ""
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": "",
    }


async def show(request: Request) -> Response:
    """Loads the model: what it is stands in its artifact."""
    fields = await read_fields(request)
    async with service_of(request).library.use(fields.text("model") or fields.text("name")) as model:
        engine = model.engine
        sampling = engine.artifact.manifest["sampling"]
        return Json(
            {
                "modelfile": "",
                "parameters": "\n".join(f"{name} {value}" for name, value in sampling.items()),
                "template": engine.chat_template.source,
                "details": _details(engine.artifact),
                "model_info": {
                    "general.architecture": engine.config["architecture"],
                    "general.name": engine.artifact.manifest["name"],
                    f"{engine.config['architecture']}.context_length": engine.context,
                },
                "capabilities": ["completion", "tools"],
                "modified_at": _model(request, model.name)["modified_at"],
            }
        )


async def version(request: Request) -> Response:
    return Json({"version": mlc_amd.__version__})
