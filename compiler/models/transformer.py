"""What dense decoders share: the metadata they have in common, their tensors, their graph.

    x = embedding
    x = x + norm(W_o attention(rope(W_q h), rope(W_k h), W_v h))     h = norm(x)     each norm where the layer has one
    x = x + norm(W_down (act(W_gate h) * W_up h))                    h = norm(x)
    logits = W_out rms_norm(x)

An architecture's file fills in a `ModelConfig` with the functions of the first part; `tensors` and `decoder` follow the
config. Key names, tensor names and defaults are llama.cpp's (src/llama-arch.cpp, src/llama-model.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlc_amd.compiler.models.config import AttentionConfig, FeedForwardConfig, LayerConfig, ModelConfig, RopeConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.runtime.errors import shorten

if TYPE_CHECKING:
    from mlc_amd.compiler.models.graph import Graph

MAX_LAYERS = 1024  # the largest known models have about 130: more means a damaged file
ROPE, ROPE_FACTORS = "rope", "rope_freqs.weight"

# ---- metadata


def read_layers(keys: Keys) -> int:
    return keys.integer("block_count", maximum=MAX_LAYERS)


def read_attention(keys: Keys, rope: str = ROPE, **variant) -> AttentionConfig:
    """Head counts and sizes, the same in all layers. `variant`: further fields of AttentionConfig."""
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    kv_heads = keys.integer("attention.head_count_kv", heads)
    if keys.integer("attention.value_length", hidden // heads) != head_dim:
        raise keys.error(
            f"{keys.full('attention.value_length')} differs from key_length ({head_dim}); only equal lengths are "
            "supported"
        )
    if heads % kv_heads:
        raise keys.error(
            f"heads ({heads}) must be a multiple of KV heads ({kv_heads}) to be compiled; use another model"
        )
    check_multiple(keys, "head size", head_dim)
    return AttentionConfig(heads, kv_heads, head_dim, rope, **variant)


def read_feed_forward(keys: Keys, act: str = "silu") -> FeedForwardConfig:
    if keys.integer("expert_count", 0, minimum=0):
        raise keys.error(
            f"this is a mixture of experts ({keys.full('expert_count')} > 0); only dense models are supported"
        )
    size = keys.integer("feed_forward_length")
    check_multiple(keys, "feed-forward size", size)
    return FeedForwardConfig(size, act)


def read_rope(keys: Keys, head_dim: int, neox: bool) -> RopeConfig:
    scaling = keys.string("rope.scaling.type", "linear")  # llama.cpp's default; without a factor it scales nothing
    if scaling not in ("none", "linear", "yarn"):
        raise keys.error(f"RoPE scaling {shorten(scaling)} is not supported; supported are none, linear, yarn")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0, minimum=0.0), minimum=0.0)
    factor = factor or 1.0  # 0 means none
    if scaling == "none" or (scaling == "linear" and factor == 1.0):
        scaling, factor = "none", 1.0
    base, dim = keys.number("rope.freq_base", 10000.0), keys.integer("rope.dimension_count", head_dim)
    if base <= 1.0:
        raise keys.error(f"RoPE's frequency base is {base:g}, it must be above 1; convert the model again")
    if dim % 2 or dim > head_dim:
        raise keys.error(f"RoPE's dimensions ({dim}) must be even and <= {head_dim} to be compiled; use another model")
    return RopeConfig(
        dim=dim,
        base=base,
        neox=neox,
        scaling=scaling,
        factor=factor,
        original_context=keys.integer("rope.scaling.original_context_length", keys.integer("context_length")),
        attn_factor=keys.number("rope.scaling.attn_factor", 1.0),
        ext_factor=keys.number("rope.scaling.yarn_ext_factor", 1.0, minimum=0.0) if scaling == "yarn" else 0.0,
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        factors=ROPE_FACTORS if ROPE_FACTORS in keys.tensors else "",
    )


def read_model(keys: Keys, layers: list[LayerConfig], ropes: dict[str, RopeConfig], **variant) -> ModelConfig:
    """The model around its layers. `variant`: further fields of ModelConfig."""
    if keys.metadata.get(keys.full("attention.causal"), True) is not True:
        raise keys.error(
            f"this is an embedding model ({keys.full('attention.causal')} is false); give a text-generation model"
        )
    hidden = keys.integer("embedding_length")
    check_multiple(keys, "hidden size", hidden)
    return ModelConfig(
        architecture=keys.prefix,
        name=keys.string("general.name", ""),
        vocab=_vocabulary(keys),
        hidden=hidden,
        context=keys.integer("context_length"),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        tied="output.weight" not in keys.tensors,
        layers=tuple(layers),
        ropes=ropes,
        **variant,
    )


def read_uniform(keys: Keys, neox: bool, **attention) -> ModelConfig:
    """A model whose layers are all the same. `attention`: further fields of AttentionConfig."""
    mixer = read_attention(keys, output_bias="blk.0.attn_output.bias" in keys.tensors, **attention)
    layers = [LayerConfig(mixer, read_feed_forward(keys))] * read_layers(keys)
    return read_model(keys, layers, {ROPE: read_rope(keys, mixer.head_dim, neox)})


def check_multiple(keys: Keys, what: str, size: int, of: int = 32) -> None:
    """UserError unless the kernels can take the size: blocks of quantized values have 32 columns."""
    if size % of:
        raise keys.error(f"the {what} ({size}) must be a multiple of {of} to be compiled; use another model")


def _vocabulary(keys: Keys) -> int:
    """As llama.cpp: the token list decides, `vocab_size` stands in for it in files without a tokenizer."""
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) and tokens else keys.integer("vocab_size")


# ---- tensors


def tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor, in file order. Shapes are (rows, columns) or (columns,), rows = outputs."""
    c = config
    yield "token_embd.weight", (c.vocab, c.hidden)
    for rope in c.ropes.values():
        if rope.factors:
            yield rope.factors, (rope.dim // 2,)
    for i, layer in enumerate(c.layers):
        for name, shape in layer_tensors(c, layer):
            yield f"blk.{i}.{name}", shape
    yield "output_norm.weight", (c.hidden,)
    if not c.tied:
        yield "output.weight", (c.vocab, c.hidden)


def layer_tensors(config: ModelConfig, layer: LayerConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name within the layer, shape)."""
    hidden, a, f = config.hidden, layer.attention, layer.feed_forward
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    for present, name, shape in (
        (layer.attention_norms.before, f"{layer.attention_norms.before}.weight", (hidden,)),
        (True, "attn_q.weight", (q, hidden)),
        (True, "attn_k.weight", (kv, hidden)),
        (True, "attn_v.weight", (kv, hidden)),
        (a.qkv_bias, "attn_q.bias", (q,)),
        (a.qkv_bias, "attn_k.bias", (kv,)),
        (a.qkv_bias, "attn_v.bias", (kv,)),
        (a.head_norms, "attn_q_norm.weight", (a.head_dim,)),
        (a.head_norms, "attn_k_norm.weight", (a.head_dim,)),
        (a.sinks, "attn_sinks.weight", (a.heads,)),
        (True, "attn_output.weight", (hidden, q)),
        (a.output_bias, "attn_output.bias", (hidden,)),
        (layer.attention_norms.after, f"{layer.attention_norms.after}.weight", (hidden,)),
        (layer.feed_forward_norms.before, f"{layer.feed_forward_norms.before}.weight", (hidden,)),
        (True, "ffn_gate.weight", (f.size, hidden)),
        (True, "ffn_up.weight", (f.size, hidden)),
        (True, "ffn_down.weight", (hidden, f.size)),
        (layer.feed_forward_norms.after, f"{layer.feed_forward_norms.after}.weight", (hidden,)),
    ):
        if present:
            yield name, shape


# ---- graph


def decoder(g: Graph):
    """The whole model: logits of every token or of the last live one."""
    x = g.embed("token_embd.weight", g.config.embedding_scale)
    for i, layer in enumerate(g.config.layers):
        x = residual_block(g, x, i, layer.attention_norms, attention)
        x = residual_block(g, x, i, layer.feed_forward_norms, feed_forward)
    return logits(g, x)


def residual_block(g: Graph, x, i: int, norms, block):
    """x + after(block(before(x))) of layer i; `norms` names the weights, "" stands for no norm."""
    h = g.norm(x, f"blk.{i}.{norms.before}") if norms.before else x
    y = block(g, h, i)
    return g.add(x, g.norm(y, f"blk.{i}.{norms.after}") if norms.after else y)


def attention(g: Graph, h, i: int):
    block = f"blk.{i}."
    q, k, v = (g.linear(h, f"{block}attn_{which}.weight") for which in "qkv")
    return g.linear(g.attention(q, k, v, i), block + "attn_output.weight")


def feed_forward(g: Graph, h, i: int):
    block = f"blk.{i}."
    gate, up = g.linear(h, block + "ffn_gate.weight"), g.linear(h, block + "ffn_up.weight")
    act = g.config.layers[i].feed_forward.act
    return g.linear(g.multiply(g.activation(gate, act), up), block + "ffn_down.weight")


def logits(g: Graph, x):
    """The embedding serves as output where the file has no output.weight (tied)."""
    h = g.norm(x, "output_norm", rows="all" if g.all_logits else "last")
    y = g.linear(h, "token_embd.weight" if g.config.tied else "output.weight")
    return g.softcap(y, g.config.logit_softcap) if g.config.logit_softcap else y
