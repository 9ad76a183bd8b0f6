"""A conversation to the text of a prompt, by the Jinja template that came with the model.

In:  a directory with `tokenizer_config.json` (see `mlc_amd.compiler.tokenizer.export`); messages as {"role": str,
     "content": str}.
Out: `ChatTemplate.render`, the prompt's text, to be encoded with control tokens parsed. Put text from outside through
     `Tokenizer.escape` before it goes into a message, or it can forge control tokens and with them other speakers'
     turns.

A template is foreign code: it runs in Jinja's sandbox, which hides Python's internals and bounds ranges.
The environment is the one that templates are written for, that of Hugging Face transformers (`chat_template_utils.py`).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.tokenizer import read_config

# For models that bring no template (base models): plain text that a reader, and so a language model, takes for a
# dialogue.
FALLBACK = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
FALLBACK_STOPS = ("\nUser:", "\nSystem:", "\nAssistant:")


class _Generation(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %}: marks an assistant's words in training data; here it only renders what it
    holds."""

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


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


class ChatTemplate:
    """A model's chat template; where it has none, the plain dialogue `FALLBACK`, and `is_fallback` is True.

    source: the template's text    tokens: {"bos_token": text, ...}, "" where the model has no such token
    Raises UserError when the source is no valid Jinja template.
    """

    def __init__(self, source: str | None, tokens: dict[str, str]):
        self.is_fallback: bool = source is None
        self.source: str = FALLBACK if source is None else source
        self._tokens = tokens
        try:
            self._template = _environment().from_string(self.source)
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

        add_generation_prompt: end with the opening of the assistant's turn.
        variables:             further ones that the template knows (tools, documents, enable_thinking, ...); they win
                               over the usual ones.
        Raises UserError with the template's own message when it rejects the conversation or fails.
        """
        usual = {
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        try:
            return self._template.render(**{**self._tokens, **usual, **variables})
        except Exception as error:  # a template can raise whatever the Python operations in it raise
            raise UserError(
                f"the model's chat template failed ({_one_line(error)}): change the messages or the template"
            ) from error

    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end the assistant's turn besides the tokenizer's `end_ids`: a plain dialogue has no token for
        that."""
        return FALLBACK_STOPS if self.is_fallback else ()
