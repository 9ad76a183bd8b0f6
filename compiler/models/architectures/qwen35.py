"""qwen35: Qwen 3.5 and later, dense. Three of four layers are gated delta nets, the others attention with partial RoPE,
head norms and an output gate. A block for multi-token prediction, which has attention, stands at the end."""

from mlc_amd.compiler.models.config import (
    DeltaNetConfig,
    ExpertsConfig,
    FeedForwardConfig,
    LayerConfig,
    Mixer,
    ModelConfig,
    Norms,
    RopeConfig,
)
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import (
    ROPE,
    check_multiple,
    predicting_layers,
    read_attention,
    read_feed_forward,
    read_layers,
    read_model,
    read_rope,
    read_taps,
)
from mlc_amd.compiler.models.registry import architecture

INTERVAL = 4  # of so many layers the last one has attention: llama.cpp's default of full_attention_interval
VECTOR = 16  # columns that kernels of delta nets take at once


@architecture("qwen35")
def read(keys: Keys) -> ModelConfig:
    return read_hybrid(keys, read_feed_forward(keys))


def read_hybrid(keys: Keys, block: FeedForwardConfig | ExpertsConfig, **variant) -> ModelConfig:
    """A model of delta nets and attention with that block in each layer. `variant`: of DeltaNetConfig."""
    predicting = predicting_layers(keys)
    attention = read_attention(keys, head_norms=True, output_gate=True, merged_qkv=False)
    check_multiple(keys, "columns of all heads", attention.heads * attention.head_dim)
    delta = _read_delta_net(keys, **variant)
    mixers: list[Mixer] = [delta if recurrent else attention for recurrent in _recurrent(keys, predicting.count)]
    norms = Norms(before="post_attention_norm")
    layers = [LayerConfig(mixer, block, feed_forward_norms=norms) for mixer in mixers]
    layers += predicting.layers(LayerConfig(attention, block, feed_forward_norms=norms))
    ropes: dict[str, RopeConfig] = {}
    if attention in mixers or predicting.predictor:
        ropes[ROPE] = read_rope(keys, attention.head_dim, neox=True)
    return read_model(keys, layers, ropes, unused=predicting.unused)


def _recurrent(keys: Keys, count: int) -> list[bool]:
    """Which layers are delta nets."""
    if keys.has("attention.recurrent_layers"):
        return keys.flags("attention.recurrent_layers", read_layers(keys))[:count]
    interval = keys.integer("full_attention_interval", INTERVAL)
    return [(i + 1) % interval != 0 for i in range(count)]


def _read_delta_net(keys: Keys, **variant) -> DeltaNetConfig:
    key_heads, value_heads = keys.integer("ssm.group_count"), keys.integer("ssm.time_step_rank")
    size = keys.integer("ssm.state_size")
    if value_heads % key_heads:
        raise keys.error(
            f"value heads ({value_heads}) must be a multiple of key heads ({key_heads}) to be compiled; use another "
            "model"
        )
    check_multiple(keys, "columns of a head of delta nets", size, VECTOR)
    check_multiple(keys, "columns of all heads of delta nets", value_heads * size)
    return DeltaNetConfig(key_heads, value_heads, size, read_taps(keys, "ssm.conv_kernel"), **variant)
