"""Parses numbers with units, as users type them: sizes and times."""

import re
from collections.abc import Mapping

from mlc_amd.runtime.errors import UsageError

BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def number(text: str, what: str, units: Mapping[str, int], example: str) -> float:
    """Parses a number with one of these units. what: its name, such as a flag. Raises UsageError for other texts."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]?)(?:i?[bB])?", text.strip())
    scale = next((value for unit, value in units.items() if parts and parts[2].lower() == unit.lower()), None)
    if parts is None or scale is None:
        raise UsageError(f"{what} {text!r}: give a number and a unit, as {example}")
    return float(parts[1]) * scale
