"""What guesses tokens besides a decoder: its own layer of multi-token prediction, or a draft from a file of its own.
Parts of `ModelConfig`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PredictorConfig:
    """Makes a layer one that guesses tokens, and no part of the decoder. Of multi-token prediction
    (`transformer.predictor`): which tensors it does not share."""

    embedding: bool = False  # nextn.embed_tokens
    head: bool = False  # nextn.shared_head_head
    norm: bool = False  # nextn.shared_head_norm


@dataclass(frozen=True)
class DraftConfig:
    """A draft that reads rows of the model it guesses for; graphs.py has the formulas. Its layers follow the
    model's, with tensors of their numbers; its other tensors have the prefix PREFIX of drafts.py.

    A draft with a `block` guesses as many tokens at once, but for the first, which is known: rows of the token `mask`
    stand for them. Others guess one after the other, each from `drafted` columns of the one before.
    """

    architecture: str  # GGUF's general.architecture
    file: str
    hidden: int  # columns of its rows
    norm_eps: float
    kept: tuple[int, ...]  # layers of the model whose inputs it takes; the number of layers: the last one's output
    embedding: bool  # it has token_embd
    head: str  # its output matrix; "": the model's
    vocab: int = 0  # rows of that matrix, for some of the tokens; 0: all tokens
    drafted: int = 0
    block: int = 0
    mask: int = 0
    causal: bool = False  # rows of a block see those before them only
    own_keys: bool = True  # False: it attends to the model's
    early_norm: bool = False  # eagle3: a norm before fc
    normed_residual: bool = False  # eagle3: the norm of the row, not the row, is added to attention's result
    embedding_scale: float = 1.0
