"""The registry of architectures that can be compiled, by GGUF's `general.architecture`.

Functions in compiler/models/architectures register themselves:

    @architecture("qwen3")
    def qwen3(keys: Keys) -> ModelConfig: ...
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, TypeVar

from mlc_amd.compiler.models import tensors as common
from mlc_amd.compiler.models import transformer
from mlc_amd.compiler.models.config import LayerConfig, ModelConfig
from mlc_amd.compiler.models.drafts.files import DRAFTS
from mlc_amd.compiler.models.encoders.metadata import HEADS
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.tensors import INPUT_SCALE, SCALE, Shape
from mlc_amd.runtime.errors import shorten

MOST_USED = "gemma3", "gpt-oss", "llama", "qwen3", "qwen35"  # examples in the message for an unknown architecture
FILES = "mlc_amd.compiler.models.architectures"
Reader = Callable[[Keys], ModelConfig]
Registered = TypeVar("Registered")
Tensors = Callable[[ModelConfig], Iterator[tuple[str, Shape]]]


# {kind of layer or block: its matrices whose products llama.cpp multiplies by the tensor <name>.scale}. "attention"
# counts in all architectures, the other kinds only in architectures that name them. Elsewhere llama.cpp reads scales,
# but does not use them.
SCALES = {
    "attention": ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output"),
    "latent": ("attn_output",),
    "dense": ("ffn_gate", "ffn_up", "ffn_down"),
    "experts": ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
    "shared": ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
    "states": ("ssm_in", "ssm_out", "ssm_alpha", "ssm_beta", "attn_qkv", "attn_gate"),
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """A registered architecture. read: makes the model's configuration from metadata, and checks it. tensors: yields
    (name, shape) of every tensor of a model with a configuration, in the order of the file. decoder: emits the decoder
    through a Graph, and returns the logits. scales: the kinds of SCALES that count. ignored: other tensors, of the
    model or of layers, that llama.cpp reads and does not use."""

    read: Reader
    tensors: Tensors
    decoder: Callable[[Any], Any]
    scales: tuple[str, ...]
    ignored: tuple[str, ...]

    def unread(self, keys: Keys, config: ModelConfig) -> tuple[str, ...]:
        """The names of the file's tensors that llama.cpp reads and does not use: heads for other tasks, scales of
        inputs, scales that do not count, factors of a RoPE that no layer has."""
        factors = {name for rope in config.ropes.values() for name in (rope.factors, rope.long_factors)}
        known = {f"{name}.{SCALE}" for names in SCALES.values() for name in names}
        heads = () if config.encoder else HEADS

        def unused(name: str) -> bool:
            block, _, own = name.partition(".")[2].partition(".")
            if name in self.ignored or own in self.ignored or (name.startswith("rope_") and name not in factors):
                return True
            if own in known and block.isdigit() and int(block) < len(config.layers):
                return own not in self._scaled(config.layers[int(block)])
            return name.endswith(INPUT_SCALE) or name.startswith(heads)

        return tuple(name for name in keys.tensors if unused(name))

    def _scaled(self, layer: LayerConfig) -> set[str]:
        """The scales that count in a layer."""
        kinds = set(self.scales) if layer.recurrent else set(self.scales) - {"states"}
        if layer.attention:
            kinds.add("latent" if layer.attention.latent else "attention")
        return {f"{name}.{SCALE}" for kind in kinds for name in SCALES[kind]}


_registered: dict[str, Architecture] = {}


def architecture(
    name: str,
    *scales: str,
    ignored: tuple[str, ...] = (),
    tensors: Tensors = common.tensors,
    decoder=transformer.decoder,
) -> Callable[[Reader], Reader]:
    """A decorator that registers an architecture by the function that reads its metadata. scales: kinds of SCALES that
    count, besides "attention". ignored: see Architecture."""

    def register(read: Reader) -> Reader:
        _registered[name] = Architecture(read, tensors, decoder, scales, ignored)
        return read

    return register


def all_of(package: str, registered: Mapping[str, Registered]) -> dict[str, Registered]:
    """Imports all modules of a package, and returns what they have registered."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        importlib.import_module(module.name)
    return dict(sorted(registered.items()))


@functools.cache
def architectures() -> Mapping[str, Architecture]:
    return all_of(FILES, _registered)


def read_config(
    metadata: dict[str, object], tensor_names: Collection[str], path: str, pooling: str = ""
) -> ModelConfig:
    """The configuration of a model with this metadata and these tensors. pooling: how an embedding model makes a vector
    of a text, instead of what the file says; "" for the file's. A decoder with a pooling becomes an embedding model.
    Raises UserError (with `path` in front) for a missing, mistyped, impossible or unsupported value. The caller,
    `gguf.reader`, compares the configuration with the shapes of tensors."""
    keys = Keys(metadata, tensor_names, path, pooling=pooling)
    name = keys.string("general.architecture")
    if name not in architectures():
        if name in DRAFTS:
            raise keys.error(f"{name} files hold a draft: give its model, and this file with --draft")
        if name == "clip":
            raise keys.error("mmproj files hold an image encoder; give its model, and this file with --mmproj")
        alike = get_close_matches(name, architectures(), 4) or sorted(MOST_USED)
        known = f"{len(architectures())} others are, such as {', '.join(alike)}"
        raise keys.error(f"architecture {shorten(name)} is not supported; {known}")
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise keys.error(f"this file holds a {shorten(kind)}, not a model; give the model's own GGUF file")
    keys.prefix = name
    config = architectures()[name].read(keys)
    if config.encoder and architectures()[name].decoder is not transformer.decoder:
        raise keys.error(f"{name} models cannot compute embeddings; use an embedding model")
    unread = dict.fromkeys((*config.unused, *architectures()[name].unread(keys, config)))
    return replace(config, unused=tuple(unread))


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """(name, shape) of every tensor of a model with this configuration, in the order of the file."""
    return architectures()[config.architecture].tensors(config)
