# pyright: reportMissingImports=false
"""What runs on a Ray cluster for `mlc-amd serve --ray`: replicas of the server, each with its own engine, and a gateway
that forwards each request to the best replica.

    Ray's HTTP proxy -> Gateway -> Router chooses -> Replica: the application of app.py -> back the same way

A replica gets a `Call`, and returns lists of ASGI messages as they are made. If the client goes away, or the caller
cancels, the answer ends.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ray
from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mlc_amd.runtime.engine.encoder import Encoder
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.tools.server.affinity import Affinity, prompt_blocks
from mlc_amd.tools.server.apis.response_objects import ResponseStore
from mlc_amd.tools.server.app import make_app
from mlc_amd.tools.server.errors import ApiError, overloaded
from mlc_amd.tools.server.library import Library
from mlc_amd.tools.server.middleware import error_response
from mlc_amd.tools.server.options import ServeOptions
from mlc_amd.tools.server.service import Service, parse_body, read_body
from mlc_amd.tools.terminal import terminal

# The entries of ASGI's scope that describe the request; the others belong to the process.
_SCOPE = (
    "type", "asgi", "http_version", "server", "client", "scheme", "method", "path", "raw_path", "query_string",
    "root_path", "headers",
)  # fmt: skip
# Seconds within which all replicas must return their metrics.
_METRICS_LIMIT = 10.0
_RESPONSES = "/v1/responses"


@dataclass(frozen=True)
class Call:
    """A request as data. blocks: of its prompt (affinity.py). response: the id of the Responses API's response to which
    it refers; it begins with the name of the replica that made it."""

    scope: dict[str, Any]
    body: bytes
    blocks: tuple[int, ...] = ()
    response: str = ""


# ---- a replica


class Replica:
    """The server's application. load: (name, numbers of the GPUs that Ray assigned to this replica) -> its engine."""

    def __init__(
        self, names: Sequence[str], load: Callable[[str, tuple[int, ...]], Engine | Encoder], options: ServeOptions
    ) -> None:
        terminal.clean_process()
        gpus = tuple(map(int, ray.get_gpu_ids()))
        loaders = {name: lambda name=name: load(name, gpus) for name in names}
        library = Library(loaders, options.models_max, options.idle_unload, image_urls=options.allow_image_urls)
        library.add(names[0], load(names[0], gpus))
        library.start()
        self._name = serve.get_replica_context().replica_id.unique_id
        self._app = make_app(Service(library, options))
        self._app.state.responses = ResponseStore(self._name)
        self._tasks: set[asyncio.Task[None]] = set()

    async def answer(self, call: Call) -> AsyncIterator[list[Message]]:
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        gone, bodies = asyncio.Event(), [call.body]

        async def receive() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app(dict(call.scope), receive, sent.put)
            finally:
                sent.put_nowait(None)

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            while (message := await sent.get()) is not None:
                messages = [message]
                while not sent.empty() and (message := sent.get_nowait()) is not None:
                    messages.append(message)
                yield messages
                if message is None:
                    break
            await task
        finally:
            gone.set()

    async def whole(self, call: Call) -> tuple[str, list[Message]]:
        """This replica's name, and the whole answer."""
        return self._name, [message async for messages in self.answer(call) for message in messages]


# ---- the choice of a replica


class Router(RequestRouter):
    """Chooses the replica that can begin the answer first; or the one with the response that the call is about."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._affinity = Affinity()
        self._running: Counter[str] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # if all replicas are full
        call: Call = pending_request.args[0]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ranked = self._affinity.ranked(call.blocks, {name: self._running[name] for name in by_name})
        if call.response:
            ranked.sort(key=lambda name: not call.response.startswith(f"resp_{name}"))
        return [[by_name[name]] for name in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._affinity.given(replica_id.unique_id, pending_request.args[0].blocks)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._running[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._running[replica_id.unique_id] -= 1

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._affinity.gone(replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        before = set(self.curr_replicas)
        super().update_replicas(replicas)
        for replica_id in before - set(self.curr_replicas):
            self._affinity.gone(replica_id.unique_id)


# ---- the gateway


class Gateway:
    """Accepts the requests. replicas: a handle to a deployment of `Replica` with `Router`. There is one gateway
    process, as it has in memory what it knows of the replicas' caches and load."""

    def __init__(self, replicas: DeploymentHandle, options: ServeOptions) -> None:
        terminal.clean_process()
        self._replicas, self._options = replicas, options
        self._stopping = False
        self._running: set[asyncio.Task[Any]] = set()

    async def __call__(self, request: Request) -> Response:
        return _Asgi(self._serve)

    async def stop(self) -> int:
        """Accepts no more requests. Returns how many are in progress."""
        self._stopping = True
        return len(self._running)

    async def end(self, now: bool = False) -> None:
        """Returns when the requests in progress are answered. now: ends them instead."""
        for task in self._running if now else ():
            task.cancel()
        while self._running:
            await asyncio.wait(self._running)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        task, begun = asyncio.current_task(), False
        assert task is not None
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            if self._stopping:
                raise overloaded("this server is stopping")
            call = await self._call(scope, receive)
            answers = self._metrics(call) if call.scope["path"] == "/metrics" else self._answer(call)
            async for messages in answers:
                for message in messages:
                    begun = True
                    await send(message)
        except (ApiError, RayActorError, RayServeException, TimeoutError) as error:
            if begun:  # the response has begun: the connection ends without an error body
                raise
            known = error if isinstance(error, ApiError) else overloaded("the replica that had this request has died")
            await error_response(scope["path"], known)(scope, receive, send)

    async def _call(self, scope: Scope, receive: Receive) -> Call:
        """Reads a request. Raises ApiError if its body is late or too large. The replica reports other errors."""
        body = bytes(await read_body(Request(scope, receive), self._options))
        made, path = {name: scope[name] for name in _SCOPE if name in scope}, scope["path"]
        # the body is decoded already
        made["headers"] = [header for header in scope["headers"] if header[0] != b"content-encoding"]
        blocks, response = (), path.removeprefix(f"{_RESPONSES}/") if path.startswith(f"{_RESPONSES}/") else ""
        if body:
            with suppress(ApiError):
                fields = await parse_body(body)
                blocks = await asyncio.to_thread(prompt_blocks, fields)
                response = str(fields.get("previous_response_id") or "") if isinstance(fields, dict) else ""
        return Call(made, body, blocks, response)

    async def _answer(self, call: Call) -> AsyncIterator[list[Message]]:
        response: Any = self._replicas.options(method_name="answer", stream=True).remote(call)
        try:
            async for messages in response:
                yield messages
        finally:
            response.cancel()  # no effect if the response has ended

    async def _metrics(self, call: Call) -> AsyncIterator[list[Message]]:
        """The metrics of all replicas, with an additional label `replica`."""
        answers = await self._replicas.broadcast("whole", call).results_async(timeout_s=_METRICS_LIMIT)
        refused = [messages for _, messages in answers if messages[0]["status"] != 200]
        yield refused[0] if refused else _merged(dict(answers))


class _Asgi(Response):
    """A response that an ASGI application makes."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Any]) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _merged(answers: Mapping[str, Iterable[Message]]) -> list[Message]:
    """The answer with the metrics of all replicas, from one answer for each replica."""
    families: dict[str, Metric] = {}
    for replica, messages in sorted(answers.items()):
        text = b"".join(message.get("body", b"") for message in messages).decode()
        for family in text_string_to_metric_families(text):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            whole.samples += [one._replace(labels={**one.labels, "replica": replica}) for one in family.samples]
    headers = [(b"content-type", CONTENT_TYPE_LATEST.encode())]
    registry: Any = SimpleNamespace(collect=families.values)  # the interface that prometheus_client needs
    return [
        {"type": "http.response.start", "status": 200, "headers": headers},
        {"type": "http.response.body", "body": generate_latest(registry)},
    ]
