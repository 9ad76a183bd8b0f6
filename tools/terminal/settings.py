"""The settings of a chat, by their names for `/set` and for the flags of `mlc-amd chat`.

In: a conversation with its options, a setting's name and its value as typed. Out: the checked value, which is set; all
values as text. Raises UserError for an unknown name or an invalid value.
"""

import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mlc_amd.runtime.engine.chat import Conversation
from mlc_amd.runtime.engine.generation import check_stop
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import Option, described
from mlc_amd.runtime.sampling.settings import SamplingChanges
from mlc_amd.tools.options import ChatOptions

UNSET = "-"
_SWITCH = {"on": True, "off": False}
_SAMPLING = [name for name in described(SamplingChanges) if name != "logit_bias"]  # it cannot be typed in a line
_CONVERSATION = ("thinking", "on_full")
NAMES = (*_SAMPLING, *described(ChatOptions))


def values(conversation: Conversation, options: ChatOptions) -> dict[str, str]:
    """All settings, in the form in which they can be typed."""
    found = {name: getattr(conversation.sampling, name) for name in _SAMPLING}
    found |= {name: getattr(options, name) for name in described(ChatOptions)}
    return {name: _written(value) for name, value in found.items()}


def change(conversation: Conversation, options: ChatOptions, name: str, text: str) -> ChatOptions:
    """Changes a setting of the conversation or of the options. Returns the options."""
    if name not in NAMES:
        raise UserError(f"unknown setting {name}: choose from {', '.join(NAMES)}")
    if not text:
        raise UserError(f"{name} needs a value: /set {name} VALUE")
    group = SamplingChanges if name in _SAMPLING else ChatOptions
    changes: Any = {name: _value(name, *described(group)[name], text)}
    if name in _SAMPLING:
        conversation.sampling = conversation.sampling.changed(**changes)
        return options
    if name in _CONVERSATION:
        setattr(conversation, name, changes[name])  # raises UserError for an invalid value
    return replace(options, **changes)


def _value(name: str, kind: object, option: Option, text: str) -> object:
    """The value, of this type, of a text."""
    if kind == tuple[str, ...]:
        return _texts(name, text)
    if kind == int | None and text in (UNSET, option.unset):
        return None
    read, what = _READERS.get(kind, (str, "a text"))
    try:
        value = read(text)
    except (ValueError, KeyError):
        raise UserError(f"{name} must be {what}, not {text!r}") from None
    if problem := option.problem(name, value):
        raise UserError(problem)
    return value


# type of a setting -> (how its text is read, what it must be)
_READERS: dict[object, tuple[Callable[[str], object], str]] = {
    int: (int, "a whole number"),
    int | None: (int, f"a whole number, or {UNSET} for none"),
    float: (float, "a number"),
    bool: (_SWITCH.__getitem__, " or ".join(_SWITCH)),
}


def _texts(name: str, text: str) -> tuple[str, ...]:
    """Splits a text into words like a shell; "\\n" and "\\t" become a new line and a tab."""
    if text == UNSET:
        return ()
    try:
        words = shlex.split(text)
    except ValueError:
        raise UserError(f"{name} has a quote without an end: {text}") from None
    return check_stop([word.replace("\\n", "\n").replace("\\t", "\t") for word in words])


def _written(value: object) -> str:
    if value is None or value == ():
        return UNSET
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(shlex.quote(text).replace("\n", "\\n").replace("\t", "\\t") for text in value)
    return str(value)
