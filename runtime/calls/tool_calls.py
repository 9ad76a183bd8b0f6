"""Finds calls of tools in a model's answer.

In: the parts of an answer (reasoning.py), piece by piece, and the tools that may be called (tools.py). Out: the same
parts without the calls, and events for the calls, as early as they are certain. Arguments are JSON text in every
format. A malformed call, or a call of an unknown tool, remains text. Nothing is raised.

`detect` finds the format of a model in FORMATS by its vocabulary and its chat template. If the template does not
support tools, or has an unknown format, the format is `GENERIC`: Hermes' format. Then an instruction in the system
message describes it (call_messages.py), and the template gets no tools.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mlc_amd.runtime.calls.call_arguments import BareCalls, TaggedCalls
from mlc_amd.runtime.calls.call_formats import (
    CallArguments,
    CallBegin,
    CallEnd,
    CallEvent,
    CallFormat,
    CallSink,
    HarmonyCalls,
    JsonCalls,
    NamedCalls,
)
from mlc_amd.runtime.calls.json_reader import Malformed, Reading, TextReader
from mlc_amd.runtime.calls.tools import Tool
from mlc_amd.runtime.text.marks import split_at
from mlc_amd.runtime.text.reasoning import AnswerPart

Event = AnswerPart | CallEvent


@dataclass(frozen=True)
class KnownFormat:
    """A format, and how to detect it. tokens: must be in the vocabulary. template: must be in the chat template."""

    format: CallFormat
    tokens: tuple[str, ...] = ()
    template: tuple[str, ...] = ()


HERMES = JsonCalls(opening="<tool_call>", closing="</tool_call>")
GENERIC = replace(HERMES, instructed=True)
_FUNCTIONS = TaggedCalls(
    opening="<tool_call>",
    closing="</tool_call>",
    name=("<function=", ">"),
    key=("<parameter=", ">"),
    value_closing="</parameter>",
    end="</function>",
)
_DEEPSEEK = NamedCalls(
    opening="<｜tool▁calls▁begin｜>",
    closing="<｜tool▁calls▁end｜>",
    repeated="<｜tool▁call▁begin｜>",
    each_closing="<｜tool▁call▁end｜>",
    after="<｜tool▁sep｜>",
)


def _invoked(block: str, space: str = "") -> TaggedCalls:
    """Several calls in the tag `block`, with the tags `invoke` and `parameter`. space: the namespace of these tags."""
    return TaggedCalls(
        opening=f"<{block}>",
        closing=f"</{block}>",
        name=(f'<{space}invoke name="', '">'),
        key=(f'<{space}parameter name="', '">'),
        value_closing=f"</{space}parameter>",
        end=f"</{space}invoke>",
        several=True,
    )


# an attribute of the parameter's tag says whether the value is a string
_DSML = replace(
    _invoked("｜DSML｜tool_calls", "｜DSML｜"),
    key=('<｜DSML｜parameter name="', '" string="'),
    kinds=('true">', 'false">'),
)
_LLAMA = JsonCalls(opening="<|python_tag|>", arguments_key="parameters", bare=True, separator=";")
# A model has the first format whose texts are all found. Sources: the models' chat templates.
FORMATS: tuple[KnownFormat, ...] = (
    # gpt-oss
    KnownFormat(HarmonyCalls(), tokens=("<|start|>", "<|channel|>", "<|message|>", "<|call|>")),
    # Gemma 4
    KnownFormat(
        BareCalls(opening="<|tool_call>", closing="<tool_call|>", quote='<|"|>'),
        tokens=("<|tool_call>", "<tool_call|>"),
        template=("<|tool_call>call:",),
    ),
    # FunctionGemma
    KnownFormat(
        BareCalls(opening="<start_function_call>", closing="<end_function_call>", quote="<escape>"),
        template=("<start_function_call>call:",),
    ),
    # Mistral Small 3.2, Magistral 2507: with an id; Ministral 3, Devstral 2 and later: without
    KnownFormat(
        NamedCalls(opening="[TOOL_CALLS]", id_mark="[CALL_ID]", after="[ARGS]"), template=("[TOOL_CALLS]", "[ARGS]")
    ),
    # Mistral 7B v0.3, Nemo, Small 3.1
    KnownFormat(JsonCalls(opening="[TOOL_CALLS]", listed=True), template=("[TOOL_CALLS]",)),
    # Kimi K2
    KnownFormat(
        NamedCalls(
            opening="<|tool_calls_section_begin|>",
            closing="<|tool_calls_section_end|>",
            repeated="<|tool_call_begin|>",
            each_closing="<|tool_call_end|>",
            after="<|tool_call_argument_begin|>",
            numbered=True,
        ),
        tokens=("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
    ),
    # DeepSeek V3, R1: the kind of the tool, its name, and fenced JSON
    KnownFormat(
        replace(_DEEPSEEK, after="", before=("function", _DEEPSEEK.after), fence=True),
        template=("<｜tool▁sep｜>", "```json"),
    ),
    # DeepSeek V3.1
    KnownFormat(_DEEPSEEK, template=("<｜tool▁sep｜>",)),
    # DeepSeek V3.2; V4
    KnownFormat(
        replace(_DSML, opening="<｜DSML｜function_calls>", closing="</｜DSML｜function_calls>"),
        template=("｜DSML｜", "function_calls>"),
    ),
    KnownFormat(_DSML, template=("｜DSML｜", "tool_calls>")),
    # Kimi K3
    KnownFormat(
        TaggedCalls(
            opening="<|open|>tools<|sep|>",
            closing="<|close|>tools<|sep|>",
            name=('<|open|>call tool="', '" index="'),
            number_end='"<|sep|>',
            key=('<|open|>argument key="', '" type="'),
            kinds=tuple(f'{kind}"<|sep|>' for kind in ("string", "number", "boolean", "null", "object", "array")),
            value_closing="<|close|>argument<|sep|>",
            end="<|close|>call<|sep|>",
            control=("<|open|>", "<|sep|>", "<|close|>"),
            several=True,
        ),
        tokens=("<|open|>", "<|sep|>", "<|close|>"),
    ),
    # Hunyuan 3
    KnownFormat(
        TaggedCalls(
            opening="<tool_calls:opensource>",
            closing="</tool_calls:opensource>",
            name=("<tool_call:opensource>", "<tool_sep:opensource>"),
            key=("<arg_key:opensource>", "</arg_key:opensource>"),
            value_opening="<arg_value:opensource>",
            value_closing="</arg_value:opensource>",
            end="</tool_call:opensource>",
            several=True,
        ),
        template=("tool_calls", "tool_sep", ":opensource"),
    ),
    # GLM 4.5, 4.6, 4.7, Laguna, Ling 3, Spark 2.5
    KnownFormat(
        TaggedCalls(
            opening="<tool_call>",
            closing="</tool_call>",
            name=("", ""),
            key=("<arg_key>", "</arg_key>"),
            value_opening="<arg_value>",
            value_closing="</arg_value>",
        ),
        template=("<arg_key>", "<arg_value>"),
    ),
    # MiniMax M2
    KnownFormat(_invoked("minimax:tool_call"), template=("<minimax:tool_call>",)),
    # MiniMax M3
    KnownFormat(
        TaggedCalls(
            opening="]<]minimax[>[<tool_call>",
            closing="]<]minimax[>[</tool_call>",
            name=(']<]minimax[>[<invoke name="', '">'),
            key=("]<]minimax[>[<", ">"),
            value_closing="]<]minimax[>[</{}>",
            end="]<]minimax[>[</invoke>",
            control=("]<]minimax[>[",),
            nested=True,
            several=True,
        ),
        template=("]<]minimax[>[", "<tool_call>"),
    ),
    # Muse Glimmer
    KnownFormat(_invoked("atem:function_calls", "atem:"), template=("<atem:function_calls>",)),
    # Seed-OSS
    KnownFormat(
        replace(_FUNCTIONS, opening="<seed:tool_call>", closing="</seed:tool_call>"), template=("<seed:tool_call>",)
    ),
    # Qwen3 Coder, Qwen3.5, Nemotron 3, Step 3.5
    KnownFormat(replace(_FUNCTIONS, lines=True), template=("<tool_call>", "<function=", "<parameter=")),
    # Command R7B, Command A
    KnownFormat(
        JsonCalls(
            opening="<|START_ACTION|>",
            closing="<|END_ACTION|>",
            listed=True,
            id_key="tool_call_id",
            name_key="tool_name",
            arguments_key="parameters",
        ),
        template=("<|START_ACTION|>",),
    ),
    # Phi-4 mini
    KnownFormat(
        JsonCalls(opening="<|tool_call|>", closing="<|/tool_call|>", listed=True),
        template=("<|tool_call|>", "<|/tool_call|>"),
    ),
    # Granite 3
    KnownFormat(JsonCalls(opening="<|tool_call|>", listed=True), template=("<|tool_call|>",)),
    # Nemotron Nano 2, Nemotron Super 1.5
    KnownFormat(JsonCalls(opening="<TOOLCALL>", closing="</TOOLCALL>", listed=True), template=("<TOOLCALL>",)),
    # Jamba, Hunyuan
    KnownFormat(JsonCalls(opening="<tool_calls>", closing="</tool_calls>", listed=True), template=("<tool_calls>",)),
    # Hermes 2 and 3, Qwen2.5, Qwen3, Granite 4, SmolLM3, EXAONE 4, Ling
    KnownFormat(HERMES, template=("<tool_call>",)),
    # Llama 3.1, 3.2, 3.3, 4
    KnownFormat(_LLAMA, tokens=("<|python_tag|>",), template=("tools", '"parameters"')),
    KnownFormat(
        replace(_LLAMA, opening="<|python_start|>", closing="<|python_end|>"),
        tokens=("<|python_start|>",),
        template=("tools", '"parameters"'),
    ),
)


def detect(has_token: Callable[[str], bool], template: str) -> CallFormat:
    """The format of a model. has_token: whether a text is a token of its vocabulary. template: the text of its chat
    template; if it has several, of the one for tools."""
    rows = (
        row for row in FORMATS if all(map(has_token, row.tokens)) and all(text in template for text in row.template)
    )
    return next((row.format for row in rows), GENERIC)


class CallParser:
    """Finds the calls in one answer. Call `feed` with each of its parts, then `finish`."""

    def __init__(self, found: CallFormat, tools: Sequence[Tool]) -> None:
        self._format = found
        self._events: list[Event] = []
        self._reader = TextReader()  # reads what may be a call
        self._call_end = 0  # the place after the last call
        self._sink = CallSink(tools, self._emit)
        self._held = ""  # white space that is text only if no call follows it
        self._after_call = False  # there was no text since the last call
        self._answer = _ReadInPieces(self._read)
        self._message: _ReadInPieces | None = None  # the message to a tool that is in progress
        self._recipient = ""

    def feed(self, part: AnswerPart) -> list[Event]:
        """The events that the part completes or continues."""
        if part.kind != "tool" or part.recipient != self._recipient:
            self._end_message()
        if part.kind == "thinking":
            self._events.append(part)
        elif part.kind == "final":
            self._answer.feed(part.text)
        else:
            if self._message is None:
                self._recipient = part.recipient
                self._message = _ReadInPieces(self._read_message)
            self._message.feed(part.text)
        return self._take()

    def finish(self) -> list[Event]:
        """The remaining events, at the end of the answer."""
        self._end_message()
        self._answer.finish()
        if not self._after_call:
            self._write_text("", last=True)
        return self._take()

    def _end_message(self) -> None:
        if self._message is not None:
            self._message.finish()
            self._message = None

    def _take(self) -> list[Event]:
        """The events so far. Adjacent pieces of the same part, or of the same arguments, are joined."""
        merged: list[Event] = []
        for event in self._events:
            last = merged[-1] if merged else None
            if isinstance(event, CallArguments) and isinstance(last, CallArguments):
                merged[-1] = CallArguments(event.number, last.text + event.text)
            elif isinstance(event, AnswerPart) and isinstance(last, AnswerPart) and event.kind == last.kind:
                merged[-1] = AnswerPart(event.kind, last.text + event.text)
            else:
                merged.append(event)
        self._events = []
        return merged

    def _emit(self, event: CallEvent) -> None:
        if isinstance(event, CallBegin):
            self._held, self._after_call = "", True
        elif isinstance(event, CallEnd):
            self._call_end = self._reader.place
            self._reader.keep(self._call_end)
        self._events.append(event)

    def _write_text(self, text: str, last: bool = False) -> None:
        """Adds text of the answer, without the white space around calls."""
        text = self._held + text
        if self._after_call:
            text = text.lstrip()
        trimmed = text if last else text.rstrip()
        self._held = text[len(trimmed) :]
        if trimmed:
            self._after_call = False
            self._events.append(AnswerPart("final", trimmed))

    def _read(self, reader: TextReader) -> Reading[None]:
        """Reads the text of the answer and its calls."""
        opening = self._format.opening
        if self._format.bare:
            self._write_text((yield from reader.space()))
            if (yield from reader.peek()) == "{":
                yield from self._read_call(reader, "")
        while True:
            before, mark, _ = split_at(reader.available(), (opening,), reader.ended)
            self._write_text(before)
            reader.skip(len(before) + len(mark or ""))
            if mark is not None:
                yield from self._read_call(reader, mark)
            elif reader.ended:
                return
            else:
                yield

    def _read_call(self, reader: TextReader, mark: str) -> Reading[None]:
        """Reads the call after `mark`. If there is none, `mark` is text."""
        place, count = reader.place, self._sink.count
        self._reader = reader
        reader.keep(place)
        try:
            yield from self._format.read(reader, self._sink)
        except Malformed:
            if self._sink.tool is not None:
                self._sink.end(complete=False)
            elif self._sink.count > count:
                reader.back(self._call_end)
            else:
                self._write_text(mark)
                reader.back(place)
        finally:
            reader.keep(None)

    def _read_message(self, reader: TextReader) -> Reading[None]:
        """Reads a message to a tool: a call, or text if there is no such tool."""
        self._reader = reader
        prefix = self._format.prefix if isinstance(self._format, HarmonyCalls) else ""
        try:
            self._sink.begin(self._recipient.removeprefix(prefix))
        except Malformed:
            while not reader.ended:
                self._write_text(text := reader.available())
                reader.skip(len(text))
                yield
            return
        try:
            yield from self._format.read(reader, self._sink)
        except Malformed:
            self._sink.end(complete=False)


class _ReadInPieces:
    """Runs a reading generator: resumes it for each piece of text."""

    def __init__(self, read: Callable[[TextReader], Reading[None]]) -> None:
        self._reader = TextReader()
        self._reading = read(self._reader)

    def feed(self, text: str) -> None:
        self._reader.feed(text)
        next(self._reading, None)

    def finish(self) -> None:
        self._reader.end()
        next(self._reading, None)
