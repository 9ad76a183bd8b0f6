"""Decoders, one file per architecture, named as GGUF's `general.architecture`.

A file has three functions:
    read(keys) -> ModelConfig       its metadata, checked; UserError for what the compiler cannot run
    tensors(config) -> (name, shape) of every tensor that the model has, in file order
    decoder(graph) -> Relax variable with the logits, emitted op by op through a `graph.Graph`

Nothing here imports TVM except `graph.py` and `build.py`: files are read and checked without it.
"""

from collections.abc import Collection, Iterator
from typing import Protocol

from mlc_amd.compiler.models import gemma2, llama, qwen2, qwen3
from mlc_amd.compiler.models.config import ModelConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.runtime.errors import shorten


class Architecture(Protocol):
    def read(self, keys: Keys) -> ModelConfig: ...

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]: ...

    def decoder(self, g): ...


ARCHITECTURES: dict[str, Architecture] = {"gemma2": gemma2, "llama": llama, "qwen2": qwen2, "qwen3": qwen3}


def read_config(metadata: dict[str, object], tensor_names: Collection[str], path: str) -> ModelConfig:
    """The configuration of a model with that metadata and those tensors. UserError (with `path` in front) for a
    missing, mistyped or impossible value and for what is not supported. `gguf.check` compares it with the tensors'
    shapes."""
    keys = Keys(metadata, tensor_names, path)
    name = keys.string("general.architecture")
    if name not in ARCHITECTURES:
        raise keys.error(f"architecture {shorten(name)} is not supported; supported are {', '.join(ARCHITECTURES)}")
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise keys.error(f"this file holds a {shorten(kind)}, not a model; give the model's own GGUF file")
    keys.prefix = name
    return ARCHITECTURES[name].read(keys)


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor that a model of that configuration has, in file order."""
    return ARCHITECTURES[config.architecture].tensors(config)
