"""The objects of OpenAI's Responses API: responses, their items, and the store of those that can be continued."""

import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlc_amd.tools.server.blocks import Block
from mlc_amd.tools.server.chat_request import TokenLogprob, Usage
from mlc_amd.tools.server.errors import ApiError

# Responses that are kept, and characters of all of them.
_MOST_RESPONSES, _MOST_CHARACTERS = 1000, 64_000_000
_PREFIXES = {"thinking": "rs", "text": "msg", "call": "fc"}


def new_id(kind: str, maker: str = "") -> str:
    """maker: what it begins with."""
    return f"{kind}_{maker}{uuid.uuid4().hex}"


def response(id: str, created: int, model: str, echo: Mapping[str, Any], status: str = "in_progress") -> dict[str, Any]:
    """A response without output. echo: what it repeats of its request."""
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


def ended(begun: Mapping[str, Any], output: Sequence[Mapping[str, Any]], usage: Usage, cut: bool) -> dict[str, Any]:
    """The response with its output. cut: it was cut off at the limit of tokens."""
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


def item(block: Block, id: str, status: str = "completed") -> dict[str, Any]:
    """A block of the answer as an item of the output."""
    made: dict[str, Any] = {"id": id, "status": status}
    if block.kind == "call":
        return {**made, "type": "function_call", "call_id": block.id, "name": block.name, "arguments": block.text}
    if block.kind == "thinking":
        return {**made, "type": "reasoning", "summary": [], "content": [part(block)] if block.text else []}
    content = [part(block)] if block.text or status == "completed" else []
    return {**made, "type": "message", "role": "assistant", "content": content}


def item_id(block: Block) -> str:
    return new_id(_PREFIXES[block.kind])


def part(block: Block) -> dict[str, Any]:
    """The content of a message, or of reasoning."""
    if block.kind == "thinking":
        return {"type": "reasoning_text", "text": block.text}
    logprobs = [logprob_body(one) for one in block.logprobs]
    return {"type": "output_text", "annotations": [], "logprobs": logprobs, "text": block.text}


def logprob_body(token: TokenLogprob) -> dict[str, Any]:
    """As OpenAI's chat API and this one have it."""
    return {**_token(token), "top_logprobs": [_token(other) for other in token.top]}


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}


def as_message(blocks: Sequence[Block]) -> dict[str, Any]:
    """The answer as a message that the next request continues."""
    made: dict[str, Any] = {"role": "assistant", "content": "".join(b.text for b in blocks if b.kind == "text")}
    if thought := "".join(block.text for block in blocks if block.kind == "thinking"):
        made["reasoning_content"] = thought
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.arguments}}
        for block in blocks
        if block.kind == "call"
    ]
    return made | ({"tool_calls": calls} if calls else {})


# ---- the store


@dataclass(frozen=True)
class Stored:
    """client: whose response it is. body: the response; messages: the conversation up to its end."""

    client: object
    body: dict[str, Any]
    messages: list[dict[str, Any]]
    size: int


class ResponseStore:
    """The last responses of all clients, in memory. maker: what their ids begin with, to tell several stores apart."""

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
        """ApiError 404 where it is not, not any more, or another client's."""
        found = self._kept.get(id)
        if found is None or found.client != client:
            raise ApiError(404, f"there is no response {id!r} here", param, "response_not_found")
        return found

    def remove(self, id: str, client: object) -> None:
        self._size -= self.find(id, client).size
        del self._kept[id]
