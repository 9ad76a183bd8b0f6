"""The configuration of an image encoder: a vision transformer over the patches of an image, and a projector from its
output to rows for the decoder."""

from dataclasses import dataclass
from typing import Literal

NEIGHBOURS = 9  # rows that a convolution of 3 x 3 reads


@dataclass(frozen=True)
class Turns:
    """Rotary positions in two dimensions. Of the pairs of columns of a head, the first half rotates by the position
    along the first of `axes`, the second half by the position along the other one. Pair i of a half rotates by position
    * theta ** (-4 i / head size).

    pairs: which columns form a pair: "adjacent" ones; columns of the first and the second half of a "half" of the head;
    or columns of the first and the second half of the "whole" head. first: the position of the first row and column.
    odd: the pairs of the second half have frequencies between those of the first half (Pixtral).
    """

    axes: Literal["xy", "yx"]
    pairs: Literal["adjacent", "half", "whole"]
    first: int = 0
    theta: float = 10000.0
    odd: bool = False

    def span(self, head_dim: int) -> int:
        """The number of columns in whose first half each column is paired with one in the second half."""
        return {"adjacent": 2, "half": head_dim // 2, "whole": head_dim}[self.pairs]


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The configuration of all encoders; a projector reads the fields that are its own. Sizes are columns or, for
    images, pixels.

    merge: patches that become one token, along each axis. table: how learned positions of a square of patches are
    mapped to an image (runtime/images/layout.py); "": none. class_row: the place of the class token's position in the
    table; "": no class token. full: layers with attention to the whole image; other layers attend within windows of
    `window` x `window` tokens. least, most: range of an image's tokens, for the sizes of functions; equal if all images
    have one size.
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
    unused: int = 0  # further layers in the file, which are not used
    merge: int = 1
    scale: float = 0.0  # factor on attention's scores; 0: 1 / sqrt(head size)
    value_norm: bool = False  # an RMS norm without weights over each value head
    table: str = ""
    class_row: Literal["", "first", "last"] = ""
    turns: Turns | None = None
    window: int = 0
    full: tuple[int, ...] = ()
    inner: int = 0  # number of layers after which 2 x 2 of merge x merge rows become one; 0: all are merged at the end
    convolved: bool = False  # rows become tokens by two convolutions, each of 3 x 3 rows with a stride of 2
    by_column: bool = False  # tokens are ordered column by column
    breaks: bool = False  # a learned row follows each row of tokens, except the last
    deepstack: tuple[int, ...] = ()  # layers whose projected outputs are added after the decoder's first layers
    attention: Literal["causal", "image"] = "causal"
    positions: Literal["sequence", "grid"] = "sequence"
    least: int = 0
    most: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads
