"""A text with a flag for each character: whether a chat template wrote it itself ("own"), or it comes from a message.

Only own characters can become control tokens (`Tokenizer.encode`). Plain strings are not own. An operation that is
missing here returns a plain str, so no operation of a template can turn the text of a message into a control token.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, SupportsIndex

_SPANS = re.compile(b"\1+")


class Traced(str):
    """own: for each character 1 if it is own, otherwise 0; None: all are 0."""

    _own: bytes
    __slots__ = ("_own",)

    def __new__(cls, text: str = "", own: bytes | None = None) -> "Traced":
        result = super().__new__(cls, text)
        result._own = bytes(len(result)) if own is None else own
        return result

    @classmethod
    def all_own(cls, text: str) -> "Traced":
        """A text of a template: all characters are own."""
        return cls(text, b"\1" * len(text))

    @classmethod
    def of_spans(cls, text: str, spans: Iterable[tuple[int, int]]) -> "Traced":
        """The inverse of `spans`: the text, with own characters in these ranges."""
        own = bytearray(len(text))
        for start, stop in spans:
            own[start:stop] = b"\1" * (stop - start)
        return cls(text, bytes(own))

    def spans(self) -> list[tuple[int, int]]:
        """The ranges of own characters, [start, stop): ascending, never adjacent."""
        return [match.span() for match in _SPANS.finditer(self._own)]

    def is_own(self, start: int, stop: int) -> bool:
        """Whether all characters of a range are own."""
        return 0 not in self._own[start:stop]

    def begins_with(self, other: "Traced") -> bool:
        """Whether this text begins with `other`, with the same characters own."""
        return self.startswith(other) and self._own.startswith(other._own)

    # ---- the operations of str

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: SupportsIndex | slice) -> "Traced":
        own = self._own[key] if isinstance(key, slice) else self._own[key : key + 1 or None]  # pyright: ignore
        return Traced(super().__getitem__(key), own)

    def __add__(self, other: str) -> "Traced":
        return Traced(super().__add__(other), self._own + _own_of(other))

    def __radd__(self, other: str) -> "Traced":
        return Traced(str.__add__(other, self), _own_of(other) + self._own)

    def __mul__(self, count: SupportsIndex) -> "Traced":
        return Traced(super().__mul__(count), self._own * count)

    def __rmul__(self, count: SupportsIndex) -> "Traced":
        return self * count

    def __mod__(self, values: Any) -> str:
        return derived(super().__mod__(values), self, values)

    def join(self, texts: Iterable[str]) -> str:
        pieces: list[str] = []
        for text in texts:
            pieces += (self, text) if pieces else (text,)
        return concatenate(pieces)

    def lstrip(self, chars: str | None = None) -> "Traced":
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None) -> "Traced":
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None) -> "Traced":
        return self.rstrip(chars).lstrip(chars)

    def removeprefix(self, prefix: str) -> "Traced":
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> "Traced":
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        return self._found(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        return self._found(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[Any]:
        ends = self._found(super().splitlines(True), "")
        return ends if keepends else [self._line(end) for end in ends]

    def partition(self, sep: str) -> tuple[Any, ...]:
        return tuple(self._found(super().partition(sep), ""))

    def rpartition(self, sep: str) -> tuple[Any, ...]:
        return tuple(self._found(super().rpartition(sep), ""))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        separator = new if isinstance(new, Traced) else Traced(new)
        return separator.join(self.split(old, count)) if old else super().replace(old, new, count)

    def _found(self, pieces: Iterable[str], sep: str | None) -> list["Traced"]:
        """The pieces as Traced. They are consecutive in this text, with `sep` between them; None: with white space."""
        result, place = [], 0
        for piece in pieces:
            place = self.find(piece, place) if sep is None else place
            result.append(self[place : place + len(piece)])
            place += len(piece) + len(sep or "")
        return result

    @staticmethod
    def _line(text: "Traced") -> "Traced":
        return text[: len(str.splitlines(text)[0])]


def _changing(name: str) -> Callable[..., str]:
    """A method of str that changes single characters, or adds others around them."""
    method = getattr(str, name)

    def change(self: Traced, *values: Any) -> str:
        result = method(self, *values)
        if self.isascii() and len(result) == len(self):
            return Traced(result, self._own)
        return derived(result, self, values)

    return change


for _name in ("lower", "upper", "capitalize", "title", "swapcase", "casefold", "center", "ljust", "rjust", "zfill"):
    setattr(Traced, _name, _changing(_name))


def concatenate(pieces: Iterable[object]) -> str:
    """The joined texts: Traced if one of them is Traced."""
    texts = [str(piece) for piece in pieces]
    result = "".join(texts)
    if not any(isinstance(text, Traced) for text in texts):
        return result
    return Traced(result, b"".join(map(_own_of, texts)))


def derived(result: str, *sources: object) -> str:
    """`result`, which was computed from `sources`: own if all texts among them are own, otherwise not own at all."""
    return Traced.all_own(result) if all(map(_is_own, sources)) else result


def _is_own(value: object) -> bool:
    if isinstance(value, Traced):
        return value.is_own(0, len(value))
    if isinstance(value, Mapping):
        return all(map(_is_own, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_own, value))
    return value is None or isinstance(value, int | float)


def _own_of(text: str) -> bytes:
    return text._own if isinstance(text, Traced) else bytes(len(text))
