"""nemotron_h: NVIDIA Nemotron H and Nano. A layer is one of a selective state space (Mamba-2), attention without RoPE
and a dense block without a gate: which, the numbers of KV heads and of the block's columns say layer by layer."""

from collections.abc import Callable

from mlc_amd.compiler.models.architectures.mamba2 import read_mamba2
from mlc_amd.compiler.models.config import ExpertsConfig, FeedForwardConfig, LayerConfig, ModelConfig, Norms
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import attention, feed_forward, read_layers, read_model
from mlc_amd.compiler.models.registry import architecture

NORM = Norms(before="attn_norm")  # of every layer, whatever it is


@architecture("nemotron_h")
def read(keys: Keys) -> ModelConfig:
    return read_single(keys, lambda size: feed_forward(keys, size, "relu_sq", gated=False))


def read_single(keys: Keys, block: Callable[[int], FeedForwardConfig | ExpertsConfig]) -> ModelConfig:
    """A model whose layers are one thing each. block: the feed-forward block of that many columns."""
    count = read_layers(keys)
    heads = keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", max(1, keys.integer("embedding_length") // heads))
    mamba = read_mamba2(keys)
    layers = []
    kv_heads = keys.integers("attention.head_count_kv", count, minimum=0)
    for kv, size in zip(kv_heads, keys.integers("feed_forward_length", count, minimum=0), strict=True):
        if size:
            layers.append(LayerConfig(None, block(size), feed_forward_norms=NORM))
        else:
            mixer = attention(keys, heads, kv, head_dim, "") if kv else mamba
            layers.append(LayerConfig(mixer, None, mixer_norms=NORM))
    return read_model(keys, layers, {})
