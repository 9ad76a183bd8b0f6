"""The events of a streamed response of OpenAI's Responses API
(https://platform.openai.com/docs/api-reference/responses-streaming).

    response.created, response.in_progress
    for each item: response.output_item.added
        of messages and reasoning: response.content_part.added, .. .delta, .. .done, response.content_part.done
        of calls: response.function_call_arguments.delta, .done
      response.output_item.done
    response.completed or response.incomplete; error and response.failed where it fails
"""

from collections.abc import Callable, Sequence
from typing import Any

from mlc_amd.tools.server.apis.response_objects import ended, item, item_id, logprob_body, part
from mlc_amd.tools.server.blocks import Block
from mlc_amd.tools.server.chat_request import Event, Finish, Text, Thinking, ToolCallArguments, ToolCallBegin
from mlc_amd.tools.server.errors import ApiError
from mlc_amd.tools.server.streaming import merged, sse

# kind of a block -> what its deltas are called
_DELTAS = {
    "text": "response.output_text",
    "thinking": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


class ResponseEvents:
    """The encoder (streaming.Encoder). begun: the response without output. keep: is told the whole response and its
    blocks."""

    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, begun: dict[str, Any], keep: Callable[[dict[str, Any], Sequence[Block]], None] | None) -> None:
        self._response, self._keep = begun, keep
        self._number = 0  # of the next event
        self._blocks: list[Block] = []
        self._items: list[dict[str, Any]] = []  # that are complete
        self._id = ""  # of the item that is open
        self._end: Finish | None = None

    def _event(self, kind: str, **fields: Any) -> bytes:
        made = sse({"type": kind, "sequence_number": self._number, **fields}, kind)
        self._number += 1
        return made

    def begin(self) -> bytes:
        created = self._event("response.created", response=self._response)
        return created + self._event("response.in_progress", response=self._response)

    def events(self, events: Sequence[Event]) -> bytes:
        return b"".join(self._encoded(event) for event in merged(events))

    def _encoded(self, event: Event) -> bytes:
        if isinstance(event, Text | Thinking):
            kind = "text" if isinstance(event, Text) else "thinking"
            begun = b"" if self._is_open(kind) else self._open(Block(kind))
            block = self._blocks[-1]
            block.text += event.text
            logprobs = event.logprobs if isinstance(event, Text) else ()
            block.logprobs += logprobs
            about = {"logprobs": [logprob_body(one) for one in logprobs]} if kind == "text" else {}
            return begun + self._delta(event.text, content_index=0, **about)
        if isinstance(event, ToolCallBegin):
            return self._open(Block("call", id=event.id, name=event.name))
        if isinstance(event, ToolCallArguments):
            self._blocks[-1].text += event.text
            return self._delta(event.text)
        if isinstance(event, Finish):
            self._end = event
            return self._close()
        return b""  # this API has no progress of prompts

    def _is_open(self, kind: str) -> bool:
        return bool(self._id) and self._blocks[-1].kind == kind

    def _where(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self._items)}

    def _delta(self, text: str, **more: Any) -> bytes:
        return self._event(f"{_DELTAS[self._blocks[-1].kind]}.delta", **self._where(), **more, delta=text)

    def _open(self, block: Block) -> bytes:
        made = self._close()
        self._id = item_id(block)
        self._blocks.append(block)
        made += self._event(
            "response.output_item.added", output_index=len(self._items), item=item(block, self._id, "in_progress")
        )
        if block.kind == "call":
            return made
        return made + self._event("response.content_part.added", **self._where(), content_index=0, part=part(block))

    def _close(self) -> bytes:
        """Ends the item that is open."""
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
        if self._keep:
            self._keep(body, self._blocks)
        return self._event(f"response.{body['status']}", response=body)

    def error(self, error: ApiError) -> bytes:
        code = error.code or "server_error"
        failed = {**self._response, "status": "failed", "error": {"code": code, "message": error.message}}
        made = self._event("error", code=code, message=error.message, param=error.param)
        return made + self._event("response.failed", response=failed)

    def ping(self) -> bytes:
        return b": ping\n\n"
