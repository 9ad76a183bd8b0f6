"""Writes grammars in llguidance's dialect of Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).

In:  texts, which may contain control tokens of the vocabulary, and JSON schemas.
Out: expressions, as strings, to be combined (" " sequence, "|" choice, "?", "*"), and `source`, the whole grammar.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mlc_amd.runtime.grammars.schemas import closed

# White space in JSON: that of indented text, as in llama.cpp. Without a limit a model could fill the context with it.
JSON_SPACE = r" |\n{1,2}[ \t]{0,20}"
# no_forcing: else the tokenizer encodes text that must follow, which is not the inverse of decoding where it adds a
# space before a text.
_END = r"""
%llguidance {"no_forcing": true}
TEXT: /(.|\n)*/
SPACE: /[ \t\r\n]{1,2}/
"""


class ControlTokens:
    """The control tokens of a vocabulary: ids by text."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = ids
        texts = sorted(ids, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, texts)) or '(?!)'})")

    def split(self, text: str) -> list[str]:
        """The text divided into control tokens and what is between them."""
        return [part for part in self._pattern.split(text) if part]


class Rules:
    """The rules of one grammar. TEXT is any text without control tokens, `SPACE?` white space."""

    TEXT, SPACE = "TEXT", "SPACE?"

    def __init__(self, control: ControlTokens) -> None:
        self._control = control
        self._names: dict[str, str] = {}  # by what follows the name

    def rule(self, body: str, options: str = "") -> str:
        """The name of a rule."""
        return self._names.setdefault(f"{options}: {body}", f"r{len(self._names)}")

    def literal(self, text: str) -> str:
        """Exactly this text, with its control tokens."""
        ids = self._control.ids
        parts = self._control.split(text)
        return " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part, ensure_ascii=False) for part in parts)

    def mark(self, text: str, before: str = "") -> str:
        """`before`, then a mark, at its first occurrence."""
        lazy = not any(part in self._control.ids for part in self._control.split(text))
        return self.rule(f"{before} {self.literal(text)}", "[lazy]" if lazy else "")

    def until(self, text: str) -> str:
        """Any text up to the first mark, and the mark."""
        return self.mark(text, self.TEXT)

    def choice(self, options: Iterable[str]) -> str:
        return self.rule(" | ".join(dict.fromkeys(options)))

    def json(self, schema: Mapping[str, Any], lenient: bool = False) -> str:
        """A JSON value that matches the schema, without properties that it does not list (schemas.py).

        lenient: keywords that cannot be enforced are ignored.
        """
        settings = {"whitespace_pattern": JSON_SPACE, "lenient": lenient}
        return self.rule("%json " + json.dumps({**closed(schema), "x-guidance": settings}, ensure_ascii=False))

    def source(self, start: str) -> str:
        """The grammar with the expression `start`."""
        return "\n".join([f"start: {start}", *(f"{name}{body}" for body, name in self._names.items()), _END])
