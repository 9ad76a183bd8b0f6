"""Which of this machine's GPUs the user asks for, with --device or $MLC_AMD_DEVICE: a number or a part of a name."""

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


def asked(wanted: str | None) -> str:
    """What the user asks for: `wanted`, else what the environment says; "" for nothing."""
    return os.environ.get(VARIABLE, "") if wanted is None else wanted


def asked_for(gpus: Sequence[_Gpu], wanted: str | None, api: str) -> list[_Gpu]:
    """Those of the GPUs that the user asks for, in their order. wanted: of --device, None if it was not given; api: the
    name of what lists them. UserError when there is none."""
    text = asked(wanted)
    numbered = [gpu for gpu in gpus if str(gpu.index) == text]  # no GPU: a number may still be a part of names
    found = numbered or [gpu for gpu in gpus if text.lower() in gpu.name.lower()]
    if not found:
        flag = VARIABLE if wanted is None else "--device"
        there = ", ".join(f"{gpu.index}: {gpu.name}" for gpu in sorted(gpus, key=lambda gpu: gpu.index))
        raise UserError(f"{flag} {text}: no such {api} device here; there are {there}")
    return found
