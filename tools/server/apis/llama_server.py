"""`POST /tokenize`, `POST /detokenize`, `POST /apply-template` and `GET /props`, as llama-server has them
(https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md).

`model` says whose they are, which llama-server's do not need.
"""

import asyncio
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import mlc_amd
from mlc_amd.runtime.text.tokenizer import Tokenizer
from mlc_amd.tools.server.apis.openai_chat import chat_request
from mlc_amd.tools.server.errors import invalid
from mlc_amd.tools.server.service import client_of, read_fields, service_of
from mlc_amd.tools.server.streaming import Json


async def tokenize(request: Request) -> Response:
    """{"content", "add_special": false, "parse_special": true, "with_pieces": false} -> {"tokens": [..]}."""
    fields = await read_fields(request)
    fields.required("content")
    text, special = fields.text("content"), fields.flag("add_special")
    parse, pieces = fields.flag("parse_special", True), fields.flag("with_pieces")
    async with service_of(request).library.use(fields.text("model")) as model:
        tokenizer = model.engine.tokenizer
        ids = await asyncio.to_thread(tokenizer.encode, text, special, parse)
        return Json({"tokens": [_with_piece(tokenizer, token) for token in ids] if pieces else ids})


def _with_piece(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    """A piece that is no text by itself is a list of its bytes."""
    piece = tokenizer.token_bytes(token)
    try:
        return {"id": token, "piece": piece.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(piece)}


async def detokenize(request: Request) -> Response:
    """{"tokens": [..]} -> {"content"}, the texts of control tokens included."""
    fields = await read_fields(request)
    tokens = fields.required("tokens")
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise fields.wrong("tokens", "a list of token ids")
    async with service_of(request).library.use(fields.text("model")) as model:
        size = model.engine.tokenizer.vocab_size
        if bad := next((token for token in tokens if not 0 <= token < size), None):
            raise invalid(f"token id {bad} is outside the vocabulary of {size}", "tokens")
        return Json({"content": await asyncio.to_thread(model.engine.tokenizer.decode, tokens, False)})


async def apply_template(request: Request) -> Response:
    """A chat request -> {"prompt"}: the text that the model would continue."""
    asked = chat_request(await read_fields(request), client_of(request))
    async with service_of(request).library.use(asked.model) as model:
        text, _ = await asyncio.to_thread(model.prompter.prompt, asked)
        return Json({"prompt": text})


async def props(request: Request) -> Response:
    """Of the model that the query names (?model=), which is loaded if it is not."""
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
                "modalities": {"vision": False, "audio": False},
                "build_info": f"mlc-amd {mlc_amd.__version__}",
                "is_sleeping": False,
            }
        )
