"""`POST /v1/completions`: OpenAI's text API (https://platform.openai.com/docs/api-reference/completions).

The prompt is continued without a chat template; control tokens in it are parsed. There may be several prompts, as texts
or as lists of token ids. As in OpenAI's API, `max_tokens` is 16 by default; 0 only computes the prompt. `echo` puts the
prompt before the text, and with `logprobs` also the prompt's tokens before the new ones. `prompt_logprobs` is vLLM's
list for the prompt's tokens; if it is given without `logprobs`, that field has the values of all tokens. An end token
has a log probability, but no text. With `suffix`, the answer is the text between the prompt, which must be a text, and
the suffix, if the model has tokens for this (fill_in_middle.py). Not supported: `best_of` (400).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlc_amd.runtime.engine.generation import MOST_LOGPROBS, PromptProgress
from mlc_amd.tools.server.answering import Answering
from mlc_amd.tools.server.apis import openai_fields
from mlc_amd.tools.server.apis.openai_fields import progress_body, timings_body
from mlc_amd.tools.server.chat_request import Event, Finish, Gap, PromptEcho, SeenText, Text, TextRequest, TokenLogprob
from mlc_amd.tools.server.fields import Fields
from mlc_amd.tools.server.service import client_of, read_fields, respond
from mlc_amd.tools.server.streaming import dumps

_DEFAULT_TOKENS = 16
_MOST_PROMPTS = 128


async def completions(request: Request) -> Response:
    fields = await read_fields(request)
    asked = text_request(fields, client_of(request))
    stream, usage = openai_fields.streamed(fields)
    if stream and fields.has("prompt_logprobs"):
        raise fields.wrong(
            "prompt_logprobs", "left out of streamed requests, which have those of `echo` and `logprobs`"
        )
    encoder = partial(TextChunks, usage=usage) if stream else None
    choice = partial(_choice, asked.echo or not fields.has("logprobs"), fields.whole("prompt_logprobs"))
    whole = partial(openai_fields.whole, "cmpl", "text_completion", choice)
    return await respond(request, asked, encoder, whole)


def text_request(fields: Fields, client: str) -> TextRequest:
    if fields.has("best_of") and fields.raw("best_of") != 1:
        raise fields.wrong("best_of", "left out: this server has no such function")
    prompts = prompts_of(fields, fields.required("prompt"))
    if suffix := fields.text("suffix"):
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise fields.wrong("prompt", "a text, or a list of texts, before a suffix")
        for name in ("echo", "prompt_logprobs"):
            if fields.raw(name):
                raise fields.wrong(name, "left out of requests with a suffix")
        prompts = [Gap(prompt, suffix) for prompt in prompts]
    common = openai_fields.common(fields, client, least=0)
    if not any(map(fields.has, openai_fields.LIMITS)):
        common["max_tokens"] = _DEFAULT_TOKENS
    echo, logprobs = fields.flag("echo"), fields.whole("logprobs", 0, MOST_LOGPROBS)
    of_prompt = fields.whole("prompt_logprobs", 0, MOST_LOGPROBS)
    return TextRequest(
        **common,
        prompts=prompts,
        n=openai_fields.answers(fields),
        logprobs=of_prompt if logprobs is None else logprobs,
        echo=echo,
        prompt_logprobs=max((one for one in (of_prompt, logprobs if echo else None) if one is not None), default=None),
    )


def prompts_of(fields: Fields, given: Any, parts: tuple[type, ...] = (int,)) -> list[Any]:
    """The prompts in a field, as a list of texts and lists of ids. It may have a text, token ids, or a list of these.
    fields: the request. parts: the types of which a list that is one prompt consists."""
    found = [given] if isinstance(given, str) or _is_ids(given) else given
    if not isinstance(found, list) or not 0 < len(found) <= _MOST_PROMPTS:
        raise fields.wrong("prompt", f"a string, a list of token ids, or a list of up to {_MOST_PROMPTS} of these")
    if not all(isinstance(one, str | SeenText) or _is_ids(one, parts) for one in found):
        raise fields.wrong("prompt", "a string, a list of token ids, or a list of these")
    return found


def _is_ids(value: Any, parts: tuple[type, ...] = (int,)) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) in parts for one in value)


def _choice(every: bool, of_prompt: int | None, events: Sequence[Event], end: Finish) -> dict[str, Any]:
    """A whole answer. every: whether `logprobs` also has the prompt's tokens. of_prompt: `prompt_logprobs`."""
    texts = [event for event in events if isinstance(event, Text)]
    prompt = next((event for event in events if isinstance(event, PromptEcho)), PromptEcho())
    shown = prompt if every else replace(prompt, logprobs=())
    made = _part(end.index, texts, len(prompt.text), end, shown)
    if of_prompt is not None:
        made["prompt_logprobs"] = [_vllm(one, of_prompt) for one in prompt.logprobs]
    return made


def _vllm(token: TokenLogprob, most: int) -> dict[str, Any] | None:
    """A token of a prompt and the most likely tokens in its place, by id, in vLLM's form."""
    if token.logprob is None:
        return None
    ranked = [*(replace(one, rank=rank) for rank, one in enumerate(token.top[:most], 1)), token]
    return {str(one.id): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.text} for one in ranked}


def _part(
    index: int, events: Sequence[Text], offset: int, end: Finish | None, prompt: PromptEcho | None = None
) -> dict[str, Any]:
    """A choice of a body. offset: where the first event's text begins in the whole answer. prompt: the echoed prompt,
    if this part begins with it."""
    prompt = prompt or PromptEcho()
    logprobs = [one for event in events for one in event.logprobs]
    logprobs += [end.last] if end and end.last else []
    places = [*_places(prompt), *(offset + at for at in accumulate((len(one.text) for one in logprobs), initial=0))]
    every = [*prompt.logprobs, *logprobs]
    return {
        "index": index,
        "text": prompt.text + "".join(event.text for event in events),
        "logprobs": logprobs_body(every, places[: len(every)]) if every else None,
        "finish_reason": end.reason if end else None,
    }


def logprobs_body(logprobs: Sequence[TokenLogprob], places: Sequence[int]) -> dict[str, Any]:
    """The field `logprobs`. places: where the tokens begin in the text."""
    return {
        "tokens": [one.text for one in logprobs],
        "token_logprobs": [one.logprob for one in logprobs],
        "top_logprobs": [_top(one) for one in logprobs],
        "text_offset": list(places),
    }


def _top(token: TokenLogprob) -> dict[str, float | None] | None:
    """The most likely tokens and the token itself; of several with the same text the most likely one. None for a token
    that nothing predicts."""
    if token.logprob is None:
        return None
    upwards = (token, *(token if one.id == token.id else one for one in reversed(token.top)))
    return {one.text: one.logprob for one in upwards}


def _places(prompt: PromptEcho) -> list[int]:
    """Where a prompt's tokens begin in its text, which may lack the first tokens, or a space that tokenizing adds."""
    text, at, characters, found = prompt.text.encode("utf-8", "surrogatepass"), 0, 0, []
    for token in prompt.logprobs:
        found.append(characters)
        piece = token.bytes if text.startswith(token.bytes, at) else token.bytes.removeprefix(b" ")
        if text.startswith(piece, at):
            at += len(piece)
            characters += sum(byte & 0xC0 != 0x80 for byte in piece)
    return found


class TextChunks(openai_fields.Chunks):
    """The encoder of streamed texts."""

    def __init__(self, answering: Answering, usage: bool) -> None:
        super().__init__("cmpl", "text_completion", answering, usage)
        self._lengths: dict[int, int] = {}  # lengths of the texts so far, by index

    def events(self, events: Sequence[Event]) -> bytes:
        parts: dict[int, list[Text]] = {}
        made: list[bytes] = []
        for event in events:
            if isinstance(event, Text):
                parts.setdefault(event.index, []).append(event)
            elif isinstance(event, PromptEcho):
                self._lengths[event.index] = len(event.text)
                made.append(self._chunk(dumps(_part(event.index, (), 0, None, event))))
            elif isinstance(event, PromptProgress):
                made.append(self._chunk(dumps(_part(event.index, (), 0, None)), progress_body(event)))
            elif isinstance(event, Finish):
                made += [self._texts(event.index, parts.pop(event.index))] if event.index in parts else []
                self._finishes.append(event)
                made.append(self._texts(event.index, (), event))
        return b"".join(made + [self._texts(index, texts) for index, texts in parts.items()])

    def _texts(self, index: int, texts: Sequence[Text], end: Finish | None = None) -> bytes:
        at = self._lengths.get(index, 0)
        self._lengths[index] = at + sum(len(one.text) for one in texts)
        about = {"timings": timings_body(end)} if end else None
        return self._chunk(dumps(_part(index, texts, at, end)), about)
