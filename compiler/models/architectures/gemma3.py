"""gemma3: Gemma 3. As gemma2 with norms over the heads of q and k instead of softcaps; of six layers five see a window
of keys, with a RoPE of their own."""

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

PATTERN = 6  # of every six layers the last one sees all keys
LAYERS_27B = 62  # the one model whose scores are scaled by the hidden size instead of the head's


@architecture("gemma3")
def read(keys: Keys) -> ModelConfig:
    count, hidden = read_layers(keys), keys.integer("embedding_length")
    mixer = read_attention(keys, head_norms=True)
    if count == LAYERS_27B:
        mixer = replace(mixer, scale=(hidden / mixer.heads) ** -0.5)
    ropes = {ROPE: read_rope(keys, mixer.head_dim, neox=True)}
    is_local = [False] * count
    local = mixer
    if keys.has("attention.sliding_window"):
        is_local = local_layers(keys, count, PATTERN)
        local = replace(mixer, window=keys.integer("attention.sliding_window"), rope=LOCAL_ROPE)
        base = keys.number("rope.freq_base_swa", 10000.0)
        ropes[LOCAL_ROPE] = read_rope(keys, mixer.head_dim, neox=True, scaled=False, base=base)
    block = read_feed_forward(keys, act="gelu")
    layers = [
        LayerConfig(
            mixer=local if windowed else mixer,
            feed_forward=block,
            mixer_norms=Norms("attn_norm", "post_attention_norm"),
            feed_forward_norms=Norms("ffn_norm", "post_ffw_norm"),
        )
        for windowed in is_local
    ]
    return read_model(
        keys,
        layers,
        ropes,
        embedding_scale=hidden**0.5,
        logit_softcap=keys.number("final_logit_softcapping", 0.0, minimum=0.0),
    )
