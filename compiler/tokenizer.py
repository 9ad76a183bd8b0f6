"""Turns the vocabulary of a GGUF file into the two files that `runtime/text/tokenizer.py` and
`runtime/text/chat_template.py` read.

In:  GGUF metadata as plain Python values (`tokenizer.ggml.*`, `tokenizer.chat_template*`, `general.name`).
Out: `tokenizer.json`, in the format of the `tokenizers` library (vocabulary, merges, normalizer, pre-tokenizer, added
tokens), and
     `tokenizer_config.json`, everything that this format cannot represent; its keys are listed at `export`.

Token ids equal llama.cpp's (`llama-vocab.cpp` is the reference for GGUF vocabularies), with four deliberate exceptions:
- where llama.cpp approximates the Unicode classes of a model's own pre-tokenizer, the model's classes are kept (see
  `runtime/text/pre_tokenizers.py`);
- the tokens of gpt-oss's message format, which llama.cpp makes user-defined, remain what the file says they are:
  control tokens, which a message cannot contain;
- merges never produce a control, unknown or byte token, so plain text cannot produce one;
- U+FDD0, a code point that Unicode reserves for a program's internal use, is removed from text. Here the names of
  control and unknown tokens begin with it (`runtime.tokenizer.MARK`), so that no text contains such a name; the caller
  of the tokenizer inserts these tokens explicitly.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Tokenizer, models

from mlc_amd.compiler.fill_tokens import fill_tokens
from mlc_amd.compiler.tokenizer_keys import CONVERT, DEFAULT_IDS, SPECIAL_IDS, get, listed, special_token
from mlc_amd.compiler.vocabularies import MARKED, byte_pairs, sentencepiece, unigrams, word_pieces
from mlc_amd.runtime.errors import UserError, shorten
from mlc_amd.runtime.text.chat_template import ChatTemplate
from mlc_amd.runtime.text.pre_tokenizers import DEFAULT, PRE_TOKENIZERS, PreTokenizer
from mlc_amd.runtime.text.text_pipeline import set_pipeline
from mlc_amd.runtime.text.tokenizer import MARK
from mlc_amd.runtime.text.tokenizer_files import NO_TOKENIZER, library_errors

_MAX_CHARACTERS = 1024  # upper limit of a token's length; the longest token of any known vocabulary is 128 spaces
# Tokens with these texts end a turn or a text, whatever the metadata says. NOT_END_TEXTS has exceptions: (texts, text)
# means that in a vocabulary that contains all of `texts`, `text` does not end a turn.
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

_MISSING = "none", "no_vocab", "test"  # kinds of vocabularies without a tokenizer
_SEPARATOR = "tokenizer.ggml.seperator_token_id"  # the key's actual spelling
_FILL_IDS = ("fim_pad", "fim_rep", "fim_sep")  # keys of tokens that end a generation of code
_PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")


def export(metadata: Mapping[str, object], directory: Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` into `directory`, which is created if it does not exist.

    The keys of `tokenizer_config.json`:
        model: "gpt2" (BPE), "gemma4" (BPE of characters), "llama" (SentencePiece's BPE), "bert" (WordPiece) or "t5"
        (SentencePiece's unigram), or "none": texts have no tokens
        normalizer: a tokenizer_files.Normalizer for "bert" and "t5", else None
        pair: three lists of ids, for ranking: before the first text, between the two texts, after the second
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
    kind = get(metadata, "tokenizer.ggml.model", str)
    if kind in _MISSING:
        metadata = _numbered(metadata)
        kind = NO_TOKENIZER
    if kind not in DEFAULT_IDS:
        raise UserError(
            f"tokenizer model {shorten(kind)} is not supported: use a GGUF whose tokenizer.ggml.model is one of "
            f"{', '.join(name for name in DEFAULT_IDS if name != NO_TOKENIZER)}"
        )
    if kind == "gemma4":  # such files name no pre-tokenizer; the first ones wrongly have add_bos_token = false
        metadata = {k: v for k, v in metadata.items() if k != "tokenizer.ggml.add_bos_token"}
        metadata["tokenizer.ggml.pre"] = kind
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(listed(metadata, "tokenizer.ggml.tokens", str))]
    if (longest := max(map(len, tokens), default=0)) > _MAX_CHARACTERS:
        raise UserError(f"tokenizer.ggml.tokens holds a token of {longest} characters: {CONVERT}")
    vocab = {text: i for i, text in enumerate(tokens)}
    types = _types(metadata, tokens)
    names = {MARK + text if types[i] in MARKED else text: i for i, text in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(names) != len(tokens):
        raise UserError(f"tokenizer.ggml.tokens holds the same token twice: {CONVERT}")
    pre_name, normalizer, ends = None, None, kind == "t5"
    if kind == "bert":  # the separator ends a text, too
        metadata = {"tokenizer.ggml.eos_token_id": metadata.get(_SEPARATOR), **metadata}
        byte_level, add_bos, add_space_prefix, ends = False, True, True, True
        tokenizer, normalizer = word_pieces(metadata, names, tokens)
    elif kind == "t5":
        add_space_prefix = get(metadata, "tokenizer.ggml.add_space_prefix", bool, True)
        byte_level, add_bos = False, False
        tokenizer, normalizer = unigrams(metadata, names, types)
    elif kind == NO_TOKENIZER:
        byte_level, add_bos, add_space_prefix = False, False, False
        tokenizer = Tokenizer(models.BPE(vocab=names, merges=[]))
    elif kind == "llama":
        add_space_prefix = get(metadata, "tokenizer.ggml.add_space_prefix", bool, True)
        byte_level, add_bos = False, True
        tokenizer = sentencepiece(metadata, names, types, add_space_prefix)
    else:
        pre_name, pre = _pre_tokenizer(metadata)
        byte_level, add_bos, add_space_prefix = pre.byte_level, pre.add_bos, False
        tokenizer = byte_pairs(metadata, names, types, pre)
    with library_errors("tokenizer.ggml.precompiled_charsmap cannot be used", CONVERT):
        set_pipeline(tokenizer, kind, pre_name, add_space_prefix, normalizer)
    _add_tokens(tokenizer, names, types, strip=_strips_space(metadata))

    special = {name: special_token(metadata, tokens, name, DEFAULT_IDS[kind].get(name)) for name in SPECIAL_IDS}
    prefix = "tokenizer.chat_template."
    config = {
        "model": kind,
        "pre": pre_name,
        "byte_level": byte_level,
        "vocab_size": len(tokens),
        "special": special,
        "end_ids": _end_ids(metadata, vocab, special),
        "fill": fill_tokens(lambda key: get(metadata, key, int, None), vocab),
        "add_bos": _adds(metadata, "bos", special, add_bos),
        "add_eos": _adds(metadata, "eos", special, ends),
        "normalizer": normalizer,
        "pair": _pair(metadata, special, kind, add_bos, ends),
        "add_space_prefix": add_space_prefix,
        "mark": MARK,
        "chat_template": get(metadata, "tokenizer.chat_template", str, None),
        "chat_templates": {
            key.removeprefix(prefix): get(metadata, key, str) for key in metadata if key.startswith(prefix)
        },
    }
    _check_templates(config)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
    )


def _check_templates(config: Mapping[str, Any]) -> None:
    """Raises UserError for a chat template that cannot be compiled."""
    for source in (config["chat_template"], *config["chat_templates"].values()):
        if source is not None:
            template = ChatTemplate(source, {})
            try:
                template.check()
            finally:
                template.close()


def _numbered(metadata: Mapping[str, object]) -> dict[str, object]:
    """The metadata of a file without a tokenizer, with a name for each token: the file's, or its number in brackets."""
    size = metadata.get(f"{metadata.get('general.architecture')}.vocab_size")
    tokens = metadata.get("tokenizer.ggml.tokens") or [f"[{i}]" for i in range(size if isinstance(size, int) else 0)]
    return {"tokenizer.ggml.tokens": tokens}


def _types(metadata: Mapping[str, object], tokens: list[str]) -> list[int]:
    """Token types. A token that ends a generation is a control token whatever the file says, as in llama.cpp."""
    types = listed(metadata, "tokenizer.ggml.token_type", int, len(tokens), default=[TokenType.NORMAL] * len(tokens))
    ends = END_TEXTS - _not_end(set(tokens))
    return [TokenType.CONTROL if text in ends else kind for text, kind in zip(tokens, types, strict=False)]


def _not_end(texts: set[str]) -> set[str]:
    return {text for present, text in NOT_END_TEXTS if present <= texts}


def _pre_tokenizer(metadata: Mapping[str, object]) -> tuple[str | None, PreTokenizer]:
    name = get(metadata, "tokenizer.ggml.pre", str, None)
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


def _pair(
    metadata: Mapping[str, object], special: Mapping[str, dict[str, Any] | None], kind: str, bos: bool, ends: bool
) -> list[list[int]]:
    """The ids around a query and a text for ranking, as llama-server joins them (format_prompt_rerank of
    tools/server)."""

    def added(name: str, default: bool) -> bool:
        return get(metadata, f"tokenizer.ggml.add_{name}_token", bool, default)

    end = [special["eos"]["id"]] if special["eos"] and added("eos", ends and kind != "bert") else []
    separator = get(metadata, _SEPARATOR, int, DEFAULT_IDS[kind].get("eos") if kind == "bert" else None)
    between = [separator] if separator is not None and added("sep", kind == "bert") else []
    begin = [special["bos"]["id"]] if special["bos"] and added("bos", bos) else []
    return [begin, end + between, end]


def _add_tokens(tokenizer: Tokenizer, names: dict[str, int], types: list[int], strip: bool) -> None:
    """Registers the tokens that are matched as whole texts before anything else: control and unknown tokens as special,
    user-defined tokens as not special."""
    control, user_defined = [], []
    for name, i in names.items():
        if types[i] in MARKED:
            rstrip = strip and name.removeprefix(MARK) not in _PHI3_KEEPS_SPACE
            control.append(AddedToken(name, special=True, normalized=False, rstrip=rstrip))
        elif types[i] == TokenType.USER_DEFINED:
            user_defined.append(AddedToken(name, special=False, normalized=False, rstrip=strip))
    # One call for all tokens: the library rebuilds its matcher at every call.
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(user_defined)


def _strips_space(metadata: Mapping[str, object]) -> bool:
    """Whether white space after an added token is dropped, as Phi-3 does after most of them. GGUF has no key for this,
    so the model's name decides, as in llama.cpp."""
    name = get(metadata, "general.name", str, "").lower()
    return "phi-3" in name or "phi3" in name


def _adds(
    metadata: Mapping[str, object], name: str, special: Mapping[str, dict[str, Any] | None], default: bool
) -> bool:
    key = f"tokenizer.ggml.add_{name}_token"
    wanted = get(metadata, key, bool, default)
    if wanted and special[name] is None:
        raise UserError(
            f"the model expects a {name} token ({key}) but tokenizer.ggml.{name}_token_id is not set: {CONVERT}"
        )
    return wanted


def _end_ids(
    metadata: Mapping[str, object], vocab: dict[str, int], special: Mapping[str, dict[str, Any] | None]
) -> list[int]:
    named = {token["id"] for name in ("eos", "eot", "eom") if (token := special[name])}
    fills = [get(metadata, f"tokenizer.ggml.{name}_token_id", int, None) for name in _FILL_IDS]
    named |= {i for i in fills if i is not None and 0 <= i < len(vocab)}
    ends = {vocab[text] for text in END_TEXTS if text in vocab} | named
    return sorted(ends - {vocab[text] for text in _not_end(set(vocab)) if text in vocab})
