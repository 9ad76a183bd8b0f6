"""Converts text to token ids and back, for one compiled model. compiler/tokenizer.py writes, and documents, its files.

In the library's vocabulary, names of control tokens begin with `MARK`, which texts never contain. `encode` inserts
`MARK` before the texts that are to become control tokens. Decoding works on bytes, without the `tokenizers` library: a
token may be a part of a character, and only bytes can be joined without loss.
"""

import codecs
import functools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import tokenizers
from tokenizers import models

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.text.text_pipeline import check_runs, has_pipeline
from mlc_amd.runtime.text.tokenizer_files import (
    ADVICE,
    NO_TOKENIZER,
    Config,
    FillName,
    library_errors,
    read_config,
    read_library,
)
from mlc_amd.runtime.text.traced_text import Traced

MARK = "\ufdd0"  # a code point that Unicode reserves for internal use in programs


def _byte_characters() -> dict[str, int]:
    """Character -> byte, as in GPT-2's encoder.py: printable Latin-1 characters stand for themselves, characters from
    U+0100 on for the other bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_characters()
_PLACES = re.compile(r"(\{query\}|\{document\})")  # the places in a template for pairs
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class _Controls:
    """Finds the texts of control tokens in a text, as the library does: of overlapping added tokens the first one, of
    tokens that begin at the same place the longest one."""

    def __init__(self, added: Iterable[tokenizers.AddedToken]) -> None:
        texts: dict[bool, list[str]] = {True: [], False: []}
        for token in added:
            texts[token.special].append(token.content.removeprefix(MARK))
        # Text between added tokens is one unknown word with the id 0. Control tokens have the next ids.
        self._backend = tokenizers.Tokenizer(models.WordLevel({MARK: 0}, unk_token=MARK))
        for special in (True, False):
            self._backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in texts[special]])
        self._last = len(texts[True])

    def places(self, text: str) -> list[int]:
        """The places where control tokens begin."""
        with library_errors("the text cannot be tokenized", "change it"):
            found = self._backend.encode(text, add_special_tokens=False)
        return [start for i, (start, _) in zip(found.ids, found.offsets, strict=True) if 0 < i <= self._last]


class Tokenizer:
    """The tokenizer of one model. Immutable except for caches, and thread-safe. Token ids are 0..vocab_size-1."""

    def __init__(self, backend: tokenizers.Tokenizer, config: Config):
        self._backend = backend
        self._byte_level: bool = config["byte_level"]
        self._missing = config["model"] == NO_TOKENIZER
        self._pre: str | None = config["pre"]
        self.add_space_prefix: bool = config["add_space_prefix"]
        self.vocab_size: int = config["vocab_size"]
        self.bos_id: int | None = (config["special"]["bos"] or {}).get("id")
        self.eos_id: int | None = (config["special"]["eos"] or {}).get("id")
        # tokens that end a generation: of a text, a turn or a message
        self.end_ids: frozenset[int] = frozenset(config["end_ids"])
        self.add_bos: bool = config["add_bos"]  # whether `encode` adds it, with add_special
        self.add_eos: bool = config["add_eos"]
        self.fill: Mapping[FillName, int] = config["fill"]  # tokens for fill in the middle (fill_in_middle.py)
        self._pair, self._pair_template = config["pair"], config["chat_templates"].get("rerank")
        added = backend.get_added_tokens_decoder()
        self._added = {i: token.content.removeprefix(MARK).encode() for i, token in added.items()}
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._controls = _Controls(added.values())
        self.control_ids = {self._added[i].decode(): i for i in sorted(self._special)}  # ids of control tokens by text
        self._pieces: dict[int, bytes] = {}  # cache of `token_bytes`

    @classmethod
    def load(cls, directory: str | Path) -> "Tokenizer":
        """Loads the tokenizer of an artifact. Raises UserError if a file is missing or corrupt."""
        config = read_config(Path(directory))
        backend = read_library(Path(directory), config["vocab_size"])
        parts = config["model"], config["pre"], config["add_space_prefix"], config["normalizer"]
        if config["mark"] != MARK or not has_pipeline(backend, *parts):
            raise UserError(f"{directory}: its tokenizer is not what this version of mlc-amd writes; {ADVICE}")
        return cls(backend, config)

    def same_vocabulary(self, other: "Tokenizer") -> bool:
        """Whether the same ids stand for the same tokens."""
        return self._backend.get_vocab(True) == other._backend.get_vocab(True)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """The token ids of `text`.

        add_special:   whether to add the beginning-of-text and end-of-text tokens that the model expects; never a
                       second one, as a chat template may contain them.
        parse_special: whether texts of control tokens ("<|im_end|>") become these tokens; in a `Traced` text only if
                       all their characters are own. Otherwise they are plain text. User-defined tokens, which have no
                       control function, always become tokens.

        Raises UserError for invalid Unicode, for texts that the library cannot tokenize, and without a tokenizer.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"the text is not valid Unicode ({error}): pass UTF-8") from error
        ids = self._ids(self._marked(text) if parse_special else text.replace(MARK, ""))
        if add_special and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        if add_special and self.add_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
        return ids

    def _marked(self, text: str) -> str:
        """The text, with MARK before each control token and nowhere else."""
        text = text.replace(MARK, "")
        plain, pieces, done = str.__str__(text), [], 0
        for begin, end in text.spans() if isinstance(text, Traced) else [(0, len(text))]:
            for place in self._controls.places(plain[begin:end]):
                pieces += (plain[done : begin + place], MARK)
                done = begin + place
        return "".join((*pieces, plain[done:]))

    def _ids(self, text: str) -> list[int]:
        if self._missing:
            raise UserError("the model's file has no tokenizer: give token ids instead of texts")
        check_runs(text, self._pre)
        with library_errors("the text cannot be tokenized", "change it"):
            return self._backend.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """The token ids of a text that a model will continue: `encode`, but without an end-of-text token."""
        return self.encode(text, add_special=not self.add_eos)

    def encode_parts(self, parts: Iterable[int | str], first: Callable[[str], list[int]] | None = None) -> list[int]:
        """The token ids of consecutive ids and texts. first: encodes a text at the beginning, with the tokens that the
        model expects around it; by default `encode`."""
        ids: list[int] = []
        for place, part in enumerate(parts):
            if not isinstance(part, str):
                ids.append(part)
            else:
                ids += self.encode(part, add_special=False) if place else (first or self.encode)(part)
        return ids

    def encode_pair(self, query: str, text: str) -> list[int]:
        """The token ids of a query and a text for a ranking model, by the model's template for pairs if it has one."""
        if self._pair_template:
            given = {"{query}": query, "{document}": text}
            parts = (given.get(part) or Traced.all_own(part) for part in _PLACES.split(self._pair_template))
            return self.encode(functools.reduce(operator.add, parts, Traced()), add_special=False)
        begin, between, end = self._pair
        first, second = (self.encode(one, add_special=False, parse_special=False) for one in (query, text))
        return [*begin, *first, *between, *second, *end]

    def encode_inner(self, data: bytes) -> list[int]:
        """The token ids of bytes within a text, which may begin and end anywhere; without control tokens, and without
        the space that `encode` adds before a text for some models. An incomplete character at the end is left out. []
        if the ids do not decode to the beginning of `data`, for example if it begins inside a character."""
        text = data.decode(errors="ignore")
        for before in ("", "\n"):
            ids, start = self.encode(before + text, add_special=False, parse_special=False), b""
            while ids and len(start) < len(before):
                start = (start + self.token_bytes(ids.pop(0))).lstrip(b" ")
            if start == before.encode() and data.startswith(b"".join(map(self.token_bytes, ids))):
                return ids
        return []

    def decode(self, ids: list[int], skip_special: bool = True, continues: bool = False) -> str:
        """The text of `ids`: the inverse of `encode`. Invalid UTF-8 becomes U+FFFD.

        skip_special: control tokens have no text.
        continues:    whether the ids continue others (a generation after its prompt). Otherwise they begin a text, and
                      the space that `encode` adds before a text for some models (`add_space_prefix`) is removed.
        """
        stream = TextStream(self, skip_special, continues)
        return "".join([stream.push(i) for i in ids]) + stream.flush()

    def stream(self, skip_special: bool = True, continues: bool = True, shown: Collection[str] = ()) -> "TextStream":
        """A decoder for ids that arrive one at a time. skip_special, continues: see `decode`. shown: control tokens
        that have a text nevertheless."""
        return TextStream(self, skip_special, continues, shown)

    def controls_in(self, texts: Iterable[str]) -> dict[str, int]:
        """The control tokens whose texts are in `texts`: text to id."""
        joined = "\n".join(texts)
        return {text: i for text, i in self.control_ids.items() if text in joined} if joined else {}

    def has_token(self, text: str) -> bool:
        """Whether the vocabulary has a token with this text."""
        return any(self._backend.token_to_id(name) is not None for name in (text, MARK + text))

    def token_text(self, token: int) -> str:
        """The token as written in the vocabulary ("Ġthe", "▁the", "<0x0A>"). Raises UserError for an unknown id."""
        text = self._backend.id_to_token(token) if 0 <= token < self.vocab_size else None
        if text is None:
            raise UserError(f"token id {token} is outside the vocabulary: ids go from 0 to {self.vocab_size - 1}")
        return text.removeprefix(MARK)

    def token_bytes(self, token: int) -> bytes:
        """The token's bytes in a text; they may be a part of a character. Raises UserError for an unknown id."""
        if (piece := self._pieces.get(token)) is None:
            piece = self._pieces[token] = self._bytes(token)
        return piece

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token]
        text = self.token_text(token)
        if self._byte_level:
            return b"".join(bytes((_BYTES[c],)) if c in _BYTES else c.encode() for c in text)
        if byte := _BYTE_TOKEN.fullmatch(text):
            return bytes((int(byte[1], 16),))
        return text.replace("▁", " ").encode()

    def vocabulary(self) -> list[bytes]:
        """`token_bytes` of all tokens, in the order of ids."""
        return [self.token_bytes(token) for token in range(self.vocab_size)]

    def is_special(self, token: int) -> bool:
        """Whether the token is a control token, which has no text."""
        return token in self._special

    def is_added(self, token: int) -> bool:
        """Whether the token is matched as a whole text: a control token or a user-defined token."""
        return token in self._added


class TextStream:
    """Decodes ids one at a time. `push(id)` returns the characters that the id completes, `flush()` the rest at the
    end. Together they equal `decode` of the same ids. An incomplete character is held back."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, continues: bool, shown: Collection[str] = ()):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._shown = frozenset(text.encode() for text in shown)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._after_prefix = tokenizer.add_space_prefix and not continues

    def push(self, token: int) -> str:
        """Returns the text that this id completes. Raises UserError for an unknown id."""
        piece = self._tokenizer.token_bytes(token)
        if self._tokenizer.is_added(token):
            # `encode` also adds a space to the text after such a token.
            self._after_prefix = self._tokenizer.add_space_prefix
            hidden = self._skip_special and self._tokenizer.is_special(token) and piece not in self._shown
            return "" if hidden else self._utf8.decode(piece)
        if self._after_prefix:
            piece = piece.removeprefix(b" ")
            self._after_prefix = False
        return self._utf8.decode(piece)

    @property
    def incomplete(self) -> bool:
        """Whether bytes of an incomplete character are held back."""
        return bool(self._utf8.getstate()[0])

    def flush(self) -> str:
        """The rest, with U+FFFD for an incomplete character. The stream may be continued afterwards."""
        return self._utf8.decode(b"", final=True)
