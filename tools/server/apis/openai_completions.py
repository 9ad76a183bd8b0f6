"""`POST /v1/completions`, OpenAI's text API (https://platform.openai.com/docs/api-reference/completions).

The prompt is continued as it is, without a chat template; control tokens in it are parsed. Several prompts, as texts or
as lists of token ids, are answered together. `max_tokens` is 16 unless the request says otherwise, as there. `echo`
puts the prompt before the text (without log probabilities). Not supported: `suffix`, `best_of` (400).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlc_amd.runtime.engine.generation import MOST_LOGPROBS, PromptProgress
from mlc_amd.tools.server.answering import Answering
from mlc_amd.tools.server.apis import openai_fields
from mlc_amd.tools.server.apis.openai_fields import progress_body, timings_body
from mlc_amd.tools.server.chat_request import Event, Finish, Text, TextRequest, TokenLogprob
from mlc_amd.tools.server.fields import Fields
from mlc_amd.tools.server.service import client_of, read_fields, respond
from mlc_amd.tools.server.streaming import dumps

_DEFAULT_TOKENS = 16
_MOST_PROMPTS = 128


async def completions(request: Request) -> Response:
    fields = await read_fields(request)
    asked = text_request(fields, client_of(request))
    stream, usage = openai_fields.streamed(fields)
    before = partial(_before, asked, fields.flag("echo"))
    encoder = partial(TextChunks, usage=usage, before=before) if stream else None
    whole = partial(openai_fields.whole, "cmpl", "text_completion", partial(_choice, before))
    return await respond(request, asked, encoder, whole)


def text_request(fields: Fields, client: str) -> TextRequest:
    for name in ("suffix", "best_of"):
        if fields.has(name) and fields.raw(name) not in ("", 1):
            raise fields.wrong(name, "left out: this server has no such function")
    prompts = prompts_of(fields, fields.required("prompt"))
    common = openai_fields.common(fields, client)
    if not any(map(fields.has, openai_fields.LIMITS)):
        common["max_tokens"] = _DEFAULT_TOKENS
    return TextRequest(
        **common,
        prompts=prompts,
        n=openai_fields.answers(fields),
        logprobs=fields.whole("logprobs", 0, MOST_LOGPROBS),
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


def _before(asked: TextRequest, echo: bool, index: int) -> str:
    """The text that comes before the answer of this index: with `echo` its prompt."""
    prompt = asked.prompts[index // asked.n]
    return prompt if echo and isinstance(prompt, str) else ""


def _choice(before: Callable[[int], str], events: Sequence[Event], end: Finish) -> dict[str, Any]:
    """A whole answer."""
    texts = [event for event in events if isinstance(event, Text)]
    begun = before(end.index)
    return _part(end.index, begun + "".join(text.text for text in texts), texts, len(begun), end)


def _part(index: int, text: str, events: Sequence[Text], offset: int, end: Finish | None) -> dict[str, Any]:
    """A choice in a body. text: with what comes before; offset: of the first event's text in the whole answer."""
    logprobs = [one for event in events for one in event.logprobs]
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs_body(logprobs, offset) if logprobs else None,
        "finish_reason": end.reason if end else None,
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


class TextChunks(openai_fields.Chunks):
    """The encoder of streamed texts. before: an answer's index -> the text before it."""

    def __init__(self, answering: Answering, usage: bool, before: Callable[[int], str]) -> None:
        super().__init__("cmpl", "text_completion", answering, usage)
        self._before = before
        self._lengths: dict[int, int] = {}  # of the texts so far, by index

    def events(self, events: Sequence[Event]) -> bytes:
        parts: dict[int, list[Text]] = {}
        made: list[bytes] = []
        for event in events:
            if isinstance(event, Text):
                parts.setdefault(event.index, []).append(event)
            elif isinstance(event, PromptProgress):
                made.append(self._chunk(dumps(_part(event.index, "", (), 0, None)), progress_body(event)))
            elif isinstance(event, Finish):
                made += [self._texts(event.index, parts.pop(event.index))] if event.index in parts else []
                self._finishes.append(event)
                made.append(self._texts(event.index, (), event))
        return b"".join(made + [self._texts(index, texts) for index, texts in parts.items()])

    def _texts(self, index: int, texts: Sequence[Text], end: Finish | None = None) -> bytes:
        text = "" if index in self._lengths else self._before(index)
        at = self._lengths.get(index, len(text))
        text += "".join(one.text for one in texts)
        self._lengths[index] = self._lengths.get(index, 0) + len(text)
        about = {"timings": timings_body(end)} if end else None
        return self._chunk(dumps(_part(index, text, texts, at, end)), about)
