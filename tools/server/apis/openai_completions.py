"""`POST /v1/completions`, OpenAI's text API (https://platform.openai.com/docs/api-reference/completions).

The prompt is continued as it is, without a chat template; control tokens in it are parsed. Several prompts, as texts or
as lists of token ids, are answered together. `max_tokens` is 16 unless the request says otherwise, as there. `echo`
puts the prompt before the text (without log probabilities). Not supported: `suffix`, `best_of` (400).
"""

import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlc_amd.runtime.engine.generation import MOST_LOGPROBS, PromptProgress
from mlc_amd.tools.server import errors
from mlc_amd.tools.server.answering import Answering
from mlc_amd.tools.server.apis import openai_fields
from mlc_amd.tools.server.apis.openai_chat import DONE
from mlc_amd.tools.server.apis.openai_fields import (
    FINGERPRINT,
    finishes_of,
    progress_body,
    timings_body,
    total_usage,
    usage_body,
)
from mlc_amd.tools.server.chat_request import Event, Finish, Text, TextRequest, TokenLogprob
from mlc_amd.tools.server.errors import ApiError
from mlc_amd.tools.server.fields import Fields
from mlc_amd.tools.server.formats import answer_format
from mlc_amd.tools.server.service import client_of, read_fields, respond
from mlc_amd.tools.server.streaming import dumps, sse

_DEFAULT_TOKENS = 16
_MOST_PROMPTS = 128


async def completions(request: Request) -> Response:
    fields = await read_fields(request)
    asked = text_request(fields, client_of(request))
    stream, usage = openai_fields.streamed(fields)
    echo = _Echo(asked, fields.flag("echo"))
    encoder = partial(TextChunks, usage=usage, echo=echo) if stream else None
    return await respond(request, asked, encoder, partial(_whole, echo))


def text_request(fields: Fields, client: str) -> TextRequest:
    for name in ("suffix", "best_of"):
        if fields.has(name) and fields.raw(name) not in ("", 1):
            raise fields.wrong(name, "left out: this server has no such function")
    limited = any(map(fields.has, openai_fields.LIMITS))
    return TextRequest(
        model=fields.text("model"),
        prompts=prompts_of(fields, fields.required("prompt")),
        sampling=openai_fields.sampling(fields),
        max_tokens=openai_fields.most_tokens(fields) if limited else _DEFAULT_TOKENS,
        min_tokens=openai_fields.least_tokens(fields),
        stop=openai_fields.stops(fields),
        n=openai_fields.answers(fields),
        logprobs=fields.whole("logprobs", 0, MOST_LOGPROBS),
        response_format=answer_format(fields),
        progress=openai_fields.progress_wanted(fields),
        client=client,
    )


def prompts_of(fields: Fields, given: Any, parts: tuple[type, ...] = (int,)) -> list[Any]:
    """A text, token ids, or a list of these, as a list of texts and lists of ids. fields: have it as `prompt`. parts:
    types of what a list that is one prompt consists of."""
    found = [given] if isinstance(given, str) or _is_ids(given) else given
    if not isinstance(found, list) or not 0 < len(found) <= _MOST_PROMPTS:
        raise fields.wrong("prompt", f"a string, a list of token ids, or a list of up to {_MOST_PROMPTS} of these")
    if not all(isinstance(one, str) or _is_ids(one, parts) for one in found):
        raise fields.wrong("prompt", "a string, a list of token ids, or a list of these")
    return found


def _is_ids(value: Any, parts: tuple[type, ...] = (int,)) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) in parts for one in value)


class _Echo:
    """The texts that come before the answers: the prompts, if `wanted`."""

    def __init__(self, asked: TextRequest, wanted: bool) -> None:
        self._asked, self._wanted = asked, wanted

    def before(self, index: int) -> str:
        prompt = self._asked.prompts[index // self._asked.n]
        return prompt if self._wanted and isinstance(prompt, str) else ""


def _whole(echo: _Echo, answering: Answering, events: Sequence[Event]) -> dict[str, Any]:
    finishes = finishes_of(events)
    return {
        **_head(answering.model.name),
        "choices": [_choice([event for event in events if event.index == end.index], end, echo) for end in finishes],
        "usage": usage_body(total_usage(finishes, answering.request.n)),
        "timings": timings_body(finishes[0]),
    }


def _choice(events: Sequence[Event], end: Finish, echo: _Echo) -> dict[str, Any]:
    texts = [event for event in events if isinstance(event, Text)]
    before = echo.before(end.index)
    logprobs = [one for text in texts for one in text.logprobs]
    return {
        "index": end.index,
        "text": before + "".join(text.text for text in texts),
        "logprobs": logprobs_body(logprobs, len(before)) if logprobs else None,
        "finish_reason": end.reason,
    }


def logprobs_body(logprobs: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """offset: of the first token in the text."""
    offsets = []
    for one in logprobs:
        offsets.append(offset)
        offset += len(one.text)
    return {
        "tokens": [one.text for one in logprobs],
        "token_logprobs": [one.logprob for one in logprobs],
        "top_logprobs": [{other.text: other.logprob for other in one.top} for one in logprobs],
        "text_offset": offsets,
    }


def _head(model: str) -> dict[str, Any]:
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        **FINGERPRINT,
    }


class TextChunks:
    """The encoder of streamed texts (streaming.Encoder)."""

    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, answering: Answering, usage: bool, echo: _Echo) -> None:
        self._head, self._n = _head(answering.model.name), answering.request.n
        self._usage, self._echo = usage, echo
        # Most chunks differ in their text alone: the rest of them is written once.
        self._open = b"data: " + dumps(self._head)[:-1] + b',"choices":['
        self._close = (b'],"usage":null}' if usage else b"]}") + b"\n\n"
        self._lengths: dict[int, int] = {}  # of the texts so far, by index
        self._finishes: list[Finish] = []

    def begin(self) -> bytes:
        return b""

    def events(self, events: Sequence[Event]) -> bytes:
        parts: dict[int, list[Text]] = {}
        made: list[bytes] = []
        for event in events:
            if isinstance(event, Text):
                parts.setdefault(event.index, []).append(event)
            elif isinstance(event, PromptProgress):
                choice = {"index": event.index, "text": "", "logprobs": None, "finish_reason": None}
                made.append(self._open + dumps(choice) + b"]," + dumps(progress_body(event))[1:-1] + self._close[1:])
            elif isinstance(event, Finish):
                made += [self._chunk(event.index, parts.pop(event.index))] if event.index in parts else []
                self._finishes.append(event)
                made.append(self._chunk(event.index, (), event))
        return b"".join(made + [self._chunk(index, texts) for index, texts in parts.items()])

    def _chunk(self, index: int, texts: Sequence[Text], end: Finish | None = None) -> bytes:
        text = "" if index in self._lengths else self._echo.before(index)
        at = self._lengths.get(index, len(text))
        text += "".join(one.text for one in texts)
        self._lengths[index] = self._lengths.get(index, 0) + len(text)
        logprobs = [one for part in texts for one in part.logprobs]
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs_body(logprobs, at) if logprobs else None,
            "finish_reason": end.reason if end else None,
        }
        close = b'],"timings":' + dumps(timings_body(end)) + self._close[1:] if end else self._close
        return self._open + dumps(choice) + close

    def end(self) -> bytes:
        usage = usage_body(total_usage(self._finishes, self._n))
        return (sse({**self._head, "choices": [], "usage": usage}) if self._usage else b"") + DONE

    def error(self, error: ApiError) -> bytes:
        return sse(errors.openai_body(error)) + DONE

    def ping(self) -> bytes:
        return b": ping\n\n"
