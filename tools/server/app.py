"""The Starlette application: which handler answers which path.

In: `Service`. Out: `make_app(service)`, an ASGI application. When it ends, it unloads all models.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Mount, Route, compile_path
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from mlc_amd.tools.server import metrics, middleware
from mlc_amd.tools.server.apis import (
    anthropic,
    embeddings,
    llama_server,
    llama_slots,
    ollama,
    openai_chat,
    openai_completions,
    responses,
)
from mlc_amd.tools.server.apis.response_objects import ResponseStore
from mlc_amd.tools.server.service import Service

# The page may only load scripts and styles from its own files, and only connect to this server.
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
# path, method, handler
ROUTES = (
    ("/health", "GET", llama_server.health),
    ("/metrics", "GET", metrics.metrics),
    ("/v1/models", "GET", llama_server.models),
    ("/v1/models/{name:path}", "GET", llama_server.model),
    ("/v1/chat/completions", "POST", openai_chat.chat_completions),
    ("/v1/completions", "POST", openai_completions.completions),
    ("/v1/responses", "POST", responses.create),
    ("/v1/responses/{id}", "GET", responses.retrieve),
    ("/v1/responses/{id}", "DELETE", responses.delete),
    ("/v1/messages", "POST", anthropic.messages),
    ("/v1/messages/count_tokens", "POST", anthropic.count_tokens),
    ("/api/chat", "POST", ollama.chat),
    ("/api/generate", "POST", ollama.generate),
    ("/v1/embeddings", "POST", embeddings.openai),
    ("/embedding", "POST", embeddings.llama_server),
    ("/embeddings", "POST", embeddings.llama_server),
    ("/api/embed", "POST", embeddings.ollama),
    ("/api/embeddings", "POST", embeddings.ollama_single),
    ("/v1/rerank", "POST", embeddings.rerank),
    ("/v2/rerank", "POST", embeddings.rerank),
    ("/rerank", "POST", embeddings.rerank),
    ("/v1/reranking", "POST", embeddings.rerank),
    ("/reranking", "POST", embeddings.rerank),
    ("/api/tags", "GET", ollama.tags),
    ("/api/ps", "GET", ollama.running),
    ("/api/show", "POST", ollama.show),
    ("/api/pull", "POST", ollama.pull),
    ("/api/delete", "DELETE", ollama.delete),
    ("/api/version", "GET", ollama.version),
    ("/tokenize", "POST", llama_server.tokenize),
    ("/detokenize", "POST", llama_server.detokenize),
    ("/tokenizer_info", "GET", llama_server.tokenizer_info),
    ("/apply-template", "POST", llama_server.apply_template),
    ("/props", "GET", llama_server.props),
    ("/completion", "POST", llama_server.completion),
    ("/completions", "POST", llama_server.completion),
    ("/infill", "POST", llama_server.infill),
    ("/slots/{number:int}", "POST", llama_slots.slot),
    # OpenAI's paths without /v1, which llama-server also accepts
    ("/models", "GET", llama_server.models),
    ("/chat/completions", "POST", openai_chat.chat_completions),
    ("/responses", "POST", responses.create),
)
_PATHS = [(compile_path(path)[0], method) for path, method, _ in ROUTES]


class _Page(StaticFiles):
    """The files of the chat page, with headers that keep browsers from running anything else. For a path without a file
    the answer is "not found", whatever the method; paths of an API have other handlers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if taken := [method for path, method in _PATHS if path.fullmatch(scope["path"])]:
            raise HTTPException(405, headers={"Allow": ", ".join(taken)})
        if self.get_path(scope) == "." and scope["path"] != "/":  # other names of the folder lead to the page
            raise HTTPException(404)
        try:
            found = self.lookup_path(self.get_path(scope))[1]
        except (OSError, ValueError):  # the path of no file can be like this
            raise HTTPException(404) from None
        if scope["method"] not in ("GET", "HEAD") and not found:
            raise HTTPException(404)

        async def send_with_headers(message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(name.encode(), value.encode()) for name, value in PAGE_HEADERS.items()]
            await send(message)

        await super().__call__(scope, receive, send_with_headers)


def make_app(service: Service) -> Starlette:
    routes: list[BaseRoute] = [Route(path, handler, methods=[method]) for path, method, handler in ROUTES]
    page = Path(str(resources.files("mlc_amd.tools.server").joinpath("page")))
    if page.is_dir():
        routes.append(Mount("/", _Page(directory=page, html=True)))
    options, paths = service.options, [path for path, *_ in ROUTES]
    cors = Middleware(
        CORSMiddleware, allow_origins=list(options.cors_origins), allow_methods=["GET", "POST"], allow_headers=["*"],
        expose_headers=["x-request-id"],
    )  # fmt: skip
    layers = [
        *([cors] if options.cors_origins else []),
        Middleware(middleware.Gate, service=service, paths=paths),
        Middleware(
            middleware.Access, paths=paths, keys=options.api_key, origins=options.cors_origins, hosts=options.hosts
        ),
    ]
    handlers = {HTTPException: middleware.http_error}
    app = Starlette(routes=routes, middleware=layers, lifespan=_lifespan, exception_handlers=handlers)
    app.state.service, app.state.responses = service, ResponseStore()
    return app


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    app.state.service.library.start()
    yield
    await app.state.service.library.close()
