"""Prompts for the text between two others, of models that were trained for this: fill in the middle.

In:  the tokens that a vocabulary has for it, of tokenizer_config.json; the text before the gap, the one after it,
     perhaps other files.
Out: the prompt's token ids. UserError for a model without such tokens.

Forms: <begin> <prefix> BEFORE <suffix> AFTER <middle>, or, of a vocabulary without a token `middle`, Codestral's:
<begin> <suffix> AFTER <prefix> BEFORE. Other files come first: <repository> NAME, then <file> NAME and TEXT for each,
<file> NAME for the one with the gap; where there is no token `file`, texts with a line between them. Names of the
repository and of the file with the gap, and the line, are those of llama-server: no API has them.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.text.tokenizer import Tokenizer

_REPOSITORY, _FILE = "myproject\n", "filename\n"
UNNAMED = "tmp"
_BETWEEN = "\n\n--- snippet ---\n\n"


class OtherFile(NamedTuple):
    """A file, or a part of one, beside the one with the gap."""

    text: str
    name: str = UNNAMED


class FillInMiddle:
    """Prompts of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._ids = tokenizer, tokenizer.fill

    @property
    def possible(self) -> bool:
        """Whether the vocabulary has the tokens."""
        return bool(self._ids)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end the text of a gap."""
        return frozenset(self._ids.values())

    def prompt(self, before: str, after: str, files: Sequence[OtherFile] = (), room: int | None = None) -> list[int]:
        """room: tokens of the prompt at most: what is farthest from the gap is left out, of other files the first ones,
        of the text after the gap what is beyond a quarter of the room."""
        if not self.possible:
            raise UserError("this model has no tokens to fill in the middle: use one for code that was trained for it")
        ids, encode = self._ids, self._encode
        begin = [] if self._tokenizer.bos_id is None or not self._tokenizer.add_bos else [self._tokenizer.bos_id]
        others = self._others(files) if files else []
        first, last = encode(before), self._tokenizer.encode_inner(after.encode())
        if room is not None:
            room = max(room - len(begin) - 3, 0)
            last = last[: max(room // 4, room - len(first))]
            first = _end(first, room - len(last))
            others = _end(others, room - len(last) - len(first))
        prefix, suffix = [ids["prefix"], *first], [ids["suffix"], *last]
        if "middle" in ids:
            return [*begin, *others, *prefix, *suffix, ids["middle"]]
        return [*begin, *others, *suffix, *prefix]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False, parse_special=False)

    def _others(self, files: Sequence[OtherFile]) -> list[int]:
        ids, encode = self._ids, self._encode
        found = [ids["repository"], *encode(_REPOSITORY)] if "repository" in ids else []
        for file in files:
            found += [ids["file"], *encode(f"{file.name}\n")] if "file" in ids else encode(_BETWEEN)
            found += encode(file.text)
        return found + ([ids["file"], *encode(_FILE)] if "file" in ids else [])


def _end(ids: list[int], count: int) -> list[int]:
    return ids[max(len(ids) - count, 0) :]
