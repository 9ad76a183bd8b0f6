"""`POST /tokenize`, `/detokenize`, `/apply-template`, `/completion` and `/infill`, `GET /props`, `/health` and
`/v1/models`, as in llama-server (https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md).

In addition to llama-server's fields, `model` names the model. /completion continues a prompt: a text; a list of token
ids and texts with at least one id; {"prompt_string": text, "multimodal_data": images in base64}, whose text has
"<__media__>" in the place of each image; or a list of these, for which the response is a list of answers. As in
llama-server, `n_predict` is unlimited by default. `response_fields` selects fields of whole answers and of the last
chunk ("a/b" is the field b of a); missing fields are left out. openai_fields.py has the fields of sampling, formats.py
the formats.

/infill writes the text between `input_prefix` and `input_suffix`, if the model has tokens for this (fill_in_middle.py).
`prompt` is the end of the prefix; `input_extra` is a list of other files, {"filename", "text"}. What does not fit the
context together with `n_predict` tokens is left out. The other fields are those of /completion.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import mlc_amd
from mlc_amd.runtime.engine.generation import ENDLESS, MOST_LOGPROBS, PromptProgress
from mlc_amd.runtime.text.fill_in_middle import UNNAMED, OtherFile
from mlc_amd.runtime.text.messages import IMAGE
from mlc_amd.runtime.text.tokenizer import Tokenizer
from mlc_amd.tools.server.answering import Answering
from mlc_amd.tools.server.apis import openai_fields
from mlc_amd.tools.server.apis.openai_chat import chat_request
from mlc_amd.tools.server.apis.openai_completions import prompts_of
from mlc_amd.tools.server.apis.openai_fields import finishes_of, progress_body, timings_body
from mlc_amd.tools.server.chat_request import Event, Finish, Gap, SeenText, Text, TextRequest, TokenLogprob
from mlc_amd.tools.server.errors import invalid, loading
from mlc_amd.tools.server.fields import Fields
from mlc_amd.tools.server.images import ImageSource
from mlc_amd.tools.server.library import Library, Loaded, LoadedEncoder
from mlc_amd.tools.server.service import client_of, read_fields, respond, service_of
from mlc_amd.tools.server.streaming import Encoder, Json, sse

_MEDIA = "<__media__>"  # stands for an image in a text
# this project's names of sampling parameters -> llama-server's
_SETTINGS = {"repetition_penalty": "repeat_penalty", "repetition_window": "repeat_last_n"}


async def tokenize(request: Request) -> Response:
    """{"content", "add_special": false, "parse_special": true, "with_pieces": false} -> {"tokens": [..]}. Also vLLM's
    form: {"prompt", "add_special_tokens": true} -> {"tokens", "count", "max_model_len"}."""
    fields = await read_fields(request)
    vllm = fields.has("prompt") and not fields.has("content")
    fields.required("prompt" if vllm else "content")
    text = fields.text("prompt" if vllm else "content")
    special = fields.flag("add_special_tokens", True) if vllm else fields.flag("add_special")
    parse, pieces = fields.flag("parse_special", True), fields.flag("with_pieces")
    async with service_of(request).library.use(fields.text("model"), Loaded) as model:
        tokenizer = model.engine.tokenizer
        ids = await asyncio.to_thread(tokenizer.encode, text, special, parse)
        more = {"count": len(ids), "max_model_len": model.engine.longest} if vllm else {}
        return Json({"tokens": [_with_piece(tokenizer, token) for token in ids] if pieces else ids, **more})


def _with_piece(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    """A token with its piece of text; a piece that is not valid text is a list of bytes."""
    piece = tokenizer.token_bytes(token)
    try:
        return {"id": token, "piece": piece.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(piece)}


async def detokenize(request: Request) -> Response:
    """{"tokens": [..]} -> {"content"}, with the texts of control tokens. vLLM's name of the result is "prompt"."""
    fields = await read_fields(request)
    tokens = fields.required("tokens")
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise fields.wrong("tokens", "a list of token ids")
    async with service_of(request).library.use(fields.text("model"), Loaded) as model:
        size = model.engine.tokenizer.vocab_size
        if bad := next((token for token in tokens if not 0 <= token < size), None):
            raise invalid(f"token id {bad} is outside the vocabulary of {size}", "tokens")
        text = await asyncio.to_thread(model.engine.tokenizer.decode, tokens, False)
        return Json({"content": text, "prompt": text})


async def tokenizer_info(request: Request) -> Response:
    """vLLM's `GET /tokenizer_info`: special tokens and chat template of the model that the query names (?model=)."""
    async with service_of(request).library.use(request.query_params.get("model", "")) as model:
        tokenizer = model.engine.tokenizer
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        texts = {name: None if token is None else tokenizer.token_text(token) for name, token in ids.items()}
        return Json(
            {"tokenizer_class": type(tokenizer).__name__, **texts, "chat_template": model.engine.chat_template.source}
        )


async def apply_template(request: Request) -> Response:
    """A chat request -> {"prompt"}: the text that the model would continue, in the form for /completion."""
    asked = chat_request(await read_fields(request), client_of(request))
    async with service_of(request).library.use(asked.model) as model:
        text, _ = await asyncio.to_thread(model.prompter.prompt, asked)
        return Json({"prompt": str(text).replace(IMAGE, _MEDIA)})


async def props(request: Request) -> Response:
    """The properties of the model that the query names (?model=). The model is loaded if necessary."""
    service = service_of(request)
    async with service.library.use(request.query_params.get("model", "")) as model:
        engine = model.engine
        return Json(
            {
                "default_generation_settings": {"n_ctx": engine.context, "params": asdict(engine.sampling)},
                "total_slots": service.options.max_requests,
                "model_alias": model.name,
                "model_path": str(engine.artifact.path),
                "chat_template": engine.chat_template.source,
                "media_marker": _MEDIA,
                "modalities": {"vision": model.sees, "audio": False},
                "build_info": f"mlc-amd {mlc_amd.__version__}",
                "is_sleeping": False,
            }
        )


# ---- information about the server


async def models(request: Request) -> Response:
    """The models, in OpenAI's form, and llama-server's list of what models can do."""
    library = service_of(request).library
    capable = [{"name": name, "model": name, "capabilities": _capabilities(library, name)} for name in library.names]
    return Json({"object": "list", "data": [_model(library, name) for name in library.names], "models": capable})


async def model(request: Request) -> Response:
    library = service_of(request).library
    return Json(_model(library, library.name(request.path_params["name"])))


def _model(library: Library, name: str) -> dict[str, Any]:
    """A model: OpenAI's fields; `status` as in llama-server's router; for a loaded model `meta` as in llama-server, and
    `architecture` as in OpenRouter."""
    loaded = library.loaded.get(name)
    made: dict[str, Any] = {"id": name, "object": "model", "created": library.created, "owned_by": "mlc-amd"}
    made["status"] = {"value": "loaded" if loaded else "unloaded"}
    if loaded:
        config, context = loaded.engine.config, loaded.engine.context
        made["meta"] = {"n_vocab": loaded.engine.vocab, "n_ctx": context, "n_ctx_train": config["context"]}
        made["max_model_len"] = context  # vLLM's name of this field
        made["architecture"] = {"input_modalities": ["text", "image"] if loaded.sees else ["text"]}
    return made


def _capabilities(library: Library, name: str) -> list[str]:
    """What the model can do; unknown while it is not loaded."""
    loaded = library.loaded.get(name)
    if loaded is None:
        return []
    first = "embedding" if isinstance(loaded, LoadedEncoder) else "completion"
    return [first, "multimodal"] if loaded.sees else [first]


async def health(request: Request) -> Response:
    """200 if the server accepts requests; 503 until the default model is loaded, and while the server is stopping."""
    service = service_of(request)
    if service.stopping or service.loading:
        return Json({"status": "stopping" if service.stopping else "loading model"}, 503, loading().headers)
    return Json({"status": "ok"})


# ---- /completion


async def completion(request: Request) -> Response:
    fields = await read_fields(request)
    given = fields.required("prompt")
    several = _are_several(given)
    prompts = prompts_of(fields, [_plain(fields, one) for one in (given if several else [given])], (int, str))
    return await _answer(request, fields, prompts, several)


async def infill(request: Request) -> Response:
    fields = await read_fields(request)
    for name in ("input_prefix", "input_suffix"):
        fields.required(name)
    before, after = fields.text("input_prefix") + fields.text("prompt"), fields.text("input_suffix")
    return await _answer(request, fields, [Gap(before, after, _other_files(fields), cut=True)], False)


def _other_files(fields: Fields) -> tuple[OtherFile, ...]:
    given = fields.raw("input_extra") or []
    if not isinstance(given, list):
        raise fields.wrong("input_extra", 'a list of {"filename", "text"}')
    found = []
    for place, one in enumerate(given):
        part = Fields(one, f"input_extra[{place}]")
        part.required("text")
        found.append(OtherFile(part.text("text"), part.text("filename") or UNNAMED))
    return tuple(found)


async def _answer(request: Request, fields: Fields, prompts: list[Any], several: bool) -> Response:
    asked, stream = _text_request(fields, prompts, client_of(request)), fields.flag("stream")
    wanted = fields.flag("return_tokens") or stream, bool(fields.whole("n_probs"))
    shown = fields.texts("response_fields")
    encoder = partial(_Chunks, wanted=wanted, shown=shown, timed=fields.flag("timings_per_token")) if stream else None
    return await respond(request, asked, encoder, partial(_whole, several, wanted, shown))


def _text_request(fields: Fields, prompts: list[Any], client: str) -> TextRequest:
    probabilities = fields.whole("n_probs", 0, MOST_LOGPROBS) or 0
    ids = probabilities or fields.flag("return_tokens") or fields.flag("stream")
    return TextRequest(
        **openai_fields.common(fields, client, least=0),
        prompts=prompts,
        logprobs=probabilities if ids else None,
    )


def _are_several(prompt: Any) -> bool:
    """Whether a prompt is a list of prompts."""
    return isinstance(prompt, list) and not any(type(one) is int for one in prompt)


def _plain(fields: Fields, prompt: Any) -> Any:
    """A prompt that may be an object with a text and images."""
    if not isinstance(prompt, Mapping):
        return prompt
    of = Fields(prompt, fields.path("prompt"))
    of.required("prompt_string")
    text, data = of.text("prompt_string"), of.texts("multimodal_data")
    if not data:
        return text
    if text.count(_MEDIA) != len(data):
        raise of.wrong("prompt_string", f"a text with {_MEDIA} once for each of multimodal_data")
    path = of.path("multimodal_data")
    images = [ImageSource(one, f"{path}[{place}]") for place, one in enumerate(data)]
    return SeenText(text.replace(IMAGE, "").replace(_MEDIA, IMAGE), images)


# ---- answers

# whether token ids are wanted, and whether probabilities are
Wanted = tuple[bool, bool]


def _chosen(body: Mapping[str, Any], fields: Sequence[str]) -> Mapping[str, Any]:
    """The selected fields of a body; see `response_fields` in the module's docstring."""
    if not fields:
        return body
    found = {}
    for field in fields:
        value: Any = body
        for name in field.split("/"):
            value = value.get(name) if isinstance(value, Mapping) else None
        found |= {} if value is None else {field: value}
    return found


def _whole(several: bool, wanted: Wanted, shown: Sequence[str], answering: Answering, events: Sequence[Event]) -> Any:
    made = []
    for end in finishes_of(events):
        texts = [event for event in events if isinstance(event, Text) and event.index == end.index]
        body = _said(end.index, texts, wanted) | _ended(answering, end, "".join(text.text for text in texts))
        made.append(_chosen(body, shown))
    return made if several else made[0]


def _said(index: int, texts: Sequence[Text], wanted: Wanted) -> dict[str, Any]:
    logprobs = [one for text in texts for one in text.logprobs]
    ids, probabilities = wanted
    made: dict[str, Any] = {"index": index, "content": "".join(text.text for text in texts), "stop": False}
    made |= {"id_slot": index, "tokens": [one.id for one in logprobs] if ids else []}
    if probabilities:
        told = [_token(one) | {"top_logprobs": list(map(_token, one.top))} for one in logprobs]
        made["completion_probabilities"] = told
    return made


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"id": token.id, "token": token.text, "bytes": list(token.bytes), "logprob": token.logprob}


def _ended(answering: Answering, end: Finish, text: str) -> dict[str, Any]:
    """The fields of an answer's end. text: of the whole answer."""
    request, engine = answering.request, answering.model.engine
    assert isinstance(request, TextRequest), "it was asked for"
    limited, prompt = end.reason == "length", request.prompts[end.index]
    settings = asdict(engine.sampling.changed(**request.sampling))
    settings = {_SETTINGS.get(name, name): value for name, value in settings.items()}
    settings["logit_bias"] = [{"token": token, "bias": bias} for token, bias in settings["logit_bias"].items()]
    limit = -1 if request.max_tokens is None else request.max_tokens
    return {
        "stop": True,
        "model": answering.model.name,
        "prompt": prompt.before if isinstance(prompt, Gap) else prompt.text if isinstance(prompt, SeenText) else prompt,
        "stop_type": "limit" if limited else "eos" if end.stop is None else "word",
        "stopping_word": end.stop or "",
        "has_new_line": "\n" in text,
        "truncated": limited and end.usage.completion != request.max_tokens,
        "tokens_predicted": end.usage.completion,
        "tokens_evaluated": end.usage.prompt,
        "tokens_cached": end.usage.cached,
        "generation_settings": {
            **settings,
            "n_ctx": engine.context,
            "n_predict": limit,
            "max_tokens": limit,
            "stop": list(request.stop),
            "ignore_eos": request.min_tokens == ENDLESS,
            "n_probs": request.logprobs or 0,
        },
        "timings": timings_body(end),
    }


class _Chunks(Encoder):
    """The encoder of streamed answers."""

    def __init__(self, answering: Answering, wanted: Wanted, shown: Sequence[str], timed: bool) -> None:
        self._answering, self._wanted, self._shown, self._timed = answering, wanted, shown, timed
        self._texts: dict[int, str] = {}  # the texts so far, by index

    def events(self, events: Sequence[Event]) -> bytes:
        return b"".join(self._encoded(event) for event in events if isinstance(event, Text | PromptProgress | Finish))

    def _encoded(self, event: Text | PromptProgress | Finish) -> bytes:
        if isinstance(event, PromptProgress):
            return sse(_said(event.index, [], self._wanted) | progress_body(event))
        before = self._texts.get(event.index, "")
        if isinstance(event, Text):
            self._texts[event.index] = before + event.text
            timings = {"timings": timings_body(self._answering.progress(event.index))} if self._timed else {}
            return sse(_said(event.index, [event], self._wanted) | timings)
        body = _said(event.index, [], self._wanted) | _ended(self._answering, event, before)
        return sse(_chosen(body, self._shown))
