"""The settings of a chat, by the names that `/set` and the flags of `mlc-amd chat` have.

In:  a session, a name and a value as it was typed.
Out: the value, checked and set; all values as text. UserError for an unknown name and a value that does not fit.
"""

import dataclasses
import shlex
from collections.abc import Callable
from typing import Any, Protocol

from mlc_amd.runtime.engine.chat import Conversation
from mlc_amd.runtime.engine.generation import check_max_tokens, check_stop
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.sampling.settings import Sampling

UNSET = "-"
_SWITCH = {"on": True, "off": False}


class HasSettings(Protocol):
    """What of a Session can be set, besides its conversation's."""

    conversation: Conversation
    max_tokens: int | None
    stop: tuple[str, ...]
    show_thinking: bool
    quiet: bool


def _number(name: str, text: str) -> Any:
    """A value of the type that the sampling parameter has."""
    kind = type(getattr(Sampling(), name))
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"{name} must be {'a whole number' if kind is int else 'a number'}, not {text!r}") from None


def _count(name: str, text: str) -> int | None:
    if text == UNSET:
        return None
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name} must be a whole number, or {UNSET} for none, not {text!r}") from None


def _limit(name: str, text: str) -> int | None:
    return check_max_tokens(_count(name, text))


def _texts(name: str, text: str) -> tuple[str, ...]:
    """Words as in a shell; "\\n" and "\\t" are a new line and a tab."""
    if text == UNSET:
        return ()
    try:
        words = shlex.split(text)
    except ValueError:
        raise UserError(f"{name} has a quote without an end: {text}") from None
    return check_stop([word.replace("\\n", "\n").replace("\\t", "\t") for word in words])


def _switch(name: str, text: str) -> bool:
    if text not in _SWITCH:
        raise UserError(f"{name} must be {' or '.join(_SWITCH)}, not {text!r}")
    return _SWITCH[text]


def _word(name: str, text: str) -> str:
    return text


_Reader = Callable[[str, str], Any]  # (name, text) -> value
# Which object has the setting: the conversation's `sampling`, the conversation, or the session.
_SAMPLING: dict[str, _Reader] = {
    field.name: _count if field.name == "seed" else _number
    for field in dataclasses.fields(Sampling)
    if field.name != "logit_bias"  # a mapping, which has no form in a line
}
_CONVERSATION: dict[str, _Reader] = {"thinking": _word, "on_full": _word}
_SESSION: dict[str, _Reader] = {"max_tokens": _limit, "stop": _texts, "show_thinking": _switch, "quiet": _switch}
_READERS = _SAMPLING | _SESSION | _CONVERSATION
NAMES = tuple(_READERS)


def values(session: HasSettings) -> dict[str, str]:
    """All settings, as they would be typed."""
    found = {name: getattr(session.conversation.sampling, name) for name in _SAMPLING}
    found |= {name: getattr(session, name) for name in _SESSION}
    found |= {name: getattr(session.conversation, name) for name in _CONVERSATION}
    return {name: _written(value) for name, value in found.items()}


def change(session: HasSettings, name: str, text: str) -> str:
    """Sets one; returns its new value as text."""
    if name not in _READERS:
        raise UserError(f"unknown setting {name}: choose from {', '.join(NAMES)}")
    if not text:
        raise UserError(f"{name} needs a value: /set {name} VALUE")
    value = _READERS[name](name, text)
    if name in _SAMPLING:
        changes: Any = {name: value}
        session.conversation.sampling = session.conversation.sampling.changed(**changes)
    else:
        setattr(session if name in _SESSION else session.conversation, name, value)
    return values(session)[name]


def _written(value: object) -> str:
    if value is None or value == ():
        return UNSET
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(shlex.quote(text).replace("\n", "\\n").replace("\t", "\\t") for text in value)
    return str(value)
