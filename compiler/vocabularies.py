"""Makes the tokenizer model (BPE, WordPiece, unigram) of a vocabulary in a GGUF file.

In: the metadata; the tokens' names and ids (names of control and unknown tokens begin with MARK, so that no text
contains them); the tokens' types. Out: a `Tokenizer` of the `tokenizers` library with model and decoder; for kinds with
a normalizer, (tokenizer, normalizer).
"""

import base64
import math
from collections.abc import Mapping

from gguf import TokenType
from tokenizers import Tokenizer, decoders, models

from mlc_amd.compiler.tokenizer_keys import CONVERT, DEFAULT_IDS, get, listed, special_token
from mlc_amd.runtime.errors import UserError, shorten
from mlc_amd.runtime.text.pre_tokenizers import PreTokenizer
from mlc_amd.runtime.text.tokenizer_files import Normalizer, library_errors

# Types of tokens that encoding a text never produces; the caller inserts them explicitly.
MARKED = (TokenType.CONTROL, TokenType.UNKNOWN)


def byte_pairs(metadata: Mapping[str, object], names: dict[str, int], types: list[int], pre: PreTokenizer) -> Tokenizer:
    """Byte-pair encoding: the bytes or characters of a word, merged in the order of `tokenizer.ggml.merges`."""
    pieces = _pieces(names, types)
    # For a pair that is listed twice, the first rank counts.
    pairs = dict.fromkeys(map(_split_merge, listed(metadata, "tokenizer.ggml.merges", str)))
    merges = [(left, right) for left, right in pairs if left in pieces and right in pieces and left + right in pieces]
    if pre.byte_level:
        tokenizer = Tokenizer(models.BPE(vocab=names, merges=merges, ignore_merges=pre.ignore_merges))
        tokenizer.decoder = decoders.ByteLevel()
    else:
        if pre.whole_lines:
            merges += [pair for pair in _newline_merges(pieces) if pair not in pairs]
        tokenizer = Tokenizer(models.BPE(vocab=names, merges=merges, byte_fallback=True))
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _pieces(names: dict[str, int], types: list[int]) -> dict[str, int]:
    """The tokens that encoding a text may produce."""
    return {name: i for name, i in names.items() if types[i] not in MARKED and types[i] != TokenType.BYTE}


def _newline_merges(vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Merges that join a run of newlines to one token, where the vocabulary has a token for the run: every way to
    divide such a run into two tokens."""
    longest = max((len(text) for text in vocab if not text.strip("\n")), default=0)
    lines = ["\n" * n for n in range(1, longest + 1)]
    return [(a, b) for a in lines for b in lines if a in vocab and b in vocab and a + b in vocab]


def _split_merge(merge: str) -> tuple[str, str]:
    at = merge.find(" ", 1)  # from 1: the first token may itself begin with a space
    if at < 0:
        raise UserError(
            f"tokenizer.ggml.merges holds {shorten(merge)}, expected two tokens with a space between: {CONVERT}"
        )
    return merge[:at], merge[at + 1 :]


def sentencepiece(
    metadata: Mapping[str, object], names: dict[str, int], types: list[int], add_space_prefix: bool
) -> Tokenizer:
    """SentencePiece BPE. Of all neighbours whose concatenation is a token, the pair with the best score is merged
    first.

    This becomes a list of ranked merges: every way to divide a token into two tokens, best score first. A character
    that is no token becomes its UTF-8 bytes.
    """
    scores = listed(metadata, "tokenizer.ggml.scores", (int, float), len(names))
    pieces = _pieces(names, types)
    lengths = set(map(len, pieces))
    merges = sorted(
        (-scores[i], i, pieces[text[:at]], text[:at], text[at:])
        for text, i in pieces.items()
        for at in range(1, len(text))
        if at in lengths and len(text) - at in lengths and text[:at] in pieces and text[at:] in pieces
    )
    unknown = next((name for name, i in names.items() if types[i] == TokenType.UNKNOWN), None)
    model = models.BPE(
        vocab=names, merges=[merge[3:] for merge in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    strip = [decoders.Strip(" ", 1, 0)] if add_space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def word_pieces(
    metadata: Mapping[str, object], names: dict[str, int], tokens: list[str]
) -> tuple[Tokenizer, Normalizer]:
    """WordPiece. A word begins with "▁"; the longest token with which its rest begins is split off repeatedly."""
    lowercase = get(metadata, "tokenizer.ggml.normalizer.lowercase", bool, True)
    accents = get(metadata, "tokenizer.ggml.normalizer.strip_accents", bool, lowercase)
    unknown, longest = _unknown(metadata, names, "bert"), 1 << 20  # longest word, characters; llama.cpp has no limit
    model = models.WordPiece(names, unk_token=unknown, continuing_subword_prefix="", max_input_chars_per_word=longest)
    return Tokenizer(model), {"lowercase": lowercase, "strip_accents": accents, "charsmap": "", "merge_spaces": True}


def unigrams(metadata: Mapping[str, object], names: dict[str, int], types: list[int]) -> tuple[Tokenizer, Normalizer]:
    """SentencePiece's unigram model: of all ways to divide a text into tokens, that of the largest sum of scores."""
    if get(metadata, "tokenizer.ggml.treat_whitespace_as_suffix", bool, False):
        raise UserError("tokenizer.ggml.treat_whitespace_as_suffix is true, which is not supported: use another model")
    scores = listed(metadata, "tokenizer.ggml.scores", (int, float), len(names))
    known = [scores[i] for i, kind in enumerate(types[: len(names)]) if kind == TokenType.NORMAL]
    if not all(map(math.isfinite, scores)):
        raise UserError(f"tokenizer.ggml.scores has numbers that are not finite: {CONVERT}")
    # The library derives the score of unknown characters from the lowest score: marked tokens must not change it.
    lowest = min(known, default=0.0)
    pieces = [
        (name, 0.0 if types[i] == TokenType.USER_DEFINED else lowest if types[i] in MARKED else float(scores[i]))
        for name, i in names.items()
    ]
    charsmap = bytes(x & 0xFF for x in listed(metadata, "tokenizer.ggml.precompiled_charsmap", int, default=[]))
    merge = get(metadata, "tokenizer.ggml.remove_extra_whitespaces", bool, False)
    with library_errors("tokenizer.ggml.scores and tokens make no vocabulary", CONVERT):
        tokenizer = Tokenizer(models.Unigram(pieces, names[_unknown(metadata, names, "t5")], byte_fallback=False))
    encoded = base64.b64encode(charsmap).decode()
    return tokenizer, {"lowercase": False, "strip_accents": False, "charsmap": encoded, "merge_spaces": merge}


def _unknown(metadata: Mapping[str, object], names: dict[str, int], kind: str) -> str:
    """The name of the token for characters that the vocabulary lacks. Raises UserError if there is none."""
    tokens = list(names)
    found = special_token(metadata, tokens, "unk", DEFAULT_IDS[kind]["unk"])
    if found is None:
        raise UserError(f"tokenizer.ggml.unknown_token_id is missing: {CONVERT}")
    return found["text"]
