"""The typed configuration of an image encoder: a vision transformer over the patches of an image, and a projector that
makes rows for the decoder of its output."""

from dataclasses import dataclass
from typing import Literal

NEIGHBOURS = 9  # rows that a convolution takes


@dataclass(frozen=True)
class Turns:
    """Rotary positions in two dimensions: of a head's pairs of columns, the first half turn with the position along the
    first of `axes`, the second half with that along the other one. Pair i of a half turns by position * theta **
    (-4 i / head size).

    pairs: "adjacent" columns; columns of a "half" of the head, in whose other half they lie; or of the "whole" head.
    first: the position of the first row and column. odd: pairs of the second half have the frequencies between those of
    the first one (Pixtral)."""

    axes: Literal["xy", "yx"]
    pairs: Literal["adjacent", "half", "whole"]
    first: int = 0
    theta: float = 10000.0
    odd: bool = False

    def span(self, head_dim: int) -> int:
        """Columns of which the first half are paired with the second one."""
        return {"adjacent": 2, "half": head_dim // 2, "whole": head_dim}[self.pairs]


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """What all encoders have, and what a projector's file says of its own. Sizes in columns or, of images, pixels.

    merge: patches that become one token, along each axis. table: how learned positions of a square of patches become
    those of an image (runtime/images/layout.py); "": there are none. class_row: where the class token's position stands
    in it; "": there is no class token. full: layers with attention to the whole image; others attend within windows of
    `window` x `window` tokens. least, most: tokens of an image, to size the functions for; the same: all have one size.
    """

    projector: str
    hidden: int
    layers: int
    heads: int
    eps: float
    patch: int
    image: int  # side of the image that positions were learned for
    act: str  # of activations.ACTIVATIONS
    norm: Literal["layer", "rms"] = "layer"
    unused: int = 0  # layers of the file after these, which are not run
    merge: int = 1
    scale: float = 0.0  # on scores of attention; 0: 1 / sqrt(head size)
    value_norm: bool = False  # an RMS norm without weights of each value head
    table: str = ""
    class_row: Literal["", "first", "last"] = ""
    turns: Turns | None = None
    window: int = 0
    full: tuple[int, ...] = ()
    inner: int = 0  # layers after which 2 x 2 rows become one, of merge x merge; 0: all become one at the end
    convolved: bool = False  # rows become tokens by two convolutions, each of 3 x 3 rows with a stride of 2
    by_column: bool = False  # tokens follow one another along columns
    breaks: bool = False  # a learned row ends each row of tokens but the last
    deepstack: tuple[int, ...] = ()  # layers whose output, projected, joins the decoder's first layers
    attention: Literal["causal", "image"] = "causal"
    positions: Literal["sequence", "grid"] = "sequence"
    least: int = 0
    most: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads
