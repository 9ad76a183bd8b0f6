"""More decoders in which some layers attend to a window of keys only; many have gates on attention's output."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from mlc_amd.compiler.models.architectures.mixtures import HEAD_NORMS, beside_shared, idle_blocks
from mlc_amd.compiler.models.architectures.uniform import (
    deepseek_experts,
    indexed_rotations,
    latent_attention,
    read_indexer,
)
from mlc_amd.compiler.models.config import BARE, AttentionConfig, Block, LayerConfig, ModelConfig, Norms
from mlc_amd.compiler.models.metadata import (
    LOCAL_ROPE,
    NORMS_AROUND,
    ROPE,
    SHARED_NORM,
    Keys,
    dense,
    dense_then,
    each_layer,
    experts_alone,
    experts_weighting,
    last_of,
    local_layers,
    predicting_layers,
    read_attention,
    read_experts,
    read_feed_forward,
    read_layers,
    read_model,
    rotations,
    shared_expert,
)
from mlc_amd.compiler.models.registry import architecture
from mlc_amd.schedules.operators.experts import CUT, LIMITED

# Of mimo2: what llama.cpp does not use
PLAIN_QKV = tuple(f"attn_{which}.{what}" for which in ("q", "k", "v", "qkv") for what in ("bias", "scale"))
POST_EPS = 1e-8  # muse-glimmer: of norms after blocks
NOPE_STEP = 4  # afmoe: of so many layers the last one has no RoPE
NORMS_BARE: dict[str, Any] = {  # as NORMS_AROUND, where the names of the second ones are without ".weight"
    "mixer_norms": Norms("attn_norm", "post_attention_norm", bare="after"),
    "feed_forward_norms": Norms("ffn_norm", "post_ffw_norm", bare="after"),
}


def _windows(keys: Keys, pattern: int, dense_first: bool = False) -> list[int]:
    """The keys to which each layer's rows attend; 0: all."""
    count, window = read_layers(keys), keys.integer("attention.sliding_window", 0, minimum=0)
    local = local_layers(keys, count, pattern, dense_first) if window else [False] * count
    return [window if is_local else 0 for is_local in local]


def _layers(
    keys: Keys, windows: list[int], mixer: Callable[[Keys, int], AttentionConfig], block: Callable[[Keys], Block],
    **norms: Any,
) -> list[LayerConfig]:  # fmt: skip
    """The layers. mixer: makes a layer's mixer from its keys and its window."""
    return [
        LayerConfig(mixer(own, window), block(own), **norms)
        for own, window in zip(each_layer(keys, len(windows)), windows, strict=True)
    ]


@architecture("mellum", "experts")
def mellum(keys: Keys) -> ModelConfig:
    """Mellum 2. As qwen3moe; three of four layers attend to a window, with an unscaled RoPE."""

    def mixer(own: Keys, window: int) -> AttentionConfig:
        return HEAD_NORMS(own, rope=LOCAL_ROPE if window else ROPE, window=window)

    layers = _layers(keys, _windows(keys, 4), mixer, experts_alone("softmax"))
    ropes = rotations(keys, layers, True) | rotations(keys, layers, True, LOCAL_ROPE, scaled=False)
    return read_model(keys, layers, ropes)


@architecture("exaone-moe")
def exaone_moe(keys: Keys) -> ModelConfig:
    """K-EXAONE. Norms over the heads of q and k; three of four layers attend to a window and have RoPE, the last has
    neither; after a few dense layers experts and a shared one."""

    def experts(own: Keys) -> Block:
        size = own.integer("expert_shared_feed_forward_length", 0, minimum=0)
        return beside_shared(own, **({"shared": shared_expert(size)} if size else {}))

    predicting = predicting_layers(keys, known=False)
    windows = _windows(keys, 4)[: predicting.count]

    def mixer(own: Keys, window: int) -> AttentionConfig:
        return HEAD_NORMS(own, rope=ROPE if window else "", window=window)

    layers = _layers(keys, windows, mixer, dense_then(keys, experts))
    base = keys.number("rope.freq_base_swa", keys.number("rope.freq_base", 10000.0))
    return read_model(keys, layers, rotations(keys, layers, True, base=base), unused=predicting.unused)


@architecture("afmoe")
def afmoe(keys: Keys) -> ModelConfig:
    """Trinity. Norms around the blocks and over the heads of q and k, gates on attention's output, scaled embedding;
    three of four layers attend to a window and have RoPE; after a few dense layers experts and shared ones."""

    def mixer(own: Keys, window: int) -> AttentionConfig:
        return HEAD_NORMS(own, rope="" if last_of(own, NOPE_STEP) else ROPE, window=window, own_gate="sigmoid")

    def experts(own: Keys) -> Block:
        return beside_shared(own, gating="" if own.integer("expert_gating_func", 0, minimum=0) else "sigmoid")

    layers = _layers(keys, _windows(keys, 4), mixer, dense_then(keys, experts), **NORMS_AROUND)
    scale = keys.integer("embedding_length") ** 0.5
    return read_model(keys, layers, rotations(keys, layers, neox=True), embedding_scale=scale)


@architecture("laguna")
def laguna(keys: Keys) -> ModelConfig:
    """Laguna. Norms over the heads of q and k, gates on attention's output; the first of four layers attends to all
    keys, the others to a window, with a RoPE of their own; after a few dense layers experts and a shared one."""

    def mixer(own: Keys, window: int) -> AttentionConfig:
        of_heads = own.rows(f"blk.{own.layer}.attn_gate.weight") in (0, own.integer("attention.head_count"))
        rope = LOCAL_ROPE if window else ROPE
        return HEAD_NORMS(own, rope=rope, window=window, own_gate="softplus", head_gate=of_heads)

    def experts(own: Keys) -> Block:
        size = own.integer("expert_shared_feed_forward_length", 0, minimum=0)
        gating = "" if own.integer("expert_gating_func", 0, minimum=0) else "sigmoid"
        return beside_shared(own, gating=gating, **({"shared": shared_expert(size)} if size else {}))

    layers = _layers(keys, _windows(keys, 4, dense_first=True), mixer, dense_then(keys, experts))
    base = keys.number("rope.freq_base_swa", keys.number("rope.freq_base", 10000.0))
    local = {"scaled": False, "base": base, "dim": keys.integer("rope.dimension_count_swa", 0, minimum=0) or None}
    return read_model(keys, layers, rotations(keys, layers, True) | rotations(keys, layers, True, LOCAL_ROPE, **local))


@architecture("smallthinker")
def smallthinker(keys: Keys) -> ModelConfig:
    """SmallThinker. Experts with a relu gate, chosen by the layer's input. If the file has a window, the first of four
    layers attends to all keys and has no RoPE."""
    windows = _windows(keys, 4, dense_first=True)
    windows = [4096 if window else 0 for window in windows]  # whatever the file says

    def mixer(own: Keys, window: int) -> AttentionConfig:
        return read_attention(own, rope=ROPE if window or not any(windows) else "", window=window)

    layers = _layers(keys, windows, mixer, experts_alone(act="relu", early=True))
    return read_model(keys, layers, rotations(keys, layers, neox=True))


@architecture("plamo3", ignored=("attn_qkv.scale",))
def plamo3(keys: Keys) -> ModelConfig:
    """PLaMo 3. Norms around the blocks and over the heads of q and k; seven of eight layers attend to a window, with a
    RoPE of their own."""

    def mixer(own: Keys, window: int) -> AttentionConfig:
        return HEAD_NORMS(own, rope=LOCAL_ROPE if window else ROPE, window=window)

    layers = _layers(keys, _windows(keys, 8), mixer, partial(read_feed_forward, merged=True), **NORMS_BARE)
    local = {"scaled": False, "base": keys.number("rope.freq_base_swa", 10000.0)}
    return read_model(keys, layers, rotations(keys, layers, True) | rotations(keys, layers, True, LOCAL_ROPE, **local))


@architecture("spark2_5")
def spark(keys: Keys) -> ModelConfig:
    """Spark 2.5. Gates on the output of heads, GELU; some layers attend to a window of keys."""

    def mixer(own: Keys, window: int) -> AttentionConfig:
        return read_attention(own, window=window, own_gate="sigmoid", head_gate=True)

    layers = _layers(keys, _windows(keys, 4), mixer, partial(read_feed_forward, act="gelu"))
    return read_model(keys, layers, rotations(keys, layers, neox=True))


@architecture("muse-glimmer")
def muse_glimmer(keys: Keys) -> ModelConfig:
    """Muse Glimmer. Norms around the blocks and over the heads of q and k, gates on attention's output, a normalized
    embedding, scaled and capped logits; three of four layers attend to a window and have RoPE."""

    def mixer(own: Keys, window: int) -> AttentionConfig:
        return HEAD_NORMS(own, rope=ROPE if window else "", window=window, own_gate="sigmoid")

    norms = {name: replace(around, after_eps=POST_EPS) for name, around in NORMS_AROUND.items()}
    layers = _layers(keys, _windows(keys, 4), mixer, read_feed_forward, **norms)
    cap = keys.number("final_logit_softcapping", 0.0, minimum=0.0)
    logits = {"logit_scale": keys.number("logit_scale"), "logit_softcap": cap}
    return read_model(keys, layers, rotations(keys, layers, neox=False), embedding_norm=BARE, **logits)


@architecture("cohere2moe", "dense", "experts", "shared")
def cohere2moe(keys: Keys) -> ModelConfig:
    """Command A+. As cohere2, but the first of four layers attends to all keys; after a few dense layers experts, whose
    output is averaged with that of a shared one."""
    leading = keys.integer("leading_dense_block_count", minimum=0)
    norm = "rms" if keys.number("attention.layer_norm_rms_epsilon", 0.0, minimum=0.0) else "layer"
    predicting = predicting_layers(keys, known=False)
    windows = _windows(keys, 4, dense_first=True)[: predicting.count]

    def mixer(own: Keys, window: int) -> AttentionConfig:
        return read_attention(own, rope=ROPE if window or (own.layer or 0) < leading else "", window=window)

    def experts(own: Keys) -> Block:
        size, count = own.integer("expert_feed_forward_length"), own.integer("expert_shared_count", 0, minimum=0)
        gating = "" if own.integer("expert_gating_func", 0, minimum=0) else "sigmoid"
        fields: dict[str, Any] = experts_weighting(own) | {"gating": gating}
        if count:
            shared = own.integer("expert_shared_feed_forward_length", 0, minimum=0) or size * count
            fields |= {"shared": shared_expert(shared, factor=0.5), "scale": fields["scale"] / 2}
        return read_experts(own, size, **fields)

    layers = _layers(keys, windows, mixer, dense_then(keys, experts), **SHARED_NORM)
    ropes, scale = rotations(keys, layers, neox=False), keys.number("logit_scale", minimum=0.0) or 1.0
    return read_model(keys, layers, ropes, norm=norm, logit_scale=scale, unused=predicting.unused)


@architecture("maple")
def maple(keys: Keys) -> ModelConfig:
    """Maple. Norms over the heads of q and k; some layers attend to a window and have RoPE, the others neither; experts
    with limits in every layer."""

    def mixer(own: Keys, window: int) -> AttentionConfig:
        return HEAD_NORMS(own, rope=ROPE if window else "", window=window)

    def experts(own: Keys) -> Block:
        limit = own.number("swiglu_clamp_exp", 0.0, minimum=0.0)
        act = f"{LIMITED}{limit}" if limit else "silu"
        return read_experts(own, own.integer("expert_feed_forward_length"), gating="softmax", act=act)

    layers = _layers(keys, _windows(keys, 4), mixer, experts)
    base = keys.number("rope.freq_base_swa", keys.number("rope.freq_base", 10000.0))
    return read_model(keys, layers, rotations(keys, layers, neox=True, base=base))


@architecture("mimo2", ignored=PLAIN_QKV)
def mimo2(keys: Keys) -> ModelConfig:
    """MiMo 2. Values shorter than keys; some layers attend to a window, with a RoPE of their own, and have sinks; in
    most layers experts."""
    predicting = predicting_layers(keys, known=False)
    windows = _windows(keys, 1)[: predicting.count]
    factor = keys.number("attention.value_scale", 0.0, minimum=0.0) or 1.0

    def mixer(own: Keys, window: int) -> AttentionConfig:
        rope, sinks = LOCAL_ROPE if window else ROPE, own.owns("attn_sinks.weight")
        return read_attention(own, rope, window=window, sinks=sinks, value_dim=own.integer("attention.value_length"))

    def block(own: Keys) -> Block:
        if not own.owns("ffn_gate_inp.weight"):
            return dense(own)
        scale = own.number("expert_weights_scale", 1.0, minimum=0.0) or 1.0
        bias = own.owns("exp_probs_b.bias")
        size = own.integer("expert_feed_forward_length")
        return read_experts(own, size, gating="sigmoid", scale=scale, selection_bias=bias)

    layers = _layers(keys, windows, mixer, block, mixer_norms=Norms("attn_norm", factor=factor))
    local = {"scaled": False, "base": keys.number("rope.freq_base_swa", 10000.0)}
    ropes = rotations(keys, layers, True) | rotations(keys, layers, True, LOCAL_ROPE, **local)
    return read_model(keys, layers, ropes, unused=(*predicting.unused, *idle_blocks(keys)))


@architecture("step35")
def step35(keys: Keys) -> ModelConfig:
    """Step 3.5. Norms over the heads of q and k, gates on the output of heads; most layers attend to a window, with
    heads and a RoPE of their own, the others rotate half as many columns; in most layers experts with limits and a
    shared one."""
    predicting = predicting_layers(keys, known=False)
    windows = _windows(keys, 4, dense_first=True)[: predicting.count]

    def mixer(own: Keys, window: int) -> AttentionConfig:
        gate: dict[str, Any] = {"own_gate": "sigmoid", "head_gate": True} if own.owns("attn_gate.weight") else {}
        norms = own.owns("attn_q_norm.weight")
        return read_attention(own, LOCAL_ROPE if window else ROPE, window=window, head_norms=norms, **gate)

    def act(own: Keys, key: str) -> str:
        limit = own.number(f"swiglu_clamp_{key}", 0.0, minimum=0.0)
        return f"{CUT}{limit}" if limit else "silu"

    def block(own: Keys) -> Block:
        if not own.owns("ffn_gate_inp.weight"):
            return dense(own)
        gating = "" if own.integer("expert_gating_func", 0, minimum=0) else "sigmoid"
        shared = shared_expert(own.integer("expert_shared_feed_forward_length"), act=act(own, "shexp"))
        return beside_shared(own, gating=gating, act=act(own, "exp"), shared=shared)

    layers, dim = _layers(keys, windows, mixer, block), keys.integer("rope.dimension_count")
    base = keys.number("rope.freq_base_swa", 10000.0)
    local = {"scaled": False, "base": base, "dim": keys.integer("rope.dimension_count_swa", dim), "factors": ""}
    ropes = rotations(keys, layers, True, dim=dim // 2) | rotations(keys, layers, True, LOCAL_ROPE, **local)
    return read_model(keys, layers, ropes, unused=(*predicting.unused, *idle_blocks(keys)))


@architecture("dots3note", "dense", "experts", "shared")
def dots3note(keys: Keys) -> ModelConfig:
    """dots 3. Latent attention with a norm of the key's rotating columns and gates on the output of heads; some layers
    attend to a window, with sizes and a RoPE of their own, the others to the keys that an indexer chooses."""
    predicting, block = predicting_layers(keys, known=False), dense_then(keys, deepseek_experts)
    windows = _windows(keys, 4)[: predicting.count]
    gate: dict[str, Any] = {"own_gate": "sigmoid", "head_gate": True}

    def mixer(own: Keys, window: int) -> AttentionConfig:
        if window:
            return latent_attention(own, LOCAL_ROPE, local="_swa", window=window, **gate)
        return latent_attention(own, ROPE, indexer=read_indexer(own, True), **gate)

    layers, ropes = _layers(keys, windows, mixer, block), indexed_rotations(keys, neox=True)
    local = {LOCAL_ROPE: replace(ropes[ROPE], base=keys.number("rope.freq_base_swa", 10000.0))}
    return read_model(keys, layers, ropes | local, unused=predicting.unused)
