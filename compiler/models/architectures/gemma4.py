"""gemma4: Gemma 4. As gemma3, with norms over the heads of v, too. Layers with a window have their own head size. In
some models, the last layers use the keys and values of earlier layers, layers have experts in addition to the
feed-forward block, or each token has an embedding for each layer."""

from collections.abc import Iterator
from math import sqrt

from mlc_amd.compiler.models import images, transformer
from mlc_amd.compiler.models.config import AttentionConfig, ExpertsConfig, FeedForwardConfig, LayerConfig, ModelConfig
from mlc_amd.compiler.models.metadata import (
    LOCAL_ROPE,
    NORMS_AROUND,
    ROPE,
    Keys,
    attention,
    read_experts,
    read_layers,
    read_model,
    read_rope,
)
from mlc_amd.compiler.models.registry import architecture
from mlc_amd.compiler.models.residuals.config import ATTENTION, FEED_FORWARD
from mlc_amd.compiler.models.tensors import Shape, expert_tensors
from mlc_amd.compiler.models.tensors import tensors as common_tensors
from mlc_amd.compiler.models.transformer import add_all, dense, logits, mixture, residual_block

PER_LAYER = "per_layer_token_embd.weight"
CAUSAL = (1536, 2560)  # hidden sizes of E2B and E4B, whose images are causal
KV_TENSORS = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")


def read(keys: Keys) -> ModelConfig:
    count, hidden = read_layers(keys), keys.integer("embedding_length")
    local = keys.flags("attention.sliding_window_pattern", count)
    shared = keys.integer("attention.shared_kv_layers", 0, minimum=0)
    if shared >= count:
        raise keys.error(f"{shared} of {count} layers share keys and values of earlier ones; convert the model again")
    sizes = keys.integers("feed_forward_length", count)
    layers = [
        LayerConfig(
            mixer=mixer,
            feed_forward=FeedForwardConfig(size, act="gelu"),
            experts=_read_experts(keys.at(i)) if f"blk.{i}.ffn_gate_inp.weight" in keys.tensors else None,
            output_scale=f"blk.{i}.layer_output_scale.weight" in keys.tensors,
            **NORMS_AROUND,
        )
        for i, (mixer, size) in enumerate(zip(_read_attention(keys, local, count - shared), sizes, strict=True))
    ]
    of_others = (f"blk.{i}.{kind}" for i in range(count - shared, count) for kind in KV_TENSORS)
    heads = {which: keys.integer(f"attention.key_length{which}") for which in ("", "_swa")}
    bases = {which: keys.number(f"rope.freq_base{which}", 10000.0) for which in heads}
    dims = {which: keys.integer(f"rope.dimension_count{which}", heads[which]) for which in heads}
    return read_model(
        keys,
        layers,
        {
            ROPE: read_rope(keys, heads[""], neox=True, base=bases[""], dim=dims[""]),
            LOCAL_ROPE: read_rope(keys, heads["_swa"], True, False, base=bases["_swa"], dim=dims["_swa"], factors=""),
        },
        embedding_scale=hidden**0.5,
        logit_softcap=keys.number("final_logit_softcapping", 30.0),
        layer_embedding=keys.integer("embedding_length_per_layer_input", 0, minimum=0),
        unused=tuple(name for name in of_others if name in keys.tensors),
    )


def _read_attention(keys: Keys, local: list[bool], own: int) -> list[AttentionConfig]:
    """The attention of each layer. From number `own` on, they use the cache of the last of their kind before it."""
    kv_heads = keys.integers("attention.head_count_kv", len(local))
    window = keys.integer("attention.sliding_window") if any(local) else 0
    found = []
    for i, (is_local, kv) in enumerate(zip(local, kv_heads, strict=True)):
        which = "_swa" if is_local else ""
        head_dim = keys.integer(f"attention.key_length{which}")
        if keys.integer(f"attention.value_length{which}", head_dim) != head_dim:
            raise keys.error(f"{keys.full(f'attention.value_length{which}')} must be key_length ({head_dim})")
        source = own - (2 if is_local else 1) if i >= own else None
        if source is not None and (source < 0 or local[source] != is_local):
            raise keys.error(f"layer {i} shares keys and values of layer {source}, which is of another kind")
        variant = {"scale": 1.0, "head_norms": True, "value_norm": True, "window": window if is_local else 0}
        variant["images"] = is_local and keys.integer("embedding_length") not in CAUSAL
        variant["value_is_key"] = source is None and f"blk.{i}.attn_v.weight" not in keys.tensors
        heads, rope = keys.integer("attention.head_count"), LOCAL_ROPE if is_local else ROPE
        found.append(attention(keys, heads, kv, head_dim, rope, kv_layer=source, **variant))
    return found


def _read_experts(keys: Keys) -> ExpertsConfig | None:
    if not keys.integer("expert_count", 0, minimum=0):
        return None
    return read_experts(
        keys,
        keys.integer("expert_feed_forward_length"),
        gating="softmax",
        act="gelu",
    )


def tensors(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden, size, count = config.hidden, config.layer_embedding, len(config.decoder_layers)
    yield from common_tensors(config)
    if size:
        yield PER_LAYER, (config.vocab, size * count)
        yield "per_layer_model_proj.weight", (size * count, hidden)
        yield "per_layer_proj_norm.weight", (size,)
    for i, layer in enumerate(config.layers):
        block = f"blk.{i}."
        if layer.experts:
            for name, shape in expert_tensors(hidden, layer.experts):
                yield block + name, shape
            yield block + "ffn_gate_inp.scale", (hidden,)
            for name in ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"):
                yield f"{block}{name}.weight", (hidden,)
        if size:
            yield block + "inp_gate.weight", (size, hidden)
            yield block + "proj.weight", (hidden, size)
            yield block + "post_norm.weight", (hidden,)
        if layer.output_scale:
            yield block + "layer_output_scale.weight", (1,)


def decoder(g):
    x = images.inputs(g)
    inputs = layer_inputs(g, x) if g.config.layer_embedding else None
    for i, layer in enumerate(g.config.decoder_layers):
        g.hidden[i] = x
        x = residual_block(g, x, i, ATTENTION, layer.mixer_norms, transformer.attention)
        if layer.experts:
            y = dense_and_experts(g, x, i, layer, layer.experts)
            x = g.add(x, g.norm(y, f"blk.{i}.{layer.feed_forward_norms.after}"))
        else:
            x = residual_block(g, x, i, FEED_FORWARD, layer.feed_forward_norms, transformer.feed_forward)
        if inputs is not None:
            x = g.add(x, layer_input(g, x, inputs, i))
        if layer.output_scale:
            x = g.multiply(x, g.number(f"blk.{i}.layer_output_scale.weight"))
        x = images.deepstack(g, x, i)
    return logits(g, x)


def dense_and_experts(g, x, i: int, layer: LayerConfig, experts: ExpertsConfig):
    """The sum of the dense block's result and the experts'. Both read x, each within its own norms."""
    block, f = f"blk.{i}.", layer.feed_forward
    assert f, "a layer with a feed-forward block"
    y = dense(g, g.norm(x, f"{block}{layer.feed_forward_norms.before}"), block + "ffn_{}", f.act)
    router = g.linear(g.rms_norm(x, block + "ffn_gate_inp.scale"), block + "ffn_gate_inp.weight", exact=True)
    router = g.scaled(router, 1 / sqrt(g.config.hidden))
    terms = mixture(g, g.norm(x, block + "pre_ffw_norm_2"), i, experts, router)
    mixed = g.norm(add_all(g, terms[0], terms[1:]), block + "post_ffw_norm_2")
    return g.add(g.norm(y, block + "post_ffw_norm_1"), mixed)


def layer_inputs(g, x):
    """The input of each layer besides x, float32 [m, layers * size]: from an embedding of the token for each layer, and
    a projection of x."""
    c = g.config
    size, count = c.layer_embedding, len(c.decoder_layers)
    y = g.scaled(g.linear(x, "per_layer_model_proj.weight"), 1 / sqrt(c.hidden))
    y = g.grouped_rms_norm(y, "per_layer_proj_norm.weight", count, size)
    return g.scaled(g.add(g.embed(PER_LAYER, sqrt(size)), y), 1 / sqrt(2))


def layer_input(g, x, inputs, i: int):
    block, size = f"blk.{i}.", g.config.layer_embedding
    gate = g.activation(g.linear(x, block + "inp_gate.weight"), "gelu")
    y = g.multiply(gate, g.columns(inputs, i * size, size))
    return g.norm(g.linear(y, block + "proj.weight"), block + "post_norm")


architecture("gemma4", "dense", "experts", tensors=tensors, decoder=decoder)(read)
