"""Decoders, one file per architecture, named as GGUF's `general.architecture`.

A file has three functions:
    read(keys) -> ModelConfig       its metadata, checked; UserError for what the compiler cannot run
    tensors(config) -> (name, shape) of every tensor that the model has, in file order
    decoder(graph) -> Relax variable with the logits, emitted op by op through a `graph.Graph`

Nothing here imports TVM except `graph.py` and `build.py`: files are read and checked without it.
"""

from collections.abc import Collection, Iterator
from typing import Any, Protocol

from mlc_amd.compiler.models.architectures import (
    cohere2,
    deepseek2,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    falcon_h1,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    glm4,
    glm4moe,
    gpt_oss,
    granite,
    granitehybrid,
    granitemoe,
    hunyuan_dense,
    kimi_linear,
    lfm2,
    lfm2moe,
    llama,
    llama4,
    mamba2,
    minimax_m2,
    mistral3,
    nemotron_h,
    nemotron_h_moe,
    olmo2,
    olmoe,
    phi3,
    qwen2,
    qwen2moe,
    qwen3,
    qwen3moe,
    qwen3next,
    qwen35,
    qwen35moe,
    seed_oss,
    smollm3,
    starcoder2,
)
from mlc_amd.compiler.models.config import ModelConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.tensors import Part, merged_parts
from mlc_amd.runtime.errors import shorten

__all__ = ["ARCHITECTURES", "Architecture", "Part", "expected_tensors", "merged_parts", "read_config"]


class Architecture(Protocol):
    def read(self, keys: Keys) -> ModelConfig: ...

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]: ...

    def decoder(self, g) -> Any: ...


ARCHITECTURES: dict[str, Architecture] = {
    "cohere2": cohere2,
    "deepseek2": deepseek2,
    "ernie4_5": ernie4_5,
    "ernie4_5-moe": ernie4_5_moe,
    "exaone4": exaone4,
    "falcon-h1": falcon_h1,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "glm4": glm4,
    "glm4moe": glm4moe,
    "gpt-oss": gpt_oss,
    "granite": granite,
    "granitehybrid": granitehybrid,
    "granitemoe": granitemoe,
    "hunyuan-dense": hunyuan_dense,
    "kimi-linear": kimi_linear,
    "lfm2": lfm2,
    "lfm2moe": lfm2moe,
    "llama": llama,
    "llama4": llama4,
    "mamba2": mamba2,
    "minimax-m2": minimax_m2,
    "mistral3": mistral3,
    "nemotron_h": nemotron_h,
    "nemotron_h_moe": nemotron_h_moe,
    "olmo2": olmo2,
    "olmoe": olmoe,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen2moe": qwen2moe,
    "qwen3": qwen3,
    "qwen35": qwen35,
    "qwen35moe": qwen35moe,
    "qwen3moe": qwen3moe,
    "qwen3next": qwen3next,
    "seed_oss": seed_oss,
    "smollm3": smollm3,
    "starcoder2": starcoder2,
}


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
