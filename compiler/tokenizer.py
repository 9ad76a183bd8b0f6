"""Turns the vocabulary of a GGUF file into the two files that `runtime/text/tokenizer.py` and
`runtime/text/chat_template.py` read.

In:  GGUF metadata as plain Python values (`tokenizer.ggml.*`, `tokenizer.chat_template*`, `general.name`).
Out: `tokenizer.json`, in the format of the `tokenizers` library (vocabulary, merges, normalizer, pre-tokenizer, added
tokens), and
     `tokenizer_config.json`, everything that this format cannot represent; its keys are listed at `export`.

Token ids equal llama.cpp's (its `llama-vocab.cpp` is the reference for GGUF vocabularies), with four deliberate
exceptions:
- where llama.cpp approximates the Unicode classes of a model's own pre-tokenizer, the model's classes are kept (see
  `runtime/text/pre_tokenizers.py`);
- the tokens of gpt-oss's message format, which llama.cpp makes user-defined, remain what the file says they are:
  control tokens, which a message cannot contain;
- merges never produce a control, unknown or byte token, so plain text cannot produce one;
- U+FDD0, a code point that Unicode reserves for a program's internal use, is dropped from text: here the names of
  control and unknown tokens begin with it (`runtime.tokenizer.MARK`), so that no text contains them, and whoever
  encodes says where they are.
"""

import base64
import json
import math
import warnings
from collections.abc import Mapping
from itertools import repeat
from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models

from mlc_amd.compiler.fill_tokens import fill_tokens
from mlc_amd.runtime.errors import UserError, shorten
from mlc_amd.runtime.text.chat_template import ChatTemplate
from mlc_amd.runtime.text.pre_tokenizers import DEFAULT, PRE_TOKENIZERS, PreTokenizer
from mlc_amd.runtime.text.text_pipeline import set_pipeline
from mlc_amd.runtime.text.tokenizer import MARK
from mlc_amd.runtime.text.tokenizer_files import NO_TOKENIZER, Normalizer, library_errors

_MAX_CHARACTERS = 1024  # of a token: several times as many as any vocabulary's longest one, 128 spaces, has
# Tokens that no text becomes unless it says so.
_MARKED = (TokenType.CONTROL, TokenType.UNKNOWN)

# Texts of tokens that end a turn or a text, whatever the metadata says of them, and tokens that a vocabulary uses for
# something else.
_END_TEXTS = """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|>
    <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜>
    [e~[ <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>
    <|file_sep|>
"""
END_TEXTS = frozenset(_END_TEXTS.split())
NOT_END_TEXTS: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset(("<|return|>", "<|call|>")), "<|end|>"),  # it only ends a message within a turn
    (frozenset(("<|calls|>", "<|flush|>")), "<|end|>"),
    (frozenset(("<|tool_response>",)), "</s>"),  # plain text in that vocabulary
)

# name in tokenizer_config.json -> key suffix in GGUF
_SPECIAL_IDS = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding"}
_DEFAULT_IDS = {
    "gpt2": {}, "llama": {"bos": 1, "eos": 2, "unk": 0}, "gemma4": {}, "bert": {"bos": 101, "eos": 102, "unk": 100},
    "t5": {"eos": 1, "unk": 2}, NO_TOKENIZER: {},
}  # fmt: skip
_MISSING = "none", "no_vocab", "test"  # kinds of vocabularies without a tokenizer
_SEPARATOR = "tokenizer.ggml.seperator_token_id"  # spelt so
_FILL_IDS = ("fim_pad", "fim_rep", "fim_sep")  # keys of tokens that end a generation of code
_PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")


def export(metadata: Mapping[str, object], directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `directory` (created when absent).

    The keys of `tokenizer_config.json`:
        model: "gpt2" (BPE), "gemma4" (BPE of characters), "llama" (SentencePiece's BPE), "bert" (WordPiece) or "t5"
        (SentencePiece's unigram), or "none": texts have no tokens
        normalizer: of "bert" and "t5", see tokenizer_files.Normalizer; else None
        pair: what begins two texts that are to be compared, what is between them, and what ends them: lists of ids
        pre: the pre-tokenizer's name, None for "llama"    byte_level: whether tokens are written as the printable
        characters of their bytes (GPT-2's); otherwise as text, with "▁" for a space and <0x0A> for a byte
        vocab_size: int    special: {"bos"|"eos"|"eot"|"eom"|"unk"|"pad": {"id": int, "text": str} or None}
        end_ids: sorted ids that end a generation    fill: of fill_tokens.py    add_bos, add_eos, add_space_prefix: bool
        mark: what the names of control tokens begin with in `tokenizer.json`
        chat_template: str or None    chat_templates: {name: template} of the GGUF's further, named ones

    Raises UserError for a missing or malformed key, for a tokenizer model other than these, for an unknown
    pre-tokenizer and for a chat template that cannot be compiled; warns (UserWarning) and uses the default
    pre-tokenizer when `tokenizer.ggml.pre` is missing.
    """
    kind = _get(metadata, "tokenizer.ggml.model", str)
    if kind in _MISSING:
        metadata = _numbered(metadata)
        kind = NO_TOKENIZER
    if kind not in _DEFAULT_IDS:
        raise UserError(
            f"tokenizer model {shorten(kind)} is not supported: use a GGUF whose tokenizer.ggml.model is one of "
            f"{', '.join(name for name in _DEFAULT_IDS if name != NO_TOKENIZER)}"
        )
    if kind == "gemma4":  # such files name no pre-tokenizer, and the first ones deny the token that begins a text
        metadata = {k: v for k, v in metadata.items() if k != "tokenizer.ggml.add_bos_token"}
        metadata["tokenizer.ggml.pre"] = kind
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(_list(metadata, "tokenizer.ggml.tokens", str))]
    if (longest := max(map(len, tokens), default=0)) > _MAX_CHARACTERS:
        raise UserError(f"tokenizer.ggml.tokens holds a token of {longest} characters: {_CONVERT}")
    vocab = {text: i for i, text in enumerate(tokens)}
    types = _types(metadata, tokens)
    names = {MARK + text if types[i] in _MARKED else text: i for i, text in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(names) != len(tokens):
        raise UserError(f"tokenizer.ggml.tokens holds the same token twice: {_CONVERT}")
    pre_name, normalizer, ends = None, None, kind == "t5"
    if kind == "bert":  # the separator ends a text, too
        metadata = {"tokenizer.ggml.eos_token_id": metadata.get(_SEPARATOR), **metadata}
        byte_level, add_bos, add_space_prefix, ends = False, True, True, True
        tokenizer, normalizer = _word_pieces(metadata, names, tokens)
    elif kind == "t5":
        add_space_prefix = _get(metadata, "tokenizer.ggml.add_space_prefix", bool, True)
        byte_level, add_bos = False, False
        tokenizer, normalizer = _unigrams(metadata, names, types)
    elif kind == NO_TOKENIZER:
        byte_level, add_bos, add_space_prefix = False, False, False
        tokenizer = Tokenizer(models.BPE(vocab=names, merges=[]))
    elif kind == "llama":
        add_space_prefix = _get(metadata, "tokenizer.ggml.add_space_prefix", bool, True)
        byte_level, add_bos = False, True
        tokenizer = _sentencepiece(metadata, names, types, add_space_prefix)
    else:
        pre_name, pre = _pre_tokenizer(metadata)
        byte_level, add_bos, add_space_prefix = pre.byte_level, pre.add_bos, False
        tokenizer = _byte_pairs(metadata, names, types, pre)
    with library_errors("tokenizer.ggml.precompiled_charsmap cannot be used", _CONVERT):
        set_pipeline(tokenizer, kind, pre_name, add_space_prefix, normalizer)
    _add_tokens(tokenizer, names, types, strip=_strips_space(metadata))

    special = {name: _special(metadata, tokens, name, _DEFAULT_IDS[kind].get(name)) for name in _SPECIAL_IDS}
    prefix = "tokenizer.chat_template."
    config = {
        "model": kind,
        "pre": pre_name,
        "byte_level": byte_level,
        "vocab_size": len(tokens),
        "special": special,
        "end_ids": _end_ids(metadata, vocab, special),
        "fill": fill_tokens(lambda key: _get(metadata, key, int, None), vocab),
        "add_bos": _adds(metadata, "bos", special, add_bos),
        "add_eos": _adds(metadata, "eos", special, ends),
        "normalizer": normalizer,
        "pair": _pair(metadata, special, kind, add_bos, ends),
        "add_space_prefix": add_space_prefix,
        "mark": MARK,
        "chat_template": _get(metadata, "tokenizer.chat_template", str, None),
        "chat_templates": {
            key.removeprefix(prefix): _get(metadata, key, str) for key in metadata if key.startswith(prefix)
        },
    }
    _check_templates(config)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
    )


def _check_templates(config: Mapping[str, Any]) -> None:
    """UserError for a chat template that cannot be compiled."""
    for source in (config["chat_template"], *config["chat_templates"].values()):
        if source is not None:
            template = ChatTemplate(source, {})
            try:
                template.check()
            finally:
                template.close()


def _numbered(metadata: Mapping[str, object]) -> dict[str, object]:
    """The metadata of a file that makes no tokens of texts, with a name for each: the file's, or its number."""
    size = metadata.get(f"{metadata.get('general.architecture')}.vocab_size")
    tokens = metadata.get("tokenizer.ggml.tokens") or [f"[{i}]" for i in range(size if isinstance(size, int) else 0)]
    return {"tokenizer.ggml.tokens": tokens}


_REQUIRED = object()
_CONVERT = "convert the model to GGUF again"


def _get(metadata: Mapping[str, object], key: str, kind: type, default: object = _REQUIRED) -> Any:
    value = metadata.get(key)
    if value is None:
        if default is _REQUIRED:
            raise UserError(f"the GGUF has no {key}: {_CONVERT}, with its tokenizer")
        return default
    if not isinstance(value, kind):
        raise UserError(f"{key} is {type(value).__name__}, expected {kind.__name__}: {_CONVERT}")
    return value


def _list(
    metadata: Mapping[str, object], key: str, kind: type | tuple[type, ...], count: int = 0, default: object = _REQUIRED
) -> list:
    """A list of `kind`, one entry for each of `count` tokens where that is given."""
    values = _get(metadata, key, list, default)
    if not all(map(isinstance, values, repeat(kind))):
        raise UserError(f"{key} holds values of a wrong type: {_CONVERT}")
    if len(values) < count:
        raise UserError(f"{key} has {len(values)} entries for {count} tokens: {_CONVERT}")
    return values


def _types(metadata: Mapping[str, object], tokens: list[str]) -> list[int]:
    """Token types; a token that ends a generation is a control token whatever the file says, as in llama.cpp."""
    types = _list(metadata, "tokenizer.ggml.token_type", int, len(tokens), default=[TokenType.NORMAL] * len(tokens))
    ends = END_TEXTS - _not_end(set(tokens))
    return [TokenType.CONTROL if text in ends else kind for text, kind in zip(tokens, types, strict=False)]


def _not_end(texts: set[str]) -> set[str]:
    return {text for present, text in NOT_END_TEXTS if present <= texts}


def _pre_tokenizer(metadata: Mapping[str, object]) -> tuple[str | None, PreTokenizer]:
    name = _get(metadata, "tokenizer.ggml.pre", str, None)
    if name is None:
        warnings.warn(
            "the GGUF names no pre-tokenizer (tokenizer.ggml.pre): using 'default', answers may be worse than the "
            "model can give",
            stacklevel=3,
        )
        return None, DEFAULT
    if name not in PRE_TOKENIZERS:
        raise UserError(
            f"pre-tokenizer {shorten(name)} is not supported: use a GGUF with another tokenizer.ggml.pre, or a newer "
            "mlc-amd"
        )
    return name, PRE_TOKENIZERS[name]


def _byte_pairs(
    metadata: Mapping[str, object], names: dict[str, int], types: list[int], pre: PreTokenizer
) -> Tokenizer:
    """Byte-pair encoding: the bytes or characters of a word, merged in the order of `tokenizer.ggml.merges`."""
    pieces = _pieces(names, types)
    # A pair that is listed twice has its first rank.
    pairs = dict.fromkeys(map(_split_merge, _list(metadata, "tokenizer.ggml.merges", str)))
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
    """The tokens that text may become."""
    return {name: i for name, i in names.items() if types[i] not in _MARKED and types[i] != TokenType.BYTE}


def _newline_merges(vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Merges by which a run of newlines that is a token as a whole becomes that token: every way to cut it in two."""
    longest = max((len(text) for text in vocab if not text.strip("\n")), default=0)
    lines = ["\n" * n for n in range(1, longest + 1)]
    return [(a, b) for a in lines for b in lines if a in vocab and b in vocab and a + b in vocab]


def _split_merge(merge: str) -> tuple[str, str]:
    at = merge.find(" ", 1)  # from 1: the first token may itself begin with a space
    if at < 0:
        raise UserError(
            f"tokenizer.ggml.merges holds {shorten(merge)}, expected two tokens with a space between: {_CONVERT}"
        )
    return merge[:at], merge[at + 1 :]


def _sentencepiece(
    metadata: Mapping[str, object], names: dict[str, int], types: list[int], add_space_prefix: bool
) -> Tokenizer:
    """SentencePiece BPE: of all neighbours whose concatenation is a token, the one with the best score is merged first.

    As ranked merges: every way to cut a token into two tokens, best score first. A character that is no token becomes
    its UTF-8 bytes.
    """
    scores = _list(metadata, "tokenizer.ggml.scores", (int, float), len(names))
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


def _word_pieces(
    metadata: Mapping[str, object], names: dict[str, int], tokens: list[str]
) -> tuple[Tokenizer, Normalizer]:
    """WordPiece: of each word, which begins with "▁", the longest token that it begins with, and so on."""
    lowercase = _get(metadata, "tokenizer.ggml.normalizer.lowercase", bool, True)
    accents = _get(metadata, "tokenizer.ggml.normalizer.strip_accents", bool, lowercase)
    unknown, longest = _unknown(metadata, names, "bert"), 1 << 20  # of a word: llama.cpp has no limit
    model = models.WordPiece(names, unk_token=unknown, continuing_subword_prefix="", max_input_chars_per_word=longest)
    return Tokenizer(model), {"lowercase": lowercase, "strip_accents": accents, "charsmap": "", "merge_spaces": True}


def _unigrams(metadata: Mapping[str, object], names: dict[str, int], types: list[int]) -> tuple[Tokenizer, Normalizer]:
    """SentencePiece's unigram model: of all ways to cut the text into tokens the one with the largest sum of scores."""
    if _get(metadata, "tokenizer.ggml.treat_whitespace_as_suffix", bool, False):
        raise UserError("tokenizer.ggml.treat_whitespace_as_suffix is true, which is not supported: use another model")
    scores = _list(metadata, "tokenizer.ggml.scores", (int, float), len(names))
    known = [scores[i] for i, kind in enumerate(types[: len(names)]) if kind == TokenType.NORMAL]
    if not all(map(math.isfinite, scores)):
        raise UserError(f"tokenizer.ggml.scores has numbers that are not finite: {_CONVERT}")
    # what text never becomes must not change the score of unknown characters, which follows from the lowest one
    lowest = min(known, default=0.0)
    pieces = [
        (name, 0.0 if types[i] == TokenType.USER_DEFINED else lowest if types[i] in _MARKED else float(scores[i]))
        for name, i in names.items()
    ]
    charsmap = bytes(x & 0xFF for x in _list(metadata, "tokenizer.ggml.precompiled_charsmap", int, default=[]))
    merge = _get(metadata, "tokenizer.ggml.remove_extra_whitespaces", bool, False)
    with library_errors("tokenizer.ggml.scores and tokens make no vocabulary", _CONVERT):
        tokenizer = Tokenizer(models.Unigram(pieces, names[_unknown(metadata, names, "t5")], byte_fallback=False))
    encoded = base64.b64encode(charsmap).decode()
    return tokenizer, {"lowercase": False, "strip_accents": False, "charsmap": encoded, "merge_spaces": merge}


def _unknown(metadata: Mapping[str, object], names: dict[str, int], kind: str) -> str:
    """The name of the token for what the vocabulary lacks. UserError without one."""
    tokens = list(names)
    found = _special(metadata, tokens, "unk", _DEFAULT_IDS[kind]["unk"])
    if found is None:
        raise UserError(f"tokenizer.ggml.unknown_token_id is missing: {_CONVERT}")
    return found["text"]


def _pair(
    metadata: Mapping[str, object], special: Mapping[str, dict[str, Any] | None], kind: str, bos: bool, ends: bool
) -> list[list[int]]:
    """As llama-server joins a query and a text for ranking (format_prompt_rerank of tools/server)."""

    def added(name: str, default: bool) -> bool:
        return _get(metadata, f"tokenizer.ggml.add_{name}_token", bool, default)

    end = [special["eos"]["id"]] if special["eos"] and added("eos", ends and kind != "bert") else []
    separator = _get(metadata, _SEPARATOR, int, _DEFAULT_IDS[kind].get("eos") if kind == "bert" else None)
    between = [separator] if separator is not None and added("sep", kind == "bert") else []
    begin = [special["bos"]["id"]] if special["bos"] and added("bos", bos) else []
    return [begin, end + between, end]


def _add_tokens(tokenizer: Tokenizer, names: dict[str, int], types: list[int], strip: bool) -> None:
    """Register the tokens that are matched as whole texts before anything else: control and unknown ones as special,
    user-defined ones not."""
    control, user_defined = [], []
    for name, i in names.items():
        if types[i] in _MARKED:
            rstrip = strip and name.removeprefix(MARK) not in _PHI3_KEEPS_SPACE
            control.append(AddedToken(name, special=True, normalized=False, rstrip=rstrip))
        elif types[i] == TokenType.USER_DEFINED:
            user_defined.append(AddedToken(name, special=False, normalized=False, rstrip=strip))
    # All at once: the library rebuilds its matcher at every call.
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(user_defined)


def _strips_space(metadata: Mapping[str, object]) -> bool:
    """Phi-3 drops white space after most of its added tokens; GGUF has no key for that, so llama.cpp too goes by the
    model's name."""
    name = _get(metadata, "general.name", str, "").lower()
    return "phi-3" in name or "phi3" in name


def _special(
    metadata: Mapping[str, object], tokens: list[str], name: str, default: int | None
) -> dict[str, Any] | None:
    key = f"tokenizer.ggml.{_SPECIAL_IDS[name]}_token_id"
    default = default if default is not None and default < len(tokens) else None
    i = _get(metadata, key, int, default)
    if i is not None and not 0 <= i < len(tokens):
        warnings.warn(f"{key} is {i} but the vocabulary has {len(tokens)} tokens: it is ignored", stacklevel=3)
        i = default
    return None if i is None else {"id": i, "text": tokens[i]}


def _adds(
    metadata: Mapping[str, object], name: str, special: Mapping[str, dict[str, Any] | None], default: bool
) -> bool:
    key = f"tokenizer.ggml.add_{name}_token"
    wanted = _get(metadata, key, bool, default)
    if wanted and special[name] is None:
        raise UserError(
            f"the model expects a {name} token ({key}) but tokenizer.ggml.{name}_token_id is not set: {_CONVERT}"
        )
    return wanted


def _end_ids(
    metadata: Mapping[str, object], vocab: dict[str, int], special: Mapping[str, dict[str, Any] | None]
) -> list[int]:
    named = {token["id"] for name in ("eos", "eot", "eom") if (token := special[name])}
    fills = [_get(metadata, f"tokenizer.ggml.{name}_token_id", int, None) for name in _FILL_IDS]
    named |= {i for i in fills if i is not None and 0 <= i < len(vocab)}
    ends = {vocab[text] for text in END_TEXTS if text in vocab} | named
    return sorted(ends - {vocab[text] for text in _not_end(set(vocab)) if text in vocab})
