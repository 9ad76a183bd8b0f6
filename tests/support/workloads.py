"""Operators from plain arguments, as tests write them."""

from typing import Any

from mlc_amd.schedules.operators import Operator, from_json


def operator(name: str, args: dict[str, Any]) -> Operator:
    """args: attributes, of which Attention's and Rope's have the keys `layer` and `rope`."""
    return from_json({"op": name, "args": args})
