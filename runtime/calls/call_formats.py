"""The formats in which models write calls of tools, with their parsers.

A parser reads what follows the text that begins calls (`CallFormat.opening`). It passes the tool's name, and the
arguments as JSON text piece by piece, to a `CallSink`. It raises `Malformed` if the text is no call; the pieces of a
call that has begun remain. call_grammars.py writes the same syntax as grammars. tool_calls.py has the table of formats.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mlc_amd.runtime.calls.json_reader import Malformed, Reading, TextReader, Write, parsed, text_of, value
from mlc_amd.runtime.calls.tools import NAME, Tool


@dataclass(frozen=True)
class CallBegin:
    """A call of a tool begins. number: of the call in this answer, from 0."""

    number: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    number: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """A call has ended. complete: False if its arguments are incomplete or malformed, so that they are not JSON."""

    number: int
    complete: bool = True


CallEvent = CallBegin | CallArguments | CallEnd


class CallSink:
    """Receives the calls that parsers read. tools: the tools that may be called. tool: of the call in progress."""

    def __init__(self, tools: Iterable[Tool], emit: Callable[[CallEvent], object]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._emit = emit
        self.count = 0
        self.tool: Tool | None = None

    def begin(self, name: str) -> Tool:
        """Begins a call. Raises Malformed if there is no such tool: then the text is no call."""
        if name not in self._tools:
            raise Malformed
        self.tool = self._tools[name]
        self._emit(CallBegin(self.count, name))
        self.count += 1
        return self.tool

    def write(self, text: str) -> None:
        """Adds a piece of the arguments."""
        if text:
            self._emit(CallArguments(self.count - 1, text))

    def end(self, complete: bool = True) -> None:
        self.tool = None
        self._emit(CallEnd(self.count - 1, complete))


@dataclass(frozen=True, kw_only=True)
class CallFormat(ABC):
    """A format. opening, closing: the texts around calls."""

    opening: str = ""  # the text that begins a call, or several calls
    closing: str = ""
    bare: bool = False  # the opening may be missing if a call begins the answer
    instructed: bool = False  # the chat template does not describe it, so an instruction must (call_messages.py)

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks of the format. If they are control tokens, the parser needs their texts."""
        return tuple(filter(None, (self.opening, self.closing)))

    @abstractmethod
    def read(self, reader: TextReader, sink: CallSink) -> Reading[None]:
        """Reads the calls after `opening`, and `closing` if it is there."""

    def _close(self, reader: TextReader) -> Reading[None]:
        """Reads the end of a call. An incomplete closing mark at the end of the answer is not text of the answer."""
        yield from reader.space()
        if self.closing and not (yield from reader.one_of((self.closing,))):
            rest = reader.available()
            if reader.ended and self.closing.startswith(rest):
                reader.skip(len(rest))


# ---- objects with a name and arguments

_NAMES, _ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters")


@dataclass(frozen=True, kw_only=True)
class JsonCalls(CallFormat):
    """`{"name": .., "arguments": {..}}`, with these or other keys."""

    id_key: str = ""  # name of the first key, which has the call's number
    name_key: str = "name"
    arguments_key: str = "arguments"
    listed: bool = False  # a JSON list of such objects
    separator: str = ""  # between several calls that are in no list and have no openings of their own

    def read(self, reader: TextReader, sink: CallSink) -> Reading[None]:
        yield from reader.space()
        if self.listed and (yield from reader.one_of(("[",))):
            yield from reader.space()
            while not (yield from reader.one_of(("]",))):
                yield from self._call(reader, sink)
                yield from reader.space()
                if (yield from reader.one_of((",",))):
                    yield from reader.space()
        else:
            yield from self._call(reader, sink)
            while True:
                yield from reader.space()
                separated = yield from reader.one_of((self.separator or ",",))
                yield from reader.space()
                if (yield from reader.peek()) != "{":
                    if separated:
                        raise Malformed
                    break
                yield from self._call(reader, sink)
        yield from self._close(reader)

    @staticmethod
    def _call(reader: TextReader, sink: CallSink) -> Reading[None]:
        """Reads an object. Keys may have any order, so arguments before the name are buffered."""
        yield from reader.expect("{")
        held: list[str] = []
        has_name = has_arguments = False
        while True:
            yield from reader.space()
            key = yield from text_of(reader)
            yield from reader.space()
            yield from reader.expect(":")
            yield from reader.space()
            if key in _NAMES and not has_name:
                sink.begin((yield from text_of(reader)))
                has_name = True
                for text in held:
                    sink.write(text)
            elif key in _ARGUMENTS and not has_arguments:
                has_arguments = True
                yield from arguments(reader, sink.write if has_name else held.append)
            else:
                yield from value(reader, lambda text: None)
            yield from reader.space()
            if (yield from reader.one_of(("}",))):
                break
            yield from reader.expect(",")
        if not has_name:
            raise Malformed
        if not has_arguments:
            sink.write("{}")
        sink.end()


def arguments(reader: TextReader, write: Write) -> Reading[None]:
    """Copies arguments: an object, or an object written as a string, or null."""
    character = yield from reader.peek()
    if character == "{":
        yield from value(reader, write)
    elif character == '"':
        text = yield from text_of(reader)
        try:
            correct = isinstance(parsed(text), dict)
        except ValueError as error:
            raise Malformed from error
        if not correct:
            raise Malformed
        write(text)
    else:
        yield from reader.expect("null")
        write("{}")


# ---- a name, then arguments as an object


@dataclass(frozen=True, kw_only=True)
class NamedCalls(CallFormat):
    """A name between marks, then a JSON object."""

    before: tuple[str, ...] = ()  # texts before the name, like `after`
    after: str = ""
    numbered: bool = False  # the name is between "functions." and ":" and the number of the call
    id_mark: str = ""  # the text that begins an id after the name
    fence: bool = False  # the object is between "```json" and "```"
    repeated: str = ""  # if set, one opening begins several calls, and each is between this text and `each_closing`
    each_closing: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        own = (*self.before, self.after, self.id_mark, self.repeated, self.each_closing)
        return (*super().marks, *filter(None, own))

    def read(self, reader: TextReader, sink: CallSink) -> Reading[None]:
        while True:
            if self.repeated:
                yield from reader.space()
                if not (yield from reader.one_of((self.repeated,))):
                    break
            yield from self._call(reader, sink)
            if not self.repeated:
                break
        yield from self._close(reader)

    def _call(self, reader: TextReader, sink: CallSink) -> Reading[None]:
        yield from reader.space()
        for text in self.before:
            yield from reader.expect(text)
        name = yield from reader.take(NAME)
        yield from reader.space()
        if self.id_mark and (yield from reader.one_of((self.id_mark,))):
            yield from reader.take(NAME)
        yield from reader.expect(self.after)
        yield from reader.space()
        if self.fence and (yield from reader.one_of(("```json", "```"))):
            yield from reader.space()
        sink.begin(re.sub(r":\d+$", "", name.removeprefix("functions.")) if self.numbered else name)
        yield from arguments(reader, sink.write)
        sink.end()
        yield from reader.space()
        if self.fence:
            yield from reader.one_of(("```",))
            yield from reader.space()
        if self.each_closing:
            yield from reader.one_of((self.each_closing,))


# ---- OpenAI's Harmony: messages to a tool


@dataclass(frozen=True, kw_only=True)
class HarmonyCalls(CallFormat):
    """Messages to `prefix` and a tool; reasoning.py separates them. `read` reads that of a call that has begun."""

    prefix: str = "functions."

    def read(self, reader: TextReader, sink: CallSink) -> Reading[None]:
        yield from reader.space()
        yield from arguments(reader, sink.write)
        sink.end()
