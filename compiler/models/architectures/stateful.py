"""Decoders with layers that keep a state (selective state spaces, delta nets, short convolutions), most of them beside
layers of attention; and Granite, of which some have none."""

from collections.abc import Callable, Sequence
from typing import Any

from mlc_amd.compiler.models.architectures.uniform import latent_attention
from mlc_amd.compiler.models.config import (
    Block,
    ChannelDeltaConfig,
    DeltaNetConfig,
    ExpertsConfig,
    LayerConfig,
    Mamba2Config,
    Mixer,
    ModelConfig,
    Norms,
    SharedExpertConfig,
    ShortConvConfig,
)
from mlc_amd.compiler.models.metadata import (
    NORMS_BEFORE,
    ROPE,
    Keys,
    attention_or,
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
    read_taps,
    read_uniform,
    shared_expert,
)
from mlc_amd.compiler.models.registry import architecture

VECTOR = 16  # columns that kernels of states take at once
NORM = Norms(before="attn_norm")  # of every layer of nemotron_h, whatever it is
INTERVAL = 4  # of so many layers the last one has attention: llama.cpp's default of full_attention_interval


# ---- selective state spaces


@architecture("mamba2")
def mamba2(keys: Keys) -> ModelConfig:
    """Mamba-2, Codestral Mamba. Every layer is a selective state space, without a feed-forward block."""
    return read_model(keys, [LayerConfig(read_mamba2(keys), None)] * read_layers(keys), {})


def read_mamba2(keys: Keys, norm: bool = True) -> Mamba2Config:
    """The state space, the same in all layers that have one. norm: whether it has one."""
    inner, state = keys.integer("ssm.inner_size"), keys.integer("ssm.state_size")
    heads, groups = keys.integer("ssm.time_step_rank"), keys.integer("ssm.group_count")
    for what, size, by in (("inner size", inner, heads), ("heads", heads, groups)):
        if size % by:
            raise keys.error(f"the state space's {what} ({size}) must be a multiple of {by} to be compiled")
    check_multiple(keys, "inner size of the state space", inner)
    check_multiple(keys, "columns of a head of the state space", inner // heads, VECTOR)
    check_multiple(keys, "columns of a group of the state space", inner // groups, VECTOR)
    check_multiple(keys, "state's size", state, VECTOR)
    eps = keys.number("attention.layer_norm_rms_epsilon") if norm else 0.0
    return Mamba2Config(inner, state, heads, groups, read_taps(keys, "ssm.conv_kernel"), eps)


@architecture("falcon-h1")
def falcon_h1(keys: Keys) -> ModelConfig:
    """Falcon H1. In every layer attention and a state space read the same norm. The weight of the norm before the dense
    block is named without ".weight"."""
    beside = read_mamba2(keys, norm="blk.0.ssm_norm.weight" in keys.tensors)
    layer = {"feed_forward_norms": Norms(before="ffn_norm", bare=True), "beside": beside}
    return read_uniform(keys, neox=True, norms=layer)


@architecture("nemotron_h")
def nemotron_h(keys: Keys) -> ModelConfig:
    """NVIDIA Nemotron H and Nano. A layer is one of a state space, attention without RoPE and a dense block without a
    gate: which, the numbers of KV heads and of the block's columns say layer by layer."""
    return _read_single(keys, lambda size: feed_forward(keys, size, "relu_sq", gated=False))


@architecture("nemotron_h_moe")
def nemotron_h_moe(keys: Keys) -> ModelConfig:
    """NVIDIA Nemotron 3 Nano and Super. As nemotron_h, with experts without gates in the place of dense blocks, beside
    a shared one; in some models the experts get fewer columns."""
    shared = keys.integer("expert_shared_feed_forward_length", 0, minimum=0)
    experts = read_experts(
        keys,
        keys.integer("expert_feed_forward_length"),
        gating="sigmoid",
        act="relu",
        gated=False,
        latent=keys.integer("moe_latent_size", 0, minimum=0),
        **experts_weighting(keys),
        groups=keys.integer("expert_group_count", 1, minimum=0) or 1,
        groups_used=keys.integer("expert_group_used_count", 1, minimum=0) or 1,
        selection_bias=any(name.endswith("exp_probs_b.bias") for name in keys.tensors),
        shared=shared_expert(shared, act="relu_sq", gated=False),
    )
    return _read_single(keys, lambda size: experts)


def _read_single(keys: Keys, block: Callable[[int], Block]) -> ModelConfig:
    """A model whose layers are one thing each. block: the feed-forward block of that many columns."""
    mixers, _ = attention_or(keys, read_mamba2(keys), "")
    layers = [
        LayerConfig(None, block(size), feed_forward_norms=NORM) if size else LayerConfig(mixer, None, mixer_norms=NORM)
        for mixer, size in zip(mixers, keys.integers("feed_forward_length", len(mixers), minimum=0), strict=True)
    ]
    return read_model(keys, layers, {})


@architecture("granite")
def granite(keys: Keys) -> ModelConfig:
    """IBM Granite 3 and 4, dense. As llama, with factors on the embedding, the attention's scores, the outputs of the
    blocks and the logits."""
    return _uniform_granite(keys, read_feed_forward(keys))


@architecture("granitemoe")
def granitemoe(keys: Keys) -> ModelConfig:
    """IBM Granite 3 and 4 with experts in every layer, beside a shared expert in some models."""
    return _uniform_granite(keys, _granite_experts(keys))


@architecture("granitehybrid")
def granitehybrid(keys: Keys) -> ModelConfig:
    """IBM Granite 4 H. Most layers are selective state spaces (Mamba-2), the others attention; which, the number of KV
    heads says layer by layer. Every layer has a dense block or experts beside a shared one."""
    mixers, head_dim = attention_or(keys, read_mamba2(keys), **_granite_attention(keys))
    sparse = keys.integer("expert_count", 0, minimum=0)
    return _read_granite(keys, mixers, _granite_experts(keys) if sparse else read_feed_forward(keys), head_dim)


def _granite_experts(keys: Keys) -> ExpertsConfig:
    shared = shared_expert(keys.integer("expert_shared_feed_forward_length", 0, minimum=0))
    return read_experts(keys, keys.integer("feed_forward_length"), gating="softmax", shared=shared)


def _uniform_granite(keys: Keys, block: Block) -> ModelConfig:
    mixer = read_attention(keys, **_granite_attention(keys))
    return _read_granite(keys, [mixer] * read_layers(keys), block, mixer.head_dim)


def _granite_attention(keys: Keys) -> dict[str, Any]:
    """Fields of Granite's AttentionConfig."""
    return {
        "rope": ROPE if keys.flag("rope.scaling.finetuned", True) else "",
        "scale": keys.number("attention.scale", 0.0, minimum=0.0),
    }


def _read_granite(keys: Keys, mixers: Sequence[Mixer], block: Block, head_dim: int) -> ModelConfig:
    """A model whose layers have these mixers and that block.

    The residual stream x of the original is kept as x / residual_scale: then blocks add their outputs as they are, and
    norms, whose results do not depend on a factor of x, only need another epsilon."""
    residual = keys.number("residual_scale", 0.0, minimum=0.0) or 1.0
    rotates = bool(_granite_attention(keys)["rope"])
    return read_model(
        keys,
        [LayerConfig(mixer, block) for mixer in mixers],
        {ROPE: read_rope(keys, head_dim, neox=False)} if rotates else {},
        norm_eps=keys.number("attention.layer_norm_rms_epsilon") / residual**2,
        embedding_scale=(keys.number("embedding_scale", 0.0, minimum=0.0) or 1.0) / residual,
        logit_scale=1.0 / (keys.number("logit_scale", 0.0, minimum=0.0) or 1.0),
    )


# ---- delta nets


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


def _read_qwen(keys: Keys, block: Block, **variant) -> ModelConfig:
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


# ---- short convolutions


@architecture("lfm2")
def lfm2(keys: Keys) -> ModelConfig:
    """LFM2 and LFM2.5. Most layers mix by short gated convolutions, the others by attention with head norms; which, the
    number of KV heads says layer by layer."""
    return _read_lfm2(keys, [read_feed_forward(keys)] * read_layers(keys))


@architecture("lfm2moe")
def lfm2moe(keys: Keys) -> ModelConfig:
    """As lfm2, with experts after the leading dense layers, chosen by sigmoid (which the file says) and a bias."""
    experts = read_experts(keys, keys.integer("expert_feed_forward_length"), selection_bias=True)
    return _read_lfm2(keys, dense_then(keys, read_layers(keys), lambda keys, leading: experts))


def _read_lfm2(keys: Keys, blocks: list) -> ModelConfig:
    window = keys.integer("attention.sliding_window", 0, minimum=0)
    conv = ShortConvConfig(read_taps(keys, "shortconv.l_cache"))
    check_multiple(keys, "hidden size", keys.integer("embedding_length"))
    mixers, head_dim = attention_or(keys, conv, ROPE, head_norms=True, window=window)
    rotates = any(mixer is not conv for mixer in mixers)
    ropes = {ROPE: read_rope(keys, head_dim, neox=True)} if rotates else {}
    layers = [LayerConfig(mixer, block) for mixer, block in zip(mixers, blocks, strict=True)]
    return read_model(keys, layers, ropes, output_norm="token_embd_norm")
