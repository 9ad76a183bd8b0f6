"""One tile of a picture for an image encoder: normalized pixels, the number of tokens that it becomes, a key.

A picture becomes a list of `Piece`, in the order in which they enter the prompt: tiles, and texts (marks of images,
tiles and lines, which are tokenized with special tokens).
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Self

import numpy as np


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """pixels: float32 [3, height, width], red, green and blue, normalized; height and width are multiples of the
    encoder's patch. rows: the number of rows of features, which are tokens of the prompt; includes Pixtral's line
    breaks. grid: (rows, columns) of tokens if positions are of the kind "grid" (M-RoPE), (1, `rows`) for the kind
    "sequence". key: a digest; images with equal keys have equal features."""

    pixels: np.ndarray
    rows: int
    grid: tuple[int, int]
    key: bytes

    @classmethod
    def of(
        cls, pixels: np.ndarray, rows: int, grid: tuple[int, int], parameters: str, content: bytes | None = None
    ) -> Self:
        """A tile with its key. parameters: encoder parameters that differ between its images. content: bytes that
        determine the pixels, None: the pixels themselves."""
        pixels = np.ascontiguousarray(pixels, np.float32)
        digest = blake2b(f"{pixels.shape} {rows} {grid} {parameters}".encode(), digest_size=16)
        digest.update(pixels.data if content is None else content)
        return cls(pixels, rows, grid, digest.digest())


Piece = str | PreparedImage
