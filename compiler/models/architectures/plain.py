"""Decoders that differ from llama in a few points: norms with a mean, other activations, positions, limits."""

from functools import partial

from mlc_amd.compiler.models.config import BARE, FeedForwardConfig, LayerConfig, ModelConfig, Norms
from mlc_amd.compiler.models.metadata import (
    ROPE,
    SHARED_NORM,
    Keys,
    each_layer,
    read_attention,
    read_feed_forward,
    read_layers,
    read_model,
    read_uniform,
    rotations,
)
from mlc_amd.compiler.models.registry import architecture

UNGATED_GELU = partial(read_feed_forward, act="gelu", gated=False)
SQUARES = partial(read_feed_forward, act="relu_sq", gated=False)
# Of cogvlm: what llama.cpp does not use of texts
VISUAL = ("attn_qkv.scale", *(f"vis_{name}.weight" for name in ("attn_qkv", "attn_output", "gate", "up", "down")))
ALIBI = 8.0  # largest bias of models whose files do not say it
BAICHUAN_7B, BAICHUAN_13B = 32, 40  # layers
COMMAND_R_PLUS = 64  # layers from which on heads of q and k have norms


@architecture("internlm2")
@architecture("xverse")
def internlm2(keys: Keys) -> ModelConfig:
    """InternLM 2, XVERSE. As llama."""
    return read_uniform(keys, neox=False)


@architecture("exaone")
@architecture("pangu-embedded")
def exaone(keys: Keys) -> ModelConfig:
    """EXAONE 3, Pangu Embedded. As llama, with RoPE pairs half a head apart."""
    return read_uniform(keys, neox=True)


@architecture("qwen")
def qwen(keys: Keys) -> ModelConfig:
    """Qwen 1. As qwen2; the file counts the columns of gate and up together."""
    return read_uniform(keys, True, block=lambda own: FeedForwardConfig(own.integer("feed_forward_length") // 2))


@architecture("nanbeige", "dense")
def nanbeige(keys: Keys) -> ModelConfig:
    """Nanbeige. As llama."""
    if keys.integer("num_loops", 1) > 1:
        raise keys.error("the layers of this model are run several times, which is not supported; use another model")
    return read_uniform(keys, neox=False)


@architecture("arcee")
def arcee(keys: Keys) -> ModelConfig:
    """Arcee. As llama, with squares of relu instead of a gate."""
    return read_uniform(keys, neox=False, block=SQUARES)


@architecture("maincoder")
def maincoder(keys: Keys) -> ModelConfig:
    """Maincoder. As llama, with norms over the heads of q and k after RoPE."""
    return read_uniform(keys, False, partial(read_attention, head_norms=True, norm_after_rope=True))


@architecture("chatglm")
def chatglm(keys: Keys) -> ModelConfig:
    """ChatGLM 3 and GLM 4 9B. Partial RoPE; merged gate and up."""
    return read_uniform(keys, neox=False, block=partial(read_feed_forward, merged=True))


@architecture("openelm", ignored=("attn_qkv.scale",))
def openelm(keys: Keys) -> ModelConfig:
    """OpenELM. Heads and columns differ between layers; norms over the heads of q and k."""
    return read_uniform(keys, True, partial(read_attention, head_norms=True))


@architecture("cogvlm", ignored=VISUAL)
def cogvlm(keys: Keys) -> ModelConfig:
    """The decoder of CogVLM, for texts: images have matrices of their own, which are not read. As llama, with a plain
    RoPE, whose pairs are half a head apart."""
    return read_uniform(keys, neox=True, rope={"scaled": False, "base": 10000.0, "factors": ""})


@architecture("talkie", "dense", ignored=("ffn_gate.scale", "ffn_up.scale"))
def talkie(keys: Keys) -> ModelConfig:
    """Talkie. Norms without weights, before blocks, of the embedding and over the heads of q and k, with a factor on
    each of q; every layer adds the embedding with a factor; scaled logits."""
    mixer = partial(read_attention, head_factors=True)
    scale = keys.number("logit_scale", minimum=0.0) or 1.0
    return read_uniform(
        keys, True, mixer, norms={"skip": True}, norm_weights=False, embedding_norm=BARE, logit_scale=scale
    )


@architecture("deci")
def deci(keys: Keys) -> ModelConfig:
    """Llama Nemotron. As llama; heads and columns differ between layers, some of which lack attention or a block."""

    def layer(own: Keys) -> LayerConfig:
        heads, kv_heads = (own.integer(f"attention.{key}", minimum=0) for key in ("head_count", "head_count_kv"))
        if heads and not kv_heads:
            raise keys.error(f"layer {own.layer} has a matrix for attention, which is not supported; use another model")
        block = read_feed_forward(own) if own.integer("feed_forward_length", minimum=0) else None
        if heads and not block:
            raise keys.error(f"layer {own.layer} has attention alone, which is not supported; use another model")
        return LayerConfig(read_attention(own), block) if heads else LayerConfig(None, block, mixer_norms=Norms())

    layers = [layer(own) for own in each_layer(keys)]
    return read_model(keys, layers, rotations(keys, layers, neox=False))


# ---- norms with a mean


@architecture("orion")
def orion(keys: Keys) -> ModelConfig:
    """Orion. Layer norms."""
    return read_uniform(keys, neox=True, norm="layer")


@architecture("nemotron")
@architecture("jais2")
def nemotron(keys: Keys) -> ModelConfig:
    """Nemotron and Minitron, Jais 2. Layer norms; squares of relu instead of a gate."""
    return read_uniform(keys, neox=True, block=SQUARES, norm="layer")


@architecture("olmo")
def olmo(keys: Keys) -> ModelConfig:
    """OLMo 1. Layer norms without weights; q, k and v have limits in some models."""
    mixer = partial(read_attention, clamp=keys.number("attention.clamp_kqv", 0.0, minimum=0.0))
    return read_uniform(keys, False, mixer, norm="layer", norm_weights=False)


@architecture("codeshell")
def codeshell(keys: Keys) -> ModelConfig:
    """CodeShell. Layer norms; GELU without a gate."""
    return read_uniform(keys, neox=True, block=UNGATED_GELU, norm="layer")


@architecture("gpt2")
@architecture("starcoder")
def gpt2(keys: Keys) -> ModelConfig:
    """GPT-2, StarCoder 1. Learned positions, layer norms, GELU without a gate."""
    mixer, positions = partial(read_attention, rope=""), keys.integer("context_length")
    return read_uniform(keys, True, mixer, UNGATED_GELU, norm="layer", positions=positions)


# ---- ALiBi


@architecture("baichuan")
def baichuan(keys: Keys) -> ModelConfig:
    """Baichuan 1 and 2. As llama, with RoPE pairs half a head apart; the large model has ALiBi instead."""
    variant = {BAICHUAN_7B: {"rope": ROPE}, BAICHUAN_13B: {"rope": "", "alibi": ALIBI}}
    return read_uniform(keys, True, partial(read_attention, **variant.get(read_layers(keys), {"rope": ""})))


@architecture("bloom")
def bloom(keys: Keys) -> ModelConfig:
    """BLOOM. ALiBi, layer norms, one of them of the embedding, GELU without a gate."""
    mixer = partial(read_attention, rope="", alibi=ALIBI)
    return read_uniform(keys, True, mixer, UNGATED_GELU, norm="layer", embedding_norm="token_embd_norm")


@architecture("jais")
def jais(keys: Keys) -> ModelConfig:
    """Jais. ALiBi, layer norms; scores are divided by the columns of a head."""
    scale = 1.0 / read_attention(keys.at(0)).head_dim
    return read_uniform(keys, True, partial(read_attention, rope="", alibi=_alibi(keys), scale=scale), norm="layer")


@architecture("mpt")
def mpt(keys: Keys) -> ModelConfig:
    """MPT. ALiBi or learned positions, layer norms, GELU without a gate; in some models q, k and v have limits, or q
    and k norms."""
    normed = keys.owns("attn_q_norm.weight")
    mixer = partial(
        read_attention, rope="", alibi=_alibi(keys), row_norms=normed,
        clamp=keys.number("attention.clamp_kqv", 0.0, minimum=0.0),
    )  # fmt: skip
    block = partial(UNGATED_GELU, divided=keys.owns("ffn.act.scales"))
    unused = () if normed else tuple(name for name in keys.tensors if ".attn_k_norm." in name)
    positions = keys.integer("context_length") if "position_embd.weight" in keys.tensors else 0
    return read_uniform(keys, True, mixer, block, norm="layer", positions=positions, unused=unused)


@architecture("refact", ignored=("attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"))
def refact(keys: Keys) -> ModelConfig:
    """Refact. As llama, with ALiBi."""
    return read_uniform(keys, True, partial(read_attention, rope="", alibi=ALIBI))


def _alibi(keys: Keys) -> float:
    return keys.number("attention.max_alibi_bias", 0.0, minimum=0.0)


# ---- attention and a block beside one another


@architecture("plamo")
def plamo(keys: Keys) -> ModelConfig:
    """PLaMo. Attention and the block read the same norm."""
    return read_uniform(keys, neox=True, norms=SHARED_NORM)


@architecture("phi2")
def phi2(keys: Keys) -> ModelConfig:
    """Phi 1 and 2. Attention and a block without a gate read the same layer norm; partial RoPE."""
    return read_uniform(keys, neox=True, block=UNGATED_GELU, norms=SHARED_NORM, norm="layer")


@architecture("gptneox")
def gptneox(keys: Keys) -> ModelConfig:
    """GPT-NeoX, Pythia. Attention, and a block without a gate; in most models the two are parallel; partial RoPE."""
    norms = {"parallel": keys.flag("use_parallel_residual", True)}
    return read_uniform(keys, neox=True, block=UNGATED_GELU, norms=norms, norm="layer")


@architecture("falcon")
def falcon(keys: Keys) -> ModelConfig:
    """Falcon. As phi2; in large models attention reads a norm of its own."""
    own = {"parallel": True, "mixer_norms": Norms("attn_norm_2"), "feed_forward_norms": Norms("attn_norm")}
    norms = own if keys.owns("attn_norm_2.weight") else SHARED_NORM
    return read_uniform(keys, neox=True, block=UNGATED_GELU, norms=norms, norm="layer")


@architecture("stablelm")
def stablelm(keys: Keys) -> ModelConfig:
    """StableLM. Layer norms, partial RoPE; in some models norms of each head of q and of k, or attention and the block
    are parallel."""
    mixer = partial(read_attention, each_norm="layer" if keys.owns("attn_q_norm.weight") else "")
    norms = {} if keys.owns("ffn_norm.weight") else SHARED_NORM
    return read_uniform(keys, True, mixer, norms=norms, norm="layer")


@architecture("command-r")
def command_r(keys: Keys) -> ModelConfig:
    """Command R and R+. Attention and the block read the same layer norm; scaled logits; in the large model norms of
    each head of q and of k."""
    mixer = partial(read_attention, each_norm="layer" if read_layers(keys) >= COMMAND_R_PLUS else "")
    scale = keys.number("logit_scale", 0.0, minimum=0.0) or 1.0
    return read_uniform(keys, False, mixer, norms=SHARED_NORM, norm="layer", logit_scale=scale)
