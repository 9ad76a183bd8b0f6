"""Decoders most of whose layers keep states: for each column, as in Mamba-1, or for each head without gates. The other
layers are attention."""

from functools import partial
from typing import Any

from mlc_amd.compiler.models.architectures.local import NORMS_BARE
from mlc_amd.compiler.models.architectures.stateful import VECTOR
from mlc_amd.compiler.models.config import Block, LayerConfig, Mixer, ModelConfig, Norms
from mlc_amd.compiler.models.metadata import (
    ROPE,
    Keys,
    attention_or,
    check_multiple,
    dense,
    each_layer,
    read_attention,
    read_experts,
    read_feed_forward,
    read_layers,
    read_model,
    read_taps,
    read_uniform,
    rotations,
)
from mlc_amd.compiler.models.recurrent_config import LinearAttentionConfig, MambaConfig
from mlc_amd.compiler.models.registry import architecture


@architecture("mamba", "states")
def mamba(keys: Keys) -> ModelConfig:
    """Mamba-1, Falcon Mamba. Every layer is a selective state space, without a feed-forward block."""
    norms = "bare" if keys.flag("ssm.dt_b_c_rms", False) else ""
    return read_model(keys, [LayerConfig(read_mamba(keys, norms=norms), None)] * read_layers(keys), {})


def read_mamba(keys: Keys, **variant) -> MambaConfig:
    """The state space, which is the same in all layers that have one. `variant`: fields of MambaConfig that replace the
    file's."""
    inner, state = keys.integer("ssm.inner_size"), keys.integer("ssm.state_size")
    check_multiple(keys, "inner size of the state space", inner)
    check_multiple(keys, "state's size", state, VECTOR)
    fields: dict[str, Any] = {"rank": variant.pop("rank", 0) or keys.integer("ssm.time_step_rank")} | variant
    return MambaConfig(inner, state, taps=read_taps(keys, "ssm.conv_kernel"), **fields)


@architecture("jamba", "states")
def jamba(keys: Keys) -> ModelConfig:
    """Jamba. Most layers are selective state spaces with norms, the others attention without RoPE; the number of KV
    heads, layer by layer, says which. Some layers have experts."""
    mixers = attention_or(keys, read_mamba(keys, norms="weight"), "")

    def block(own: Keys) -> Block:
        if not own.owns("ffn_gate_inp.weight"):
            return dense(own)
        scale = own.number("expert_weights_scale", 1.0, minimum=0.0) or 1.0
        return read_experts(own, own.integer("feed_forward_length"), gating="softmax", normalize=False, scale=scale)

    layers = [LayerConfig(mixer, block(own)) for own, mixer in zip(each_layer(keys), mixers, strict=True)]
    return read_model(keys, layers, {})


@architecture("plamo2", ignored=("attn_qkv.scale",))
def plamo2(keys: Keys) -> ModelConfig:
    """PLaMo 2. Most layers are selective state spaces with norms and a decay for each head, the others attention with
    norms of each head of q and of k; norms around the blocks."""
    heads, rank = keys.integer("ssm.time_step_rank"), max(64, keys.integer("embedding_length") // 16)
    state_space = read_mamba(keys, rank=rank, heads=heads, norms="short")
    mixers = attention_or(keys, state_space, ROPE, each_norm="rms")
    block = partial(read_feed_forward, merged=True)
    layers = [LayerConfig(mixer, block(own), **NORMS_BARE) for own, mixer in zip(each_layer(keys), mixers, strict=True)]
    return read_model(keys, layers, rotations(keys, layers, neox=True))


@architecture("minimax-01")
def minimax_01(keys: Keys) -> ModelConfig:
    """MiniMax 01. Seven of eight layers have linear attention, whose states decay, the last one attention; experts in
    every layer. The residual that a block's result is added to is the normed stream, times a factor."""
    count = read_layers(keys)
    if keys.has("attention.recurrent_layers"):
        linear = keys.flags("attention.recurrent_layers", count)
    else:
        interval = keys.integer("full_attention_interval", 8)
        linear = [(i + 1) % interval != 0 for i in range(count)]
    residual = keys.number("residual_scale")
    norms = {
        "mixer_norms": Norms("attn_norm", residual=residual),
        "feed_forward_norms": Norms("ffn_norm", residual=residual),
    }

    def mixer(own: Keys) -> Mixer:
        i, attention = own.layer or 0, read_attention(own)
        if not linear[i]:
            return attention
        check_multiple(keys, "columns of a head", attention.head_dim, VECTOR)
        return LinearAttentionConfig(attention.heads, attention.head_dim, 1.0 - i / max(count - 1, 1) + 1e-5)

    def block(own: Keys) -> Block:
        scale, bias = own.number("expert_weights_scale", 1.0, minimum=0.0) or 1.0, own.owns("exp_probs_b.bias")
        return read_experts(own, own.integer("feed_forward_length"), gating="softmax", scale=scale, selection_bias=bias)

    return read_uniform(keys, True, mixer, block, norms)
