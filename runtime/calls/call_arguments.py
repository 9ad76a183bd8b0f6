"""Formats of calls whose arguments are not JSON: with tags around each argument, or objects with bare keys. The parsers
convert the arguments to JSON text; see call_formats.py."""

import ast
import json
import re
from dataclasses import dataclass

from mlc_amd.runtime.calls.call_formats import CallFormat, CallSink
from mlc_amd.runtime.calls.json_reader import Malformed, Reading, TextReader, Write, parsed, quoted, string, value
from mlc_amd.runtime.calls.tools import ALL_TYPES, NAME, json_type

DEPTH = 32  # limit of the depth of nested arguments
ITEM = "item"
_DIGITS = re.compile(r"[0-9]+")

# ---- arguments between tags


@dataclass(frozen=True, kw_only=True)
class TaggedCalls(CallFormat):
    """Each argument is between tags: strings unchanged, other values as JSON."""

    name: tuple[str, str]  # the texts around the tool's name
    number_end: str = ""  # if set, a number follows the name, and then this text
    key: tuple[str, str]  # the texts around an argument's name
    kinds: tuple[str, ...] = ()  # the texts that may follow it: the first one before a string, the others before JSON
    nested: bool = False  # objects and lists may consist of arguments, too; those of a list have the name ITEM
    value_opening: str = ""
    value_closing: str  # after a value; {} is the argument's name
    end: str = ""  # after the last argument
    lines: bool = False  # a value is on lines of its own
    control: tuple[str, ...] = ()  # the control tokens that these texts consist of
    several: bool = False  # there may be several calls before `closing`

    @property
    def marks(self) -> tuple[str, ...]:
        own = (*self.control, *self.key, *self.kinds, self.value_opening, self.value_closing, self.end)
        return (*super().marks, *filter(None, own))

    def read(self, reader: TextReader, sink: CallSink) -> Reading[None]:
        while True:
            yield from self._call(reader, sink)
            yield from reader.space()
            if not self.several or not (yield from reader.peek()) or (yield from reader.one_of((self.closing,))):
                break
        yield from self._close(reader)

    def _call(self, reader: TextReader, sink: CallSink) -> Reading[None]:
        yield from reader.space()
        yield from reader.expect(self.name[0])
        name = yield from reader.take(NAME)
        yield from reader.expect(self.name[1])
        if self.number_end:
            yield from reader.take(_DIGITS)
            yield from reader.expect(self.number_end)
        yield from reader.space()
        if not (yield from reader.peek()):
            raise Malformed  # the name may be incomplete
        tool = sink.begin(name)
        sink.write("{")
        first = True
        while True:
            yield from reader.space()
            mark = yield from reader.one_of((self.key[0], self.end or self.closing))
            if mark != self.key[0]:
                break
            parts: list[str] = []
            yield from reader.until(self.key[1], parts.append)
            key = "".join(parts)
            types = tool.types(key)
            if self.kinds:
                kind = yield from reader.one_of(self.kinds)
                if kind is None:
                    raise Malformed
                types = frozenset({"string"}) if kind == self.kinds[0] else types - {"string"} or ALL_TYPES - {"string"}
            if self.value_opening:
                yield from reader.space()
                yield from reader.expect(self.value_opening)
            sink.write(f'{"" if first else ", "}"{quoted(key)}": ')
            first = False
            yield from self._value(reader, sink.write, types, self.value_closing.replace("{}", key))
        if mark is None:
            raise Malformed
        sink.write("}")
        sink.end()

    def _value(self, reader: TextReader, write: Write, types: frozenset[str], mark: str) -> Reading[None]:
        """Copies the value before `mark` as JSON: a string as it arrives, other values when they are complete."""
        if self.lines:
            yield from reader.one_of(("\n",))
        if types == {"string"}:
            write('"')
            newline = _WithoutLast("\n", lambda text: write(quoted(text))) if self.lines else None
            yield from reader.until(mark, newline or (lambda text: write(quoted(text))))
            write('"')
            return
        parts: list[str] = []
        if "string" not in types:
            place = reader.place
            try:
                yield from reader.space()
                yield from value(reader, parts.append)
                yield from reader.space()
                # the first mark after the value: strings in the value may contain the mark
                yield from reader.expect(mark)
            except Malformed:
                reader.back(place)
                parts.clear()
            else:
                write("".join(parts))
                return
        yield from reader.until(mark, parts.append)
        text = "".join(parts)
        if self.nested and self.key[0] in text and types != {"string"}:
            write(json.dumps(self._of_arguments(text), ensure_ascii=False))
            return
        write(_as_json(text.removesuffix("\n") if self.lines else text, types))

    def _of_arguments(self, text: str, depth: int = 0) -> object:
        """The value of a text of nested arguments. Raises Malformed for other texts, and nesting beyond DEPTH."""
        (opening, end), found, rest = self.key, [], text.strip()
        if depth > DEPTH:
            raise Malformed
        while rest:
            key, ended, after = rest.removeprefix(opening).partition(end)
            inner, closed, rest = after.partition(self.value_closing.replace("{}", key))
            if not ended or not closed:
                raise Malformed
            plain = opening not in inner
            found.append((key, parsed(_as_json(inner, ALL_TYPES)) if plain else self._of_arguments(inner, depth + 1)))
            rest = rest.strip()
        return [value for _, value in found] if all(key == ITEM for key, _ in found) else dict(found)


class _WithoutLast:
    """Writes a text that arrives in pieces, except for `last` at its end."""

    def __init__(self, last: str, write: Write) -> None:
        self._last, self._write, self._held = last, write, ""

    def __call__(self, text: str) -> None:
        text = self._held + text
        self._held = self._last if text.endswith(self._last) else ""
        self._write(text.removesuffix(self._last))


def _as_json(text: str, types: frozenset[str]) -> str:
    """The JSON text of a value whose text is JSON or a Python literal. Other texts are strings."""
    try:
        found = parsed(text)
        converted = text.strip()
    except ValueError:
        try:
            found = ast.literal_eval(text.strip())
            converted = json.dumps(found, ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            found, converted = text, ""
    # A value of a type that is not allowed is a string, if strings are allowed.
    if "string" in types and json_type(found) in {"string"} | (ALL_TYPES - types):
        return json.dumps(text, ensure_ascii=False)
    return converted or json.dumps(text, ensure_ascii=False)


# ---- Gemma: objects with bare keys


@dataclass(frozen=True, kw_only=True)
class BareCalls(CallFormat):
    """`call:NAME{key:value,..}`: JSON with keys without quotes, and with strings between two `quote`."""

    quote: str

    @property
    def marks(self) -> tuple[str, ...]:
        return (*super().marks, self.quote)

    def read(self, reader: TextReader, sink: CallSink) -> Reading[None]:
        yield from reader.space()
        yield from reader.expect("call:")
        yield from reader.space()
        name = yield from reader.take(NAME)
        yield from reader.space()
        if (yield from reader.peek()) != "{":
            raise Malformed
        sink.begin(name)
        yield from value(reader, sink.write, self._text, quotes=f'"{self.quote[0]}')
        sink.end()
        yield from self._close(reader)

    def _text(self, reader: TextReader, write: Write) -> Reading[None]:
        """Copies a string or a key."""
        if (yield from reader.peek()) == '"':
            yield from string(reader, write)
        elif (yield from reader.one_of((self.quote,))):
            write('"')
            yield from reader.until(self.quote, lambda text: write(quoted(text)))
            write('"')
        elif key := (yield from reader.take(_BARE)).strip():
            write(f'"{quoted(key)}"')
        else:
            raise Malformed


_BARE = re.compile(r'[^:{}\[\],"<\n]+')  # a key without quotes
