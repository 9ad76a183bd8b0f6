"""The steps before the words of a text are merged to tokens, as components of the `tokenizers` library: normalization,
and the split into words (`pre_tokenizers.py`). compiler/tokenizer.py writes them to tokenizer.json.

A loaded model must have exactly these components: another regex could take minutes for a line of text, or crash the
library. `check_runs` rejects texts for which these regexes would take too long.
"""

import base64
import re
from typing import Any

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.text.pre_tokenizers import DEFAULT, LONGEST_RUN, PRE_TOKENIZERS
from mlc_amd.runtime.text.tokenizer_files import ADVICE, NO_TOKENIZER, Normalizer, library_errors

_RUNS = re.compile(r"\s+|\d+")


def set_pipeline(
    tokenizer: Tokenizer, kind: str, pre: str | None, add_space_prefix: bool, changes: Normalizer | None
) -> None:
    """Sets the normalizer and the pre-tokenizer of `tokenizer`. kind: of the vocabulary, as compiler/tokenizer.py names
    it. pre: a name of pre_tokenizers.py, None: the default; raises KeyError for an unknown name. add_space_prefix:
    whether a space is added before each text, as SentencePiece does."""
    normalizer, words = _pipeline(kind, pre, add_space_prefix, changes)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if words is not None:
        tokenizer.pre_tokenizer = words


def has_pipeline(
    tokenizer: Tokenizer, kind: str, pre: str | None, add_space_prefix: bool, changes: Normalizer | None
) -> bool:
    """Whether `tokenizer` has these components and no others; False for an unknown name."""
    if pre is not None and pre not in PRE_TOKENIZERS:
        return False
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer)
    others = (tokenizer.post_processor, tokenizer.truncation, tokenizer.padding)
    if (kind in ("bert", "t5")) != (changes is not None):
        return False
    with library_errors("the tokenizer's normalizer is damaged", ADVICE):
        expected = _pipeline(kind, pre, add_space_prefix, changes)
    return list(map(_state, parts)) == list(map(_state, expected)) and others == (None, None, None)


def check_runs(text: str, pre: str | None) -> None:
    """Raises UserError for a text that the pre-tokenizer would take too long to split."""
    longest = (DEFAULT if pre is None else PRE_TOKENIZERS[pre]).longest_number
    if len(text) <= longest:
        return
    for found in _RUNS.finditer(text):
        space = found[0].isspace()
        if found.end() - found.start() > (most := LONGEST_RUN if space else longest):
            what = "characters of white space" if space else "digits"
            raise UserError(f"the text has more than {most} {what} in a row: shorten them")


def _pipeline(kind: str, pre: str | None, add_space_prefix: bool, changes: Normalizer | None) -> tuple[Any, Any]:
    spaces = normalizers.Replace(" ", "▁")
    if changes and kind == "bert":
        cleaned = normalizers.BertNormalizer(True, True, changes["strip_accents"], changes["lowercase"])
        marked = pre_tokenizers.Metaspace("▁", "always", split=False)
        return cleaned, pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), marked])
    if changes:
        steps: list[Any] = []
        if changes["charsmap"]:
            steps.append(normalizers.Precompiled(base64.b64decode(changes["charsmap"])))
        if changes["merge_spaces"]:
            steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        return normalizers.Sequence([*steps, *([normalizers.Prepend("▁")] if add_space_prefix else []), spaces]), None
    if kind in ("llama", NO_TOKENIZER):
        return normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if add_space_prefix else spaces, None
    found = DEFAULT if pre is None else PRE_TOKENIZERS[pre]
    splits: list[Any] = [pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in found.splits]
    if found.byte_level:
        splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return None if found.byte_level else spaces, pre_tokenizers.Sequence(splits)


def _state(part: Any) -> object:
    return None if part is None else part.__getstate__()
