"""olmo2: OLMo 2 and 3. Norms after the blocks only, RMS norms over all of q and all of k. In OLMo 3 three of four
layers see a window of keys, with an unscaled RoPE."""

from dataclasses import replace

from mlc_amd.compiler.models.config import LayerConfig, ModelConfig, Norms
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import (
    LOCAL_ROPE,
    ROPE,
    local_layers,
    read_attention,
    read_feed_forward,
    read_layers,
    read_model,
    read_rope,
)
from mlc_amd.compiler.models.registry import architecture

PATTERN = 4  # of every four layers the last one sees all keys, where there is a window


@architecture("olmo2")
def read(keys: Keys) -> ModelConfig:
    count, mixer, block = read_layers(keys), read_attention(keys, row_norms=True), read_feed_forward(keys)
    ropes = {ROPE: read_rope(keys, mixer.head_dim, neox=True)}
    is_local, local = [False] * count, mixer
    if keys.has("attention.sliding_window"):
        is_local = local_layers(keys, count, PATTERN)
        local = replace(mixer, window=keys.integer("attention.sliding_window"), rope=LOCAL_ROPE)
        ropes[LOCAL_ROPE] = read_rope(keys, mixer.head_dim, neox=True, scaled=False)
    layers = [
        LayerConfig(
            mixer=local if windowed else mixer,
            feed_forward=block,
            mixer_norms=Norms(after="post_attention_norm"),
            feed_forward_norms=Norms(after="post_ffw_norm"),
        )
        for windowed in is_local
    ]
    return read_model(keys, layers, ropes)
