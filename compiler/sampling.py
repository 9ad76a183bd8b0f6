"""Sampling parameters that a GGUF file recommends for its model.

In:  GGUF metadata as plain Python values (`general.sampling.*`, as in gguf-py's constants.py).
Out: `defaults`, the fields of `runtime.sampling.Sampling` that the file sets, for the artifact's manifest.
"""

import warnings
from collections.abc import Mapping
from typing import cast

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.sampling.settings import Sampling, SamplingChanges

_PREFIX = "general.sampling."
# key -> (field of Sampling, its type)
_FIELDS = {
    "temp": ("temperature", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "penalty_repeat": ("repetition_penalty", float),
    "penalty_last_n": ("repetition_window", int),
}
# Keys of sampling methods that this project does not have -> the value with which the method is off. Not listed:
# `sequence`, the order of the methods; `mirostat_*` and `xtc_threshold`, parameters of methods that are listed.
_METHODS = {"mirostat": 0, "xtc_probability": 0.0}


def defaults(metadata: Mapping[str, object], context: int) -> SamplingChanges:
    """{field: value}; empty for a file without recommendations. context: the number of tokens that a window of -1
    stands for.

    Warns (UserWarning) of values that are ignored: values out of range or of a wrong type, and methods that do not
    exist here.
    """
    found: SamplingChanges = {}
    negative = {"top_k": 0, "repetition_window": context}
    for key, (field, kind) in _FIELDS.items():
        value = metadata.get(_PREFIX + key)
        if value is None:
            continue
        try:
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise UserError(f"it is {value!r}, not a number")
            # The file has float32: 0.6 is 0.60000002384.
            number = negative[field] if field in negative and value < 0 else kind(float(f"{value:.6g}"))
            checked = cast(SamplingChanges, {field: number})
            Sampling(**checked)
        except (UserError, ValueError, OverflowError) as error:
            warnings.warn(f"{_PREFIX}{key} is ignored: {error}", stacklevel=2)
            continue
        found |= checked
    for key, off in _METHODS.items():
        if metadata.get(_PREFIX + key, off) != off:
            warnings.warn(f"{_PREFIX}{key} is ignored: there is no such method", stacklevel=2)
    return found
