"""exaone4: EXAONE 4. Norms after the blocks only, and over each head of q and k. In the large model three of four
layers see a window of keys, and the fourth has no RoPE."""

from dataclasses import replace

from mlc_amd.compiler.models.config import LayerConfig, ModelConfig, Norms
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import (
    ROPE,
    local_layers,
    read_attention,
    read_feed_forward,
    read_layers,
    read_model,
    read_rope,
)
from mlc_amd.compiler.models.registry import architecture

PATTERN = 4  # of every four layers the last one sees all keys
LAYERS_32B = 64  # the one model with windows


@architecture("exaone4")
def read(keys: Keys) -> ModelConfig:
    count, block = read_layers(keys), read_feed_forward(keys)
    mixer = local = read_attention(keys, head_norms=True)
    is_local = [False] * count
    if count == LAYERS_32B:
        is_local = local_layers(keys, count, PATTERN)
        local = replace(mixer, window=keys.integer("attention.sliding_window"))
        mixer = replace(mixer, rope="")
    layers = [
        LayerConfig(
            mixer=local if windowed else mixer,
            feed_forward=block,
            mixer_norms=Norms(after="post_attention_norm"),
            feed_forward_norms=Norms(after="post_ffw_norm"),
        )
        for windowed in is_local
    ]
    return read_model(keys, layers, {ROPE: read_rope(keys, mixer.head_dim, neox=True)})
