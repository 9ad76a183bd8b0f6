"""Vocabularies for tests of tokenizers: GGUF metadata as plain values, and texts that are easily damaged.

`fixtures/text/sentencepiece.json`: the pieces of a small SentencePiece vocabulary (after <unk>, <s>, </s> and the 256
bytes; scores 0, -1, ...) and texts with their ids in llama.cpp.
"""

import json
from pathlib import Path

import gguf

from mlc_amd.compiler.tokenizer import export
from mlc_amd.runtime.text.tokenizer import Tokenizer

SENTENCEPIECE = json.loads((Path(__file__).parents[2] / "fixtures/text/sentencepiece.json").read_text(encoding="utf-8"))

TEXTS = (
    "",
    " ",
    "   leading and trailing   ",
    "\n\n\t x\r\n",
    "Hello, y'all! 'RE you 12345?",
    "héllo ½ Ω нещо 你好",
    "🦙🚀 family: 👨‍👩‍👧‍👦 flag: 🇧🇬",
    "<s> </s> <unk> <0x0A> <|im_end|>",
    "\x00\x7f\u200b\ufeff",
)


def read_metadata(path: Path) -> dict[str, object]:
    fields = gguf.GGUFReader(path).fields
    return {key: field.contents() for key, field in fields.items() if key.startswith(("tokenizer.", "general."))}


def sentencepiece_metadata() -> dict[str, object]:
    pieces = SENTENCEPIECE["pieces"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }


def byte_level_metadata(**changes: object) -> dict[str, object]:
    """A vocabulary of the 256 bytes, a few merges and a few added tokens."""
    characters = [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144))]
    tokens = [*characters, "he", "ll", "llo", "hello", "Ġhello", "<think>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 261 + [4, 3, 3, 3],
        "tokenizer.ggml.merges": ["h e", "l l", "ll o", "he llo"],
        "tokenizer.ggml.bos_token_id": 262,
        "tokenizer.ggml.eos_token_id": 263,
    }
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def build_tokenizer(metadata: dict[str, object], directory: Path) -> Tokenizer:
    """The tokenizer of `metadata`, written to `directory` and read from there."""
    export(metadata, directory)
    return Tokenizer.load(directory)
