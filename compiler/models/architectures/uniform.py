"""Decoders whose layers are alike: attention, and a dense block or a mixture of experts."""

from dataclasses import replace

from mlc_amd.compiler.models.config import LayerConfig, ModelConfig, SharedExpertConfig, TemperatureConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import (
    NORMS_AROUND,
    NORMS_BEFORE,
    ROPE,
    read_attention,
    read_experts,
    read_feed_forward,
    read_layers,
    read_model,
    read_rope,
    read_uniform,
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
def qwen2(keys: Keys) -> ModelConfig:
    """Qwen 2 and 2.5. As llama, with biases on q, k and v and RoPE pairs half a head apart."""
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
def qwen3(keys: Keys) -> ModelConfig:
    """As qwen2 without biases, an RMS norm over each head of q and k before RoPE, and its own head size."""
    return read_uniform(keys, neox=True, mixer=read_attention(keys, head_norms=True))


@architecture("qwen3moe")
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
    layers = [LayerConfig(mixer, read_feed_forward(keys))] * read_layers(keys)
    return read_model(keys, layers, {ROPE: read_rope(keys, mixer.head_dim, neox=True, base=base)})


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
    block = read_feed_forward(keys, act="gelu", gated=False, bias=True)
    return read_uniform(keys, neox=True, block=block, norm="layer", norm_bias=True)
