"""The architectures that can be compiled, by GGUF's `general.architecture`.

Functions in compiler/models/architectures register themselves:

    @architecture("qwen3")
    def qwen3(keys: Keys) -> ModelConfig: ...
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mlc_amd.compiler.models import tensors as common
from mlc_amd.compiler.models import transformer
from mlc_amd.compiler.models.config import ModelConfig, Shape
from mlc_amd.compiler.models.metadata import Keys
from mlc_amd.runtime.errors import shorten

FILES = "mlc_amd.compiler.models.architectures"
Reader = Callable[[Keys], ModelConfig]
Tensors = Callable[[ModelConfig], Iterator[tuple[str, Shape]]]


@dataclass(frozen=True)
class Architecture:
    """read: metadata to the model's configuration, checked. tensors: (name, shape) of every tensor that a model of a
    configuration has, in file order. decoder: emits it through a Graph, and returns the logits."""

    read: Reader
    tensors: Tensors
    decoder: Callable[[Any], Any]


_registered: dict[str, Architecture] = {}


def architecture(
    name: str, tensors: Tensors = common.tensors, decoder=transformer.decoder
) -> Callable[[Reader], Reader]:
    """Registers an architecture by the function that reads its metadata."""

    def register(read: Reader) -> Reader:
        _registered[name] = Architecture(read, tensors, decoder)
        return read

    return register


@functools.cache
def architectures() -> Mapping[str, Architecture]:
    for module in pkgutil.iter_modules(importlib.import_module(FILES).__path__, f"{FILES}."):
        importlib.import_module(module.name)
    return dict(sorted(_registered.items()))


def read_config(
    metadata: dict[str, object], tensor_names: Collection[str], path: str, pooling: str = ""
) -> ModelConfig:
    """The configuration of a model with that metadata and those tensors. pooling: how an encoder makes a vector of a
    text, instead of how the file says; any makes a decoder one. UserError (with `path` in front) for a missing,
    mistyped or impossible value and for what is not supported. `gguf.reader` compares it with the tensors' shapes."""
    keys = Keys(metadata, tensor_names, path, pooling=pooling)
    name = keys.string("general.architecture")
    if name not in architectures():
        known = f"docs/models.md lists the {len(architectures())} that are"
        raise keys.error(f"architecture {shorten(name)} is not supported; {known}")
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise keys.error(f"this file holds a {shorten(kind)}, not a model; give the model's own GGUF file")
    keys.prefix = name
    config = architectures()[name].read(keys)
    if config.encoder and architectures()[name].decoder is not transformer.decoder:
        raise keys.error(f"{name} models cannot compute embeddings; use an embedding model")
    return config


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """(name, shape) of every tensor that a model of that configuration has, in file order."""
    return architectures()[config.architecture].tensors(config)
