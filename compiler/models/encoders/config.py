"""The part of `ModelConfig` that makes a model an encoder of texts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadLayer:
    """act(W x + b), applied to the vector of a text, then a norm if `norm`. The tensors are <name>.weight, optionally
    <name>.bias, and <name>.norm.weight."""

    name: str
    rows: int  # rows of W
    act: str = ""
    norm: bool = False


@dataclass(frozen=True)
class EncoderConfig:
    """Makes a model one that computes vectors of texts, or scores. It has no cache and no logits.

    pooling: the vector of a text is that of its first token ("cls"), that of its last token ("last"), or the mean of
    all tokens ("mean"); with "none", each token has a vector. In a ranking model ("rank"), the vector by the pooling
    `ranked` is the input of the head, whose first result is the score.
    """

    pooling: str
    features: int  # columns of a vector
    causal: bool = False  # tokens attend to tokens before them only
    ranked: str = "cls"  # for "rank": the pooling before the head
    softmax: bool = False  # whether a softmax is applied to the head's results
    head: tuple[HeadLayer, ...] = ()
    types: int = 0  # rows of token_types; the first row is added to the embedding
    norm: bool = False  # token_embd_norm: a norm of the embedding after this
