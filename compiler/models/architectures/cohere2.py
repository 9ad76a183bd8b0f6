"""cohere2: Command R7B. One layer norm for attention and feed-forward, which run in parallel; of four layers three see
a window of keys and have RoPE, the last has neither; scaled logits."""

from dataclasses import replace

from mlc_amd.compiler.models.config import LayerConfig, ModelConfig
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


@architecture("cohere2")
def read(keys: Keys) -> ModelConfig:
    mixer, block = read_attention(keys, rope=""), read_feed_forward(keys)
    local = replace(mixer, window=keys.integer("attention.sliding_window"), rope=ROPE)
    layers = [
        LayerConfig(mixer=local if windowed else mixer, feed_forward=block, parallel=True)
        for windowed in local_layers(keys, read_layers(keys), PATTERN)
    ]
    ropes = {ROPE: read_rope(keys, mixer.head_dim, neox=False)}
    return read_model(keys, layers, ropes, norm="layer", logit_scale=keys.number("logit_scale"))
