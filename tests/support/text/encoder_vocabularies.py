"""Vocabularies of encoders, WordPiece and unigram, as metadata of a GGUF file. Their tokens are words, parts of words
and characters of the lines of pre_tokenizer_cases.py, but not all of these."""

import unicodedata
from itertools import pairwise

from gguf import TokenType
from pre_tokenizer_cases import LINES

PLAIN = ("hello world", "Embeddings of texts", "unaffable wordword", "", "ÀÉ naïve café", "x" * 300)
TEXTS = (*LINES, *PLAIN)


def _characters() -> list[str]:
    found = {c for line in TEXTS for form in ("NFD", "NFC", "NFKC") for c in unicodedata.normalize(form, line)}
    found |= {c.lower() for c in found}
    kept = [c for c in sorted(found) if len(c) == 1 and not c.isspace() and unicodedata.category(c)[0] != "C"]
    return [c for i, c in enumerate(kept) if i % 9]  # some are unknown


def _pieces() -> list[str]:
    """Parts of words, of two to five characters."""
    words = [word.lower() for line in TEXTS for word in line.split()]
    found = dict.fromkeys(word[i : i + n] for word in words for n in (2, 3, 5) for i in range(0, len(word) - n + 1, 2))
    return [piece for i, piece in enumerate(found) if i % 3 == 0]


def word_pieces(lowercase: bool = True) -> dict[str, object]:
    reserved = [f"[unused{i}]" for i in range(104)]
    for place, name in ((0, "[PAD]"), (100, "[UNK]"), (101, "[CLS]"), (102, "[SEP]"), (103, "[MASK]")):
        reserved[place] = name
    texts = dict.fromkeys(["▁" + c for c in _characters()] + _characters() + _pieces() + ["▁" + p for p in _pieces()])
    words = [text for text in texts if text not in reserved]
    kinds = [TokenType.CONTROL] * len(reserved) + [TokenType.NORMAL] * len(words)
    kinds[100] = TokenType.UNKNOWN
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": reserved + words,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.ggml.bos_token_id": 101,
        "tokenizer.ggml.unknown_token_id": 100,
        "tokenizer.ggml.seperator_token_id": 102,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.normalizer.lowercase": lowercase,
    }


def unigrams(merge_spaces: bool = True, bos: bool = True) -> dict[str, object]:
    """As those of XLM-R: <s>, <pad>, </s>, <unk>, pieces."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = [*_characters(), "▁", *_pieces(), *("▁" + piece for piece in _pieces())]
    pieces += [a + b for a, b in pairwise(_characters())]
    pieces = list(dict.fromkeys(piece for piece in pieces if piece not in special))
    scores = [0.0] * 4 + [-2.0 - 0.37 * (i * 7919 % 31) - 0.5 / len(piece) for i, piece in enumerate(pieces)]
    kinds = [TokenType.CONTROL] * 3 + [TokenType.UNKNOWN] + [TokenType.NORMAL] * len(pieces)
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": special + pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.token_type_count": 1,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 1,
        "tokenizer.ggml.add_bos_token": bos,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": merge_spaces,
    }


VOCABULARIES = {
    "bert": word_pieces(), "bert-cased": word_pieces(lowercase=False), "xlm-r": unigrams(),
    "t5": unigrams(merge_spaces=False, bos=False),
}  # fmt: skip
