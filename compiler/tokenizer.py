"""Turns the vocabulary of a GGUF file into the two files that `runtime/tokenizer.py` and `runtime/chat_template.py`
read.

In:  GGUF metadata as plain Python values (`tokenizer.ggml.*`, `tokenizer.chat_template*`, `general.name`).
Out: `tokenizer.json`, in the format of the `tokenizers` library (vocabulary, merges, normalizer, pre-tokenizer, added
tokens), and
     `tokenizer_config.json`, everything that this format cannot represent; its keys are listed at `export`.

Token ids equal llama.cpp's (its `llama-vocab.cpp` is the reference for GGUF vocabularies), with three deliberate
exceptions:
- where llama.cpp replaces the Unicode classes of a model's own pre-tokenizer by ASCII ones (tekken, gpt-4o), the
model's classes are kept;
- SentencePiece merges never produce a control, unknown or byte token, so plain text cannot produce one;
- U+FDD0, a code point that Unicode reserves for a program's internal use, is dropped from text. Added tokens are looked
up before it is
  dropped, so placing one inside the text of a control token makes that text plain (`Tokenizer.escape`).
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from mlc_amd.runtime.errors import UserError

FENCE = "\ufdd0"


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type` (the GGUF specification)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class PreTokenizer:
    """How text is split into words before merging: each regex splits the pieces left by those before it.

    splits:        Oniguruma regexes; both the matches and the text between them become pieces.
    ignore_merges: a word that is a token as a whole is not merged from its bytes.
    add_bos:       whether a beginning-of-sequence token goes first where `tokenizer.ggml.add_bos_token` is absent.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


# The regexes share their parts. A contraction is written out in both cases because (?i:'s) would also match the long s
# (U+017F).
_SUFFIX = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_TRAILING_SPACE = r"\s+(?!\S)|\s+"
_SPACE = r"\s*[\r\n]+|" + _TRAILING_SPACE
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PREFIX = r"[^\r\n\p{L}\p{N}]?"


def _any(*alternatives: str) -> str:
    return "|".join(alternatives)


def _cased(number: str, suffix: str = "") -> str:
    """Words are cut where a lower-case letter meets an upper-case one."""
    lower_word, upper_word = f"{_PREFIX}{_UPPER}*{_LOWER}+{suffix}", f"{_PREFIX}{_UPPER}+{_LOWER}*{suffix}"
    return _any(lower_word, upper_word, number, r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACE)


_GPT2 = _any(r"'s|'t|'re|'ve|'m|'ll|'d", r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+", _TRAILING_SPACE)
_LLAMA3 = _any(_SUFFIX, _WORD, r"\p{N}{1,3}", _SYMBOLS, _SPACE)
_QWEN2 = _any(_SUFFIX, _WORD, r"\p{N}", _SYMBOLS, _SPACE)
_CJK_KANA = "[\u4e00-\u9fa5\u3040-\u30ff]+"
_CJK_HANGUL = "[\u0800-\u9fa5\uac00-\ud7ff]+"
_DEEPSEEK3 = _any(
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r" ?[\p{P}\p{S}]+[\r\n]*",
    _SPACE,
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN = PreTokenizer((_GPT2,))
_QWEN = PreTokenizer((_QWEN2,))
_LLAMA = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_DEEPSEEK = PreTokenizer((r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK3))
_GPT4O = PreTokenizer((_cased(r"\p{N}{1,3}", _SUFFIX + "?"),))
_BAILING = PreTokenizer(
    (_any(r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])", _WORD, r"\p{N}", _SYMBOLS, r"\s*[\r\n]", _TRAILING_SPACE),)
)
DEFAULT = PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

# `tokenizer.ggml.pre` -> pre-tokenizer
_FAMILIES: dict[PreTokenizer, str] = {
    _PLAIN: "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4",
    _SINGLE_DIGITS: "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
    _LLAMA: "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    PreTokenizer((_LLAMA3,)): "dbrx smaug-bpe glm4 chatglm-bpe",
    _QWEN: "qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2",
    _DEEPSEEK: "deepseek-v3 hunyuan-dense joyai-llm",
    _GPT4O: "gpt-4o llama4 kanana2 minimax-m2",
    _BAILING: "bailingmoe bailingmoe2 llada-moe",
    PreTokenizer((_BLOOM,)): "poro-chat bloom gpt3-finnish",
}
PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: pre for pre, names in _FAMILIES.items() for name in names.split()} | {
    "default": DEFAULT,
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "qwen35": PreTokenizer((_any(_SUFFIX, _MARKS_WORD, r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACE),)),
    "tekken": PreTokenizer((_cased(r"\p{N}"),), ignore_merges=True, add_bos=True),
    "seed-coder": PreTokenizer((_any(_SUFFIX, _WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _SPACE),)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _any(_SUFFIX, _WORD, r"\p{N}+", _SYMBOLS, _SPACE)), ignore_merges=True),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_HANGUL, r"\p{N}")),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")),
}

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
_DEFAULT_IDS = {"gpt2": {}, "llama": {"bos": 1, "eos": 2, "unk": 0}}
_PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")


def export(metadata: Mapping[str, object], directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `directory` (created when absent).

    The keys of `tokenizer_config.json`:
        model: "gpt2" (byte-level BPE) or "llama" (SentencePiece)      pre: the pre-tokenizer's name, None for "llama"
        vocab_size: int    special: {"bos"|"eos"|"eot"|"eom"|"unk"|"pad": {"id": int, "text": str} or None}
        end_ids: sorted ids that end a generation    add_bos, add_eos: bool    add_space_prefix: bool    fence: the code
                                                     point of `escape`
        chat_template: str or None    chat_templates: {name: template} of the GGUF's further, named ones

    Raises UserError for a missing or malformed key and for a tokenizer model other than these two; warns (UserWarning)
    and uses the default pre-tokenizer when `tokenizer.ggml.pre` is missing or unknown.
    """
    kind = _get(metadata, "tokenizer.ggml.model", str)
    if kind not in _DEFAULT_IDS:
        raise UserError(
            f"tokenizer model '{kind}' is not supported: use a GGUF whose tokenizer.ggml.model is "
            f"{' or '.join(_DEFAULT_IDS)}"
        )
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(_list(metadata, "tokenizer.ggml.tokens", str))]
    vocab = {text: i for i, text in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise UserError(f"tokenizer.ggml.tokens holds the same token twice: {_CONVERT}")
    types = _types(metadata, tokens)
    if kind == "gpt2":
        pre = _pre_tokenizer(metadata)
        add_bos, add_space_prefix = pre.add_bos, False
        tokenizer = _byte_level(metadata, vocab, pre)
    else:
        add_bos, add_space_prefix = True, _get(metadata, "tokenizer.ggml.add_space_prefix", bool, True)
        tokenizer = _sentencepiece(metadata, vocab, types, add_space_prefix)
    _add_tokens(tokenizer, tokens, types, strip=_strips_space(metadata))

    special = {name: _special(metadata, tokens, name, _DEFAULT_IDS[kind].get(name)) for name in _SPECIAL_IDS}
    prefix = "tokenizer.chat_template."
    config = {
        "model": kind,
        "pre": metadata.get("tokenizer.ggml.pre") if kind == "gpt2" else None,
        "vocab_size": len(tokens),
        "special": special,
        "end_ids": _end_ids(vocab, special),
        "add_bos": _adds(metadata, "bos", special, add_bos),
        "add_eos": _adds(metadata, "eos", special, False),
        "add_space_prefix": add_space_prefix,
        "fence": FENCE,
        "chat_template": _get(metadata, "tokenizer.chat_template", str, None),
        "chat_templates": {
            key.removeprefix(prefix): _get(metadata, key, str) for key in metadata if key.startswith(prefix)
        },
    }
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
    )


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
    if not all(isinstance(value, kind) for value in values):
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


def _pre_tokenizer(metadata: Mapping[str, object]) -> PreTokenizer:
    name = _get(metadata, "tokenizer.ggml.pre", str, None)
    if name not in PRE_TOKENIZERS:
        what = f"unknown pre-tokenizer '{name}'" if name else "the GGUF names no pre-tokenizer (tokenizer.ggml.pre)"
        warnings.warn(f"{what}: using 'default', answers may be worse than the model can give", stacklevel=3)
    return PRE_TOKENIZERS.get(name, DEFAULT)


def _byte_level(metadata: Mapping[str, object], vocab: dict[str, int], pre: PreTokenizer) -> Tokenizer:
    """Byte-level BPE: text's UTF-8 bytes, written as printable characters, merged in the order of
    `tokenizer.ggml.merges`."""
    pairs = map(_split_merge, _list(metadata, "tokenizer.ggml.merges", str))
    merges = [(left, right) for left, right in pairs if left in vocab and right in vocab and left + right in vocab]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    tokenizer.normalizer = normalizers.Replace(FENCE, "")
    splits = [pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in pre.splits]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split_merge(merge: str) -> tuple[str, str]:
    at = merge.find(" ", 1)  # from 1: the first token may itself begin with a space
    if at < 0:
        raise UserError(f"tokenizer.ggml.merges holds {merge!r}, expected two tokens with a space between: {_CONVERT}")
    return merge[:at], merge[at + 1 :]


def _sentencepiece(
    metadata: Mapping[str, object], vocab: dict[str, int], types: list[int], add_space_prefix: bool
) -> Tokenizer:
    """SentencePiece BPE: of all neighbours whose concatenation is a token, the one with the best score is merged first.

    As ranked merges: every way to cut a token into two tokens, best score first. A character that is no token becomes
    its UTF-8 bytes.
    """
    scores = _list(metadata, "tokenizer.ggml.scores", (int, float), len(vocab))
    reserved = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.BYTE)
    pieces = {text: i for text, i in vocab.items() if types[i] not in reserved}
    merges = sorted(
        (-scores[i], i, pieces[text[:at]], text[:at], text[at:])
        for text, i in pieces.items()
        for at in range(1, len(text))
        if text[:at] in pieces and text[at:] in pieces
    )
    unknown = next((text for text, i in vocab.items() if types[i] == TokenType.UNKNOWN), None)
    model = models.BPE(
        vocab=vocab, merges=[merge[3:] for merge in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    space = [normalizers.Prepend("▁")] if add_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(FENCE, ""), *space, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if add_space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int], strip: bool) -> None:
    """Register the tokens that are matched as whole texts before anything else: control and unknown ones as special,
    user-defined ones not.

    A control token of one character is left out: `Tokenizer.escape` could not make its text plain.
    """
    control, user_defined = [], []
    for text, kind in zip(tokens, types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN) and len(text) > 1:
            rstrip = strip and text not in _PHI3_KEEPS_SPACE
            control.append(AddedToken(text, special=True, normalized=False, rstrip=rstrip))
        elif kind == TokenType.USER_DEFINED:
            user_defined.append(AddedToken(text, special=False, normalized=False, rstrip=strip))
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
            f"the model wants a {name} token ({key}) but tokenizer.ggml.{name}_token_id is not set: {_CONVERT}"
        )
    return wanted


def _end_ids(vocab: dict[str, int], special: Mapping[str, dict[str, Any] | None]) -> list[int]:
    named = {token["id"] for name in ("eos", "eot", "eom") if (token := special[name])}
    ends = {vocab[text] for text in END_TEXTS if text in vocab} | named
    return sorted(ends - {vocab[text] for text in _not_end(set(vocab)) if text in vocab})
