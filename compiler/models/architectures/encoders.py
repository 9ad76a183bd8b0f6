"""Encoders: models that compute vectors of texts. Each token attends to all others of its text."""

from collections.abc import Callable
from functools import partial
from typing import Any

from mlc_amd.compiler.models.config import AttentionConfig, Block, LayerConfig, ModelConfig, Norms
from mlc_amd.compiler.models.encoders.metadata import read_encoder
from mlc_amd.compiler.models.metadata import (
    LOCAL_ROPE,
    NORMS_AROUND,
    ROPE,
    Keys,
    dense,
    each_layer,
    experts_alone,
    local_layers,
    read_attention,
    read_feed_forward,
    read_layers,
    read_model,
    read_uniform,
    rotations,
)
from mlc_amd.compiler.models.registry import architecture

# Norms after each block, of the sum with its input
NORMS_JOINED: dict[str, Any] = {
    "mixer_norms": Norms(joined="attn_output_norm"), "feed_forward_norms": Norms(joined="layer_output_norm"),
}  # fmt: skip
PLAIN = partial(dense, act="gelu", gated=False)
ALIBI = 8.0  # llama.cpp's f_max_alibi_bias of these models


Blocks = Callable[[Keys], Block]
Mixers = Callable[[Keys], AttentionConfig]


def _bert(
    keys: Keys, block: Blocks, rope: str = "", mixer: Mixers | None = None, norms: Any = NORMS_JOINED,
    positions: int = 0, **encoder: Any,
) -> ModelConfig:  # fmt: skip
    """Layer norms of the embeddings and after each block."""
    types = keys.integer("tokenizer.ggml.token_type_count", 0, minimum=0) if "token_types.weight" in keys.tensors else 0
    found = read_encoder(keys, required=True, types=types, norm=True, **encoder)
    mixer, model = mixer or partial(read_attention, rope=rope), {"positions": positions, "encoder": found}
    return read_uniform(keys, True, mixer, block, norms, norm="layer", output_norm="", **model)


@architecture("bert")
def bert(keys: Keys) -> ModelConfig:
    """BERT, RoBERTa, XLM-RoBERTa: bge, e5, gte, MiniLM, arctic-embed; bge-reranker. Learned positions."""
    return _bert(keys, PLAIN, positions=keys.integer("context_length"))


@architecture("nomic-bert")
def nomic_bert(keys: Keys) -> ModelConfig:
    """nomic-embed-text v1. As bert with RoPE and SwiGLU."""
    return _bert(keys, read_feed_forward, ROPE)


@architecture("nomic-bert-moe")
def nomic_bert_moe(keys: Keys) -> ModelConfig:
    """nomic-embed-text v2. As bert with RoPE; every n-th layer has experts, whose weights are not normalized."""
    every = keys.integer("moe_every_n_layers", 0, minimum=0)
    scale = keys.number("expert_weights_scale", 0.0, minimum=0.0) or 1.0
    variant: dict[str, Any] = {"act": "gelu_alone", "gated": False, "normalize": False, "scale": scale}
    experts = experts_alone("softmax", "feed_forward_length", **variant)
    return _bert(keys, lambda own: experts(own) if every and (own.layer or 0) % every == 1 else PLAIN(own), ROPE)


@architecture("jina-bert-v2")
def jina_bert_v2(keys: Keys) -> ModelConfig:
    """jina-embeddings v2, jina-reranker v1. As bert with ALiBi instead of positions and GEGLU; those for code have
    norms over all of q and all of k, and add the input of attention once more."""
    again = {"mixer_norms": Norms(joined="attn_output_norm", again="attn_norm_2")}
    around = NORMS_JOINED | (again if keys.owns("attn_norm_2.weight") else {})

    def mixer(own: Keys) -> AttentionConfig:
        return read_attention(own, "", alibi=ALIBI, row_norms=own.owns("attn_q_norm.weight"))

    def block(own: Keys) -> Block:
        merged = keys.rows(f"blk.{own.layer}.ffn_up.weight") > own.integer("feed_forward_length")
        return PLAIN(own, gated=own.owns("ffn_gate.weight") or merged, merged=merged)

    return _bert(keys, block, mixer=mixer, norms=around, rows=1)


@architecture("jina-bert-v3")
def jina_bert_v3(keys: Keys) -> ModelConfig:
    """jina-embeddings v3, with the adapter that was merged into the file. As bert with RoPE."""
    return _bert(keys, PLAIN, ROPE)


@architecture("modern-bert")
def modern_bert(keys: Keys) -> ModelConfig:
    """ModernBERT, gte-modernbert, granite-embedding R2. Layer norms before blocks, except the first; two of three
    layers attend to a window around each token, with a RoPE of their own; GEGLU or SwiGLU."""
    count, window = read_layers(keys), keys.integer("attention.sliding_window", 0, minimum=0)
    local = local_layers(keys, count, 3, dense_first=True) if window else [False] * count
    windowed = {"window": window, "rope": LOCAL_ROPE}
    act = {"silu": "silu", "swiglu": "silu"}.get(keys.string("hidden_activation", ""), "gelu")
    layers = [
        LayerConfig(
            read_attention(own, **(windowed if is_local else {})),
            read_feed_forward(own, act=act, merged=True),
            Norms(before="attn_norm" if own.owns("attn_norm.weight") or own.layer else ""),
        )
        for own, is_local in zip(each_layer(keys), local, strict=True)
    ]
    base = keys.number("rope.freq_base_swa", keys.number("rope.freq_base", 10000.0))
    ropes = rotations(keys, layers, True) | rotations(keys, layers, True, LOCAL_ROPE, scaled=False, base=base)
    encoder = read_encoder(keys, required=True, norm=True, ranked="mean", act="gelu")
    return read_model(keys, layers, ropes, norm="layer", encoder=encoder)


@architecture("neo-bert")
def neo_bert(keys: Keys) -> ModelConfig:
    """NeoBERT. RMS norms before blocks, RoPE, SwiGLU, merged matrices."""
    block, encoder = partial(read_feed_forward, merged=True), read_encoder(keys, required=True)
    return read_uniform(keys, neox=False, block=block, output_norm="enc.output_norm", encoder=encoder)


@architecture("eurobert")
def eurobert(keys: Keys) -> ModelConfig:
    """EuroBERT. As llama, with RoPE pairs half a head apart."""
    return read_uniform(keys, neox=True, encoder=read_encoder(keys, required=True))


@architecture("llama-embed")
def llama_embed(keys: Keys) -> ModelConfig:
    """Llama Embed Nemotron. As llama."""
    return read_uniform(keys, neox=False, encoder=read_encoder(keys, required=True))


@architecture("gemma-embedding")
def gemma_embedding(keys: Keys) -> ModelConfig:
    """EmbeddingGemma. As gemma3; five of six layers attend to a window around each token, with a RoPE of their own.
    Some files have two more matrices for the vector."""
    windowed: dict[str, Any] = {"window": keys.integer("attention.sliding_window"), "rope": LOCAL_ROPE}
    layers = [
        LayerConfig(
            read_attention(own, head_norms=True, **(windowed if is_local else {})),
            read_feed_forward(own, act="gelu"),
            **NORMS_AROUND,
        )
        for own, is_local in zip(each_layer(keys), local_layers(keys, read_layers(keys), 6), strict=True)
    ]
    base = keys.number("rope.freq_base_swa", 10000.0)
    ropes = rotations(keys, layers, True) | rotations(keys, layers, True, LOCAL_ROPE, scaled=False, base=base)
    scale, encoder = keys.integer("embedding_length") ** 0.5, read_encoder(keys, required=True)
    return read_model(keys, layers, ropes, embedding_scale=scale, encoder=encoder)
