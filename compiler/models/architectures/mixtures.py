"""Decoders with dense blocks in some layers and mixtures of experts, beside shared ones, in the others."""

import math

from mlc_amd.compiler.models.config import (
    AttentionConfig,
    ExpertsConfig,
    LatentConfig,
    LayerConfig,
    ModelConfig,
    SharedExpertConfig,
)
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import (
    NORMS_BEFORE,
    ROPE,
    check_multiple,
    dense_then,
    experts_weighting,
    feed_forward,
    predicting_layers,
    read_attention,
    read_experts,
    read_layers,
    read_model,
    read_rope,
    shared_expert,
    vocabulary,
)
from mlc_amd.compiler.models.registry import architecture


@architecture("deepseek2")
def deepseek2(keys: Keys) -> ModelConfig:
    """DeepSeek V2, V2 Lite, V3 and R1, Kimi K2, GLM 4.7 Flash. Latent attention; after a few dense layers experts, in
    some models of the best groups, beside a shared expert.

    Files have attn_k_b and attn_v_b, or, converted before April 2025, both as attn_kv_b, of which attn_k_b is made.
    """
    predicting = predicting_layers(keys)
    mixer = latent_attention(keys, ROPE, merged="blk.0.attn_kv_b.weight" in keys.tensors)
    rotating = mixer.head_dim - mixer.latent.rank if mixer.latent else 0
    # yarn's factor on cos and sin is in the scale of the scores
    rope = read_rope(keys, rotating, neox=False, dim=rotating, log_multiplier=1.0)
    layers = [LayerConfig(mixer, block) for block in dense_then(keys, predicting.count, _deepseek_experts)]
    layers += predicting.layers(layers[-1])
    return read_model(keys, layers, {ROPE: rope}, unused=predicting.unused)


def latent_attention(keys: Keys, rope: str, merged: bool = False) -> AttentionConfig:
    """rope: as AttentionConfig has it. merged: with attn_kv_b."""
    suffix = "" if merged else "_mla"
    heads, rank = keys.integer("attention.head_count"), keys.integer("attention.kv_lora_rank")
    rotating, value = keys.integer("rope.dimension_count"), keys.integer(f"attention.value_length{suffix}")
    columns = keys.integer(f"attention.key_length{suffix}")
    if rotating >= columns:
        raise keys.error(
            f"{keys.full('rope.dimension_count')} ({rotating}) must be less than a key's {columns} columns; convert "
            "the model again"
        )
    check_multiple(keys, "rank of the latent", rank)
    for what, size in (("rotating columns", rotating), ("columns of a value", value)):
        check_multiple(keys, what, size, 16)
    latent = LatentConfig(rank, columns - rotating, value, keys.integer("attention.q_lora_rank", 0, minimum=0), merged)
    factor = keys.number("rope.scaling.factor", 1.0, minimum=0.0) or 1.0
    magnitude = 1.0 + keys.number("rope.scaling.yarn_log_multiplier", 0.0, minimum=0.0) * math.log(factor)
    return AttentionConfig(heads, 1, rank + rotating, rope, scale=magnitude**2 / math.sqrt(columns), latent=latent)


def _deepseek_experts(keys: Keys, leading: int) -> ExpertsConfig:
    size = keys.integer("expert_feed_forward_length")
    # GLM 4.7 Flash was first converted without the key that says so
    unsaid = not keys.integer("expert_gating_func", 0, minimum=0)
    sigmoid = unsaid and keys.integer("block_count") in (47, 48) and vocabulary(keys) == 154880
    groups = keys.integer("expert_group_count", 1, minimum=0) or 1
    return read_experts(
        keys,
        size,
        gating="sigmoid" if sigmoid else "",
        **experts_weighting(keys),
        groups=groups,
        groups_used=keys.integer("expert_group_used_count", groups, minimum=0) or groups,
        selection_bias=f"blk.{leading}.exp_probs_b.bias" in keys.tensors,
        shared=shared_expert(size * keys.integer("expert_shared_count", 0, minimum=0)),
    )


@architecture("ernie4_5-moe")
def ernie4_5_moe(keys: Keys) -> ModelConfig:
    """ERNIE 4.5 with experts in some layers after the leading dense ones, chosen by probability and a bias, beside a
    shared expert."""
    count, mixer = read_layers(keys), read_attention(keys, output_bias=False)
    leading = keys.integer("leading_dense_block_count", 0, minimum=0)
    step = keys.integer("interleave_moe_layer_step", 1)
    shared = shared_expert(keys.integer("expert_shared_feed_forward_length", 0, minimum=0))
    experts = read_experts(
        keys,
        keys.integer("expert_feed_forward_length"),
        gating="softmax",
        selection_bias=any(f"blk.{i}.exp_probs_b.bias" in keys.tensors for i in range(count)),
        shared=shared,
    )
    dense = feed_forward(keys, keys.integer("feed_forward_length"))
    layers = [LayerConfig(mixer, experts if i >= leading and (i + 1) % step == 0 else dense) for i in range(count)]
    return read_model(keys, layers, {ROPE: read_rope(keys, mixer.head_dim, neox=False)})


@architecture("glm4moe")
def glm4moe(keys: Keys) -> ModelConfig:
    """GLM 4.5. Partial RoPE, head norms in some models; after a few dense layers experts chosen by sigmoid and a bias,
    beside a shared expert. A block for multi-token prediction stands at the end."""
    predicting = predicting_layers(keys)
    mixer = read_attention(keys, head_norms="blk.0.attn_q_norm.weight" in keys.tensors)
    size = keys.integer("expert_feed_forward_length")
    shared = SharedExpertConfig(size * keys.integer("expert_shared_count", 1))
    experts = read_experts(keys, size, **experts_weighting(keys), selection_bias=True, shared=shared)
    blocks = dense_then(keys, predicting.count, lambda keys, leading: experts)
    layers = [LayerConfig(mixer, block, **NORMS_BEFORE) for block in blocks]
    layers += predicting.layers(LayerConfig(mixer, experts, **NORMS_BEFORE))
    ropes = {ROPE: read_rope(keys, mixer.head_dim, neox=True)}
    return read_model(keys, layers, ropes, unused=predicting.unused)
