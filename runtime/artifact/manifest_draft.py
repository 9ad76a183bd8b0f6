"""The entry of manifest.json that says what a draft is, which was compiled with the model."""

from typing import Annotated, TypedDict

from msgspec import Meta

MOST_BLOCK = 64  # tokens that a draft guesses at once, with the known one
_Count = Annotated[int, Meta(ge=0, le=1 << 40)]
_Size = Annotated[int, Meta(ge=1, le=1 << 40)]


class ManifestDraft(TypedDict):
    """compiler/models/drafts/config.py."""

    architecture: str
    file: str
    hidden: _Size
    norm_eps: float
    kept: list[_Count]
    embedding: bool
    head: str
    vocab: _Count
    drafted: _Count
    block: Annotated[int, Meta(ge=0, le=MOST_BLOCK)]
    mask: Annotated[int, Meta(ge=0, le=(1 << 30) - 1)]
    causal: bool
    own_keys: bool
    early_norm: bool
    normed_residual: bool
    embedding_scale: float
