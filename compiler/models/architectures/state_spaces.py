"""Decoders of selective state spaces (Mamba-2), alone and with attention."""

from collections.abc import Callable

from mlc_amd.compiler.models.config import (
    ExpertsConfig,
    FeedForwardConfig,
    LayerConfig,
    Mamba2Config,
    ModelConfig,
    Norms,
)
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import (
    attention_or,
    check_multiple,
    experts_weighting,
    feed_forward,
    read_experts,
    read_layers,
    read_model,
    read_taps,
    read_uniform,
    shared_expert,
)
from mlc_amd.compiler.models.registry import architecture

VECTOR = 16  # columns that kernels take at once
NORM = Norms(before="attn_norm")  # of every layer of nemotron_h, whatever it is


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


def _read_single(keys: Keys, block: Callable[[int], FeedForwardConfig | ExpertsConfig]) -> ModelConfig:
    """A model whose layers are one thing each. block: the feed-forward block of that many columns."""
    mixers, _ = attention_or(keys, read_mamba2(keys), "")
    layers = [
        LayerConfig(None, block(size), feed_forward_norms=NORM) if size else LayerConfig(mixer, None, mixer_norms=NORM)
        for mixer, size in zip(mixers, keys.integers("feed_forward_length", len(mixers), minimum=0), strict=True)
    ]
    return read_model(keys, layers, {})
