"""Decoders whose layers all have the same attention, and a dense block, a mixture of experts, or some layers the one
and some the other."""

import math
from dataclasses import replace

from mlc_amd.compiler.models.config import (
    AttentionConfig,
    ExpertsConfig,
    LatentConfig,
    LayerConfig,
    ModelConfig,
    SharedExpertConfig,
    TemperatureConfig,
)
from mlc_amd.compiler.models.encoder_metadata import read_encoder
from mlc_amd.compiler.models.metadata import (
    NORMS_AROUND,
    NORMS_BEFORE,
    ROPE,
    Keys,
    check_multiple,
    dense_then,
    experts_weighting,
    feed_forward,
    predicting_layers,
    read_attention,
    read_experts,
    read_feed_forward,
    read_layers,
    read_model,
    read_rope,
    read_uniform,
    shared_expert,
    vocabulary,
)
from mlc_amd.compiler.models.registry import architecture

STEP = 4  # smollm3: of every four layers the last one has no RoPE


@architecture("llama")
def llama(keys: Keys) -> ModelConfig:
    """Llama 2 and 3.x, Mistral, Mixtral, TinyLlama, SmolLM. Grouped queries, interleaved RoPE pairs, SwiGLU; biases
    where the file has them; a mixture of experts in every layer where it counts experts."""
    sparse = keys.integer("expert_count", 0, minimum=0)
    return read_uniform(keys, False, block=read_experts(keys, keys.integer("feed_forward_length")) if sparse else None)


@architecture("ernie4_5")
def ernie4_5(keys: Keys) -> ModelConfig:
    """ERNIE 4.5, dense. As llama."""
    return read_uniform(keys, neox=False)


@architecture("qwen2")
@architecture("qwen2vl")
def qwen2(keys: Keys) -> ModelConfig:
    """Qwen 2 and 2.5, also the decoders that see. As llama, with biases on q, k and v and RoPE pairs half a head
    apart."""
    return read_uniform(keys, neox=True, mixer=read_attention(keys, qkv_bias=True))


@architecture("qwen2moe")
def qwen2moe(keys: Keys) -> ModelConfig:
    """Qwen 1.5 and 2 with experts, whose weights do not add up to 1, and a gated shared expert."""
    dense, used = keys.integer("feed_forward_length"), keys.integer("expert_used_count")
    experts = read_experts(
        keys,
        keys.integer("expert_feed_forward_length", max(1, dense // used)),
        normalize=False,
        shared=SharedExpertConfig(keys.integer("expert_shared_feed_forward_length", dense), gated_output=True),
    )
    return read_uniform(keys, neox=True, mixer=read_attention(keys, qkv_bias=True), block=experts)


@architecture("qwen3")
@architecture("qwen3vl")
def qwen3(keys: Keys) -> ModelConfig:
    """As qwen2 without biases, an RMS norm over each head of q and k before RoPE, and its own head size."""
    encoder = read_encoder(keys, ranked="last", softmax=True)
    return read_uniform(keys, neox=True, mixer=read_attention(keys, head_norms=True), encoder=encoder)


@architecture("qwen3moe")
@architecture("qwen3vlmoe")
def qwen3moe(keys: Keys) -> ModelConfig:
    """Qwen 3's mixtures of experts. As qwen3, with experts in every layer."""
    experts = read_experts(keys, keys.integer("expert_feed_forward_length"))
    return read_uniform(keys, neox=True, mixer=read_attention(keys, head_norms=True), block=experts)


@architecture("olmoe")
def olmoe(keys: Keys) -> ModelConfig:
    """OLMoE. RMS norms over all of q and all of k; experts in every layer, whose weights do not add up to 1."""
    experts = read_experts(keys, keys.integer("feed_forward_length"), gating="softmax", normalize=False)
    return read_uniform(keys, neox=True, mixer=read_attention(keys, row_norms=True), block=experts)


@architecture("minimax-m2")
def minimax_m2(keys: Keys) -> ModelConfig:
    """MiniMax M2. Partial RoPE, RMS norms over all of q and all of k; experts in every layer, chosen by sigmoid and a
    bias."""
    experts = read_experts(keys, keys.integer("feed_forward_length"), gating="sigmoid", selection_bias=True)
    return read_uniform(keys, neox=True, mixer=read_attention(keys, row_norms=True), block=experts)


@architecture("phi3")
def phi3(keys: Keys) -> ModelConfig:
    """Phi 3 and 4. Merged matrices for q, k and v and for gate and up; two sets of RoPE factors, for short and for long
    contexts. The sliding window in the metadata is ignored, as by llama.cpp."""
    return read_uniform(keys, neox=True, block=read_feed_forward(keys, merged=True))


@architecture("gemma")
def gemma(keys: Keys) -> ModelConfig:
    """Gemma 1. As llama with a GELU gate, a scaled embedding and its own head size."""
    block, scale = read_feed_forward(keys, act="gelu"), keys.integer("embedding_length") ** 0.5
    return read_uniform(keys, neox=True, block=block, embedding_scale=scale)


@architecture("glm4")
def glm4(keys: Keys) -> ModelConfig:
    """GLM 4. Partial RoPE, RMS norms before and after each block, merged gate and up."""
    # sections are those of images, which pair columns as NeoX does; the angles of text are the same in all of them
    neox = keys.has("rope.dimension_sections")
    return read_uniform(keys, neox, block=read_feed_forward(keys, merged=True), norms=NORMS_AROUND)


@architecture("hunyuan-dense")
def hunyuan_dense(keys: Keys) -> ModelConfig:
    """Hunyuan, dense. RMS norms over the heads of q and k after RoPE, whose base grows with alpha."""
    mixer = read_attention(keys, head_norms=True, norm_after_rope=True)
    base, alpha = keys.number("rope.freq_base", 10000.0), keys.number("rope.scaling.alpha", 0.0, minimum=0.0)
    if alpha:
        base *= alpha ** (mixer.head_dim / (mixer.head_dim - 2))
    return read_uniform(keys, neox=True, mixer=mixer, base=base)


@architecture("mistral3")
def mistral3(keys: Keys) -> ModelConfig:
    """Ministral 3 and Mistral Small 3. As llama; the temperature of attention changes with the position."""
    scale = keys.number("attention.temperature_scale", 0.0, minimum=0.0)
    length = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
    mixer = read_attention(keys, temperature=TemperatureConfig(scale, length) if scale else None)
    return read_uniform(keys, neox=False, mixer=mixer)


@architecture("seed_oss")
def seed_oss(keys: Keys) -> ModelConfig:
    """Seed OSS. As qwen2, with its own head size."""
    return read_uniform(keys, neox=True, norms=NORMS_BEFORE)


@architecture("smollm3")
def smollm3(keys: Keys) -> ModelConfig:
    """SmolLM 3. As llama, without RoPE in every fourth layer."""
    mixer, block = read_attention(keys), read_feed_forward(keys)
    layers = [
        LayerConfig(replace(mixer, rope="" if (i + 1) % STEP == 0 else ROPE), block) for i in range(read_layers(keys))
    ]
    return read_model(keys, layers, {ROPE: read_rope(keys, mixer.head_dim, neox=False)})


@architecture("starcoder2")
def starcoder2(keys: Keys) -> ModelConfig:
    """StarCoder 2. Layer norms and matrices with biases, a feed-forward block without a gate."""
    block = read_feed_forward(keys, act="gelu", gated=False, bias=True, down_bias=True)
    return read_uniform(keys, neox=True, block=block, norm="layer", norm_bias=True)


# ---- dense blocks in some layers, experts in the others


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
