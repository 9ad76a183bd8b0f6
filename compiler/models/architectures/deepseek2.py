"""deepseek2: DeepSeek V2, V2 Lite, V3 and R1, Kimi K2, GLM 4.7 Flash. Latent attention; after a few dense layers
experts, in some models of the best groups, beside a shared expert.

Files have attn_k_b and attn_v_b, or, converted before April 2025, both as attn_kv_b, of which attn_k_b is made.
"""

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
    ROPE,
    check_multiple,
    feed_forward,
    predicting_layers,
    read_experts,
    read_model,
    read_rope,
    vocabulary,
)
from mlc_amd.compiler.models.registry import architecture


@architecture("deepseek2")
def read(keys: Keys) -> ModelConfig:
    predicting = predicting_layers(keys)
    count = predicting.count
    mixer = latent_attention(keys, ROPE, merged="blk.0.attn_kv_b.weight" in keys.tensors)
    rotating = mixer.head_dim - mixer.latent.rank if mixer.latent else 0
    # yarn's factor on cos and sin is in the scale of the scores
    rope = read_rope(keys, rotating, neox=False, dim=rotating, log_multiplier=1.0)
    leading = keys.integer("leading_dense_block_count", 0, minimum=0)
    experts = _experts(keys) if leading < count else None
    dense = feed_forward(keys, keys.integer("feed_forward_length")) if leading else None
    layers = [LayerConfig(mixer, block) for i in range(count) if (block := dense if i < leading else experts)]
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


def _experts(keys: Keys) -> ExpertsConfig:
    size = keys.integer("expert_feed_forward_length")
    # GLM 4.7 Flash was first converted without the key that says so
    unsaid = not keys.integer("expert_gating_func", 0, minimum=0)
    sigmoid = unsaid and keys.integer("block_count") in (47, 48) and vocabulary(keys) == 154880
    groups = keys.integer("expert_group_count", 1, minimum=0) or 1
    shared = keys.integer("expert_shared_count", 0, minimum=0)
    leading = keys.integer("leading_dense_block_count", 0, minimum=0)
    return read_experts(
        keys,
        size,
        gating="sigmoid" if sigmoid else "",
        normalize=keys.flag("expert_weights_norm", False),
        scale=keys.number("expert_weights_scale", 1.0, minimum=0.0) or 1.0,
        groups=groups,
        groups_used=keys.integer("expert_group_used_count", groups, minimum=0) or groups,
        selection_bias=f"blk.{leading}.exp_probs_b.bias" in keys.tensors,
        shared=SharedExpertConfig(size * shared) if shared else None,
    )
