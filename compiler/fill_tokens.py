"""Finds a vocabulary's tokens for fill-in-the-middle (FIM), by the keys of a GGUF file or by the texts of tokens.

In: the ids that the file's keys name, and the vocabulary. Out: `fill_tokens`, ids by `tokenizer_files.FillName`.
"""

from collections.abc import Callable, Mapping

# FillName -> (keys of the token's id, texts of the token for files without such a key).
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
    """Ids by tokenizer_files.FillName; {} if there is no token for the prefix or for the suffix. number: returns the id
    that a GGUF key names, or None. vocab: ids by text."""
    found = {}
    for name, (keys, texts) in _TOKENS.items():
        named = [number(f"tokenizer.ggml.{key}_token_id") for key in keys]
        ids = [i for i in named if i is not None and 0 <= i < len(vocab)]
        ids += [vocab[text] for text in texts.split() if text in vocab]
        found |= {name: ids[0]} if ids else {}
    return found if {"prefix", "suffix"} <= found.keys() else {}
