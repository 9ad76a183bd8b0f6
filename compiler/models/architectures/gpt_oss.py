"""gpt-oss: attention with sinks, a window in every other layer, the first included; biases everywhere; experts with a
clamped SwiGLU, chosen by their logits."""

from dataclasses import replace

from mlc_amd.compiler.models.config import LayerConfig, ModelConfig, Norms
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import (
    ROPE,
    local_layers,
    read_attention,
    read_experts,
    read_layers,
    read_model,
    read_rope,
)
from mlc_amd.compiler.models.registry import architecture

PATTERN = 2  # of every two layers the last one sees all keys


@architecture("gpt-oss")
def read(keys: Keys) -> ModelConfig:
    count = read_layers(keys)
    mixer = read_attention(keys, sinks=True)
    local = replace(mixer, window=keys.integer("attention.sliding_window"))
    experts = read_experts(
        keys,
        keys.integer("expert_feed_forward_length"),
        gating="softmax_used",
        normalize=False,
        act="swiglu_oai",
        router_bias=True,
        biases=True,
    )
    layers = [
        LayerConfig(
            mixer=local if is_local else mixer,
            feed_forward=experts,
            feed_forward_norms=Norms(before="post_attention_norm"),
        )
        for is_local in local_layers(keys, count, PATTERN)
    ]
    return read_model(keys, layers, {ROPE: read_rope(keys, mixer.head_dim, neox=True)})
