"""`/api/chat`, `/api/generate`, `/api/tags`, `/api/ps`, `/api/show`, `/api/pull`, `/api/delete` and `/api/version`:
ollama's API (https://github.com/ollama/ollama/blob/main/docs/api.md).

By default, answers are streamed as lines of JSON. `load_duration` is always 0, although a request may wait for its
model. These have no effect: `keep_alive` (see --idle-unload), `options` about devices (num_gpu, ..). `num_ctx` limits
the tokens of prompt and answer together. With a `suffix`, `/api/generate` writes the text between prompt and suffix.
These are rejected: `context`, and models with which the server was not started.
"""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import mlc_amd
from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.engine.generation import MOST_LOGPROBS
from mlc_amd.schedules.formats import parameters
from mlc_amd.tools.server import chat_request as forms
from mlc_amd.tools.server import errors
from mlc_amd.tools.server.answering import Answering
from mlc_amd.tools.server.apis.openai_chat import check_tools
from mlc_amd.tools.server.apis.openai_fields import endings, logprob_body, sampling
from mlc_amd.tools.server.errors import ApiError
from mlc_amd.tools.server.fields import Fields
from mlc_amd.tools.server.formats import answer_format
from mlc_amd.tools.server.images import images_in
from mlc_amd.tools.server.library import Loaded, LoadedEncoder
from mlc_amd.tools.server.prompts import check_messages, with_images
from mlc_amd.tools.server.service import client_of, read_fields, respond, service_of
from mlc_amd.tools.server.streaming import Encoder, Json, dumps

_EFFORTS = {"low": ("low", "on"), "medium": ("medium", "on"), "high": ("high", "on")}
_OF_CALLS = (forms.ToolCallBegin, forms.ToolCallArguments)
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
    """Loads the model; the answer to a request without a prompt."""
    async with service_of(request).library.use(name) as model:
        return Json({**_head(model.name), **answer, "done": True, "done_reason": "load"})


# ---- requests


def chat_request(fields: Fields, client: str) -> forms.ChatRequest | None:
    """The request; None if there are no messages: then the model is only loaded."""
    if not fields.raw("messages"):
        return None
    return forms.ChatRequest(
        messages=check_messages(fields), tools=check_tools(fields), thinking=_thinking(fields),
        **_common(fields, client),
    )  # fmt: skip


def generate_request(fields: Fields, client: str) -> forms.AnswerRequest | None:
    """The request; None if there is no prompt: then the model is only loaded."""
    if fields.raw("context"):
        raise fields.wrong("context", "left out: this server has no such function")
    prompt, system, suffix = fields.text("prompt"), fields.text("system"), fields.text("suffix")
    if not (prompt or suffix):
        return None
    images = images_in(fields)
    if suffix:
        if images:
            raise fields.wrong("images", "left out of requests with a suffix")
        return forms.TextRequest(prompts=[forms.Gap(prompt, suffix)], **_common(fields, client))
    if fields.flag("raw"):
        if images:
            raise fields.wrong("images", "left out where raw is true: the chat template places them")
        return forms.TextRequest(prompts=[prompt], **_common(fields, client))
    messages = [{"role": "system", "content": system}] if system else []
    messages.append(with_images({"role": "user", "content": prompt}, images))
    return forms.ChatRequest(messages=messages, thinking=_thinking(fields), **_common(fields, client))


def _common(fields: Fields, client: str) -> dict[str, Any]:
    options = fields.object("options") or Fields({}, "options")
    limit = options.whole("num_predict")
    logprobs = fields.whole("top_logprobs", 0, MOST_LOGPROBS) or 0 if fields.flag("logprobs") else None
    return {
        "model": fields.text("model"),
        "sampling": sampling(options),
        "max_tokens": limit if limit is not None and limit > 0 else None,  # -1 means no limit
        **endings(options),
        "logprobs": logprobs,
        "response_format": answer_format(fields, "format", _format(fields)),
        "context": options.whole("num_ctx", 1),
        "client": client,
    }


def _format(fields: Fields) -> forms.ResponseFormat | None:
    """The format of the answer: "json", or a schema."""
    given = fields.raw("format")
    if not given:
        return None
    if given == "json":
        return forms.ANY_OBJECT
    if not isinstance(given, dict):
        raise fields.wrong("format", '"json" or a JSON schema')
    return forms.ResponseFormat(schema=given)


def _thinking(fields: Fields) -> tuple[str, ...]:
    given = fields.raw("think")
    if given is None:
        return ()
    if isinstance(given, bool):
        return ("on", "medium") if given else ("off", "low")
    if not isinstance(given, str) or given not in _EFFORTS:
        raise fields.wrong("think", "true, false, low, medium or high")
    return _EFFORTS[given]


# ---- answers


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


def _end(answering: Answering, end: forms.Finish) -> dict[str, Any]:
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


def _whole_chat(answering: Answering, events: Sequence[forms.Event]) -> dict[str, Any]:
    made = _said(forms.blocks_of(events), "content")
    logprobs = made.pop("logprobs", None)
    end = _end(answering, forms.finish_of(events))
    body = {**_head(answering.model.name), "message": {"role": "assistant", **made}, **end}
    return body | ({"logprobs": logprobs} if logprobs else {})


def _whole_text(answering: Answering, events: Sequence[forms.Event]) -> dict[str, Any]:
    made = _said(forms.blocks_of(events), "response")
    return {**_head(answering.model.name), **made, **_end(answering, forms.finish_of(events))}


def _said(blocks: Sequence[forms.Block], name: str) -> dict[str, Any]:
    """The fields for blocks of an answer. name: the field of the text."""
    text, thought, calls = forms.parts_of(blocks)
    found: dict[str, Any] = {name: text} | ({"thinking": thought} if thought else {})
    if calls:
        found["tool_calls"] = [
            {"id": call.id, "function": {"index": number, "name": call.name, "arguments": call.arguments}}
            for number, call in enumerate(calls)
        ]
    if logprobs := [logprob_body(one) for block in blocks for one in block.logprobs]:
        found["logprobs"] = logprobs
    return found


class TextLines(Encoder):
    """The encoder of streamed answers of `/api/generate`. Calls are written whole, because their arguments are objects.
    field: the field of the text."""

    media_type = "application/x-ndjson"
    field = "response"

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._calls: list[forms.Event] = []  # events of calls, which are written at the end

    def events(self, events: Sequence[forms.Event]) -> bytes:
        end = next((event for event in events if isinstance(event, forms.Finish)), None)
        self._calls += [event for event in events if isinstance(event, _OF_CALLS)]
        blocks = forms.blocks_of(event for event in events if not isinstance(event, _OF_CALLS))
        made = self._line(_said(blocks, self.field)) if blocks else b""
        if end is None:
            return made
        if self._calls:
            made += self._line(_said(forms.blocks_of(self._calls), self.field))
        return made + self._line({self.field: ""}, _end(self._answering, end))

    def _line(self, said: dict[str, Any], end: dict[str, Any] | None = None) -> bytes:
        return dumps({**_head(self._answering.model.name), **self._shaped(said), **(end or {"done": False})}) + b"\n"

    def _shaped(self, said: dict[str, Any]) -> dict[str, Any]:
        return said

    def error(self, error: ApiError) -> bytes:
        return dumps(errors.ollama_body(error)) + b"\n"

    def ping(self) -> bytes:
        return b""


class ChatLines(TextLines):
    """The encoder of streamed answers of `/api/chat`."""

    field = "content"

    def _shaped(self, said: dict[str, Any]) -> dict[str, Any]:
        logprobs = {"logprobs": said.pop("logprobs")} if "logprobs" in said else {}
        return {"message": {"role": "assistant", **said}, **logprobs}


# ---- models


async def tags(request: Request) -> Response:
    return Json({"models": [_model(request, name) for name in service_of(request).library.names]})


async def running(request: Request) -> Response:
    found = []
    for name, model in service_of(request).library.loaded.items():
        memory = model.engine.artifact.manifest["weight_bytes"]
        found.append({**_model(request, name), "size_vram": memory, "context_length": model.engine.context})
    return Json({"models": found})


def _model(request: Request, name: str) -> dict[str, Any]:
    """What is known of a model without loading it."""
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
    manifest = artifact.manifest if artifact else None
    family = manifest["model"]["architecture"] if manifest else ""
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _parameters(parameters(manifest["formats"])) if manifest else "",
        "quantization_level": manifest["quantization"] if manifest else "",
    }


def _parameters(count: float) -> str:
    """A number of parameters as ollama writes it ("8.0B")."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


async def show(request: Request) -> Response:
    """Describes a model. It is loaded, because the description comes from its artifact."""
    fields = await read_fields(request)
    async with service_of(request).library.use(fields.text("model") or fields.text("name"), Loaded) as model:
        engine = model.engine
        sampling = engine.artifact.manifest["sampling"]
        return Json(
            {
                "modelfile": "",
                "parameters": "\n".join(f"{name} {value}" for name, value in sampling.items()),
                "template": engine.chat_template.source if isinstance(engine, Engine) else "",
                "details": _details(engine.artifact),
                "model_info": {
                    "general.architecture": engine.config["architecture"],
                    "general.name": engine.artifact.manifest["name"],
                    f"{engine.config['architecture']}.context_length": engine.context,
                },
                "capabilities": _capabilities(model),
                "modified_at": _model(request, model.name)["modified_at"],
            }
        )


def _capabilities(model: Loaded) -> list[str]:
    if isinstance(model, LoadedEncoder):
        return ["embedding"]
    fills = isinstance(model.engine, Engine) and model.engine.fill.possible
    return ["completion", "tools", *["insert"] * fills, *["vision"] * model.sees]


async def pull(request: Request) -> Response:
    """Succeeds for the server's own models."""
    fields = await read_fields(request)
    name = _named(fields)
    try:
        service_of(request).library.name(name)
    except ApiError as error:
        advice = "this server loads no others while it runs: start it with `mlc-amd serve OWNER/REPO:QUANT`, a model of"
        raise ApiError(404, f"{error.message}; {advice} huggingface.co", error.param, error.code) from None
    done = dumps({"status": "success"})
    return Response(done + b"\n", media_type=TextLines.media_type if fields.flag("stream", True) else Json.media_type)


async def delete(request: Request) -> Response:
    name = service_of(request).library.name(_named(await read_fields(request)))
    advice = "start it without the model, and delete the file; `mlc-amd cache rm` deletes what was compiled of it"
    raise ApiError(403, f"this server deletes no models, {name} neither: {advice}", "model")


def _named(fields: Fields) -> str:
    name = fields.text("model") or fields.text("name")
    return name or fields.required("model")


async def version(request: Request) -> Response:
    return Json({"version": mlc_amd.__version__})
