"""Reads the fields of a JSON object from a client, each with the expected type.

In: a parsed JSON object. Out: values. Raises ApiError 400, which names the field, for a value of another type. Fields
that nobody reads are ignored, and null counts as absent, as in other servers. `parse_json` reads all JSON from clients.
"""

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, NoReturn

from mlc_amd.runtime.errors import shorten
from mlc_amd.tools.server.errors import ApiError, invalid

# Limit of nested lists and objects: less than any of Python's own functions can handle.
_DEEPEST = 200
# Limit of the digits of a whole number: less than a float can hold.
_LONGEST = 300


def parse_json(text: str | bytes | bytearray) -> Any:
    """The value of a JSON text. Raises ValueError for a text that is not JSON, numbers that a float cannot hold, and
    nesting that is too deep."""
    try:
        value = json.loads(text, parse_constant=_constant, parse_float=_float, parse_int=_int)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level, depth = [value], 0
    while level := [
        one
        for holder in level
        for one in (holder.values() if isinstance(holder, dict) else holder if isinstance(holder, list) else ())
        if isinstance(one, list | dict)
    ]:
        depth += 1
        if depth >= _DEEPEST:
            raise ValueError(f"it is nested too deeply: there may be {_DEEPEST} lists and objects in one another")
    return value


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _float(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"the number {shorten(text)} is too large")
    return value


def _int(text: str) -> int:
    if len(text) > _LONGEST:
        raise ValueError(f"a whole number has {len(text)} digits: it is too large")
    return int(text)


class Fields:
    """where: the path of the object in the body, "" for the body itself."""

    def __init__(self, values: Any, where: str = "") -> None:
        if not isinstance(values, Mapping):
            raise invalid(f"{where or 'the body'} is {shorten(values)}: it must be an object", where or None)
        self._values, self._where = values, where

    def path(self, name: str) -> str:
        """The field's path for errors: "messages[0].role"."""
        return f"{self._where}.{name}" if self._where else name

    def wrong(self, name: str, must: str) -> ApiError:
        """The error for a field with a wrong value. must: what it must be."""
        return invalid(f"{self.path(name)} is {shorten(self._values.get(name))}: it must be {must}", self.path(name))

    def given(self, name: str) -> bool:
        """Whether the field is there, even as null."""
        return name in self._values

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        """The value as it was sent; None if it is absent."""
        return self._values.get(name)

    def required(self, name: str) -> Any:
        if not self.has(name):
            raise invalid(f"{self.path(name)} is missing", self.path(name))
        return self._values[name]

    def _typed(self, name: str, kind: type, must: str) -> Any:
        """The value, of this type; None if it is absent."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, kind):
            raise self.wrong(name, must)
        return value

    def text(self, name: str, default: str = "") -> str:
        value = self._typed(name, str, "a string")
        return default if value is None else value

    def required_text(self, name: str) -> str:
        self.required(name)
        return self.text(name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._typed(name, bool, "true or false")
        return default if value is None else value

    def number(self, name: str) -> float | None:
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise self.wrong(name, "a number")
        return value

    def whole(self, name: str, low: int | None = None, high: int | None = None) -> int | None:
        """A whole number from `low` to `high`; 3.0 is accepted. None if it is absent."""
        value = self.number(name)
        if value is None:
            return None
        if value != int(value):
            raise self.wrong(name, "a whole number")
        if (low is not None and value < low) or (high is not None and value > high):
            raise self.wrong(name, f"at least {low}" if high is None else f"between {low} and {high}")
        return int(value)

    def choice(self, name: str, choices: Sequence[str], default: str) -> str:
        value = self._values.get(name)
        if value is not None and value not in choices:
            raise self.wrong(name, f"one of {', '.join(choices)}")
        return default if value is None else value

    def texts(self, name: str) -> tuple[str, ...]:
        """A string or a list of strings."""
        value = self._values.get(name)
        value = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.wrong(name, "a string or a list of strings")
        return tuple(value)

    def object(self, name: str) -> "Fields | None":
        value = self._typed(name, Mapping, "an object")
        return None if value is None else Fields(value, self.path(name))

    def objects(self, name: str) -> "list[Fields]":
        """A list of objects; empty if it is absent."""
        values = self._typed(name, list, "a list of objects") or ()
        return [Fields(one, f"{self.path(name)}[{place}]") for place, one in enumerate(values)]

    def values(self, name: str) -> dict[str, Any]:
        """An object as it was sent; empty if it is absent."""
        return dict(self._typed(name, Mapping, "an object") or {})
