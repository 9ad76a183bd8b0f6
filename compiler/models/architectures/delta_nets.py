"""Decoders in which most layers are gated delta nets, and the others have attention."""

from mlc_amd.compiler.models.architectures.mixtures import latent_attention
from mlc_amd.compiler.models.config import (
    ChannelDeltaConfig,
    DeltaNetConfig,
    ExpertsConfig,
    FeedForwardConfig,
    LayerConfig,
    Mixer,
    ModelConfig,
    SharedExpertConfig,
)
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import (
    NORMS_BEFORE,
    ROPE,
    check_multiple,
    dense_then,
    predicting_layers,
    read_attention,
    read_experts,
    read_feed_forward,
    read_layers,
    read_model,
    read_rope,
    read_taps,
    shared_expert,
)
from mlc_amd.compiler.models.registry import architecture

INTERVAL = 4  # of so many layers the last one has attention: llama.cpp's default of full_attention_interval
VECTOR = 16  # columns that kernels of delta nets take at once


@architecture("qwen35")
def qwen35(keys: Keys) -> ModelConfig:
    """Qwen 3.5 and later, dense. Three of four layers are delta nets, the others attention with partial RoPE, head
    norms and an output gate. A block for multi-token prediction, which has attention, stands at the end."""
    return _read_qwen(keys, read_feed_forward(keys))


@architecture("qwen35moe")
def qwen35moe(keys: Keys) -> ModelConfig:
    """Qwen 3.5 and later with experts beside a gated shared expert in every layer."""
    return _read_qwen(keys, _qwen_experts(keys))


@architecture("qwen3next")
def qwen3next(keys: Keys) -> ModelConfig:
    """As qwen35moe, with value heads in the order of their key heads, and merged inputs of the delta nets."""
    merged = any(name.endswith("ssm_in.weight") for name in keys.tensors)
    return _read_qwen(keys, _qwen_experts(keys), grouped=True, merged_gates=True, merged_inputs=merged)


def _qwen_experts(keys: Keys) -> ExpertsConfig:
    size = keys.integer("expert_feed_forward_length")
    shared = SharedExpertConfig(keys.integer("expert_shared_feed_forward_length", size), gated_output=True)
    return read_experts(keys, size, gating="softmax", shared=shared)


def _read_qwen(keys: Keys, block: FeedForwardConfig | ExpertsConfig, **variant) -> ModelConfig:
    """A model of delta nets and attention with that block in each layer. `variant`: of DeltaNetConfig."""
    predicting = predicting_layers(keys)
    attention = read_attention(keys, head_norms=True, output_gate=True, merged_qkv=False)
    check_multiple(keys, "columns of all heads", attention.heads * attention.head_dim)
    delta = _delta_net(keys, **variant)
    mixers = [delta if recurrent else attention for recurrent in _recurrent(keys, predicting.count)]
    layers = [LayerConfig(mixer, block, **NORMS_BEFORE) for mixer in mixers]
    layers += predicting.layers(LayerConfig(attention, block, **NORMS_BEFORE))
    rotates = attention in mixers or predicting.predictor
    ropes = {ROPE: read_rope(keys, attention.head_dim, neox=True)} if rotates else {}
    return read_model(keys, layers, ropes, unused=predicting.unused)


def _recurrent(keys: Keys, count: int) -> list[bool]:
    """Which layers are delta nets."""
    if keys.has("attention.recurrent_layers"):
        return keys.flags("attention.recurrent_layers", read_layers(keys))[:count]
    interval = keys.integer("full_attention_interval", INTERVAL)
    return [(i + 1) % interval != 0 for i in range(count)]


def _delta_net(keys: Keys, **variant) -> DeltaNetConfig:
    key_heads, value_heads = keys.integer("ssm.group_count"), keys.integer("ssm.time_step_rank")
    size = keys.integer("ssm.state_size")
    if value_heads % key_heads:
        raise keys.error(
            f"value heads ({value_heads}) must be a multiple of key heads ({key_heads}) to be compiled; use another "
            "model"
        )
    _check_heads(keys, value_heads, size)
    return DeltaNetConfig(key_heads, value_heads, size, read_taps(keys, "ssm.conv_kernel"), **variant)


def _check_heads(keys: Keys, heads: int, size: int) -> None:
    check_multiple(keys, "columns of a head of delta nets", size, VECTOR)
    check_multiple(keys, "columns of all heads of delta nets", heads * size)


@architecture("kimi-linear")
def kimi_linear(keys: Keys) -> ModelConfig:
    """Kimi Linear. Most layers are delta nets whose states decay channel by channel, the others have latent attention
    without rotation; which, the number of KV heads says layer by layer. After a few dense layers experts beside a
    shared one."""
    count = read_layers(keys)
    blocks = dense_then(keys, count, _kimi_experts)
    heads, size = keys.integer("attention.head_count"), keys.integer("kda.head_dim")
    _check_heads(keys, heads, size)
    delta = ChannelDeltaConfig(heads, size, read_taps(keys, "ssm.conv_kernel"))
    attention = latent_attention(keys, "")
    kv_heads = keys.integers("attention.head_count_kv", count, minimum=0)
    mixers: list[Mixer] = [attention if kv else delta for kv in kv_heads]
    return read_model(keys, [LayerConfig(mixer, block) for mixer, block in zip(mixers, blocks, strict=True)], {})


def _kimi_experts(keys: Keys, leading: int) -> ExpertsConfig:
    size = keys.integer("expert_feed_forward_length")
    return read_experts(
        keys,
        size,
        scale=keys.number("expert_weights_scale", 1.0, minimum=0.0) or 1.0,
        selection_bias=f"blk.{leading}.exp_probs_b.bias" in keys.tensors,
        shared=shared_expert(size * keys.integer("expert_shared_count", 0, minimum=0)),
    )
