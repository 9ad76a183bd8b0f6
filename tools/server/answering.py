"""A request -> the events of its answers.

In: a `ChatRequest` or a `TextRequest`. Out: `Answering`: an asynchronous iterator over lists of events, as they come
from the engine: what one step of the engine gives is one list, and what came while the consumer was busy, too. Each
answer ends with its `Finish`. Closing it ends the answers after the step in progress.

Templates, tokenizers and grammars run in threads.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from mlc_amd.runtime.calls.tools import Tool, read_tools
from mlc_amd.runtime.engine.generation import Stats
from mlc_amd.runtime.engine.generations import AsyncGeneration
from mlc_amd.runtime.grammars.grammars import Grammar
from mlc_amd.tools.server.answer_events import AnswerEvents
from mlc_amd.tools.server.chat_request import (
    AnswerFormat,
    AnswerRequest,
    ChatRequest,
    Event,
    Pattern,
    Progress,
    ResponseFormat,
    TextRequest,
    Timings,
    Usage,
)
from mlc_amd.tools.server.errors import invalid
from mlc_amd.tools.server.library import Library
from mlc_amd.tools.server.loaded_model import LoadedModel


async def answer(
    library: Library, request: AnswerRequest, told: Callable[[str, Stats], None] = lambda model, stats: None
) -> "Answering":
    """Begins the answers to a request. told: is told the model and the statistics of each answer at its end. Raises
    what the request gets instead: ApiError, UserError (400), QueueFull."""
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
    """What is computed in a thread. text: of a chat's prompt; shown: marks that the parsers need."""

    prompts: list[list[int]]
    grammar: Grammar | None
    text: str | None = None
    tools: tuple[Tool, ...] = ()
    shown: tuple[str, ...] = ()


class Answering(AsyncIterator[list[Event]]):
    """See the module's docstring. model: the one that answers. prompt_tokens: of all prompts. begun: when it was asked
    for, by time.perf_counter."""

    def __init__(
        self, library: Library, model: LoadedModel, request: AnswerRequest, told: Callable[[str, Stats], None]
    ) -> None:
        self.model, self.request, self._told = model, request, told
        self.prompt_tokens, self.begun = 0, time.perf_counter()
        self._library = library
        self._stream: AsyncGeneration | None = None
        self._events: list[AnswerEvents] = []
        self._progress: list[Event] = []  # that came since the last events
        self._ended = False

    async def begin(self) -> None:
        """Queues the answers."""
        request, model = self.request, self.model
        made = await asyncio.to_thread(self._prepare)
        self.prompt_tokens = sum(map(len, made.prompts))
        stops = (*(model.prompter.stops if isinstance(request, ChatRequest) else ()), *request.stop)
        count = request.n * len(made.prompts)
        self._events = [AnswerEvents(model, request, index, made.text, made.tools) for index in range(count)]
        self._stream = model.engine.agenerate(
            made.prompts,
            None,
            request.max_tokens,
            stops,
            made.shown,
            n=request.n,
            client=request.client,
            logprobs=request.logprobs,
            constraint=made.grammar,
            min_tokens=request.min_tokens,
            progress=self._progress.append if request.progress else None,
            **request.sampling,
        )
        await self._stream.start()

    def _prepare(self) -> "_Prepared":
        request, model = self.request, self.model
        wanted = request.response_format
        if isinstance(request, TextRequest):
            return _Prepared(self._encode(request), self._grammar(wanted, None))
        assert isinstance(request, ChatRequest), "there are two kinds"
        tools = read_tools(request.callable_tools)
        text, ids = model.prompter.prompt(request)
        shown, grammar = model.reasoning.marks, None
        if tools:
            if isinstance(wanted, Pattern):
                raise invalid(
                    "with tools an answer can be JSON by a schema, but match no grammar or regular expression"
                )
            shown += model.calls.marks
            grammar = model.grammars.tool_calls(
                model.calls,
                tools,
                request.tool_choice,
                request.parallel_tool_calls,
                text,
                wanted.schema if isinstance(wanted, ResponseFormat) else None,
            )
        else:
            grammar = self._grammar(wanted, text)
        return _Prepared([ids], grammar, text, tools, shown)

    def _grammar(self, wanted: AnswerFormat | None, prompt: str | None) -> Grammar | None:
        if wanted is None:
            return None
        grammars = self.model.grammars
        if isinstance(wanted, ResponseFormat):
            return grammars.json_schema(wanted.schema, prompt, not wanted.strict)
        return {"regex": grammars.regex, "grammar": grammars.grammar}[wanted.kind](wanted.text, prompt)

    def _encode(self, request: TextRequest) -> list[list[int]]:
        return [self._ids(prompt) for prompt in request.prompts]

    def _ids(self, prompt: str | Sequence[int | str]) -> list[int]:
        tokenizer, ids = self.model.engine.tokenizer, []
        for place, part in enumerate([prompt] if isinstance(prompt, str) else prompt):
            if not isinstance(part, str):
                ids.append(part)
            else:
                ids += tokenizer.encode(part, add_special=False) if place else tokenizer.encode_prompt(part)
        return ids

    async def __anext__(self) -> list[Event]:
        if self._ended:
            raise StopAsyncIteration
        assert self._stream is not None, "begin() has run"
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

    def progress(self, index: int) -> Progress:
        """Of an answer that was begun."""
        assert self._stream is not None, "begin() has run"
        stats = self._stream.answers[index]
        usage = Usage(stats.prompt_tokens, stats.generated, stats.cached_tokens)
        return Progress(usage, Timings(stats.ttft_s, stats.decode_s))

    async def pause(self, seconds: float) -> None:
        """Waits between two lists of events: so long, or until the answers are complete."""
        assert self._stream is not None, "begin() has run"
        await self._stream.pause(seconds)

    async def aclose(self) -> None:
        """Ends the answers, and gives the model back."""
        try:
            if self._stream is not None:
                await self._stream.aclose()
                for stats in self._stream.answers:
                    self._told(self.model.name, stats)
        finally:
            await self._library.release(self.model)
