"""Turns the flags for the form of answers into constraints (extra `serve`)."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

from mlc_amd.runtime import extras
from mlc_amd.runtime.errors import UsageError
from mlc_amd.runtime.options import Option
from mlc_amd.tools.terminal.texts import read_text

if TYPE_CHECKING:
    from mlc_amd.runtime.engine.text_engine import TextEngine
    from mlc_amd.runtime.grammars.constraints import Grammar
    from mlc_amd.runtime.grammars.grammars import Grammars


@dataclass(frozen=True, kw_only=True)
class GrammarOptions:
    """The flags. At most one of them may be given."""

    grammar: Annotated[str | None, Option("answers follow this grammar, in GBNF or Lark")] = None
    grammar_file: Annotated[str | None, Option("answers follow the grammar in this file")] = None
    json_schema: Annotated[str | None, Option(
        "answers are JSON that matches this schema; {} is any JSON", also=("-j",))] = None  # fmt: skip
    json_schema_file: Annotated[str | None, Option(
        "answers are JSON that matches the schema in this file", also=("-jf",))] = None  # fmt: skip


class AnswerGrammar:
    """The form that the flags require. They are checked before a model is loaded. Raises UsageError if several are
    given, and for invalid JSON."""

    def __init__(self, options: GrammarOptions) -> None:
        given = {name: text for name, text in asdict(options).items() if text is not None}
        if len(given) > 1:
            raise UsageError(f"give one of {', '.join('--' + name.replace('_', '-') for name in given)}")
        self._name, text = next(iter(given.items()), ("", ""))
        if given:
            extras.require("llguidance")
        self._text = read_text(text) if self._name.endswith("_file") else text
        self._schema = None
        if self._name.startswith("json"):
            try:
                self._schema = json.loads(self._text)
            except ValueError as error:
                raise UsageError(f"--{self._name.replace('_', '-')} is not JSON: {error}") from error

    @contextmanager
    def of(self, engine: "TextEngine") -> Iterator["Callable[[str | None], Grammar] | None"]:
        """Within the block: a function that returns the constraint for answers to a prompt. Its argument is the
        rendered prompt, or None for a text that is continued. None if no flag was given."""
        if not self._name:
            yield None
            return
        from mlc_amd.runtime.grammars.grammars import Grammars

        with closing(Grammars(engine.tokenizer, engine.vocab)) as grammars:
            yield lambda prompt: self._made(grammars, prompt)

    def _made(self, grammars: "Grammars", prompt: str | None) -> "Grammar":
        if self._name.startswith("json"):
            return grammars.json_schema(self._schema, prompt)  # pyright: ignore[reportArgumentType] (it is checked)
        return grammars.grammar(self._text, prompt)
