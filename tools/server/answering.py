"""Turns a request into the events of its answers.

In: a `ChatRequest` or a `TextRequest`. Out: `Answering`, an asynchronous iterator over lists of events. A list has the
events of one engine step, or all events that came while the consumer was busy. Each answer ends with its `Finish`
event. Closing the iterator ends the answers after the step in progress.

Templates, tokenizers and grammars run in threads.
"""

import asyncio
import secrets
import string
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from mlc_amd.runtime.calls.call_formats import CallArguments, CallBegin, CallEnd, CallEvent
from mlc_amd.runtime.calls.tool_calls import CallParser
from mlc_amd.runtime.calls.tools import Tool, read_tools
from mlc_amd.runtime.engine.generation import Piece, Stats
from mlc_amd.runtime.engine.generations import AsyncGeneration
from mlc_amd.runtime.grammars.grammars import Grammar
from mlc_amd.runtime.text.reasoning import AnswerPart
from mlc_amd.tools.server import chat_request as forms
from mlc_amd.tools.server.errors import ApiError, invalid
from mlc_amd.tools.server.library import Library, LoadedModel

# Letters and digits of a call's id. Mistral's chat templates accept no other ids.
_ID_LENGTH, _ID_CHARACTERS = 9, string.ascii_letters + string.digits


async def answer(
    library: Library, request: forms.AnswerRequest, told: Callable[[str, Stats], None] = lambda model, stats: None
) -> "Answering":
    """Begins the answers to a request. told: called at the end of each answer with the model and the statistics. Raises
    ApiError, UserError (status 400) or QueueFull, which become the response."""
    model = await library.acquire(request.model)
    try:
        answering = Answering(library, model, request, told)
        await answering.begin()
        return answering
    except BaseException:
        await library.release(model)
        raise


@dataclass(frozen=True)
class _Prepared:
    """What is computed in a thread. text: the prompt of a chat. shown: marks whose texts the parsers need."""

    prompts: list[list[int]]
    grammar: Grammar | None
    text: str | None = None
    tools: tuple[Tool, ...] = ()
    shown: tuple[str, ...] = ()
    echoed: tuple[str, ...] = ()  # texts of the prompts, if the request wants them
    ends: frozenset[int] = frozenset()  # tokens that end the answers


class Answering(AsyncIterator[list[forms.Event]]):
    """See the module's docstring. model: the model that answers. prompt_tokens: of all prompts together. begun: time of
    the request, by time.perf_counter."""

    def __init__(
        self, library: Library, model: LoadedModel, request: forms.AnswerRequest, told: Callable[[str, Stats], None]
    ) -> None:
        self.model, self.request, self._told = model, request, told
        self.prompt_tokens, self.begun = 0, time.perf_counter()
        self._library = library
        self._generation: AsyncGeneration | None = None
        self._events: list[AnswerEvents] = []
        self._progress: list[forms.Event] = []  # arrived since the last events
        self._prepared: _Prepared | None = None  # only while prompts are to be echoed or scored
        self._ended = False

    async def begin(self) -> None:
        """Puts the answers into the engine's queue."""
        request, model = self.request, self.model
        made = await asyncio.to_thread(self._prepare)
        self.prompt_tokens = sum(map(len, made.prompts))
        ends = model.engine.chat_template.stop_strings() if isinstance(request, forms.ChatRequest) else ()
        count = request.n * len(made.prompts)
        shown = model.engine.tokenizer.control_ids if request.control_tokens else made.shown
        self._events = [AnswerEvents(model, request, index, made.text, made.tools) for index in range(count)]
        self._generation = model.engine.agenerate(
            made.prompts, None, self._limit(made.prompts), (*ends, *request.stop), shown, n=request.n,
            client=request.client, logprobs=request.logprobs, constraint=made.grammar, min_tokens=request.min_tokens,
            stop_ids=(*request.stop_ids, *made.ends), include_stop=request.include_stop,
            progress=self._progress.append if request.progress else None, **request.sampling,
        )  # fmt: skip
        if isinstance(request, forms.TextRequest) and (request.echo or request.prompt_logprobs is not None):
            self._prepared = made
        else:
            await self._stream.start()

    def _limit(self, prompts: Sequence[Sequence[int]]) -> int | None:
        """The limit of an answer's tokens. If the request's `context` is larger than the model's, the model's counts,
        as in ollama."""
        most, context = self.request.max_tokens, self.request.context
        if context is None:
            return most
        room = min(context, self.model.engine.context) - max(map(len, prompts))
        if room < 1:
            raise ApiError(400, f"the prompt fills num_ctx, {context} tokens", code="context_length_exceeded")
        return room if most is None else min(most, room)

    @property
    def _stream(self) -> AsyncGeneration:
        assert self._generation is not None, "begin() has run"
        return self._generation

    def _prepare(self) -> "_Prepared":
        request, model = self.request, self.model
        wanted = request.response_format
        if isinstance(request, forms.TextRequest):
            prompts = [self._ids(prompt) for prompt in request.prompts]
            pairs = zip(request.prompts, prompts, strict=True) if request.echo else ()
            decode = model.engine.tokenizer.decode
            echoed = tuple(one if isinstance(one, str) else decode(ids, skip_special=False) for one, ids in pairs)
            gaps = any(isinstance(one, forms.Gap) for one in request.prompts)
            ends = model.engine.fill.stop_ids if gaps else frozenset()
            return _Prepared(prompts, self._grammar(wanted, None), echoed=echoed, ends=ends)
        assert isinstance(request, forms.ChatRequest), "there are two kinds"
        tools = read_tools(request.callable_tools)
        text, ids = model.prompter.prompt(request)
        asked = None if request.continues else text  # the rest of a begun answer has no thinking
        if not tools:
            return _Prepared([ids], self._grammar(wanted, asked), text, shown=model.reasoning.marks)
        if isinstance(wanted, forms.Pattern):
            raise invalid("with tools an answer can be JSON by a schema, but match no grammar or regular expression")
        schema = wanted.schema if isinstance(wanted, forms.ResponseFormat) else None
        grammar = model.grammars.tool_calls(
            model.calls, tools, request.tool_choice, request.parallel_tool_calls, asked, schema
        )
        return _Prepared([ids], grammar, text, tools, model.reasoning.marks + model.calls.marks)

    def _grammar(self, wanted: forms.AnswerFormat | None, prompt: str | None) -> Grammar | None:
        if wanted is None:
            return None
        grammars = self.model.grammars
        if isinstance(wanted, forms.ResponseFormat):
            return grammars.json_schema(wanted.schema, prompt, not wanted.strict)
        return {"regex": grammars.regex, "grammar": grammars.grammar}[wanted.kind](wanted.text, prompt)

    def _ids(self, prompt: str | forms.SeenText | Sequence[int | str] | forms.Gap) -> list[int]:
        if isinstance(prompt, forms.SeenText):
            return self.model.prompter.seen_text(prompt)
        if isinstance(prompt, forms.Gap):
            context = self.model.engine.longest
            wanted = context // 4 if self.request.max_tokens is None else self.request.max_tokens
            room = context - min(max(wanted, 1), context // 2) if prompt.cut else None
            return self.model.engine.fill.prompt(prompt.before, prompt.after, prompt.files, room)
        tokenizer = self.model.engine.tokenizer
        return tokenizer.encode_parts([prompt] if isinstance(prompt, str) else prompt, tokenizer.encode_prompt)

    async def __anext__(self) -> list[forms.Event]:
        if self._ended:
            raise StopAsyncIteration
        if made := self._prepared:
            self._prepared = None
            return await self._echoes(made)
        while True:
            try:
                pieces = await self._stream.batch()
            except StopAsyncIteration:
                self._ended = True
                stats = self._stream.answers
                return [event for events, one in zip(self._events, stats, strict=True) for event in events.finish(one)]
            found, self._progress[:] = list(self._progress), ()
            found += [event for piece in pieces for event in self._events[piece.index].feed(piece)]
            if found:
                return found

    async def _echoes(self, made: _Prepared) -> list[forms.Event]:
        """The prompts with their log probabilities. They are computed before the answers are queued, which then find
        them in the cache."""
        request, events = self.request, list[forms.Event]()
        assert isinstance(request, forms.TextRequest), "others have no such events"
        for place, ids in enumerate(made.prompts):
            most, logprobs = request.prompt_logprobs, ()
            if most is not None:
                logprobs = await self.model.prompt_logprobs(ids, most, request.client)
            text, first = made.echoed[place] if made.echoed else "", place * request.n
            events += [forms.PromptEcho(text, index, logprobs) for index in range(first, first + request.n)]
        return events

    def progress(self, index: int) -> forms.Progress:
        """How far an answer is that has begun."""
        stats = self._stream.answers[index]
        usage = forms.Usage(stats.prompt_tokens, stats.generated, stats.cached_tokens)
        return forms.Progress(usage, forms.Timings(stats.ttft_s, stats.decode_s))

    async def pause(self, seconds: float) -> None:
        """Waits between two lists of events: for `seconds`, or until the answers are complete."""
        await self._stream.pause(seconds)

    async def aclose(self) -> None:
        """Ends the answers, and releases the model."""
        try:
            if self._generation is not None:
                await self._generation.aclose()
                if sequences := self._generation.sequences:
                    self.model.slots[self.request.slot] = sequences[-1]
                for stats in self._generation.answers:
                    self._told(self.model.name, stats)
        finally:
            await self._library.release(self.model)


# ---- events


class AnswerEvents:
    """Turns the pieces of the answer `index` into events: call `feed` with each piece, then `finish`. prompt: the
    rendered text of a chat; None for a continued text, in which everything is text. tools: that the model may call."""

    def __init__(
        self,
        model: LoadedModel,
        request: forms.AnswerRequest,
        index: int,
        prompt: str | None,
        tools: Sequence[Tool] = (),
    ) -> None:
        self._model, self._index, self._stops = model, index, request.stop
        continued = isinstance(request, forms.ChatRequest) and request.continues
        self._parser = None if prompt is None else model.reasoning.parser(prompt, continued)
        self._calls = CallParser(model.calls, tools) if tools else None
        self._called = False
        # white space before the first text comes from the fallback template
        self._strips = prompt is not None and not continued and model.engine.chat_template.is_fallback
        self._thought = 0  # number of tokens
        self._logprobs: list[forms.TokenLogprob] = []  # of tokens whose text is still held back

    def feed(self, piece: Piece) -> list[forms.Event]:
        if piece.logprob is not None:
            self._logprobs.append(self._model.token_logprob(piece.id, piece.logprob, piece.top))
        if not piece.text:
            return []
        if self._parser is None:
            return [self._text(piece.text)]
        return self._converted(self._parser.feed(piece.text))

    def finish(self, stats: Stats) -> list[forms.Event]:
        """The text that was held back, and the end."""
        events = self._converted(self._parser.finish()) if self._parser else []
        if self._calls:
            events += self._events(self._calls.finish())
        events += [self._text("")] if self._logprobs else []  # for tokens without text
        reason: forms.FinishReason = "stop" if stats.finish == "stop" else "length"
        if self._called and reason == "stop":
            reason = "tool_calls"
        usage, end = forms.Usage(stats.prompt_tokens, stats.generated, stats.cached_tokens, self._thought), stats.end
        stop = stats.stop if stats.stop in self._stops else None
        last = self._model.token_logprob(end.id, end.logprob, end.top) if end else None
        timings = forms.Timings(stats.ttft_s, stats.decode_s)
        return [*events, forms.Finish(reason, usage, timings, self._index, stop, last)]

    def _converted(self, parts: Sequence[AnswerPart]) -> list[forms.Event]:
        if parts and parts[-1].kind == "thinking":
            self._thought += 1
        if not self._calls:
            return self._events(parts)
        return self._events([found for part in parts for found in self._calls.feed(part)])

    def _events(self, parts: Sequence[AnswerPart | CallEvent]) -> list[forms.Event]:
        events: list[forms.Event] = []
        for part in parts:
            if isinstance(part, CallBegin):
                self._called = True
                call = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))
                events.append(forms.ToolCallBegin(call, part.name, part.number, self._index))
            elif isinstance(part, CallArguments):
                events.append(forms.ToolCallArguments(part.text, part.number, self._index))
            elif isinstance(part, CallEnd):
                continue  # reported with the next event, or at the end
            elif part.kind == "thinking":
                events.append(forms.Thinking(part.text, self._index))
            elif text := part.text.lstrip() if self._strips else part.text:
                self._strips = False
                events.append(self._text(text))
                continue
            self._logprobs.clear()  # OpenAI reports them only for the text of the answer
        return events

    def _text(self, text: str) -> forms.Text:
        """A text event, with the log probabilities of the tokens since the last one."""
        logprobs, self._logprobs = tuple(self._logprobs), []
        return forms.Text(text, self._index, logprobs)
