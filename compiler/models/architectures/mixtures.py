"""Mixtures of experts whose attention is that of other decoders."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

from mlc_amd.compiler.models.config import (
    AdjugateConfig,
    AttentionConfig,
    Block,
    ExpertsConfig,
    IndexerConfig,
    LayerConfig,
    ModelConfig,
    Norms,
)
from mlc_amd.compiler.models.metadata import (
    ROPE,
    Keys,
    dense,
    dense_then,
    each_layer,
    experts_alone,
    experts_weighting,
    predicting_layers,
    read_attention,
    read_experts,
    read_model,
    read_uniform,
    rotations,
    shared_expert,
)
from mlc_amd.compiler.models.registry import architecture

HEAD_NORMS = partial(read_attention, head_norms=True)


def beside_shared(keys: Keys, **variant: Any) -> ExpertsConfig:
    """The experts of a layer, chosen and weighted as the file says, with as many shared ones in addition. `variant`:
    see `read_experts`."""
    size = keys.integer("expert_feed_forward_length")
    fields: dict[str, Any] = experts_weighting(keys) | {"selection_bias": keys.owns("exp_probs_b.bias")}
    fields["shared"] = shared_expert(size * keys.integer("expert_shared_count", 0, minimum=0))
    return read_experts(keys, size, **(fields | variant))


def idle_blocks(keys: Keys) -> tuple[str, ...]:
    """The dense blocks of layers that also have experts: llama.cpp uses the experts only."""
    sparse = [f"blk.{own.layer}." for own in each_layer(keys) if own.owns("ffn_gate_inp.weight")]
    of_both = tuple(f"{layer}ffn_{which}." for layer in sparse for which in ("gate", "up", "down"))
    return tuple(name for name in keys.tensors if name.startswith(of_both))


@architecture("deepseek")
def deepseek(keys: Keys) -> ModelConfig:
    """DeepSeek V1. As llama; after a few dense layers experts, whose weights do not add up to 1, and shared ones."""
    experts = partial(beside_shared, gating="softmax", normalize=False)
    return read_uniform(keys, neox=False, block=dense_then(keys, experts))


@architecture("bailingmoe")
def bailingmoe(keys: Keys) -> ModelConfig:
    """Ling Lite and Plus. As deepseek, in every layer."""
    return read_uniform(keys, neox=False, block=partial(beside_shared, gating="softmax"))


@architecture("bailingmoe2")
def bailingmoe2(keys: Keys) -> ModelConfig:
    """Ling 2, Ring. Norms over the heads of q and k; after a few dense layers experts and a shared one."""
    predicting = predicting_layers(keys, known=False)

    def experts(own: Keys) -> ExpertsConfig:
        size = own.integer("expert_shared_feed_forward_length", 0, minimum=0)
        size = size or own.integer("expert_feed_forward_length")
        return beside_shared(own, shared=shared_expert(size * own.integer("expert_shared_count", 0, minimum=0)))

    block = dense_then(keys, experts)
    layers = predicting.of(lambda own: LayerConfig(HEAD_NORMS(own), block(own)))
    return read_model(keys, layers, rotations(keys, layers, neox=True), unused=predicting.unused)


@architecture("dots1")
def dots1(keys: Keys) -> ModelConfig:
    """dots.llm1. Norms over the heads of q and k; after a few dense layers experts and shared ones."""
    return read_uniform(keys, True, HEAD_NORMS, dense_then(keys, beside_shared))


@architecture("hunyuan-moe")
def hunyuan_moe(keys: Keys) -> ModelConfig:
    """Hunyuan A13B. As hunyuan-dense, with experts and a shared one in every layer."""

    def experts(own: Keys) -> ExpertsConfig:
        size = own.integer("feed_forward_length")
        shared = shared_expert(own.integer("expert_shared_feed_forward_length", 0, minimum=0) or size)
        return read_experts(own, size, gating="softmax", shared=shared)

    return read_uniform(keys, True, partial(HEAD_NORMS, norm_after_rope=True), experts)


@architecture("phimoe")
def phimoe(keys: Keys) -> ModelConfig:
    """Phi 3.5 MoE. Norms have biases; experts in every layer."""
    return read_uniform(keys, neox=True, block=experts_alone("softmax", "feed_forward_length"))


@architecture("dbrx")
def dbrx(keys: Keys) -> ModelConfig:
    """DBRX. Layer norms; q, k and v have limits; experts in every layer."""
    mixer = partial(read_attention, clamp=keys.number("attention.clamp_kqv", minimum=0.0))
    norms, experts = {"feed_forward_norms": Norms("attn_output_norm")}, experts_alone("softmax", "feed_forward_length")
    return read_uniform(keys, True, mixer, experts, norms, norm="layer")


@architecture("arctic")
def arctic(keys: Keys) -> ModelConfig:
    """Snowflake Arctic. As llama, and in every layer experts that read the layer's input."""
    experts = experts_alone("softmax", "feed_forward_length")
    hidden = keys.integer("embedding_length")

    def layer(own: Keys) -> LayerConfig:
        block = dense(own, size=hidden)
        return LayerConfig(read_attention(own), block, experts=experts(own), experts_norm="ffn_norm_exps")

    layers = [layer(own) for own in each_layer(keys)]
    return read_model(keys, layers, rotations(keys, layers, neox=False))


@architecture("hy_v3", "dense", "experts", "shared")
def hy_v3(keys: Keys) -> ModelConfig:
    """Hunyuan 3. Norms over the heads of q and k; in some layers experts and a shared one."""
    predicting = predicting_layers(keys, known=False)

    def block(own: Keys) -> Block:
        if not own.owns("ffn_gate_inp.weight"):
            return dense(own)
        size = own.integer("expert_feed_forward_length")
        shared = shared_expert(own.integer("expert_shared_feed_forward_length", 0, minimum=0) or size)
        bias = "exp_probs_b" if own.owns("exp_probs_b") else ""
        unsaid = not own.integer("expert_gating_func", 0, minimum=0)
        gating = "sigmoid" if unsaid else ""
        return beside_shared(own, gating=gating, shared=shared, selection_bias=bool(bias), bias_name=bias)

    layers = predicting.of(lambda own: LayerConfig(HEAD_NORMS(own), block(own)))
    return read_model(keys, layers, rotations(keys, layers, neox=True), unused=(*predicting.unused, *idle_blocks(keys)))


@architecture("grok")
def grok(keys: Keys) -> ModelConfig:
    """Grok 1 and 2. Norms around the blocks, scores, logits and embedding with factors and limits; in every layer
    experts, in Grok 2 averaged with a dense block."""
    cap = keys.number("attn_logit_softcapping", 30.0)
    scale = keys.number("attention.output_scale", 0.08838834764831845)

    def experts(own: Keys) -> ExpertsConfig:
        dense_size = own.integer("feed_forward_length")
        size = own.integer("expert_feed_forward_length", 0, minimum=0) or dense_size
        fields: dict[str, Any] = {"gating": "softmax", "act": "gelu"}
        if own.owns("ffn_up.weight"):
            shared = shared_expert(dense_size, act="gelu", suffix="", factor=math.sqrt(0.5))
            fields |= {"shared": shared, "scale": math.sqrt(0.5)}
        return read_experts(own, size, **fields)

    last = "layer_output_norm" if keys.owns("layer_output_norm.weight") else "post_ffw_norm"
    norms = {"mixer_norms": Norms("attn_norm", "attn_output_norm"), "feed_forward_norms": Norms("ffn_norm", last)}
    return read_uniform(
        keys,
        True,
        partial(read_attention, scale=scale, softcap=cap),
        experts,
        norms,
        {"beta_fast": keys.number("rope.scaling.yarn_beta_fast", 8.0)},
        embedding_scale=keys.number("embedding_scale", 78.38367176906169),
        logit_scale=keys.number("logit_scale", 0.5773502691896257),
        logit_softcap=keys.number("final_logit_softcapping", 0.0, minimum=0.0),
    )


@architecture("grovemoe")
def grovemoe(keys: Keys) -> ModelConfig:
    """GroveMoE. Norms over the heads of q and k; in every layer experts, and small ones that read their sum."""

    def experts(own: Keys) -> ExpertsConfig:
        found = read_experts(own, own.integer("expert_feed_forward_length"), gating="softmax")
        group = own.integer("experts_per_group")
        count = found.count // group
        size = own.integer("expert_chunk_feed_forward_length", 0, minimum=0) or HEAD_NORMS(own).head_dim
        used, factor = min(found.used, count), own.number("expert_group_scale", minimum=0.0)
        scale = own.number("expert_weights_scale", 1.0, minimum=0.0) or 1.0
        return replace(found, scale=scale, adjugate=AdjugateConfig(count, used, size, group, factor * scale))

    return read_uniform(keys, True, HEAD_NORMS, experts)


@architecture("minimax-m3")
def minimax_m3(keys: Keys) -> ModelConfig:
    """MiniMax M3. Norms over the heads of q and k, partial RoPE, a clamped SwiGLU; after a few dense layers experts and
    shared ones, and attention to the best blocks of keys of each KV head."""
    leading = keys.integer("leading_dense_block_count", 0, minimum=0)
    names = "head_count", "key_length", "top_k", "block_size"
    heads, dim, blocks, size = (keys.integer(f"attention.indexer.{name}") for name in names)
    local = keys.integer("attention.indexer.local_blocks", minimum=0)
    indexer = IndexerConfig(heads, dim, blocks * size, ROPE, block=size, by_head=True, local=local)

    def mixer(own: Keys) -> AttentionConfig:
        a = HEAD_NORMS(own)
        if a.kv_heads != heads:
            raise keys.error(f"the indexer has {heads} heads, attention {a.kv_heads} KV heads; convert the model again")
        return replace(a, indexer=indexer) if (own.layer or 0) >= leading else a

    def experts(own: Keys) -> ExpertsConfig:
        count = own.integer("expert_shared_count") * own.integer("expert_feed_forward_length")
        return beside_shared(own, act="swiglu_oai", shared=shared_expert(count, act="swiglu_oai"))

    def block(own: Keys) -> Block:
        return dense(own, "swiglu_oai") if (own.layer or 0) < leading else experts(own)

    return read_uniform(keys, True, mixer, block)
