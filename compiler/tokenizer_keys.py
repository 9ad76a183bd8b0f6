"""Reads the keys of a GGUF file's metadata that describe its tokenizer. Raises UserError for missing or malformed
values."""

import warnings
from collections.abc import Mapping
from itertools import repeat
from typing import Any

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.text.tokenizer_files import NO_TOKENIZER

# name in tokenizer_config.json -> key suffix in GGUF
SPECIAL_IDS = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding"}
DEFAULT_IDS = {
    "gpt2": {}, "llama": {"bos": 1, "eos": 2, "unk": 0}, "gemma4": {}, "bert": {"bos": 101, "eos": 102, "unk": 100},
    "t5": {"eos": 1, "unk": 2}, NO_TOKENIZER: {},
}  # fmt: skip

REQUIRED = object()
CONVERT = "convert the model to GGUF again"


def get(metadata: Mapping[str, object], key: str, kind: type, default: object = REQUIRED) -> Any:
    """The value of a key, of type `kind`. If the key is missing: `default`, or UserError without one."""
    value = metadata.get(key)
    if value is None:
        if default is REQUIRED:
            raise UserError(f"the GGUF has no {key}: {CONVERT}, with its tokenizer")
        return default
    if not isinstance(value, kind):
        raise UserError(f"{key} is {type(value).__name__}, expected {kind.__name__}: {CONVERT}")
    return value


def listed(
    metadata: Mapping[str, object], key: str, kind: type | tuple[type, ...], count: int = 0, default: object = REQUIRED
) -> list:
    """The list that a key holds, of elements of `kind`. count: the least length (the number of tokens), 0: any."""
    values = get(metadata, key, list, default)
    if not all(map(isinstance, values, repeat(kind))):
        raise UserError(f"{key} holds values of a wrong type: {CONVERT}")
    if len(values) < count:
        raise UserError(f"{key} has {len(values)} entries for {count} tokens: {CONVERT}")
    return values


def special_token(
    metadata: Mapping[str, object], tokens: list[str], name: str, default: int | None
) -> dict[str, Any] | None:
    """{"id", "text"} of a special token (a name in SPECIAL_IDS), or None. default: its id if the file has no valid one.
    Warns (UserWarning) of an id that is not in the vocabulary."""
    key = f"tokenizer.ggml.{SPECIAL_IDS[name]}_token_id"
    default = default if default is not None and default < len(tokens) else None
    i = get(metadata, key, int, default)
    if i is not None and not 0 <= i < len(tokens):
        warnings.warn(f"{key} is {i} but the vocabulary has {len(tokens)} tokens: it is ignored", stacklevel=3)
        i = default
    return None if i is None else {"id": i, "text": tokens[i]}
