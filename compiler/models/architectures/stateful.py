"""Decoders with layers that keep a state (selective state spaces, delta nets, short convolutions); most have layers of
attention, too. And Granite, of which some models have no such layers."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from mlc_amd.compiler.models.architectures.local import PLAIN_QKV
from mlc_amd.compiler.models.architectures.uniform import latent_attention
from mlc_amd.compiler.models.config import (
    Block,
    ExpertsConfig,
    LayerConfig,
    Mixer,
    ModelConfig,
    Norms,
    SharedExpertConfig,
)
from mlc_amd.compiler.models.metadata import (
    NORMS_BEFORE,
    ROPE,
    Keys,
    attention_or,
    check_multiple,
    dense,
    dense_or_experts,
    dense_then,
    each_layer,
    experts_alone,
    experts_weighting,
    predicting_layers,
    read_attention,
    read_experts,
    read_feed_forward,
    read_layers,
    read_model,
    read_rope,
    read_taps,
    read_uniform,
    rotations,
    shared_expert,
)
from mlc_amd.compiler.models.recurrent_config import (
    ChannelDeltaConfig,
    DeltaNetConfig,
    Mamba2Config,
    ShortConvConfig,
)
from mlc_amd.compiler.models.registry import architecture
from mlc_amd.schedules.operators.experts import CUT

VECTOR = 16  # columns that kernels of states take at once
NORM = Norms(before="attn_norm")  # of every layer of nemotron_h, whatever it is
INTERVAL = 4  # of so many layers the last one has attention: llama.cpp's default of full_attention_interval


# ---- selective state spaces


@architecture("mamba2", "states")
def mamba2(keys: Keys) -> ModelConfig:
    """Mamba-2, Codestral Mamba. Every layer is a selective state space, without a feed-forward block."""
    return read_model(keys, [LayerConfig(read_mamba2(keys), None)] * read_layers(keys), {})


def read_mamba2(keys: Keys, norm: bool = True) -> Mamba2Config:
    """The state space, which is the same in all layers that have one. norm: whether it has a norm."""
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


@architecture("falcon-h1", "states", ignored=("attn_output.bias",))
def falcon_h1(keys: Keys) -> ModelConfig:
    """Falcon H1. In every layer attention and a state space read the same norm. The weight of the norm before the dense
    block is named without ".weight"."""
    beside = read_mamba2(keys, norm=keys.owns("ssm_norm.weight"))
    layer = {"feed_forward_norms": Norms(before="ffn_norm", bare="before"), "beside": beside}
    return read_uniform(keys, neox=True, norms=layer, rope={"factors": ""})


@architecture("nemotron_h", "dense", "experts", "shared", "states")
def nemotron_h(keys: Keys) -> ModelConfig:
    """NVIDIA Nemotron H and Nano. Each layer is a state space, or attention without RoPE, or a dense block without a
    gate; the numbers of KV heads and of the block's columns, layer by layer, say which."""
    return _read_single(keys, partial(read_feed_forward, act="relu_sq", gated=False))


@architecture("nemotron_h_moe", "dense", "experts", "shared", "states")
def nemotron_h_moe(keys: Keys) -> ModelConfig:
    """NVIDIA Nemotron 3 Nano and Super. As nemotron_h, with experts without gates in the place of dense blocks, and a
    shared one; in some models the experts get fewer columns."""

    def experts(own: Keys) -> Block:
        if not own.integer("expert_count", 0, minimum=0):
            return read_feed_forward(own, act="relu_sq", gated=False)
        shared = own.integer("expert_shared_feed_forward_length", 0, minimum=0)
        return read_experts(
            own,
            own.integer("expert_feed_forward_length"),
            gating="sigmoid",
            act="relu",
            gated=False,
            latent=own.integer("moe_latent_size", 0, minimum=0),
            **experts_weighting(own),
            groups=own.integer("expert_group_count", 1, minimum=0) or 1,
            groups_used=own.integer("expert_group_used_count", 1, minimum=0) or 1,
            selection_bias=own.owns("exp_probs_b.bias"),
            shared=shared_expert(shared, act="relu_sq", gated=False),
        )

    return _read_single(keys, experts)


def _read_single(keys: Keys, block: Callable[[Keys], Block]) -> ModelConfig:
    """A model whose layers each have a mixer or a block only. block: makes a layer's block from its keys."""
    mixers = attention_or(keys, read_mamba2(keys), "")
    sizes = keys.integers("feed_forward_length", len(mixers), minimum=0)
    layers = [
        LayerConfig(None, block(own), feed_forward_norms=NORM) if size else LayerConfig(mixer, None, mixer_norms=NORM)
        for own, mixer, size in zip(each_layer(keys), mixers, sizes, strict=True)
    ]
    return read_model(keys, layers, {})


@architecture("granite")
@architecture("granitemoe")
def granite(keys: Keys) -> ModelConfig:
    """IBM Granite 3 and 4. As llama, with factors on the embedding, the attention's scores, the outputs of the blocks
    and the logits; in some models experts in every layer, and a shared expert."""
    return _read_granite(keys, [read_attention(own, **_granite_attention(own)) for own in each_layer(keys)])


@architecture("minicpm")
def minicpm(keys: Keys) -> ModelConfig:
    """MiniCPM 1 and 2. As granite, with factors that follow from the sizes where the file has none."""
    hidden, count = keys.integer("embedding_length"), read_layers(keys)
    factors = {"embedding_scale": 12.0, "residual_scale": 1.4 / count**0.5, "logit_scale": 256.0 / hidden}
    return _read_granite(keys, [read_attention(own) for own in each_layer(keys)], factors)


@architecture("granite_swa")
def granite_swa(keys: Keys) -> ModelConfig:
    """IBM Granite with sinks; some layers attend to a window of keys, some have no RoPE."""
    count, window = read_layers(keys), keys.integer("attention.sliding_window")
    local, rotated = (
        keys.flags("attention.sliding_window_pattern", count),
        keys.integers("attention.rope_pattern", count, 1, minimum=0),
    )
    scale = keys.number("attention.scale", 0.0, minimum=0.0)
    mixers = [
        read_attention(own, ROPE if rotates else "", sinks=True, scale=scale, window=window if is_local else 0)
        for own, is_local, rotates in zip(each_layer(keys), local, rotated, strict=True)
    ]
    return _read_granite(keys, mixers, merged=True)


@architecture("granitehybrid", "states")
def granitehybrid(keys: Keys) -> ModelConfig:
    """IBM Granite 4 H. Most layers are selective state spaces (Mamba-2), the others attention; the number of KV heads,
    layer by layer, says which. Every layer has a dense block, or experts and a shared expert."""
    return _read_granite(keys, attention_or(keys, read_mamba2(keys), **_granite_attention(keys)))


def _granite_attention(keys: Keys) -> dict[str, Any]:
    """The fields of Granite's AttentionConfig."""
    return {
        "rope": ROPE if keys.flag("rope.scaling.finetuned", True) else "",
        "scale": keys.number("attention.scale", 0.0, minimum=0.0),
    }


def _read_granite(
    keys: Keys, mixers: Sequence[Mixer], factors: Mapping[str, float] = MappingProxyType({}), merged: bool = False
) -> ModelConfig:
    """A model whose layers have these mixers. factors: by key, used if the file has none. merged: whether the shared
    expert's gate and up are merged.

    The original's residual stream x is kept as x / residual_scale: then blocks add their outputs without a factor, and
    norms, whose results do not depend on a factor of x, only need another epsilon.
    """

    def factor(key: str) -> float:
        return keys.number(key, factors.get(key, 0.0), minimum=0.0) or 1.0

    residual = factor("residual_scale")
    shared = shared_expert(keys.integer("expert_shared_feed_forward_length", 0, minimum=0), merged=merged)
    layers = [
        LayerConfig(mixer, dense_or_experts(own, gating="softmax", shared=shared))
        for own, mixer in zip(each_layer(keys), mixers, strict=True)
    ]
    return read_model(
        keys,
        layers,
        rotations(keys, layers, neox=False),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon") / residual**2,
        embedding_scale=factor("embedding_scale") / residual,
        logit_scale=1.0 / factor("logit_scale"),
    )


# ---- delta nets


@architecture("qwen35", "dense", "states")
def qwen35(keys: Keys) -> ModelConfig:
    """Qwen 3.5 and later, dense. Three of four layers are delta nets, the others attention with partial RoPE, head
    norms and an output gate. The last layer, with attention, is for multi-token prediction."""
    return _read_qwen(keys, read_feed_forward)


@architecture("qwen35moe", "experts", "shared", "states")
def qwen35moe(keys: Keys) -> ModelConfig:
    """Qwen 3.5 and later with experts and a gated shared expert in every layer."""
    return _read_qwen(keys, qwen_experts)


@architecture("qwen3next", "experts", "shared")
def qwen3next(keys: Keys) -> ModelConfig:
    """As qwen35moe, with value heads in the order of their key heads, and merged inputs of the delta nets."""
    split = any(name.endswith("attn_gate.weight") for name in keys.tensors)
    return _read_qwen(keys, qwen_experts, grouped=True, merged_gates=True, merged_inputs=not split)


def qwen_experts(keys: Keys) -> ExpertsConfig:
    size = keys.integer("expert_feed_forward_length")
    shared = keys.integer("expert_shared_feed_forward_length", 0, minimum=0) or size
    shared = SharedExpertConfig(shared, gated_output=True)
    return read_experts(keys, size, gating="softmax", shared=shared)


def _read_qwen(keys: Keys, block: Callable[[Keys], Block], **variant) -> ModelConfig:
    """A model of delta nets and attention, with this block in each layer. `variant`: fields of DeltaNetConfig."""
    predicting, delta = predicting_layers(keys), delta_net(keys, **variant)
    recurrent = [*recurrent_layers(keys, predicting.count), False]

    def layer(own: Keys) -> LayerConfig:
        if recurrent[own.layer or 0]:
            return LayerConfig(delta, block(own), **NORMS_BEFORE)
        attention = read_attention(own, head_norms=True, output_gate=True, merged_qkv=False)
        check_multiple(keys, "columns of all heads", attention.heads * attention.head_dim)
        return LayerConfig(attention, block(own), **NORMS_BEFORE)

    layers = predicting.of(layer)
    # of merged and separate inputs, should a file have both, llama.cpp takes the separate ones
    twice = () if delta.merged_inputs else tuple(name for name in keys.tensors if ".ssm_in." in name)
    return read_model(keys, layers, rotations(keys, layers, neox=True), unused=(*predicting.unused, *twice))


def recurrent_layers(keys: Keys, count: int) -> list[bool]:
    """For each layer, whether it is a delta net."""
    if keys.has("attention.recurrent_layers"):
        return keys.flags("attention.recurrent_layers", read_layers(keys))[:count]
    interval = keys.integer("full_attention_interval", INTERVAL)
    return [(i + 1) % interval != 0 for i in range(count)]


def delta_net(keys: Keys, **variant) -> DeltaNetConfig:
    key_heads, value_heads = keys.integer("ssm.group_count"), keys.integer("ssm.time_step_rank")
    size = keys.integer("ssm.state_size")
    if value_heads % key_heads:
        raise keys.error(
            f"value heads ({value_heads}) must be a multiple of key heads ({key_heads}) to be compiled; use another "
            "model"
        )
    check_heads(keys, value_heads, size)
    return DeltaNetConfig(key_heads, value_heads, size, read_taps(keys, "ssm.conv_kernel"), **variant)


def check_heads(keys: Keys, heads: int, size: int) -> None:
    check_multiple(keys, "columns of a head of delta nets", size, VECTOR)
    check_multiple(keys, "columns of all heads of delta nets", heads * size)


@architecture("kimi-linear", ignored=("attn_q.bias", "attn_k.bias", "attn_v.bias"))
def kimi_linear(keys: Keys) -> ModelConfig:
    """Kimi Linear. Most layers are delta nets whose states decay channel by channel, the others latent attention
    without rotation; the number of KV heads, layer by layer, says which. After a few dense layers, layers have experts
    and a shared expert."""
    heads, size = keys.at(0).integer("attention.head_count"), keys.integer("kda.head_dim")
    check_heads(keys, heads, size)
    delta = ChannelDeltaConfig(heads, size, read_taps(keys, "ssm.conv_kernel"))
    kv_heads = keys.integers("attention.head_count_kv", read_layers(keys), minimum=0)
    return read_uniform(
        keys,
        neox=False,
        mixer=lambda own: latent_attention(own, "") if kv_heads[own.layer or 0] else delta,
        block=dense_then(keys, _kimi_experts),
    )


def _kimi_experts(keys: Keys) -> ExpertsConfig:
    size = keys.integer("expert_feed_forward_length")
    return read_experts(
        keys,
        size,
        scale=keys.number("expert_weights_scale", 1.0, minimum=0.0) or 1.0,
        selection_bias=keys.owns("exp_probs_b.bias"),
        shared=shared_expert(size * keys.integer("expert_shared_count", 0, minimum=0)),
    )


@architecture("bailingmoe3", ignored=(*PLAIN_QKV, "attn_output.scale"))
def bailingmoe3(keys: Keys) -> ModelConfig:
    """Ling 3, Ring. As kimi-linear; decays have a bound, latent attention a RoPE and gates on the output of heads,
    blocks limits."""
    kv_heads = keys.integers("attention.head_count_kv", read_layers(keys), minimum=0)
    bound = keys.number("kda.gate_lower_bound", minimum=-math.inf)
    if not keys.flag("kda.safe_gate", True) or not -math.inf < bound < 0.0:
        raise keys.error("decays without a bound are not known of bailingmoe3; convert the model again")
    heads, size = max(keys.integers("attention.head_count", len(kv_heads), minimum=0)), keys.integer("kda.head_dim")
    check_heads(keys, heads, size)
    taps = read_taps(keys, "ssm.conv_kernel")
    delta = ChannelDeltaConfig(heads, size, taps, bound, decays=("ssm_f_a",), gates=("ssm_g_a",))
    predicting = predicting_layers(keys, known=False)

    def act(own: Keys, key: str) -> str:
        limit = own.number(f"swiglu_clamp_{key}", 0.0, minimum=0.0)
        return f"{CUT}{limit}" if limit else "silu"

    def block(own: Keys) -> Block:
        if (own.layer or 0) < keys.integer("leading_dense_block_count", 0, minimum=0):
            return dense(own, act(own, "shexp"))
        each = own.integer("expert_feed_forward_length")
        size = own.integer("expert_shared_feed_forward_length", 0, minimum=0)
        shared = shared_expert(size or each * max(1, own.integer("expert_shared_count", 1)), act=act(own, "shexp"))
        bias = own.owns("exp_probs_b.bias")
        fields: dict[str, Any] = experts_weighting(own) | {"selection_bias": bias, "shared": shared}
        return read_experts(own, each, act=act(own, "exp"), **fields)

    def mixer(own: Keys) -> Mixer:
        gate: dict[str, Any] = {"own_gate": "sigmoid", "head_gate": True}
        return latent_attention(own, ROPE, **gate) if kv_heads[own.layer or 0] else delta

    layers = predicting.of(lambda own: LayerConfig(mixer(own), block(own)))
    rotating = keys.integer("rope.dimension_count")
    ropes = {ROPE: read_rope(keys, rotating, neox=False, dim=rotating)}
    return read_model(keys, layers, ropes, unused=predicting.unused)


# ---- short convolutions


@architecture("lfm2")
def lfm2(keys: Keys) -> ModelConfig:
    """LFM2 and LFM2.5. Most layers are short gated convolutions, the others attention with head norms; the number of KV
    heads, layer by layer, says which."""
    return _read_lfm2(keys, read_feed_forward)


@architecture("lfm2moe")
def lfm2moe(keys: Keys) -> ModelConfig:
    """As lfm2, with experts after the leading dense layers, chosen by sigmoid (which the file says) and a bias."""
    return _read_lfm2(keys, dense_then(keys, experts_alone(selection_bias=True)))


def _read_lfm2(keys: Keys, block: Callable[[Keys], Block]) -> ModelConfig:
    window = keys.integer("attention.sliding_window", 0, minimum=0)
    conv = ShortConvConfig(read_taps(keys, "shortconv.l_cache"))
    check_multiple(keys, "hidden size", keys.integer("embedding_length"))
    mixers = attention_or(keys, conv, ROPE, head_norms=True, window=window)
    layers = [LayerConfig(mixer, block(own)) for own, mixer in zip(each_layer(keys), mixers, strict=True)]
    return read_model(keys, layers, rotations(keys, layers, neox=True), output_norm="token_embd_norm")
