"""What the compiler takes of a model, wherever it comes from."""

from collections.abc import Mapping
from typing import Any, Protocol

from mlc_amd.compiler.models.config import ModelConfig


class Model(Protocol):
    """A model as GGUFModel, synthetic ones and ShardedModel have it: tensors by name, of which a graph reads shape,
    rows and format. gpus: that share it by tensor; sums: names of the matrices of which each GPU has some columns, so
    that products are terms of a sum; joins: of those of which each has some rows, and all need whole products.
    features: columns of what an image's encoder makes of a row: the row of the embedding, then what is added to it
    after layer 0, after layer 1 .. (deepstack); 0: there is no encoder."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tensors(self) -> Mapping[str, Any]: ...

    @property
    def vision(self) -> Any: ...

    @property
    def gpus(self) -> int: ...

    @property
    def sums(self) -> frozenset[str]: ...

    @property
    def joins(self) -> frozenset[str]: ...

    @property
    def features(self) -> int: ...
