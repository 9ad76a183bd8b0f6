"""The events of a whole answer as blocks: what the model thought, what it said, what it called, in order."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlc_amd.tools.server.chat_request import (
    Event,
    Finish,
    Text,
    Thinking,
    TokenLogprob,
    ToolCallArguments,
    ToolCallBegin,
)


@dataclass
class Block:
    """text: of a call the JSON of its arguments; id, name: of a call."""

    kind: Literal["thinking", "text", "call"]
    text: str = ""
    id: str = ""
    name: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def arguments(self) -> dict[str, Any]:
        """Of a call, as an object. What was cut off, or is no object, is in the field "arguments" as text."""
        try:
            parsed = json.loads(self.text or "{}")
        except ValueError:
            parsed = None
        return parsed if isinstance(parsed, dict) else {"arguments": self.text}


def blocks_of(events: Iterable[Event]) -> list[Block]:
    """The blocks of one answer's events."""
    found: list[Block] = []
    calls: dict[int, Block] = {}
    for event in events:
        if isinstance(event, ToolCallBegin):
            calls[event.number] = Block("call", id=event.id, name=event.name)
            found.append(calls[event.number])
        elif isinstance(event, ToolCallArguments):
            calls[event.number].text += event.text
        elif isinstance(event, Text | Thinking):
            kind = "text" if isinstance(event, Text) else "thinking"
            if not found or found[-1].kind != kind:
                found.append(Block(kind))
            found[-1].text += event.text
            if isinstance(event, Text):
                found[-1].logprobs += event.logprobs
    return found


def parts_of(blocks: Sequence[Block]) -> tuple[str, str, list[Block]]:
    """(what was said, what was thought, the calls)."""
    text, thought = ("".join(block.text for block in blocks if block.kind == kind) for kind in ("text", "thinking"))
    return text, thought, [block for block in blocks if block.kind == "call"]


def finish_of(events: Iterable[Event]) -> Finish:
    """The end of one answer."""
    return next(event for event in events if isinstance(event, Finish))
