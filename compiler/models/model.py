"""The interface of models for the compiler, wherever they come from."""

from collections.abc import Mapping
from typing import Any, Protocol

from mlc_amd.compiler.models.config import ModelConfig


class Model(Protocol):
    """A model: GGUFModel, a synthetic model or ShardedModel. Graphs read the shapes, rows and formats of its tensors.

    gpus: number of GPUs that share the model by tensor. sums: names of the matrices of which each GPU has some columns;
    the products are terms of a sum over GPUs. joins: names of the matrices of which each GPU has some rows, but whose
    whole products all GPUs need. features: columns that the image encoder computes for a row: the row of the embedding,
    then rows that are added after layer 0, layer 1, .. (deepstack); 0 without an encoder."""

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
