"""The pieces of one answer -> its events: thinking, text, calls of functions, and why it ended.

In: `Piece`s of the engine, with the texts of the control tokens that the model's formats need. Out: events of
chat_request.py, as early as they are certain.
"""

import secrets
import string
from collections.abc import Sequence

from mlc_amd.runtime.calls.call_formats import CallArguments, CallBegin, CallEnd, CallEvent
from mlc_amd.runtime.calls.tool_calls import CallParser
from mlc_amd.runtime.calls.tools import Tool
from mlc_amd.runtime.engine.generation import Piece, Stats
from mlc_amd.runtime.text.reasoning import AnswerPart
from mlc_amd.tools.server.chat_request import (
    AnswerRequest,
    Event,
    Finish,
    FinishReason,
    Text,
    Thinking,
    Timings,
    TokenLogprob,
    ToolCallArguments,
    ToolCallBegin,
    Usage,
)
from mlc_amd.tools.server.loaded_model import LoadedModel

# Letters and digits of a call's id: Mistral's chat templates take no others.
_ID_LENGTH, _ID_CHARACTERS = 9, string.ascii_letters + string.digits


class AnswerEvents:
    """`feed` the pieces of the answer `index`, then `finish`. prompt: the text that was rendered for a chat; None: a
    text is continued, all of which is text. tools: that the model may call."""

    def __init__(
        self, model: LoadedModel, request: AnswerRequest, index: int, prompt: str | None, tools: Sequence[Tool] = ()
    ) -> None:
        self._model, self._index, self._stops = model, index, request.stop
        self._parser = None if prompt is None else model.reasoning.parser(prompt)
        self._calls = CallParser(model.calls, tools) if tools else None
        self._called = False
        self._strips = prompt is not None and model.prompter.strips  # white space until the first text
        self._thought = 0  # tokens
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text is still to come

    def feed(self, piece: Piece) -> list[Event]:
        if piece.logprob is not None:
            self._logprobs.append(self._model.token_logprob(piece.id, piece.logprob, piece.top))
        if not piece.text:
            return []
        if self._parser is None:
            return [self._text(piece.text)]
        return self._converted(self._parser.feed(piece.text))

    def finish(self, stats: Stats) -> list[Event]:
        """What was held back, and the end."""
        events = self._converted(self._parser.finish()) if self._parser else []
        if self._calls:
            events += self._events(self._calls.finish())
        events += [self._text("")] if self._logprobs else []  # of tokens without a text of their own
        reason: FinishReason = "stop" if stats.finish == "stop" else "length"
        if self._called and reason == "stop":
            reason = "tool_calls"
        usage = Usage(stats.prompt_tokens, stats.generated, stats.cached_tokens, self._thought)
        stop = stats.stop if stats.stop in self._stops else None
        return [*events, Finish(reason, usage, Timings(stats.ttft_s, stats.decode_s), self._index, stop)]

    def _converted(self, parts: Sequence[AnswerPart]) -> list[Event]:
        if parts and parts[-1].kind == "thinking":
            self._thought += 1
        if not self._calls:
            return self._events(parts)
        return self._events([found for part in parts for found in self._calls.feed(part)])

    def _events(self, parts: Sequence[AnswerPart | CallEvent]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            if isinstance(part, CallBegin):
                self._called = True
                call = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))
                events.append(ToolCallBegin(call, part.name, part.number, self._index))
            elif isinstance(part, CallArguments):
                events.append(ToolCallArguments(part.text, part.number, self._index))
            elif isinstance(part, CallEnd):
                continue  # the next event says it, or the end
            elif part.kind == "thinking":
                events.append(Thinking(part.text, self._index))
            elif text := part.text.lstrip() if self._strips else part.text:
                self._strips = False
                events.append(self._text(text))
                continue
            self._logprobs.clear()  # OpenAI's are of the answer's text alone
        return events

    def _text(self, text: str) -> Text:
        """With the log probabilities of the tokens since the last text."""
        logprobs, self._logprobs = tuple(self._logprobs), []
        return Text(text, self._index, logprobs)
