"""What makes a model an encoder of texts: a part of `ModelConfig`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadLayer:
    """act(W x + b) of the vector of a text, with a norm after it where there is one. The tensors are <name>.weight,
    <name>.bias, if there is one, and <name>.norm.weight."""

    name: str
    rows: int  # of W
    act: str = ""
    norm: bool = False


@dataclass(frozen=True)
class EncoderConfig:
    """Makes a model one that computes vectors of texts, or scores: no cache, no logits.

    A text's vector is that of its first token (pooling "cls"), of its last one ("last"), or the mean of all ("mean");
    with "none" each token has one. In a ranking model ("rank") that of `ranked` goes through the head, whose first
    number is the score.
    """

    pooling: str
    features: int  # columns of a vector
    causal: bool = False  # tokens see those before them only
    ranked: str = "cls"  # of "rank": the pooling before the head
    softmax: bool = False  # of the head's numbers
    head: tuple[HeadLayer, ...] = ()
    types: int = 0  # rows of token_types, of which the first one is added
    norm: bool = False  # token_embd_norm, of these sums
