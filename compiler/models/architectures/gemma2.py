"""gemma2: Gemma 2. RMS norms before and after each block, GELU gate, scaled embedding, softcaps on attention's scores
and on the logits; every other layer, the first included, sees a window of keys."""

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

PATTERN = 2  # of every two layers the last one sees all keys
LAYERS_27B = 46  # the one model whose scores are scaled by the hidden size instead of the head's


@architecture("gemma2")
def read(keys: Keys) -> ModelConfig:
    count, hidden = read_layers(keys), keys.integer("embedding_length")
    mixer = read_attention(keys, softcap=keys.number("attn_logit_softcapping", 50.0))
    if count == LAYERS_27B:
        mixer = replace(mixer, scale=(hidden / mixer.heads) ** -0.5)
    local = replace(mixer, window=keys.integer("attention.sliding_window", 4096))
    block = read_feed_forward(keys, act="gelu")
    layers = [
        LayerConfig(
            mixer=local if is_local else mixer,
            feed_forward=block,
            mixer_norms=Norms("attn_norm", "post_attention_norm"),
            feed_forward_norms=Norms("ffn_norm", "post_ffw_norm"),
        )
        for is_local in local_layers(keys, count, PATTERN)
    ]
    return read_model(
        keys,
        layers,
        {ROPE: read_rope(keys, mixer.head_dim, neox=True)},
        embedding_scale=hidden**0.5,
        logit_softcap=keys.number("final_logit_softcapping", 30.0),
    )
