"""Reads a text that arrives in pieces (`TextReader.feed`), and JSON in it, without waiting for its end.

The functions are generators that yield nothing. They are suspended (`yield`) where they need text that has not arrived,
and are resumed after more text has. Their results do not depend on how the text was divided. Functions with a `Write`
copy their input to it, piece by piece, as valid JSON. They raise `Malformed` as soon as the text does not match, or if
it ends too early.
"""

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]  # suspended where more text is needed; returns T
Write = Callable[[str], object]

_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # within a string (RFC 8259, section 7)
_WORD = re.compile(r"[-+.\w]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")  # RFC 8259, section 6
# JSON's words and Python's, which models also write.
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_ESCAPES = '"\\/bfnrt'
_HEX = re.compile(r"[0-9a-fA-F]{4}")


class Malformed(Exception):
    """The text does not match what is read."""


def quoted(text: str) -> str:
    """The text as it is within a JSON string, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class TextReader:
    """The text, and the place up to which it is read. place: counted from the beginning of the whole text."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._dropped = 0  # number of characters before `_text`
        self._kept: int | None = None
        self.ended = False

    # ---- text comes in

    def feed(self, text: str) -> None:
        keep = self._at if self._kept is None else min(self._at, self._kept - self._dropped)
        self._text = self._text[keep:] + text
        self._at -= keep
        self._dropped += keep

    def end(self) -> None:
        self.ended = True

    # ---- places

    @property
    def place(self) -> int:
        return self._dropped + self._at

    def keep(self, place: int | None) -> None:
        """Keeps the text from this place on, so that `back` can return to it; None: keeps no text."""
        self._kept = place

    def back(self, place: int) -> None:
        """Continues at an earlier place, from which text was kept."""
        self._at = place - self._dropped

    # ---- plain text

    def available(self) -> str:
        """The text that has arrived and is not read yet."""
        return self._text[self._at :]

    def skip(self, count: int) -> None:
        self._at += count

    def peek(self) -> Reading[str]:
        """The next character, without reading it; "" at the end."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def arrived(self, pattern: re.Pattern[str]) -> str:
        """Reads what the pattern matches in the text that has arrived; perhaps nothing."""
        match = pattern.match(self._text, self._at)
        self._at += len(match[0]) if match else 0
        return match[0] if match else ""

    def take(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Reads all characters that match the pattern, a repeated class of characters; perhaps none."""
        pieces = []
        while (yield from self.peek()):
            pieces.append(self.arrived(pattern))
            if self._at < len(self._text):
                break
        return "".join(pieces)

    def space(self) -> Reading[str]:
        """Reads white space."""
        return (yield from self.take(_SPACE))

    def one_of(self, texts: Sequence[str]) -> Reading[str | None]:
        """Reads and returns the longest of `texts` that follows; None if none follows."""
        while True:
            rest = self.available()
            possible = [text for text in texts if text.startswith(rest) and len(text) > len(rest)]
            if not possible or self.ended:
                break
            yield
        found = max((text for text in texts if rest.startswith(text)), key=len, default=None)
        self._at += len(found or "")
        return found

    def expect(self, text: str) -> Reading[None]:
        if (yield from self.one_of((text,))) is None:
            raise Malformed

    def until(self, mark: str, write: Write) -> Reading[None]:
        """Copies the text before `mark`, and reads the mark."""
        while True:
            rest = self.available()
            place = rest.find(mark)
            if place >= 0:
                write(rest[:place])
                self._at += place + len(mark)
                return
            if self.ended:
                raise Malformed
            hold = next((n for n in range(min(len(mark) - 1, len(rest)), 0, -1) if rest.endswith(mark[:n])), 0)
            write(rest[: len(rest) - hold])
            self._at += len(rest) - hold
            yield


def string(reader: TextReader, write: Write) -> Reading[None]:
    """Copies a JSON string. Escapes control characters, which models write although JSON does not allow them."""
    yield from reader.expect('"')
    write('"')
    while True:
        character = yield from reader.peek()
        if not character:
            raise Malformed
        if text := reader.arrived(_PLAIN):  # written at once, as the rest of the string may arrive much later
            write(text)
            continue
        reader.skip(1)
        if character == '"':
            write('"')
            return
        if character != "\\":
            write(quoted(character))
            continue
        escape = yield from reader.peek()
        reader.skip(1)
        if escape == "u":
            digits = ""
            for _ in range(4):
                digits += yield from reader.peek()
                reader.skip(1)
            if not _HEX.fullmatch(digits):
                raise Malformed
            write("\\u" + digits)
        elif escape and escape in _ESCAPES:
            write("\\" + escape)
        else:
            raise Malformed


def text_of(reader: TextReader) -> Reading[str]:
    """The content of a JSON string."""
    parts: list[str] = []
    yield from string(reader, parts.append)
    return json.loads("".join(parts))


def _scalar(reader: TextReader, write: Write) -> Reading[None]:
    word = yield from reader.take(_WORD)
    if word not in _WORDS and not _NUMBER.fullmatch(word):
        raise Malformed
    write(_WORDS.get(word, word))


def value(
    reader: TextReader, write: Write, text: Callable[[TextReader, Write], Reading[None]] = string, quotes: str = '"'
) -> Reading[None]:
    """Copies a JSON value. text: a function that copies a string or a key. quotes: the first characters of strings."""
    closing: list[str] = []

    def space() -> Reading[str]:
        write((yield from reader.space()))
        return (yield from reader.peek())

    def key() -> Reading[None]:
        yield from space()
        yield from text(reader, write)
        yield from space()
        yield from reader.expect(":")
        write(":")

    while True:
        character = yield from space()
        if character and character in "{[":
            end = "}" if character == "{" else "]"
            reader.skip(1)
            write(character)
            if (yield from space()) != end:
                closing.append(end)
                if end == "}":
                    yield from key()
                continue
            reader.skip(1)
            write(end)
        elif character and character in quotes:
            yield from text(reader, write)
        else:
            yield from _scalar(reader, write)
        while True:  # a value is complete
            if not closing:
                return
            character = yield from space()
            if character != closing[-1]:
                break
            reader.skip(1)
            write(closing.pop())
        if character != ",":
            raise Malformed
        reader.skip(1)
        write(",")
        if closing[-1] == "}":
            yield from key()


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def parsed(text: str) -> Any:
    """The JSON value of a text. Raises ValueError if it is not valid JSON."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
