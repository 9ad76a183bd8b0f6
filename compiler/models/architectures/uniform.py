"""Decoders with the same attention in all layers. A layer has a dense block or a mixture of experts."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

from mlc_amd.compiler.models.config import (
    AttentionConfig,
    ExpertsConfig,
    IndexerConfig,
    LatentConfig,
    LayerConfig,
    ModelConfig,
    Norms,
    RopeConfig,
    SharedExpertConfig,
    TemperatureConfig,
)
from mlc_amd.compiler.models.encoders.metadata import read_encoder
from mlc_amd.compiler.models.metadata import (
    NORMS_AROUND,
    NORMS_BEFORE,
    ROPE,
    SECTIONS,
    Keys,
    check_multiple,
    dense,
    dense_or_experts,
    dense_then,
    each_layer,
    experts_alone,
    experts_weighting,
    last_of,
    predicting_layers,
    read_attention,
    read_experts,
    read_feed_forward,
    read_layers,
    read_model,
    read_rope,
    read_uniform,
    rotations,
    shared_expert,
    vocabulary,
)
from mlc_amd.compiler.models.registry import architecture

GLM_5_2_CONTEXT = 1 << 20  # tokens: with this context or a longer one, only some layers have an indexer
INDEX_ROPE = "index_rope"  # key of ModelConfig.ropes

STEP = 4  # smollm3: the last of every four layers has no RoPE


@architecture("llama", "dense", "experts")
def llama(keys: Keys) -> ModelConfig:
    """Llama 2 and 3.x, Mistral, Mixtral, TinyLlama, SmolLM. Grouped queries, interleaved RoPE pairs, SwiGLU; biases if
    the file has them; a mixture of experts in every layer if the file has a number of experts."""
    return read_uniform(keys, neox=False, block=partial(dense_or_experts, gating="softmax"))


@architecture("qwen2")
@architecture("qwen2vl", ignored=("output.bias",))
def qwen2(keys: Keys) -> ModelConfig:
    """Qwen 2 and 2.5, also the decoders of vision models. Like llama, with biases on q, k and v, and RoPE pairs half a
    head apart."""
    return read_uniform(keys, neox=True)


@architecture("qwen2moe")
def qwen2moe(keys: Keys) -> ModelConfig:
    """Qwen 1.5 and 2 with experts, whose weights do not add up to 1, and a gated shared expert."""

    def experts(own: Keys) -> ExpertsConfig:
        dense, used = own.integer("feed_forward_length"), own.integer("expert_used_count")
        size = own.integer("expert_feed_forward_length", 0, minimum=0) or max(1, dense // used)
        shared = own.integer("expert_shared_feed_forward_length", 0, minimum=0) or dense
        shared = SharedExpertConfig(shared, gated_output=True)
        return read_experts(own, size, gating="softmax", normalize=False, shared=shared)

    return read_uniform(keys, neox=True, block=experts)


@architecture("qwen3", "dense")
@architecture("qwen3vl")
def qwen3(keys: Keys) -> ModelConfig:
    """As qwen2 without biases, an RMS norm over each head of q and k before RoPE, and its own head size."""
    encoder = read_encoder(keys, ranked="last", softmax=True)
    return read_uniform(keys, neox=True, mixer=partial(read_attention, head_norms=True), encoder=encoder)


@architecture("qwen3moe", "experts")
@architecture("qwen3vlmoe")
def qwen3moe(keys: Keys) -> ModelConfig:
    """Qwen 3's mixtures of experts. As qwen3, with experts in every layer."""
    return read_uniform(keys, neox=True, mixer=partial(read_attention, head_norms=True), block=experts_alone("softmax"))


@architecture("olmoe")
def olmoe(keys: Keys) -> ModelConfig:
    """OLMoE. RMS norms over all of q and all of k; experts in every layer, whose weights do not add up to 1."""
    block = experts_alone("softmax", "feed_forward_length", normalize=False)
    return read_uniform(keys, neox=True, mixer=partial(read_attention, row_norms=True), block=block)


@architecture("minimax-m2")
def minimax_m2(keys: Keys) -> ModelConfig:
    """MiniMax M2. Partial RoPE, RMS norms over all of q and all of k; experts in every layer, chosen by sigmoid and a
    bias."""
    block = experts_alone("", "feed_forward_length", selection_bias=True)
    return read_uniform(keys, neox=True, mixer=partial(read_attention, row_norms=True), block=block)


@architecture("phi3")
def phi3(keys: Keys) -> ModelConfig:
    """Phi 3 and 4. Merged matrices for q, k and v and for gate and up; two sets of RoPE factors, for short and for long
    contexts. The sliding window in the metadata is ignored, as by llama.cpp."""
    return read_uniform(keys, neox=True, block=partial(read_feed_forward, merged=True))


@architecture("gemma")
def gemma(keys: Keys) -> ModelConfig:
    """Gemma 1. As llama with a GELU gate, a scaled embedding and its own head size."""
    scale = keys.integer("embedding_length") ** 0.5
    return read_uniform(keys, neox=True, block=partial(read_feed_forward, act="gelu"), embedding_scale=scale)


@architecture("glm4")
def glm4(keys: Keys) -> ModelConfig:
    """GLM 4. Partial RoPE, RMS norms before and after each block, merged gate and up."""
    # files with sections (for images) pair columns as NeoX does; for text, angles are the same in all sections
    neox = any(keys.integers("rope.dimension_sections", SECTIONS, 0, minimum=0))
    return read_uniform(keys, neox, block=partial(read_feed_forward, merged=True), norms=NORMS_AROUND)


@architecture("hunyuan-dense")
@architecture("hunyuan_vl")
def hunyuan_dense(keys: Keys) -> ModelConfig:
    """Hunyuan, dense. RMS norms over the heads of q and k after RoPE, whose base grows with alpha."""
    base, alpha = keys.number("rope.freq_base", 10000.0), keys.number("rope.scaling.alpha", 0.0, minimum=0.0)
    if alpha:
        size = read_attention(keys.at(0)).head_dim
        base *= alpha ** (size / (size - 2))
    mixer = partial(read_attention, head_norms=True, norm_after_rope=True)
    return read_uniform(keys, neox=True, mixer=mixer, rope={"base": base})


@architecture("mistral3", "dense", "experts")
def mistral3(keys: Keys) -> ModelConfig:
    """Ministral 3 and Mistral Small 3. As llama; the temperature of attention changes with the position."""
    scale = keys.number("attention.temperature_scale", 0.0, minimum=0.0)
    length = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
    mixer = partial(read_attention, temperature=TemperatureConfig(scale, length) if scale else None)
    return read_uniform(keys, neox=False, mixer=mixer, block=partial(dense_or_experts, gating="softmax"))


@architecture("seed_oss")
def seed_oss(keys: Keys) -> ModelConfig:
    """Seed OSS. As qwen2, with its own head size."""
    return read_uniform(keys, neox=True, norms=NORMS_BEFORE)


@architecture("smollm3")
def smollm3(keys: Keys) -> ModelConfig:
    """SmolLM 3. As llama, without RoPE in every fourth layer."""
    return read_uniform(keys, neox=False, mixer=lambda own: read_attention(own, "" if last_of(own, STEP) else ROPE))


@architecture("starcoder2")
def starcoder2(keys: Keys) -> ModelConfig:
    """StarCoder 2. Layer norms and matrices with biases, a feed-forward block without a gate."""
    return read_uniform(keys, neox=True, block=partial(read_feed_forward, act="gelu", gated=False), norm="layer")


# ---- dense blocks in some layers, experts in the others


@architecture("deepseek2")
@architecture("mistral4")
def deepseek2(keys: Keys) -> ModelConfig:
    """DeepSeek V2, V2 Lite, V3 and R1, Kimi K2, GLM 4.7 Flash. Latent attention; a few dense layers, then layers with
    experts and a shared expert. Some models choose experts from the best groups.

    Files have attn_k_b and attn_v_b; those converted before April 2025 have both merged as attn_kv_b.
    """
    predicting, block = predicting_layers(keys), dense_then(keys, deepseek_experts)
    layers = predicting.of(lambda own: LayerConfig(latent_attention(own, ROPE), block(own)))
    latent = layers[0].attention
    rotating = latent.head_dim - latent.latent.rank if latent and latent.latent else 0
    # yarn's factor on cos and sin is part of the scale of scores instead
    rope = read_rope(keys, rotating, neox=False, dim=rotating, log_multiplier=1.0)
    return read_model(keys, layers, {ROPE: rope}, unused=predicting.unused)


def latent_attention(keys: Keys, rope: str, merged: bool = False, local: str = "", **variant) -> AttentionConfig:
    """The latent attention of a layer. rope: see AttentionConfig. merged: whether attn_kv_b is merged in all files, not
    only in those with such a tensor. local: suffix of the names of metadata keys. variant: other fields of
    AttentionConfig."""
    merged = merged or keys.owns("attn_kv_b.weight")
    suffix = "" if merged else "_mla" + local
    heads, rank = keys.integer("attention.head_count"), keys.integer(f"attention.kv_lora_rank{local}")
    rotating, value = keys.integer("rope.dimension_count"), keys.integer(f"attention.value_length{suffix}")
    columns = keys.integer(f"attention.key_length{suffix}")
    if rotating > columns:
        raise keys.error(
            f"{keys.full('rope.dimension_count')} ({rotating}) must be at most a key's {columns} columns; convert "
            "the model again"
        )
    check_multiple(keys, "rank of the latent", rank)
    for what, size in (("rotating columns", rotating), ("columns of a value", value)):
        check_multiple(keys, what, size, 16)
    query_rank, key_norm = keys.integer("attention.q_lora_rank", 0, minimum=0), keys.owns("attn_k_norm.weight")
    latent = LatentConfig(rank, columns - rotating, value, query_rank, merged, key_norm)
    factor = keys.number("rope.scaling.factor", 1.0, minimum=0.0) or 1.0
    magnitude = 1.0 + keys.number("rope.scaling.yarn_log_multiplier", 0.0, minimum=0.0) * math.log(factor)
    scale = magnitude**2 / math.sqrt(columns)
    return AttentionConfig(heads, 1, rank + rotating, rope, scale=scale, latent=latent, **variant)


def deepseek_experts(keys: Keys) -> ExpertsConfig:
    """The experts of a layer, with a shared expert."""
    size = keys.integer("expert_feed_forward_length")
    # early files of GLM 4.7 Flash lack the key for the gating function
    unsaid = not keys.integer("expert_gating_func", 0, minimum=0)
    flash = keys.integer("block_count") in (47, 48) and vocabulary(keys) == 154880
    sigmoid = unsaid and (flash or keys.prefix == "glm-dsa")
    groups = keys.integer("expert_group_count", 1, minimum=0) or 1
    return read_experts(
        keys,
        size,
        gating="sigmoid" if sigmoid else "",
        **experts_weighting(keys),
        groups=groups,
        groups_used=keys.integer("expert_group_used_count", groups, minimum=0) or groups,
        selection_bias=keys.owns("exp_probs_b.bias"),
        shared=shared_expert(size * keys.integer("expert_shared_count", 0, minimum=0)),
    )


@architecture("deepseek32", "dense", "experts", "shared")
def deepseek32(keys: Keys) -> ModelConfig:
    """DeepSeek V3.2. Like deepseek2, with an indexer that chooses the keys that a row attends to."""
    return _read_indexed(keys, [1] * read_layers(keys), neox=True)


@architecture("glm-dsa", "dense", "experts", "shared")
def glm_dsa(keys: Keys) -> ModelConfig:
    """GLM 5. Like deepseek32; some layers attend to the keys that an earlier layer has chosen."""
    count, key = predicting_layers(keys, known=False).count, "attention.indexer.types"
    if keys.has(key):
        return _read_indexed(keys, keys.integers(key, count, minimum=0), neox=False)
    all_choose = keys.integer("context_length") < GLM_5_2_CONTEXT
    return _read_indexed(keys, [int(all_choose or i < 2 or i % 4 == 2) for i in range(count)], neox=False)


def _read_indexed(keys: Keys, types: list[int], neox: bool) -> ModelConfig:
    """types: for each layer whether it has an indexer of its own. neox: the pairs of the indexer's RoPE."""
    predicting, block = predicting_layers(keys, known=False), dense_then(keys, deepseek_experts)
    if not types[0]:
        raise keys.error("the first layer has no indexer, and no layer before it has one; convert the model again")

    def mixer(own: Keys) -> AttentionConfig:
        return latent_attention(own, ROPE, indexer=read_indexer(own, bool(types[own.layer or 0])))

    layers = predicting.of(lambda own: LayerConfig(mixer(own), block(own)))
    return read_model(keys, layers, indexed_rotations(keys, neox), unused=predicting.unused)


def read_indexer(keys: Keys, own: bool, **variant) -> IndexerConfig:
    """The indexer of a layer. own: whether the layer has its own choice. variant: other fields of IndexerConfig. Raises
    UserError if keys have fewer columns than rotate."""
    heads, dim, used = (keys.integer(f"attention.indexer.{key}") for key in ("head_count", "key_length", "top_k"))
    check_multiple(keys, "columns of the indexer's keys", dim)
    if (rotating := keys.integer("rope.dimension_count")) > dim:
        raise keys.error(f"the indexer's keys have {dim} columns, of which {rotating} rotate; use another model")
    return IndexerConfig(heads, dim, used, INDEX_ROPE, own=own, **variant)


def indexed_rotations(keys: Keys, neox: bool) -> dict[str, RopeConfig]:
    """The RoPE of latent attention and of its indexer. neox: the pairs of the indexer's RoPE."""
    rotating = keys.integer("rope.dimension_count")
    rope = read_rope(keys, rotating, neox=False, dim=rotating, log_multiplier=1.0, sections=())
    return {ROPE: rope, INDEX_ROPE: replace(rope, neox=neox)}


@architecture("minicpm3")
def minicpm3(keys: Keys) -> ModelConfig:
    """MiniCPM 3. Latent attention; factors on the embedding, the outputs of the blocks and the logits."""
    hidden = keys.integer("embedding_length")
    factor = 1.4 / read_layers(keys) ** 0.5
    norms: dict[str, Any] = {
        "mixer_norms": Norms("attn_norm", factor=factor),
        "feed_forward_norms": Norms("ffn_norm", factor=factor),
    }
    layers = [
        LayerConfig(latent_attention(own, ROPE, True), read_feed_forward(own), **norms) for own in each_layer(keys)
    ]
    rotating = keys.integer("rope.dimension_count")
    ropes = {ROPE: read_rope(keys, rotating, neox=True, dim=rotating)}
    return read_model(keys, layers, ropes, embedding_scale=12.0, logit_scale=256.0 / hidden)


@architecture("ernie4_5", ignored=("attn_output.bias",))
def ernie4_5(keys: Keys) -> ModelConfig:
    """ERNIE 4.5, dense. As llama."""
    return read_uniform(keys, neox=False, block=dense)


@architecture("paddleocr")
def paddleocr(keys: Keys) -> ModelConfig:
    """The decoder of PaddleOCR VL. As ernie4_5, with RoPE pairs half a head apart."""
    return read_uniform(keys, neox=True, block=dense)


@architecture("ernie4_5-moe", ignored=("attn_output.bias",))
def ernie4_5_moe(keys: Keys) -> ModelConfig:
    """ERNIE 4.5 with experts and a shared expert in some layers after the leading dense ones. Experts are chosen by
    probability plus a bias."""
    step = keys.integer("interleave_moe_layer_step", 1)
    block = dense_then(keys, lambda own: _ernie_experts(own) if last_of(own, step) else dense(own))
    return read_uniform(keys, neox=False, block=block)


def _ernie_experts(keys: Keys) -> ExpertsConfig:
    shared = shared_expert(keys.integer("expert_shared_feed_forward_length", 0, minimum=0))
    variant = {"gating": "softmax", "selection_bias": keys.owns("exp_probs_b.bias"), "shared": shared}
    return read_experts(keys, keys.integer("expert_feed_forward_length"), **variant)


@architecture("glm4moe")
def glm4moe(keys: Keys) -> ModelConfig:
    """GLM 4.5. Partial RoPE, head norms in some models; a few dense layers, then layers with experts, chosen by sigmoid
    and a bias, and a shared expert. The last layer is for multi-token prediction."""

    def experts(own: Keys) -> ExpertsConfig:
        size = own.integer("expert_feed_forward_length")
        shared = SharedExpertConfig(size * own.integer("expert_shared_count", 1))
        return read_experts(own, size, **experts_weighting(own), selection_bias=True, shared=shared)

    predicting, block = predicting_layers(keys), dense_then(keys, experts)

    def layer(own: Keys) -> LayerConfig:
        return LayerConfig(read_attention(own, head_norms=own.owns("attn_q_norm.weight")), block(own), **NORMS_BEFORE)

    layers = predicting.of(layer)
    return read_model(keys, layers, rotations(keys, layers, neox=True), unused=predicting.unused)
