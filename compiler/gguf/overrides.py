"""Metadata from the user that replace a GGUF file's, like llama.cpp's --override-kv.

In: texts KEY=TYPE:VALUE. Out: values by key. Raises a `UsageError` that says what is wrong with a text.
"""

from collections.abc import Sequence

from mlc_amd.runtime.errors import UsageError, shorten

_FLAGS = {"true": True, "false": False}
_TYPES = {"int": int, "float": float, "bool": _FLAGS.__getitem__, "str": str}


def overrides(texts: Sequence[str]) -> dict[str, object]:
    """The values of --override-kv."""
    return dict(map(_override, texts))


def _override(text: str) -> tuple[str, object]:
    key, equals, typed = text.partition("=")
    kind, colon, value = typed.partition(":")
    try:
        if not (key and equals and colon):
            raise ValueError
        return key, _TYPES[kind](value)
    except (KeyError, ValueError):
        what = "KEY=TYPE:VALUE with a type of int, float, bool (true, false) or str"
        raise UsageError(f"--override-kv is {shorten(text)}: it must be {what}") from None
