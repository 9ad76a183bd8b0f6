"""The tokens of fill in the middle that a vocabulary has, by the keys of a GGUF file or by their texts."""

from collections.abc import Callable, Mapping

# Tokens of fill in the middle: the keys of their ids, and their texts where a file has no such key.
_TOKENS = {
    "prefix": (
        ("fim_pre", "prefix"),
        "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> [PREFIX]",
    ),
    "suffix": (
        ("fim_suf", "suffix"),
        "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> [SUFFIX]",
    ),
    "middle": (
        ("fim_mid", "middle"),
        "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|>",
    ),
    "repository": (
        ("fim_rep",), "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <repo_name>",
    ),
    "file": (("fim_sep",), "<|file_sep|> <file_sep> <filename>"),
}  # fmt: skip


def fill_tokens(number: Callable[[str], int | None], vocab: Mapping[str, int]) -> dict[str, int]:
    """Ids by tokenizer_files.FillName; {} without a prefix and a suffix. number: of a key; vocab: ids by text."""
    found = {}
    for name, (keys, texts) in _TOKENS.items():
        named = [number(f"tokenizer.ggml.{key}_token_id") for key in keys]
        ids = [i for i in named if i is not None and 0 <= i < len(vocab)]
        ids += [vocab[text] for text in texts.split() if text in vocab]
        found |= {name: ids[0]} if ids else {}
    return found if {"prefix", "suffix"} <= found.keys() else {}
