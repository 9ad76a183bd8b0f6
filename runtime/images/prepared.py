"""One tile of a picture as an image encoder takes it: normalized pixels, the number of tokens that it becomes, a key.

A picture becomes a list of `Piece`: texts (marks of images, tiles and lines, which are tokenized with special tokens)
and tiles, in the order in which they enter the prompt."""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Self

import numpy as np


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """`pixels`: float32 [3, height, width], red, green and blue, normalized; height and width are multiples of the
    encoder's patches. `rows`: how many rows of features it becomes, tokens of the prompt, Pixtral's line breaks
    included. `grid`: rows and columns of tokens for positions of the kind "grid" (M-RoPE), (1, `rows`) for the kind
    "sequence". `key`: a digest of pixels or their source, shape and what `parameters` of `of` name: equal keys have
    equal features."""

    pixels: np.ndarray
    rows: int
    grid: tuple[int, int]
    key: bytes

    @classmethod
    def of(
        cls, pixels: np.ndarray, rows: int, grid: tuple[int, int], parameters: str, content: bytes | None = None
    ) -> Self:
        """A tile with its key; `parameters` are those of the encoder that are not the same for all of its images.
        content: less than the pixels, on which these depend."""
        pixels = np.ascontiguousarray(pixels, np.float32)
        digest = blake2b(f"{pixels.shape} {rows} {grid} {parameters}".encode(), digest_size=16)
        digest.update(pixels.data if content is None else content)
        return cls(pixels, rows, grid, digest.digest())


Piece = str | PreparedImage
