"""Decoders in which some layers see only the last keys: a window or a chunk of them."""

from dataclasses import replace
from typing import Any

from mlc_amd.compiler.models.config import (
    AttentionConfig,
    Block,
    LayerConfig,
    ModelConfig,
    SharedExpertConfig,
    TemperatureConfig,
)
from mlc_amd.compiler.models.metadata import (
    LOCAL_ROPE,
    NORMS_AFTER,
    NORMS_AROUND,
    NORMS_BEFORE,
    ROPE,
    Keys,
    feed_forward,
    local_layers,
    read_attention,
    read_experts,
    read_feed_forward,
    read_layers,
    read_model,
    read_rope,
)
from mlc_amd.compiler.models.registry import architecture

EXAONE4_32B = 64  # layers of the one EXAONE 4 with windows
GEMMA2_27B, GEMMA3_27B = 46, 62  # layers of the models whose scores are scaled by the hidden size, not the head's
CHUNK = 8192  # llama4: tokens of a chunk, and of a step of the temperature
MAVERICK = 128  # experts of the one Llama 4 without norms over the heads
NOPE_STEP = 4  # llama4: of every four layers the last one has no RoPE


def _layers(
    keys: Keys, pattern: int, mixer: AttentionConfig, local: AttentionConfig | None,
    block: Block, **norms: Any,
) -> list[LayerConfig]:  # fmt: skip
    """Of every `pattern` layers the last one has `mixer`, the others `local`; None: all have `mixer`."""
    count = read_layers(keys)
    windowed = local_layers(keys, count, pattern) if local else [False] * count
    return [LayerConfig(local if is_local else mixer, block, **norms) for is_local in windowed]


@architecture("cohere2")
def cohere2(keys: Keys) -> ModelConfig:
    """Command R7B. One layer norm for attention and feed-forward, which run in parallel; of four layers three see a
    window of keys and have RoPE, the last has neither; scaled logits."""
    mixer, block = read_attention(keys, rope=""), read_feed_forward(keys)
    local = replace(mixer, window=keys.integer("attention.sliding_window"), rope=ROPE)
    layers = _layers(keys, 4, mixer, local, block, parallel=True)
    ropes = {ROPE: read_rope(keys, mixer.head_dim, neox=False)}
    return read_model(keys, layers, ropes, norm="layer", logit_scale=keys.number("logit_scale"))


@architecture("exaone4")
def exaone4(keys: Keys) -> ModelConfig:
    """EXAONE 4. Norms after the blocks only, and over each head of q and k. In the large model three of four layers see
    a window of keys, and the fourth has no RoPE."""
    block, mixer, local = read_feed_forward(keys), read_attention(keys, head_norms=True), None
    if read_layers(keys) == EXAONE4_32B:
        local = replace(mixer, window=keys.integer("attention.sliding_window"))
        mixer = replace(mixer, rope="")
    layers = _layers(keys, 4, mixer, local, block, **NORMS_AFTER)
    return read_model(keys, layers, {ROPE: read_rope(keys, mixer.head_dim, neox=True)})


@architecture("gemma2")
def gemma2(keys: Keys) -> ModelConfig:
    """Gemma 2. RMS norms before and after each block, GELU gate, scaled embedding, softcaps on attention's scores and
    on the logits; every other layer, the first included, sees a window of keys."""
    mixer = _gemma_attention(keys, GEMMA2_27B, softcap=keys.number("attn_logit_softcapping", 50.0))
    local = replace(mixer, window=keys.integer("attention.sliding_window", 4096))
    ropes = {ROPE: read_rope(keys, mixer.head_dim, neox=True)}
    return _read_gemma(keys, 2, mixer, local, ropes, keys.number("final_logit_softcapping", 30.0))


@architecture("gemma3")
def gemma3(keys: Keys) -> ModelConfig:
    """Gemma 3. As gemma2 with norms over the heads of q and k instead of softcaps; of six layers five see a window of
    keys, with a RoPE of their own."""
    mixer, local = _gemma_attention(keys, GEMMA3_27B, head_norms=True, images=True), None
    ropes = {ROPE: read_rope(keys, mixer.head_dim, neox=True)}
    if keys.has("attention.sliding_window"):
        local = replace(mixer, window=keys.integer("attention.sliding_window"), rope=LOCAL_ROPE)
        base = keys.number("rope.freq_base_swa", 10000.0)
        ropes[LOCAL_ROPE] = read_rope(keys, mixer.head_dim, neox=True, scaled=False, base=base)
    return _read_gemma(keys, 6, mixer, local, ropes, keys.number("final_logit_softcapping", 0.0, minimum=0.0))


def _gemma_attention(keys: Keys, by_hidden: int, **variant) -> AttentionConfig:
    """by_hidden: layers of the model whose scores are scaled by the hidden size."""
    mixer = read_attention(keys, **variant)
    by_head = read_layers(keys) != by_hidden
    return mixer if by_head else replace(mixer, scale=(keys.integer("embedding_length") / mixer.heads) ** -0.5)


def _read_gemma(keys: Keys, pattern: int, mixer, local, ropes, softcap: float) -> ModelConfig:
    layers = _layers(keys, pattern, mixer, local, read_feed_forward(keys, act="gelu"), **NORMS_AROUND)
    scale = keys.integer("embedding_length") ** 0.5
    return read_model(keys, layers, ropes, embedding_scale=scale, logit_softcap=softcap)


@architecture("gpt-oss")
def gpt_oss(keys: Keys) -> ModelConfig:
    """Attention with sinks, a window in every other layer, the first included; biases everywhere; experts with a
    clamped SwiGLU, chosen by their logits."""
    mixer = read_attention(keys, sinks=True)
    local = replace(mixer, window=keys.integer("attention.sliding_window"))
    size, variant = keys.integer("expert_feed_forward_length"), {"router_bias": True, "biases": True}
    experts = read_experts(keys, size, gating="softmax_used", normalize=False, act="swiglu_oai", **variant)
    layers = _layers(keys, 2, mixer, local, experts, **NORMS_BEFORE)
    return read_model(keys, layers, {ROPE: read_rope(keys, mixer.head_dim, neox=True)})


@architecture("llama4")
def llama4(keys: Keys) -> ModelConfig:
    """Llama 4, text. Of four layers three have RoPE and see a chunk of keys, the last has a temperature; experts take
    their input times its weight, beside a shared expert."""
    # heads are normalized after RoPE, without weights: rotations keep the norm, so before is the same
    norms = keys.integer("expert_count") != MAVERICK
    local = read_attention(keys, chunk=CHUNK, head_norms=norms, norm_weights=False)
    temperature = TemperatureConfig(0.1, CHUNK, offset=1)
    mixer = replace(local, rope="", chunk=0, head_norms=False, temperature=temperature)
    size, step = keys.integer("expert_feed_forward_length"), keys.integer("interleave_moe_layer_step", 1)
    experts = read_experts(
        keys, size, gating="sigmoid", normalize=False, weigh_input=True, shared=SharedExpertConfig(size)
    )
    dense = feed_forward(keys, keys.integer("feed_forward_length"))
    layers = [
        LayerConfig(mixer if (i + 1) % NOPE_STEP == 0 else local, experts if (i + 1) % step == 0 else dense)
        for i in range(read_layers(keys))
    ]
    return read_model(keys, layers, {ROPE: read_rope(keys, mixer.head_dim, neox=False)})


@architecture("olmo2")
def olmo2(keys: Keys) -> ModelConfig:
    """OLMo 2 and 3. Norms after the blocks only, RMS norms over all of q and all of k. In OLMo 3 three of four layers
    see a window of keys, with an unscaled RoPE."""
    mixer, local, block = read_attention(keys, row_norms=True), None, read_feed_forward(keys)
    ropes = {ROPE: read_rope(keys, mixer.head_dim, neox=True)}
    if keys.has("attention.sliding_window"):
        local = replace(mixer, window=keys.integer("attention.sliding_window"), rope=LOCAL_ROPE)
        ropes[LOCAL_ROPE] = read_rope(keys, mixer.head_dim, neox=True, scaled=False)
    return read_model(keys, _layers(keys, 4, mixer, local, block, **NORMS_AFTER), ropes)
