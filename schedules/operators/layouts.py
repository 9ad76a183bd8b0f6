"""Layouts of activations: the forms in which operators store the input of a linear layer. A target chooses the layout.
Also: which rows of a step a norm returns (`output_rows`).

In: numbers of rows and columns, and a layout such as "rows" or "tiles:16" (16 tokens interleaved). Out: (shape, dtype)
of each tensor of the activations.
"""

import math
from collections.abc import Callable

Tensor = tuple[tuple[int, ...], str]  # shape, dtype

TILE = 16  # rows in a tile of a packed weight


def padded(n: int) -> int:
    """n rounded up to whole tiles: the columns of a linear layer's result, and the elements of a vector of weights."""
    return math.ceil(n / TILE) * TILE


def _tiles(m: int, k: int, p: int) -> list[Tensor]:
    tiles = math.ceil(m / p)
    return [((tiles, k // 32, p, 32), "int8"), ((tiles, k // 32, 8, p), "float32")]


# Layout name, without the number after a colon, to a function that returns the tensors of m rows of k columns. The
# order of elements: for "tiles" see schedules/cpu/linear/quantize.py, for the others schedules/gpu/base/quantize.py.
LAYOUTS: dict[str, Callable[..., list[Tensor]]] = {
    "": lambda m, k: [((m, k), "float32")],
    "tiles": _tiles,  # int8 blocks of 32 columns; p tokens are interleaved
    "rows": lambda m, k: [((m, k // 32, 32), "int8"), ((m, k // 32, 4), "float32")],  # int8 blocks of 32 columns
    "pairs": lambda m, k: [((m, k), "float16")],  # columns are permuted within blocks of 32
    # units of 8 tokens and g blocks of 32 columns
    "lanes": lambda m, k, g: [((math.ceil(m / 8), math.ceil(k / (32 * g)), 256 * g), "float16")],
}


# A linear layer that prepares a norm stores a sum of squares for each group of this many columns. The key is the layout
# of the prepared norm.
SUMMED = {"lanes": 16, "rows": 32}


def activations(m: int, k: int, layout: str) -> list[Tensor]:
    """(shape, dtype) of the tensors that hold `m` rows of `k` columns in a layout."""
    name, _, number = layout.partition(":")
    return LAYOUTS[name](m, k, *([int(number)] if number else []))


def kind_of(layout: str) -> str:
    """The name of a layout, without the number after a colon."""
    return layout.partition(":")[0]


def output_rows(rows: str, m: int) -> int:
    """The number of rows in the result of a norm of m rows. The attribute `rows` of the norm selects them:

    all         all rows
    last        the last live row
    answers:N   the rows whose logits are needed, at most N: the single rows, then the last row of the chunk
    """
    kind, _, count = rows.partition(":")
    return {"all": m, "last": 1}[kind] if kind != "answers" else int(count)
