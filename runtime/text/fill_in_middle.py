"""Prompts for "fill in the middle": models that were trained for it write the text between two given texts.

In: the vocabulary's tokens for this, from tokenizer_config.json; the text before the gap and the text after it;
optionally other files. Out: the prompt's token ids. Raises UserError for a model without such tokens.

The form is <begin> <prefix> BEFORE <suffix> AFTER <middle>; for a vocabulary without a token `middle`, it is
Codestral's: <begin> <suffix> AFTER <prefix> BEFORE. Other files come first: <repository> NAME, then <file> NAME and
TEXT for each, then <file> NAME for the file with the gap. Without a token `file`, their texts are separated by a line.
The names of the repository and of the file with the gap, and this line, are those of llama-server, as no API transmits
them.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.text.tokenizer import Tokenizer

_REPOSITORY, _FILE = "myproject\n", "filename\n"
UNNAMED = "tmp"
_BETWEEN = "\n\n--- snippet ---\n\n"


class OtherFile(NamedTuple):
    """A file, or a part of it, other than the file with the gap."""

    text: str
    name: str = UNNAMED


class FillInMiddle:
    """Makes the prompts with a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._ids = tokenizer, tokenizer.fill

    @property
    def possible(self) -> bool:
        """Whether the vocabulary has the tokens."""
        return bool(self._ids)

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end the text in a gap."""
        return frozenset(self._ids.values())

    def prompt(self, before: str, after: str, files: Sequence[OtherFile] = (), room: int | None = None) -> list[int]:
        """The token ids of a prompt. room: the largest number of tokens. If they are more, those farthest from the gap
        are left out: first the beginning of the other files; then the end of the text after the gap, which keeps a
        quarter of the room; then the beginning of the text before the gap."""
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
