"""Vectors of texts, and scores of texts for a query.

    POST /v1/embeddings             OpenAI's (https://platform.openai.com/docs/api-reference/embeddings)
    POST /embedding, /embeddings    llama-server's: a list with the vectors of each text's tokens, or its one vector
    POST /api/embed                 ollama's; /api/embeddings: its older API for one text, not normalized
    POST /v1/rerank, /rerank, ..    jina's, as in llama-server; with `texts` instead of `documents` the API of Hugging
                                    Face's text-embeddings-inference
    POST /v2/rerank                 Cohere's, with jina's fields in addition

A text is a string, or a list of token ids that may also contain strings. Texts that are too long are errors, unless
`truncate` is true, which is the default of ollama's API.
"""

import asyncio
import base64
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from mlc_amd.runtime.engine.encoder import Encoder, normalized
from mlc_amd.tools.server.errors import invalid
from mlc_amd.tools.server.fields import Fields
from mlc_amd.tools.server.library import LoadedEncoder
from mlc_amd.tools.server.service import read_fields, service_of
from mlc_amd.tools.server.streaming import Json

Found = TypeVar("Found")
_NANOSECONDS = 1_000_000_000


async def openai(request: Request) -> Response:
    fields = await read_fields(request)
    form = fields.choice("encoding_format", ("float", "base64"), "float")
    vectors, tokens, name = await _embedded(request, fields, _texts(fields, "input"), single=True)
    data = [
        {"object": "embedding", "index": i, "embedding": _encoded(rows[0]) if form == "base64" else rows[0].tolist()}
        for i, rows in enumerate(vectors)
    ]
    return Json({"object": "list", "data": data, "model": name, "usage": _usage(tokens)})


def _encoded(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


async def llama_server(request: Request) -> Response:
    fields = await read_fields(request)
    norm = fields.whole("embd_normalize", -1)
    texts = _texts(fields, "content" if fields.has("content") else "input")
    vectors, _, _ = await _embedded(request, fields, texts, norm=2 if norm is None else norm)
    return Json([{"index": i, "embedding": rows.tolist()} for i, rows in enumerate(vectors)])


async def ollama(request: Request) -> Response:
    fields, begun = await read_fields(request), time.perf_counter()
    vectors, tokens, name = await _embedded(request, fields, _texts(fields, "input"), single=True, truncate=True)
    spent = int((time.perf_counter() - begun) * _NANOSECONDS)
    body = {"model": name, "embeddings": [rows[0].tolist() for rows in vectors], "total_duration": spent}
    return Json(body | {"load_duration": 0, "prompt_eval_count": tokens})


async def ollama_single(request: Request) -> Response:
    fields = await read_fields(request)
    texts = [fields.required_text("prompt")]
    vectors, _, _ = await _embedded(request, fields, texts, norm=-1, single=True, truncate=True)
    return Json({"embedding": vectors[0][0].tolist()})


async def rerank(request: Request) -> Response:
    fields = await read_fields(request)
    query, top = fields.required_text("query"), fields.whole("top_n", 0)
    tei = fields.has("texts") and not fields.has("documents")
    documents = _documents(fields, "texts" if tei else "documents")

    def score(encoder: Encoder) -> tuple[np.ndarray, int]:
        encoder.check_ranks()
        pairs = encoder.ids([encoder.tokenizer.encode_pair(query, text) for text in documents], fields.flag("truncate"))
        return encoder.scores(pairs), sum(map(len, pairs))

    (scores, tokens), name = await _computed(request, fields, score, len(documents))
    order = [int(i) for i in np.argsort(-scores, kind="stable")][: len(documents) if top is None else top]
    if tei:
        shown = fields.flag("return_text")
        return Json(
            [{"index": i, "score": float(scores[i])} | ({"text": documents[i]} if shown else {}) for i in order]
        )
    shown = fields.flag("return_documents")
    results = [
        {"index": i, "relevance_score": float(scores[i])} | ({"document": {"text": documents[i]}} if shown else {})
        for i in order
    ]
    meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    body = {"object": "list", "id": str(uuid4()), "model": name, "results": results, "usage": _usage(tokens)}
    return Json(body | ({"meta": meta} if request.url.path.startswith("/v2/") else {}))


# ---- requests


def _texts(fields: Fields, name: str) -> list[str | list[int | str]]:
    """The text, or the texts, in a field."""
    given: Any = fields.required(name)
    texts = [given] if isinstance(given, str) or _is_ids(given) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(one, str) or _is_ids(one) for one in texts):
        raise fields.wrong(name, "a string, a list of token ids, or a list of these with at least one")
    return texts


def _is_ids(value: Any) -> bool:
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    return int in kinds and kinds <= {int, str}


def _documents(fields: Fields, name: str) -> list[str]:
    """The documents in a field: strings, or objects with a `text`."""
    given: Any = fields.required(name)
    documents: list[Any] = (
        [one.get("text") if isinstance(one, dict) else one for one in given] if isinstance(given, list) else []
    )
    if not documents or not all(isinstance(one, str) for one in documents):
        raise fields.wrong(name, "a list of strings, or of objects with a text, with at least one")
    return documents


async def _embedded(
    request: Request, fields: Fields, texts: Sequence[str | list[int | str]], norm: int = 2, single: bool = False,
    truncate: bool = False,
) -> tuple[list[np.ndarray], int, str]:  # fmt: skip
    """Computes vectors. Returns (float32 [vectors, numbers] for each text, number of tokens, the model's name). norm:
    see `normalized`, for vectors of whole texts. single: whether a model without pooling is an error."""
    size, cut = fields.whole("dimensions", 1), fields.flag("truncate", truncate)

    def embed(encoder: Encoder) -> tuple[list[np.ndarray], int]:
        plain = encoder.encoder["pooling"] == "none"
        if single and plain:
            raise invalid("this model has a vector for each token (pooling none): use /embedding, or another --pooling")
        ids = encoder.ids(texts, cut)
        found = encoder.embed(ids, normalize=False, dimensions=size or 0)
        rows = found if isinstance(found, list) else [row[None] for row in found]
        return [one if plain else normalized(one, norm) for one in rows], sum(map(len, ids))

    (vectors, tokens), name = await _computed(request, fields, embed, len(texts))
    return vectors, tokens, name


async def _computed(
    request: Request, fields: Fields, compute: Callable[[Encoder], tuple[Found, int]], texts: int
) -> tuple[tuple[Found, int], str]:
    """Runs a computation with the request's model in a thread. Returns its result, the number of tokens, and the
    model's name."""
    service = service_of(request)
    async with service.library.use(fields.text("model"), LoadedEncoder) as model:
        found = await asyncio.to_thread(compute, model.engine)
    service.metrics.encoded(model.name, texts, found[1])
    return found, model.name


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
