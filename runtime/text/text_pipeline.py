"""The steps before the words of a text are merged to tokens, as parts of the `tokenizers` library: normalization, and
the split into words (`pre_tokenizers.py`), which compiler/tokenizer.py writes into tokenizer.json.

A loaded model must have the same ones: another regex could take minutes for a line of text, or crash the library.
`check_runs` refuses texts for which these would.
"""

import re
from typing import Any

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.text.pre_tokenizers import DEFAULT, LONGEST_RUN, PRE_TOKENIZERS

_RUNS = re.compile(r"\s+|\d+")


def set_pipeline(tokenizer: Tokenizer, sentencepiece: bool, pre: str | None, add_space_prefix: bool) -> None:
    """Sets the tokenizer's normalizer and pre-tokenizer. pre: None: the default; KeyError for an unknown name.
    add_space_prefix: SentencePiece begins each text with a space."""
    normalizer, words = _pipeline(sentencepiece, pre, add_space_prefix)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if words is not None:
        tokenizer.pre_tokenizer = words


def has_pipeline(tokenizer: Tokenizer, sentencepiece: bool, pre: str | None, add_space_prefix: bool) -> bool:
    """Whether `tokenizer` has these parts and no others; False for an unknown name."""
    if pre is not None and pre not in PRE_TOKENIZERS:
        return False
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer)
    others = (tokenizer.post_processor, tokenizer.truncation, tokenizer.padding)
    expected = _pipeline(sentencepiece, pre, add_space_prefix)
    return list(map(_state, parts)) == list(map(_state, expected)) and others == (None, None, None)


def check_runs(text: str, pre: str | None) -> None:
    """UserError for a text that the pre-tokenizer would take too long to split."""
    longest = (DEFAULT if pre is None else PRE_TOKENIZERS[pre]).longest_number
    if len(text) <= longest:
        return
    for found in _RUNS.finditer(text):
        space = found[0].isspace()
        if found.end() - found.start() > (most := LONGEST_RUN if space else longest):
            what = "characters of white space" if space else "digits"
            raise UserError(f"the text has more than {most} {what} in a row: shorten them")


def _pipeline(sentencepiece: bool, pre: str | None, add_space_prefix: bool) -> tuple[Any, Any]:
    spaces = normalizers.Replace(" ", "▁")
    if sentencepiece:
        return normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if add_space_prefix else spaces, None
    found = DEFAULT if pre is None else PRE_TOKENIZERS[pre]
    splits: list[Any] = [pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in found.splits]
    if found.byte_level:
        splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return None if found.byte_level else spaces, pre_tokenizers.Sequence(splits)


def _state(part: Any) -> object:
    return None if part is None else part.__getstate__()
