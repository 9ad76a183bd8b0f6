"""The types of tokenizer.json and tokenizer_config.json. dist/README.md explains the keys. Only what
compiler/tokenizer.py writes is accepted; other features of the library, such as padding to any length, are not. Raises
UserError for other content."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import tokenizers
from msgspec import Meta

from mlc_amd.runtime.artifact import json_files
from mlc_amd.runtime.errors import QUOTED, UserError, one_line

LIBRARY, CONFIG = "tokenizer.json", "tokenizer_config.json"
ADVICE = "compile the model again"
NO_TOKENIZER = "none"  # value of Config.model for a file that cannot tokenize texts
Token = Annotated[int, Meta(ge=0, lt=1 << 30)]


class Special(TypedDict):
    id: Token
    text: str


SpecialName = Literal["bos", "eos", "eot", "eom", "unk", "pad"]


FillName = Literal["prefix", "suffix", "middle", "repository", "file"]


class Normalizer(TypedDict):
    """Changes to texts before WordPiece and unigram models. lowercase, strip_accents: WordPiece. charsmap: unigram
    models, SentencePiece's rules in base64, "" for none. merge_spaces: consecutive spaces become one, spaces at the
    ends are removed."""

    lowercase: bool
    strip_accents: bool
    charsmap: str
    merge_spaces: bool


class Config(TypedDict):
    model: Literal["gpt2", "gemma4", "llama", "bert", "t5", "none"]
    pre: str | None
    byte_level: bool
    vocab_size: Annotated[int, Meta(ge=1, le=1 << 30)]
    special: Annotated[dict[SpecialName, Special | None], Meta(min_length=6)]  # all six
    end_ids: list[Token]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    normalizer: Normalizer | None
    fill: dict[FillName, Token]  # tokens for fill in the middle: none, or at least prefix and suffix
    pair: Annotated[list[list[Token]], Meta(min_length=3, max_length=3)]
    mark: str
    chat_template: str | None
    chat_templates: dict[str, str]


class _Added(TypedDict):
    id: Token
    content: Annotated[str, Meta(min_length=1)]
    single_word: Literal[False]
    lstrip: Literal[False]
    rstrip: bool
    normalized: Literal[False]
    special: bool


class _Merges(msgspec.Struct, tag_field="type", tag="BPE"):
    """The library itself checks the fields that may have hundreds of thousands of entries."""

    dropout: None
    unk_token: str | None
    continuing_subword_prefix: None
    end_of_word_suffix: None
    fuse_unk: bool
    byte_fallback: bool
    ignore_merges: bool
    vocab: msgspec.Raw
    merges: msgspec.Raw


class _WordPieces(msgspec.Struct, tag_field="type", tag="WordPiece"):
    unk_token: str
    continuing_subword_prefix: Literal[""]
    max_input_chars_per_word: int
    vocab: msgspec.Raw


class _Unigrams(msgspec.Struct, tag_field="type", tag="Unigram"):
    unk_id: Token
    byte_fallback: Literal[False]
    vocab: msgspec.Raw


class _Library(msgspec.Struct):
    """text_pipeline.py checks the normalizer and the pre-tokenizer. Decoders are not used."""

    version: str
    truncation: None
    padding: None
    added_tokens: list[_Added]
    normalizer: Any
    pre_tokenizer: Any
    post_processor: None
    decoder: Any
    model: _Merges | _WordPieces | _Unigrams


def read_config(directory: Path) -> Config:
    """The content of `tokenizer_config.json`."""
    path = Path(directory) / CONFIG
    config = json_files.read(path, Config, ADVICE)
    named = {f"special.{name}.id": of["id"] for name, of in config["special"].items() if of}
    named |= {f"fill.{name}": token for name, token in config["fill"].items()}
    named |= {f"end_ids[{i}]": token for i, token in enumerate(config["end_ids"])}
    if config["fill"] and not {"prefix", "suffix"} <= config["fill"].keys():
        raise UserError(f"{path} is damaged (key fill: prefix or suffix is missing); {ADVICE}")
    if wrong := next((key for key, token in named.items() if token >= config["vocab_size"]), None):
        why = f"key {wrong}: {named[wrong]} is outside the vocabulary of {config['vocab_size']} tokens"
        raise UserError(f"{path} is damaged ({why}); {ADVICE}")
    return config


def read_library(directory: Path, tokens: int) -> tokenizers.Tokenizer:
    """The library's tokenizer from `tokenizer.json`, which must have `tokens` tokens."""
    path = Path(directory) / LIBRARY
    data = json_files.read_bytes(path)
    content = json_files.decode(data, _Library, path, ADVICE)
    with library_errors(f"{path} is damaged", ADVICE):
        backend = tokenizers.Tokenizer.from_buffer(data)
    if backend.get_vocab_size() != tokens:
        raise UserError(f"{path} has {backend.get_vocab_size()} tokens, its config {tokens}; {ADVICE}")
    for i, added in enumerate(content.added_tokens):
        if added["id"] >= tokens or backend.id_to_token(added["id"]) != added["content"]:
            raise UserError(f"{path} is damaged (key added_tokens[{i}]: {added['id']} is another token); {ADVICE}")
    return backend


@contextmanager
def library_errors(problem: str, advice: str) -> Iterator[None]:
    """Turns all errors of the library into UserError: Exception, and the BaseException of a panic in its Rust code."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise UserError(f"{problem} ({one_line(str(error), QUOTED)}); {advice}") from error
        raise
