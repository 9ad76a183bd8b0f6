"""`POST /v1/responses`, OpenAI's Responses API, and `GET`, `DELETE /v1/responses/{id}`
(https://platform.openai.com/docs/api-reference/responses).

The last responses are kept in memory, so that their clients can continue them with `previous_response_id`, unless
`store` is false. Not supported: background responses, conversations, tools that OpenAI runs, images, files (400).
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlc_amd.tools.server.answering import Answering
from mlc_amd.tools.server.apis.response_objects import ResponseStore, as_message, ended, item, item_id, new_id, response
from mlc_amd.tools.server.apis.responses_fields import Asked, asked_of
from mlc_amd.tools.server.apis.responses_stream import ResponseEvents
from mlc_amd.tools.server.blocks import Block, blocks_of, finish_of
from mlc_amd.tools.server.chat_request import Event
from mlc_amd.tools.server.service import client_of, read_fields, respond
from mlc_amd.tools.server.streaming import Json


async def create(request: Request) -> Response:
    fields, client = await read_fields(request), client_of(request)
    for name in ("background", "conversation", "prompt"):
        if fields.raw(name):
            raise fields.wrong(name, "left out: this server has no such function")
    earlier = []
    if fields.has("previous_response_id"):
        earlier = _store(request).find(fields.text("previous_response_id"), client, "previous_response_id").messages
    asked = asked_of(fields, earlier, client)
    keep = partial(_keep, _store(request), client, asked) if asked.store else None
    begin = partial(_begun, asked, new_id("resp", _store(request).maker))
    encoder = partial(_events, begin, keep) if fields.flag("stream") else None
    return await respond(request, asked.request, encoder, partial(_whole, begin, keep))


Begin = Callable[[Answering], dict[str, Any]]
Keep = Callable[[dict[str, Any], Sequence[Block]], None]


def _store(request: Request) -> ResponseStore:
    return request.app.state.responses


def _keep(store: ResponseStore, client: str, asked: Asked, body: dict[str, Any], blocks: Sequence[Block]) -> None:
    store.add(client, body, [*asked.messages, as_message(blocks)])


def _begun(asked: Asked, id: str, answering: Answering) -> dict[str, Any]:
    """The settings that the request leaves out are the model's."""
    sampling = answering.model.engine.sampling
    echo = {name: getattr(sampling, name) if value is None else value for name, value in asked.numbers.items()}
    return response(id, int(time.time()), answering.model.name, asked.echo | echo)


def _events(begin: Begin, keep: Keep | None, answering: Answering) -> ResponseEvents:
    return ResponseEvents(begin(answering), keep)


def _whole(begin: Begin, keep: Keep | None, answering: Answering, events: Sequence[Event]) -> dict[str, Any]:
    end, blocks = finish_of(events), blocks_of(events)
    output = [item(block, item_id(block)) for block in blocks]
    body = ended(begin(answering), output, end.usage, end.reason == "length")
    if keep:
        keep(body, blocks)
    return body


async def retrieve(request: Request) -> Response:
    return Json(_store(request).find(request.path_params["id"], client_of(request)).body)


async def delete(request: Request) -> Response:
    id = request.path_params["id"]
    _store(request).remove(id, client_of(request))
    return Json({"id": id, "object": "response", "deleted": True})
