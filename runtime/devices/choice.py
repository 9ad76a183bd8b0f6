"""Finds the GPUs that match the user's --device or $MLC_AMD_DEVICE: a number, or a part of a name."""

import os
import re
from collections.abc import Sequence
from typing import Protocol, TypeVar

from mlc_amd.runtime.errors import UserError

VARIABLE = "MLC_AMD_DEVICE"


class Numbered(Protocol):
    """A GPU. index: its number in `mlc-amd doctor`."""

    @property
    def index(self) -> int: ...

    @property
    def name(self) -> str: ...


_Gpu = TypeVar("_Gpu", bound=Numbered)


def selection(wanted: str | None) -> str:
    """The text of the user's selection: `wanted`, or $MLC_AMD_DEVICE if that is None; "" without a selection."""
    return os.environ.get(VARIABLE, "") if wanted is None else wanted


def selected(gpus: Sequence[_Gpu], wanted: str | None, api: str) -> list[_Gpu]:
    """The GPUs of `gpus` that match the user's selection, in the same order. wanted: the value of --device, or None.
    api: name of the API for the message. Raises UserError if none match."""
    text = selection(wanted)
    numbered = [gpu for gpu in gpus if str(gpu.index) == text]
    # if empty, a number may still be part of a name, as 7900, but not a few digits of one
    part = re.compile(rf"(?<!\d){text}(?!\d)" if text.isdecimal() else re.escape(text), re.IGNORECASE)
    found = numbered or [gpu for gpu in gpus if part.search(gpu.name)]
    if not found:
        flag = VARIABLE if wanted is None else "--device"
        there = ", ".join(f"{gpu.index}: {gpu.name}" for gpu in sorted(gpus, key=lambda gpu: gpu.index))
        raise UserError(f"{flag} {text}: no such {api} device here; there are {there}")
    return found
