"""Parts of `ModelConfig` for guessing tokens: a layer of the model for multi-token prediction, or a draft from its own
file."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PredictorConfig:
    """Marks a layer as one that guesses tokens and is not part of the decoder. For multi-token prediction
    (`transformer.predictor`): whether the layer has its own embedding, head and norm; otherwise it uses the
    decoder's."""

    embedding: bool = False  # nextn.embed_tokens
    head: bool = False  # nextn.shared_head_head
    norm: bool = False  # nextn.shared_head_norm


@dataclass(frozen=True)
class DraftConfig:
    """A draft that reads rows of the model for which it guesses; graphs.py has the formulas. Its layers follow the
    model's in `ModelConfig.layers`, and their tensors are numbered accordingly; its other tensors have the prefix
    PREFIX of files.py.

    A draft with a `block` guesses a block of tokens at once. The first token of the block is known; the others are rows
    of the token `mask`. Other drafts guess one token after the other, each from `drafted` columns of the guess before.
    """

    architecture: str  # GGUF's general.architecture
    file: str
    hidden: int  # columns of its rows
    norm_eps: float
    kept: tuple[int, ...]  # layers of the model whose inputs it reads; the number of layers: the last layer's output
    embedding: bool  # whether it has its own token_embd
    head: str  # name of its output matrix; "": the model's
    vocab: int = 0  # rows of its output matrix, if it has rows for some tokens only; 0: all tokens
    drafted: int = 0
    block: int = 0  # tokens
    mask: int = 0  # id
    causal: bool = False  # rows of a block attend to rows before them only
    own_keys: bool = True  # False: it attends to the model's keys
    early_norm: bool = False  # eagle3: a norm before fc
    normed_residual: bool = False  # eagle3: the norm of the row, not the row, is added to attention's result
    embedding_scale: float = 1.0
