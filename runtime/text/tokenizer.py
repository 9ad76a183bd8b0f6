"""Text to token ids and back, for one compiled model, whose files compiler/tokenizer.py writes (it documents them).

In the library, names of control tokens begin with `MARK`, which texts never contain: `encode` inserts it before those
occurrences that are to become control tokens. Decoding works on bytes, not through the `tokenizers` library: a token
may be a part of a character, and only bytes can be joined without loss.
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

MARK = "\ufdd0"  # a code point that Unicode reserves for a program's internal use


def _byte_characters() -> dict[str, int]:
    """Character -> byte, as GPT-2's encoder.py: printable Latin-1 is itself, other bytes are U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_characters()
_PLACES = re.compile(r"(\{query\}|\{document\})")  # of a template for pairs
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class _Controls:
    """Finds the texts of control tokens in a text, as the library does: of overlapping added tokens the first one, of
    those that begin at the same place the longest."""

    def __init__(self, added: Iterable[tokenizers.AddedToken]) -> None:
        texts: dict[bool, list[str]] = {True: [], False: []}
        for token in added:
            texts[token.special].append(token.content.removeprefix(MARK))
        # Text between added tokens is one unknown word, with the id 0; control tokens have the next ids.
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
    """The tokenizer of one model. Immutable except for caches, so thread-safe. Tokens have ids 0..vocab_size-1."""

    def __init__(self, backend: tokenizers.Tokenizer, config: Config):
        self._backend = backend
        self._byte_level: bool = config["byte_level"]
        self._missing = config["model"] == NO_TOKENIZER
        self._pre: str | None = config["pre"]
        self.add_space_prefix: bool = config["add_space_prefix"]
        self.vocab_size: int = config["vocab_size"]
        self.bos_id: int | None = (config["special"]["bos"] or {}).get("id")
        self.eos_id: int | None = (config["special"]["eos"] or {}).get("id")
        self.end_ids: frozenset[int] = frozenset(config["end_ids"])  # that end a generation: of text, turn, message
        self.add_bos: bool = config["add_bos"]  # `encode` does, with add_special
        self.add_eos: bool = config["add_eos"]
        self.fill: Mapping[FillName, int] = config["fill"]  # tokens of fill in the middle (fill_in_middle.py)
        self._pair, self._pair_template = config["pair"], config["chat_templates"].get("rerank")
        added = backend.get_added_tokens_decoder()
        self._added = {i: token.content.removeprefix(MARK).encode() for i, token in added.items()}
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._controls = _Controls(added.values())
        self.control_ids = {self._added[i].decode(): i for i in sorted(self._special)}  # of control tokens, by text
        self._pieces: dict[int, bytes] = {}  # cache of `token_bytes`

    @classmethod
    def load(cls, directory: str | Path) -> "Tokenizer":
        """Raises UserError when a file is missing or corrupt."""
        config = read_config(Path(directory))
        backend = read_library(Path(directory), config["vocab_size"])
        parts = config["model"], config["pre"], config["add_space_prefix"], config["normalizer"]
        if config["mark"] != MARK or not has_pipeline(backend, *parts):
            raise UserError(f"{directory}: its tokenizer is not what this version of mlc-amd writes; {ADVICE}")
        return cls(backend, config)

    def same_vocabulary(self, other: "Tokenizer") -> bool:
        """Whether the same ids mean the same tokens."""
        return self._backend.get_vocab(True) == other._backend.get_vocab(True)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        add_special:   add the beginning-of-text and end-of-text tokens that the model expects, but never a second one:
                       a chat template may contain them.
        parse_special: texts of control tokens ("<|im_end|>") become these tokens, those of a `Traced` text only where
                       all of their characters are own; otherwise they are plain text. User-defined tokens, which have
                       no control function, are matched either way.
        UserError for invalid Unicode, for a text that the library cannot tokenize, and without a tokenizer.
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
        """The text with MARK before each control token only."""
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
        """Token ids of a text for a model to continue: `encode`, but never with an end-of-text token after it."""
        return self.encode(text, add_special=not self.add_eos)

    def encode_parts(self, parts: Iterable[int | str], first: Callable[[str], list[int]] | None = None) -> list[int]:
        """Token ids of ids and texts one after the other. Only a text at the begin gets tokens that the model expects
        around it, those of `first`, by default `encode`."""
        ids: list[int] = []
        for place, part in enumerate(parts):
            if not isinstance(part, str):
                ids.append(part)
            else:
                ids += self.encode(part, add_special=False) if place else (first or self.encode)(part)
        return ids

    def encode_pair(self, query: str, text: str) -> list[int]:
        """Token ids of a query and a text for a ranking model: by the model's template for that, if it has one."""
        if self._pair_template:
            given = {"{query}": query, "{document}": text}
            parts = (given.get(part) or Traced.all_own(part) for part in _PLACES.split(self._pair_template))
            return self.encode(functools.reduce(operator.add, parts, Traced()), add_special=False)
        begin, between, end = self._pair
        first, second = (self.encode(one, add_special=False, parse_special=False) for one in (query, text))
        return [*begin, *first, *between, *second, *end]

    def encode_inner(self, data: bytes) -> list[int]:
        """Token ids of bytes within a text, which may begin and end anywhere: as far as they are known, without control
        tokens and the space that `encode` adds before a text for some models."""
        text = data.decode(errors="ignore")
        for before in ("", "\n"):
            ids, start = self.encode(before + text, add_special=False, parse_special=False), b""
            while ids and len(start) < len(before):
                start = (start + self.token_bytes(ids.pop(0))).lstrip(b" ")
            if start == before.encode() and data.startswith(b"".join(map(self.token_bytes, ids))):
                return ids
        return []

    def decode(self, ids: list[int], skip_special: bool = True, continues: bool = False) -> str:
        """Text of `ids`: the inverse of `encode`. Invalid UTF-8 becomes U+FFFD.

        skip_special: control tokens have no text.
        continues:    the ids continue others (a generation after its prompt); otherwise they start a text, and the
                      space that `encode` adds before a text for some models (`add_space_prefix`) is removed.
        """
        stream = TextStream(self, skip_special, continues)
        return "".join([stream.push(i) for i in ids]) + stream.flush()

    def stream(self, skip_special: bool = True, continues: bool = True, shown: Collection[str] = ()) -> "TextStream":
        """A decoder for ids that arrive one at a time; arguments: of `decode`. shown: control tokens with a text."""
        return TextStream(self, skip_special, continues, shown)

    def controls_in(self, texts: Iterable[str]) -> dict[str, int]:
        """The control tokens that texts name: ids by text."""
        joined = "\n".join(texts)
        return {text: i for text, i in self.control_ids.items() if text in joined} if joined else {}

    def has_token(self, text: str) -> bool:
        """Whether the vocabulary has a token with this text."""
        return any(self._backend.token_to_id(name) is not None for name in (text, MARK + text))

    def token_text(self, token: int) -> str:
        """The token as written in the vocabulary ("Ġthe", "▁the", "<0x0A>"). UserError for an id outside of it."""
        text = self._backend.id_to_token(token) if 0 <= token < self.vocab_size else None
        if text is None:
            raise UserError(f"token id {token} is outside the vocabulary: ids go from 0 to {self.vocab_size - 1}")
        return text.removeprefix(MARK)

    def token_bytes(self, token: int) -> bytes:
        """The token's bytes in a text, perhaps a part of a character. UserError for an unknown id."""
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
        """`token_bytes` of all tokens, by id."""
        return [self.token_bytes(token) for token in range(self.vocab_size)]

    def is_special(self, token: int) -> bool:
        """Whether the token is a control token, which has no text."""
        return token in self._special

    def is_added(self, token: int) -> bool:
        """Whether the token is matched as a whole text: a control token or a user-defined one."""
        return token in self._added


class TextStream:
    """Decodes ids one at a time: `push(id)` returns the characters completed by the id, `flush()` the rest at the end.
    The concatenation equals `decode` of the same ids. An incomplete character is buffered."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, continues: bool, shown: Collection[str] = ()):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._shown = frozenset(text.encode() for text in shown)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._after_prefix = tokenizer.add_space_prefix and not continues

    def push(self, token: int) -> str:
        """Raises UserError for an id outside the vocabulary."""
        piece = self._tokenizer.token_bytes(token)
        if self._tokenizer.is_added(token):
            # `encode` adds a space before the text after such a token, too.
            self._after_prefix = self._tokenizer.add_space_prefix
            hidden = self._skip_special and self._tokenizer.is_special(token) and piece not in self._shown
            return "" if hidden else self._utf8.decode(piece)
        if self._after_prefix:
            piece = piece.removeprefix(b" ")
            self._after_prefix = False
        return self._utf8.decode(piece)

    @property
    def incomplete(self) -> bool:
        """Whether bytes of a character are buffered."""
        return bool(self._utf8.getstate()[0])

    def flush(self) -> str:
        """The rest, with U+FFFD for an incomplete character; the stream may then be continued."""
        return self._utf8.decode(b"", final=True)
