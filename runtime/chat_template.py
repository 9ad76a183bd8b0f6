"""Renders a conversation to the text of a prompt, with the model's Jinja template.

In:  a directory with `tokenizer_config.json` (see `mlc_amd.compiler.tokenizer.export`); messages as {"role": str,
     "content": str, ...}, as transformers takes them ("tool_calls" of assistant messages, for example).
Out: `ChatTemplate.render`, the prompt's text, to be encoded with control tokens parsed. Pass untrusted text through
     `Tokenizer.escape` before it goes into a message, or it can inject control tokens and thereby turns of other roles.

A template is untrusted code: it runs in Jinja's sandbox, which hides Python's internals and bounds ranges. The
environment is that of Hugging Face transformers (`chat_template_utils.py`), which templates are written for, except
that lists and dicts can be changed, as in llama.cpp (Kimi K2's template for GGUF files keeps a list of tool calls):
each rendering gets copies of all variables.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import SandboxedEnvironment

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.tokenizer import read_config

# For models without a template (base models): a dialogue in plain text.
FALLBACK = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
FALLBACK_STOPS = ("\nUser:", "\nSystem:", "\nAssistant:")

# How much a model thinks before it answers: left to the template; switched on or off; or by effort.
THINKING = ("auto", "on", "off", "low", "medium", "high")
# Variables of templates for the two: the first one that a template has is set.
_SWITCHES, _EFFORT = ("enable_thinking", "thinking"), "reasoning_effort"
# Messages that show whether a template renders them.
_SYSTEM, _USER = "a system message", "a user message"


class _Generation(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} marks assistant text in training data; here it renders its content."""

    tags = {"generation"}  # noqa: RUF012 (its type in Jinja's class)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(fmt: str) -> str:
    return datetime.now().strftime(fmt)


def _tojson(
    value: object, ensure_ascii: bool = False, indent: int | None = None, separators=None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes <, >, & and ' for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> SandboxedEnvironment:
    environment = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _merge_system(messages: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Messages whose system message is the beginning of the first user message; without a user message, unchanged."""
    system, *others = messages
    at = next((i for i, message in enumerate(others) if message["role"] == "user"), None)
    if at is None:
        return list(messages)
    merged = {**others[at], "content": f"{system['content']}\n\n{others[at]['content']}"}
    return [*others[:at], merged, *others[at + 1 :]]


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


class ChatTemplate:
    """A model's chat template; without one, the plain dialogue `FALLBACK` (`is_fallback` is then True).

    source: the template's text    tokens: {"bos_token": text, ...}, "" where the model has no such token
    Raises UserError if the source is not a valid Jinja template.
    """

    def __init__(self, source: str | None, tokens: dict[str, str]):
        self.is_fallback: bool = source is None
        self.source: str = FALLBACK if source is None else source
        self._tokens = tokens
        environment = _environment()
        try:
            self._template = environment.from_string(self.source)
            self._variables = jinja2.meta.find_undeclared_variables(environment.parse(self.source))
        except jinja2.TemplateSyntaxError as error:
            where = f"line {error.lineno}: {_one_line(error)}"
            raise UserError(
                f"the model's chat template is malformed ({where}): correct it in the model's folder or the GGUF"
            ) from error

    @classmethod
    def load(cls, directory: str | Path, name: str | None = None) -> "ChatTemplate":
        """The default template of the model in `directory`, or the one called `name` of a model with several
        ("tool_use", "rag").

        Raises UserError for a missing or corrupt file, a malformed template and an unknown name.
        """
        config = read_config(Path(directory))
        named = config["chat_templates"]
        if name is not None and name not in named:
            raise UserError(
                f"the model has no chat template '{name}': it has {', '.join(sorted(named)) or 'no named ones'}"
            )
        tokens = {f"{key}_token": special["text"] if special else "" for key, special in config["special"].items()}
        return cls(config["chat_template"] if name is None else named[name], tokens)

    def render(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool = True, **variables: object
    ) -> str:
        """The prompt's text.

        add_generation_prompt: end with the beginning of the assistant's turn.
        variables:             further variables of the template (tools, documents, enable_thinking, ...), which
                               override the standard ones.
        A system message becomes the beginning of the first user message if the template rejects or ignores it.
        Raises UserError with the template's message if it rejects the conversation or fails.
        """
        if messages and messages[0]["role"] == "system" and not self._takes_system:
            messages = _merge_system(messages)
        return self._render(messages, add_generation_prompt, variables)

    def _render(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool, variables: Mapping[str, object]
    ) -> str:
        standard = {
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        try:
            return self._template.render(**copy.deepcopy({**self._tokens, **standard, **variables}))
        except Exception as error:  # a template can raise whatever the Python operations in it raise
            raise UserError(
                f"the model's chat template failed ({_one_line(error)}): change the messages or the template"
            ) from error

    @cached_property
    def _takes_system(self) -> bool:
        """False for a template that renders user messages but rejects or ignores system messages."""
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}]
        try:
            text = self._render(messages, True, {})
        except UserError:
            return False
        return _SYSTEM in text or _USER not in text

    def switch(self, thinking: str) -> dict[str, Any]:
        """The variables of `render` for a value of THINKING. UserError if the template has no such switch."""
        switches = [name for name in _SWITCHES if name in self._variables][:1]
        known: dict[str, dict[str, Any]] = {"auto": {}}
        known |= {value: {name: value == "on"} for name in switches for value in ("on", "off")}
        if _EFFORT in self._variables:
            known |= {value: {_EFFORT: value} for value in ("low", "medium", "high")}
        if thinking not in known:
            raise UserError(f"thinking cannot be {thinking}: with this model's chat template it is {', '.join(known)}")
        return known[thinking]

    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end an assistant turn besides the tokenizer's `end_ids`, for the plain dialogue."""
        return FALLBACK_STOPS if self.is_fallback else ()
