"""What a server tells about itself: `GET /v1/models` (OpenAI's form), `GET /health`."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlc_amd.tools.server.library import Library
from mlc_amd.tools.server.service import service_of
from mlc_amd.tools.server.streaming import Json


async def models(request: Request) -> Response:
    library = service_of(request).library
    return Json({"object": "list", "data": [_model(library, name) for name in library.names]})


async def model(request: Request) -> Response:
    library = service_of(request).library
    return Json(_model(library, library.name(request.path_params["name"])))


def _model(library: Library, name: str) -> dict[str, Any]:
    """OpenAI's fields; `status` as llama-server's router has it; `meta` of a loaded model, as llama-server's."""
    loaded = library.loaded.get(name)
    made: dict[str, Any] = {"id": name, "object": "model", "created": library.created, "owned_by": "mlc-amd"}
    made["status"] = {"value": "loaded" if loaded else "unloaded"}
    if loaded:
        config, context = loaded.engine.config, loaded.engine.context
        made["meta"] = {"n_vocab": loaded.engine.vocab, "n_ctx": context, "n_ctx_train": config["context"]}
        made["max_model_len"] = context  # vLLM's name for it
    return made


async def health(request: Request) -> Response:
    """200 once requests are taken, 503 while the server is stopping."""
    if service_of(request).stopping:
        return Json({"status": "stopping"}, 503)
    return Json({"status": "ok"})
