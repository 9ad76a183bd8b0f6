"""The GPU that the user selects with --device or $MLC_AMD_DEVICE: by its number or a part of its name."""

import os
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
    """The user's selection: `wanted`, else the environment's; "" for none."""
    return os.environ.get(VARIABLE, "") if wanted is None else wanted


def selected(gpus: Sequence[_Gpu], wanted: str | None, api: str) -> list[_Gpu]:
    """The GPUs that the user selects, in order. wanted: --device, or None; api: for the UserError if there are none."""
    text = selection(wanted)
    numbered = [gpu for gpu in gpus if str(gpu.index) == text]  # no GPU: a number may still be a part of names
    found = numbered or [gpu for gpu in gpus if text.lower() in gpu.name.lower()]
    if not found:
        flag = VARIABLE if wanted is None else "--device"
        there = ", ".join(f"{gpu.index}: {gpu.name}" for gpu in sorted(gpus, key=lambda gpu: gpu.index))
        raise UserError(f"{flag} {text}: no such {api} device here; there are {there}")
    return found
