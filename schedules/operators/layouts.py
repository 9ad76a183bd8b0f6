"""How a linear layer's input is stored: the layouts of activations, which a target chooses and operators hand over; and
which rows of a step norms give.

In: rows, columns, and a layout such as "rows" or "tiles:16" (16 tokens side by side). Out: (shape, dtype) of each
tensor that the rows consist of.
"""

import math
from collections.abc import Callable

Tensor = tuple[tuple[int, ...], str]  # shape, dtype

TILE = 16  # rows of a packed weight come in tiles


def padded(n: int) -> int:
    """Columns of a linear layer's result, and entries of a vector, with padding."""
    return math.ceil(n / TILE) * TILE


def _tiles(m: int, k: int, p: int) -> list[Tensor]:
    tiles = math.ceil(m / p)
    return [((tiles, k // 32, p, 32), "int8"), ((tiles, k // 32, 8, p), "float32")]


# By name, without the number after a colon: tensors of m rows of k columns
LAYOUTS: dict[str, Callable[..., list[Tensor]]] = {
    "": lambda m, k: [((m, k), "float32")],
    "tiles": _tiles,  # int8 blocks of 32 columns, p tokens side by side: schedules/cpu/linear/quantize.py
    "rows": lambda m, k: [((m, k // 32, 32), "int8"), ((m, k // 32, 4), "float32")],  # schedules/gpu/base/quantize.py
    "pairs": lambda m, k: [((m, k), "float16")],  # blocks of 32 columns in another order: gpu/base/quantize.py
    # units of 8 tokens and g blocks: there, too
    "lanes": lambda m, k, g: [((math.ceil(m / 8), math.ceil(k / (32 * g)), 256 * g), "float16")],
}


# Columns of which a linear layer that prepares a norm adds up the squares, by the layout that it prepares the norm in
SUMMED = {"lanes": 16, "rows": 32}


def activations(m: int, k: int, layout: str) -> list[Tensor]:
    """The tensors of `m` rows of `k` columns in a layout."""
    name, _, number = layout.partition(":")
    return LAYOUTS[name](m, k, *([int(number)] if number else []))


def kind_of(layout: str) -> str:
    """Its name without the number."""
    return layout.partition(":")[0]


def output_rows(rows: str, m: int) -> int:
    """How many rows the result of a norm of m rows has, whose attribute `rows` says which of them it gives:

    all         all of them
    last        the last live one
    answers:N   those whose logits are wanted, at most N: the single rows, then the last row of the chunk
    """
    kind, _, count = rows.partition(":")
    return {"all": m, "last": 1}[kind] if kind != "answers" else int(count)
