"""Encoders: models that compute vectors of texts. Each token sees all others of its text."""

from dataclasses import replace
from typing import Any

from mlc_amd.compiler.models.config import AttentionConfig, Block, LayerConfig, ModelConfig, Norms
from mlc_amd.compiler.models.encoder_metadata import read_encoder
from mlc_amd.compiler.models.metadata import (
    LOCAL_ROPE,
    NORMS_AROUND,
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
    read_uniform,
)
from mlc_amd.compiler.models.registry import architecture

# Norms after each block, of the sum with its input
NORMS_JOINED: dict[str, Any] = {
    "mixer_norms": Norms(joined="attn_output_norm"), "feed_forward_norms": Norms(joined="layer_output_norm"),
}  # fmt: skip
ALIBI = 8.0  # llama.cpp's f_max_alibi_bias of these models


def _bert(
    keys: Keys, mixer: AttentionConfig, blocks: list[Block], rope: bool, norms: Any = NORMS_JOINED, **encoder: Any
) -> ModelConfig:
    """Layer norms with biases, of the embeddings and after each block."""
    types = keys.integer("tokenizer.ggml.token_type_count", 0, minimum=0) if "token_types.weight" in keys.tensors else 0
    ropes = {ROPE: read_rope(keys, mixer.head_dim, neox=True)} if rope else {}
    mixer = replace(mixer, rope=ROPE if rope else "")
    layers = [LayerConfig(mixer, block, **norms) for block in blocks]
    found = read_encoder(keys, required=True, types=types, norm=True, **encoder)
    return read_model(keys, layers, ropes, norm="layer", norm_bias=True, output_norm="", encoder=found)


def _dense(keys: Keys, act: str = "gelu", gated: bool = False, size: int = 0, **variant: Any) -> list[Block]:
    """The block of each layer, with the biases of the first one."""
    variant["bias"], variant["down_bias"] = (f"blk.0.ffn_{which}.bias" in keys.tensors for which in ("up", "down"))
    block = feed_forward(keys, size or keys.integer("feed_forward_length"), act, gated=gated, **variant)
    return [block] * read_layers(keys)


@architecture("bert")
def bert(keys: Keys) -> ModelConfig:
    """BERT, RoBERTa, XLM-RoBERTa: bge, e5, gte, MiniLM, arctic-embed; bge-reranker. Learned positions."""
    return _bert(keys, read_attention(keys), _dense(keys), rope=False, positions=keys.integer("context_length"))


@architecture("nomic-bert")
def nomic_bert(keys: Keys) -> ModelConfig:
    """nomic-embed-text v1. As bert with RoPE and SwiGLU."""
    return _bert(keys, read_attention(keys), _dense(keys, "silu", gated=True), rope=True)


@architecture("nomic-bert-moe")
def nomic_bert_moe(keys: Keys) -> ModelConfig:
    """nomic-embed-text v2. As bert with RoPE; experts in every so many layers, whose weights do not add up to 1."""
    every, dense = keys.integer("moe_every_n_layers", 0, minimum=0), _dense(keys)
    scale = keys.number("expert_weights_scale", 0.0, minimum=0.0) or 1.0
    variant: dict[str, Any] = {"act": "gelu_alone", "gated": False, "normalize": False, "scale": scale}
    experts = (
        read_experts(keys, keys.integer("feed_forward_length"), gating="softmax", **variant) if every else dense[0]
    )
    blocks = [experts if every and i % every == 1 else block for i, block in enumerate(dense)]
    return _bert(keys, read_attention(keys), blocks, rope=True)


@architecture("jina-bert-v2")
def jina_bert_v2(keys: Keys) -> ModelConfig:
    """jina-embeddings v2, jina-reranker v1. As bert with ALiBi instead of positions and GEGLU; those for code have
    norms over all of q and all of k, and add the input of attention once more."""
    first = "blk.0."
    norms, biases = (f"{first}attn_q_norm.{part}" in keys.tensors for part in ("weight", "bias"))
    mixer = read_attention(keys, alibi=ALIBI, row_norms=norms, row_norm_bias=biases)
    size = keys.integer("feed_forward_length")
    gated, merged = f"{first}ffn_gate.weight" in keys.tensors, keys.rows(f"{first}ffn_up.weight") > size
    again = {"mixer_norms": Norms(joined="attn_output_norm", again="attn_norm_2")}
    around = NORMS_JOINED | (again if f"{first}attn_norm_2.weight" in keys.tensors else {})
    return _bert(keys, mixer, _dense(keys, gated=gated or merged, merged=merged), rope=False, norms=around, rows=1)


@architecture("jina-bert-v3")
def jina_bert_v3(keys: Keys) -> ModelConfig:
    """jina-embeddings v3, with the adapter that the file was merged with. As bert with RoPE."""
    return _bert(keys, read_attention(keys), _dense(keys), rope=True)


@architecture("modern-bert")
def modern_bert(keys: Keys) -> ModelConfig:
    """ModernBERT, gte-modernbert, granite-embedding R2. Layer norms before blocks, not before the first; of three
    layers two see a window around each token, with a RoPE of their own; GEGLU or SwiGLU."""
    mixer, count = read_attention(keys), read_layers(keys)
    ropes, local = {ROPE: read_rope(keys, mixer.head_dim, neox=True)}, [False] * count
    if keys.has("attention.sliding_window"):
        local = local_layers(keys, count, 3, dense_first=True)
        base = keys.number("rope.freq_base_swa", keys.number("rope.freq_base", 10000.0))
        ropes[LOCAL_ROPE] = read_rope(keys, mixer.head_dim, neox=True, scaled=False, base=base)
        window = replace(mixer, window=keys.integer("attention.sliding_window"), rope=LOCAL_ROPE)
    act = {"silu": "silu", "swiglu": "silu"}.get(keys.string("hidden_activation", ""), "gelu")
    block = read_feed_forward(keys, act=act, merged=True)
    first = Norms(before="attn_norm" if "blk.0.attn_norm.weight" in keys.tensors else "")
    layers = [
        LayerConfig(window if local[i] else mixer, block, first if i == 0 else Norms(before="attn_norm"))
        for i in range(count)
    ]
    encoder = read_encoder(keys, required=True, norm=True, ranked="mean", act="gelu")
    return read_model(keys, layers, ropes, norm="layer", encoder=encoder)


@architecture("neo-bert")
def neo_bert(keys: Keys) -> ModelConfig:
    """NeoBERT. RMS norms before blocks, RoPE, SwiGLU, merged matrices."""
    block, encoder = read_feed_forward(keys, merged=True), read_encoder(keys, required=True)
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
    """EmbeddingGemma. As gemma3; of six layers five see a window around each token, with a RoPE of their own. Some
    files have two more matrices for the vector."""
    mixer, count = read_attention(keys, head_norms=True), read_layers(keys)
    base = keys.number("rope.freq_base_swa", 10000.0)
    ropes = {ROPE: read_rope(keys, mixer.head_dim, neox=True)}
    ropes[LOCAL_ROPE] = read_rope(keys, mixer.head_dim, neox=True, scaled=False, base=base)
    window = replace(mixer, window=keys.integer("attention.sliding_window"), rope=LOCAL_ROPE)
    block = read_feed_forward(keys, act="gelu")
    local = local_layers(keys, count, 6)
    layers = [LayerConfig(window if is_local else mixer, block, **NORMS_AROUND) for is_local in local]
    scale, encoder = keys.integer("embedding_length") ** 0.5, read_encoder(keys, required=True)
    return read_model(keys, layers, ropes, embedding_scale=scale, encoder=encoder)
