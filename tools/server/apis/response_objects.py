"""The objects of OpenAI's Responses API: responses, their items, the store of responses that can be continued, and the
events of streamed responses (https://platform.openai.com/docs/api-reference/responses-streaming)."""

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlc_amd.runtime.errors import shorten
from mlc_amd.tools.server import chat_request as forms
from mlc_amd.tools.server.apis.openai_fields import logprob_body
from mlc_amd.tools.server.errors import ApiError
from mlc_amd.tools.server.streaming import Encoder, sse

# Largest number of responses that are kept, and of their characters in all.
_MOST_RESPONSES, _MOST_CHARACTERS = 1000, 64_000_000
_PREFIXES = {"thinking": "rs", "text": "msg", "call": "fc"}
# kind of a block -> name of its deltas
_DELTAS = {
    "text": "response.output_text",
    "thinking": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


def new_id(kind: str, maker: str = "") -> str:
    """A new id. maker: the beginning of its random part."""
    return f"{kind}_{maker}{uuid.uuid4().hex}"


def response(id: str, created: int, model: str, echo: Mapping[str, Any], status: str = "in_progress") -> dict[str, Any]:
    """A response without output. echo: fields of the request that it repeats."""
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
        **echo,
    }


def ended(
    begun: Mapping[str, Any], output: Sequence[Mapping[str, Any]], usage: forms.Usage, cut: bool
) -> dict[str, Any]:
    """The response with its output. cut: whether the limit of tokens cut it off."""
    return {
        **begun,
        "completed_at": None if cut else int(time.time()),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": list(output),
        "usage": {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.completion,
        },
    }


def item(block: forms.Block, id: str, status: str = "completed") -> dict[str, Any]:
    """A block of the answer as an item of the output."""
    made: dict[str, Any] = {"id": id, "status": status}
    if block.kind == "call":
        return {**made, "type": "function_call", "call_id": block.id, "name": block.name, "arguments": block.text}
    if block.kind == "thinking":
        return {**made, "type": "reasoning", "summary": [], "content": [part(block)] if block.text else []}
    content = [part(block)] if block.text or status == "completed" else []
    return {**made, "type": "message", "role": "assistant", "content": content}


def item_id(block: forms.Block) -> str:
    return new_id(_PREFIXES[block.kind])


def part(block: forms.Block) -> dict[str, Any]:
    """The content of a message item or a reasoning item."""
    if block.kind == "thinking":
        return {"type": "reasoning_text", "text": block.text}
    logprobs = [logprob_body(one) for one in block.logprobs]
    return {"type": "output_text", "annotations": [], "logprobs": logprobs, "text": block.text}


def as_message(blocks: Sequence[forms.Block]) -> dict[str, Any]:
    """The answer as a message, which the next request continues."""
    text, thought, called = forms.parts_of(blocks)
    calls = [forms.tool_call(call.id, call.name, call.arguments) for call in called]
    made: dict[str, Any] = {"role": "assistant", "content": text}
    return made | ({"reasoning_content": thought} if thought else {}) | ({"tool_calls": calls} if calls else {})


# ---- the store


@dataclass(frozen=True)
class Stored:
    """client: the client whose response it is. body: the response. messages: the conversation, including the
    response."""

    client: object
    body: dict[str, Any]
    messages: list[dict[str, Any]]
    size: int


class ResponseStore:
    """The last responses of all clients, in memory. maker: the beginning of their ids, different for each store."""

    def __init__(self, maker: str = "") -> None:
        self.maker = maker
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._size = 0

    def add(self, client: object, body: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        size = len(str(messages)) + len(str(body))
        self._kept[body["id"]] = Stored(client, body, messages, size)
        self._size += size
        while self._kept and (self._size > _MOST_CHARACTERS or len(self._kept) > _MOST_RESPONSES):
            self._size -= self._kept.popitem(last=False)[1].size

    def find(self, id: str, client: object, param: str | None = None) -> Stored:
        """The response with this id. Raises ApiError 404 if there is none (any more), or it is another client's."""
        found = self._kept.get(id)
        if found is None or found.client != client:
            raise ApiError(404, f"there is no response {shorten(id)} here", param, "response_not_found")
        return found

    def remove(self, id: str, client: object) -> None:
        self._size -= self.find(id, client).size
        del self._kept[id]


# ---- events


class ResponseEvents(Encoder):
    """The encoder of streamed responses. begun: the response without output. keep: called with the whole response and
    its blocks.

        response.created, response.in_progress
        for each item: response.output_item.added
            for messages and reasoning: response.content_part.added, .. .delta, .. .done, response.content_part.done
            for calls: response.function_call_arguments.delta, .done
          response.output_item.done
        response.completed or response.incomplete; error and response.failed after an error
    """

    def __init__(self, begun: dict[str, Any], keep: Callable[[dict[str, Any], Sequence[forms.Block]], None]) -> None:
        self._response, self._keep = begun, keep
        self._number = 0  # number of the next event
        self._blocks: list[forms.Block] = []
        self._items: list[dict[str, Any]] = []  # complete items
        self._id = ""  # id of the open item
        self._end: forms.Finish | None = None

    def _event(self, kind: str, **fields: Any) -> bytes:
        made = sse({"type": kind, "sequence_number": self._number, **fields}, kind)
        self._number += 1
        return made

    def begin(self) -> bytes:
        created = self._event("response.created", response=self._response)
        return created + self._event("response.in_progress", response=self._response)

    def _encoded(self, event: forms.Event) -> bytes:
        if isinstance(event, forms.Text | forms.Thinking):
            kind = "text" if isinstance(event, forms.Text) else "thinking"
            begun = b"" if self._id and self._blocks[-1].kind == kind else self._open(forms.Block(kind))
            block = self._blocks[-1]
            block.text += event.text
            logprobs = event.logprobs if isinstance(event, forms.Text) else ()
            block.logprobs += logprobs
            about = {"logprobs": [logprob_body(one) for one in logprobs]} if kind == "text" else {}
            return begun + self._delta(event.text, content_index=0, **about)
        if isinstance(event, forms.ToolCallBegin):
            return self._open(forms.Block("call", id=event.id, name=event.name))
        if isinstance(event, forms.ToolCallArguments):
            self._blocks[-1].text += event.text
            return self._delta(event.text)
        if isinstance(event, forms.Finish):
            self._end = event
            return self._close()
        return b""  # this API does not report the progress of prompts

    def _where(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self._items)}

    def _delta(self, text: str, **more: Any) -> bytes:
        return self._event(f"{_DELTAS[self._blocks[-1].kind]}.delta", **self._where(), **more, delta=text)

    def _open(self, block: forms.Block) -> bytes:
        made = self._close()
        self._id = item_id(block)
        self._blocks.append(block)
        added = item(block, self._id, "in_progress")
        made += self._event("response.output_item.added", output_index=len(self._items), item=added)
        if block.kind == "call":
            return made
        return made + self._event("response.content_part.added", **self._where(), content_index=0, part=part(block))

    def _close(self) -> bytes:
        """Ends the open item."""
        if not self._id:
            return b""
        block, where = self._blocks[-1], self._where()
        done = f"{_DELTAS[block.kind]}.done"
        if block.kind == "call":
            made = self._event(done, **where, name=block.name, arguments=block.text)
        else:
            whole = part(block)
            more = {"logprobs": whole["logprobs"]} if block.kind == "text" else {}
            made = self._event(done, **where, content_index=0, text=block.text, **more)
            made += self._event("response.content_part.done", **where, content_index=0, part=whole)
        finished = item(block, self._id)
        made += self._event("response.output_item.done", output_index=len(self._items), item=finished)
        self._items.append(finished)
        self._id = ""
        return made

    def end(self) -> bytes:
        assert self._end is not None, "answers end with a Finish"
        body = ended(self._response, self._items, self._end.usage, self._end.reason == "length")
        self._keep(body, self._blocks)
        return self._event(f"response.{body['status']}", response=body)

    def error(self, error: ApiError) -> bytes:
        code = error.code or "server_error"
        failed = {**self._response, "status": "failed", "error": {"code": code, "message": error.message}}
        made = self._event("error", code=code, message=error.message, param=error.param)
        return made + self._event("response.failed", response=failed)
