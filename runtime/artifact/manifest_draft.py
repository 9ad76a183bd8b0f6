"""The entry of manifest.json for a draft that was compiled together with the model."""

from typing import Annotated, TypedDict

from msgspec import Meta

MOST_BLOCK = 64  # largest block of a draft: the known token and the tokens guessed at once
_Count = Annotated[int, Meta(ge=0, le=1 << 40)]
_Size = Annotated[int, Meta(ge=1, le=1 << 40)]


class ManifestDraft(TypedDict):
    """The configuration of compiler/models/drafts/config.py."""

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
