"""Reads the metadata that decoders have in common into parts of a `ModelConfig`. Architectures (architectures/) are
built from these functions.

In: `Keys`. Out: configurations. A value that is missing, impossible or not supported raises a `UserError` with the name
of its key. The names of keys and their defaults are llama.cpp's (src/llama-arch.cpp, src/llama-model.cpp).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mlc_amd.compiler.models.config import (
    AttentionConfig,
    Block,
    ExpertsConfig,
    FeedForwardConfig,
    LayerConfig,
    Mixer,
    ModelConfig,
    Norms,
    RopeConfig,
    SharedExpertConfig,
)
from mlc_amd.compiler.models.drafts.config import PredictorConfig
from mlc_amd.compiler.models.encoders.metadata import check_encoder, read_encoder, unread
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.runtime.errors import shorten

MAX_LAYERS = 1024  # more layers mean a damaged file; the largest known models have about 130
MAX_EXPERTS = 1024  # llama.cpp supports up to 512
SECTIONS = 4  # sections of RoPE's pairs: t, y, x of an image's rows, and one that no model uses
MAX_TAPS = 16  # taps of a convolution that GPU kernels support; known models have 3 or 4
ROPE, LOCAL_ROPE = "rope", "local_rope"  # keys of ModelConfig.ropes
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
PREDICTOR = "attn_norm", "nextn.eh_proj", "nextn.enorm", "nextn.hnorm"  # tensors of a layer for multi-token prediction
SCALINGS = ("none", "linear", "yarn", "longrope")
# Fields of LayerConfig. NORMS_BEFORE: norms before both blocks, with another name for the second. NORMS_AROUND: norms
# before and after both blocks. NORMS_AFTER: norms after both blocks only.
NORMS_BEFORE: dict[str, Any] = {"feed_forward_norms": Norms(before="post_attention_norm")}
NORMS_AROUND: dict[str, Any] = {
    "mixer_norms": Norms("attn_norm", "post_attention_norm"), "feed_forward_norms": Norms("ffn_norm", "post_ffw_norm"),
}  # fmt: skip
NORMS_AFTER: dict[str, Any] = {
    "mixer_norms": Norms(after="post_attention_norm"), "feed_forward_norms": Norms(after="post_ffw_norm"),
}  # fmt: skip
SHARED_NORM: dict[str, Any] = {"parallel": True, "feed_forward_norms": Norms()}  # one norm for mixer and block
INTERLEAVED = (
    "qwen3vl",
    "qwen3vlmoe",
    "qwen35",
    "qwen35moe",
    "qwen4exp",
)  # architectures whose RoPE sections take turns
GATINGS = {1: "softmax", 2: "sigmoid", 3: "softmax_used", 4: "sqrt_softplus"}  # values of expert_gating_func


def read_layers(keys: Keys) -> int:
    """The number of layers."""
    return keys.integer("block_count", maximum=MAX_LAYERS)


def each_layer(keys: Keys, count: int = 0) -> list[Keys]:
    """The `Keys` of each layer; if count is not 0, of the first `count` layers."""
    return [keys.at(i) for i in range(count or read_layers(keys))]


class Predicting(NamedTuple):
    """The layers for multi-token prediction, which come last. count: number of the other layers. predictor:
    configuration of the first prediction layer, None if it is not used. unused: tensors of the prediction layers that
    are not used."""

    keys: Keys
    count: int
    predictor: PredictorConfig | None
    unused: tuple[str, ...]

    def of(self, layer: Callable[[Keys], LayerConfig]) -> list[LayerConfig]:
        """All layers, with the prediction layer. layer(keys): the configuration of a layer from its `Keys`."""
        layers = [layer(own) for own in each_layer(self.keys, self.count)]
        if self.predictor:
            layers.append(replace(layer(self.keys.at(self.count)), predictor=self.predictor))
        return layers


def predicting_layers(keys: Keys, known: bool = True) -> Predicting:
    """The file's layers for multi-token prediction. known: whether `transformer.predictor` supports them; otherwise all
    of their tensors are unused."""
    blocks = read_layers(keys)
    count = blocks - keys.integer("nextn_predict_layers", 0, minimum=0)
    if count < 1:
        raise keys.error(f"all {blocks} layers are for multi-token prediction; convert the model again")
    first, predictor = f"blk.{count}.", None
    if known and all(f"{first}{name}.weight" in keys.tensors for name in PREDICTOR):
        own = "embed_tokens", "shared_head_head", "shared_head_norm"
        predictor = PredictorConfig(*(f"{first}nextn.{name}.weight" in keys.tensors for name in own))
    after = tuple(f"blk.{i}." for i in range(count + bool(predictor), blocks))
    return Predicting(keys, count, predictor, tuple(name for name in keys.tensors if name.startswith(after)))


# ---- attention


def read_attention(keys: Keys, rope: str = ROPE, **variant) -> AttentionConfig:
    """The attention of a layer, with the file's numbers and sizes of heads. rope: a key of ModelConfig.ropes. variant:
    other fields of AttentionConfig."""
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", max(1, hidden // heads))
    kv_heads = keys.integer("attention.head_count_kv", heads)
    values = keys.integer("attention.value_length", max(1, hidden // heads))
    if values != head_dim and "value_dim" not in variant:
        raise keys.error(
            f"{keys.full('attention.value_length')} differs from key_length ({head_dim}); only equal lengths are "
            "supported"
        )
    return attention(keys, heads, kv_heads, head_dim, rope, **variant)


def attention(keys: Keys, heads: int, kv_heads: int, head_dim: int, rope: str, **variant) -> AttentionConfig:
    """Attention with these sizes, which are checked, and with the variants of matrices that the layer has. variant:
    other fields of AttentionConfig."""
    if heads % kv_heads:
        raise keys.error(
            f"heads ({heads}) must be a multiple of KV heads ({kv_heads}) to be compiled; use another model"
        )
    check_multiple(keys, "head size", head_dim, 8)
    fields: dict[str, Any] = {"merged_qkv": keys.owns("attn_qkv.weight")}
    return AttentionConfig(heads, kv_heads, head_dim, rope, **(fields | variant))


def attention_or(keys: Keys, other: Mixer, rope: str, **variant) -> list[Mixer]:
    """The mixer of each layer: attention, or `other` for layers without KV heads. variant: see `read_attention`."""
    kv_heads = keys.integers("attention.head_count_kv", read_layers(keys), minimum=0)
    return [read_attention(keys.at(i), rope, **variant) if kv else other for i, kv in enumerate(kv_heads)]


def local_layers(keys: Keys, layers: int, pattern: int, dense_first: bool = False) -> list[bool]:
    """For each layer whether it has a sliding window. The file's value may be a flag for each layer, or a number
    instead of `pattern`: of every `pattern` layers all but the last one (dense_first: the first one) have a window."""
    key = "attention.sliding_window_pattern"
    if isinstance(keys.metadata.get(keys.full(key)), list):
        return keys.flags(key, layers)
    pattern = keys.integer(key, pattern)
    return [i % pattern > 0 if dense_first else i % pattern < pattern - 1 for i in range(layers)]


def rotations(
    keys: Keys, layers: Sequence[LayerConfig], neox: bool, name: str = ROPE, **variant
) -> dict[str, RopeConfig]:
    """{name: the file's RoPE} if any of the layers uses this name; otherwise {}. variant: see `read_rope`."""
    heads = [a.head_dim for layer in layers if (a := layer.attention) and a.rope == name]
    return {name: read_rope(keys, heads[0], neox, **variant)} if heads else {}


def last_of(keys: Keys, step: int) -> bool:
    """Whether the layer is the last one of a group of `step` consecutive layers."""
    return ((keys.layer or 0) + 1) % step == 0


def read_rope(keys: Keys, head_dim: int, neox: bool, scaled: bool = True, **variant) -> RopeConfig:
    """The file's RoPE. scaled: whether to use the file's context extension. variant: fields of RopeConfig, instead of
    the file's."""
    scaling = keys.string("rope.scaling.type", "linear")  # llama.cpp's default; without a factor it scales nothing
    if scaling not in SCALINGS:
        raise keys.error(f"RoPE scaling {shorten(scaling)} is not supported; supported are {', '.join(SCALINGS)}")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0, minimum=0.0), minimum=0.0)
    factor = factor or 1.0  # 0 means none
    if not scaled or scaling in ("none", "longrope") or (scaling == "linear" and factor == 1.0):
        scaling, factor = "none", 1.0
    base = variant.pop("base", None) or keys.number("rope.freq_base", 10000.0)
    dim = variant.pop("dim", None) or keys.integer("rope.dimension_count", head_dim)
    if base <= 1.0:
        raise keys.error(f"RoPE's frequency base is {base:g}, it must be above 1; convert the model again")
    if dim % 2 or dim > head_dim:
        raise keys.error(f"RoPE's dimensions ({dim}) must be even and <= {head_dim} to be compiled; use another model")
    sections = keys.integers("rope.dimension_sections", SECTIONS, 0, minimum=0)
    fields: dict[str, Any] = {
        "dim": dim,
        "base": base,
        "sections": tuple(sections) if any(sections) else (),
        "interleaved": keys.prefix in INTERLEAVED,
        "neox": neox,
        "scaling": scaling,
        "factor": factor,
        "original_context": keys.integer("rope.scaling.original_context_length", keys.integer("context_length")),
        "attn_factor": keys.number("rope.scaling.attn_factor", 1.0) if scaled else 1.0,
        "ext_factor": _extrapolation(keys) if scaling == "yarn" else 0.0,
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
        "log_multiplier": keys.number("rope.scaling.yarn_log_multiplier", 0.0, minimum=0.0),
        "factors": next((name for name in (ROPE_FACTORS, SHORT_FACTORS) if name in keys.tensors), ""),
        "long_factors": LONG_FACTORS if LONG_FACTORS in keys.tensors else "",
    }
    return RopeConfig(**(fields | variant))


def _extrapolation(keys: Keys) -> float:
    """The file's yarn_ext_factor, or 1 where the file lacks the key or has a negative value."""
    factor = keys.number("rope.scaling.yarn_ext_factor", 1.0, minimum=-math.inf)
    return factor if factor >= 0.0 else 1.0


# ---- recurrent layers


def read_taps(keys: Keys, key: str) -> int:
    """The number of positions that a convolution reads."""
    return keys.integer(key, minimum=2, maximum=MAX_TAPS)


# ---- feed-forward


def read_feed_forward(keys: Keys, act: str = "silu", **variant) -> FeedForwardConfig:
    """The dense feed-forward block of a layer. variant: other fields of FeedForwardConfig."""
    if keys.integer("expert_count", 0, minimum=0):
        raise keys.error(
            f"this is a mixture of experts ({keys.full('expert_count')} > 0), which is not supported for "
            f"{keys.prefix}; use the dense model"
        )
    return dense(keys, act, **variant)


def dense(keys: Keys, act: str = "silu", size: int = 0, **variant) -> FeedForwardConfig:
    """The dense feed-forward block of a layer, in a model whose others may have experts. size: 0 for the file's."""
    return FeedForwardConfig(size or keys.integer("feed_forward_length"), act, **variant)


def dense_or_experts(keys: Keys, size: str = "feed_forward_length", **variant) -> Block:
    """Experts, if the file has a number of experts, otherwise a dense block. size: key of the experts' size. variant:
    see `read_experts`."""
    if keys.integer("expert_count", 0, minimum=0):
        return read_experts(keys, keys.integer(size), **variant)
    return read_feed_forward(keys)


def read_experts(keys: Keys, size: int, gating: str = "", **variant) -> ExpertsConfig:
    """A mixture of experts. size: columns of an expert. gating: a value of GATINGS, "" for the file's. variant: other
    fields of ExpertsConfig."""
    count = keys.integer("expert_count", maximum=MAX_EXPERTS)
    used = keys.integer("expert_used_count", maximum=MAX_EXPERTS)
    if used > count:
        raise keys.error(f"the model uses {used} of {count} experts; convert the model again")
    if not gating:
        number = keys.integer("expert_gating_func", 1, minimum=0) or 1
        if number not in GATINGS:
            raise keys.error(
                f"expert gating function {number} is not supported; supported are "
                f"{', '.join(f'{number} ({name})' for number, name in GATINGS.items())}"
            )
        gating = GATINGS[number]
    if variant.get("biases"):
        check_multiple(keys, "experts' feed-forward size", size)
    merged = keys.owns("ffn_gate_up_exps.weight")
    return ExpertsConfig(count, used, size, gating=gating, merged=merged, **variant)


def experts_alone(
    gating: str = "", size: str = "expert_feed_forward_length", **variant
) -> Callable[[Keys], ExpertsConfig]:
    """A function that reads the experts of a layer, for models with experts in every layer. size: key of the experts'
    size. variant: see `read_experts`."""
    return lambda own: read_experts(own, own.integer(size), gating=gating, **variant)


def experts_weighting(keys: Keys) -> dict[str, Any]:
    """The fields of ExpertsConfig for the weights of the chosen experts."""
    return {
        "normalize": keys.flag("expert_weights_norm", False),
        "scale": keys.number("expert_weights_scale", 1.0, minimum=0.0) or 1.0,
    }


def shared_expert(size: int, **variant) -> SharedExpertConfig | None:
    """The shared expert, None if size is 0. variant: other fields of SharedExpertConfig."""
    return SharedExpertConfig(size, **variant) if size else None


def dense_then(keys: Keys, experts: Callable[[Keys], Block]) -> Callable[[Keys], Block]:
    """A function that reads the block of a layer: dense in the file's leading dense layers, then experts(keys of the
    layer)."""
    leading = keys.integer("leading_dense_block_count", 0, minimum=0)

    def block(own: Keys) -> Block:
        return experts(own) if (own.layer or 0) >= leading else dense(own)

    return block


# ---- the model


def read_model(keys: Keys, layers: Sequence[LayerConfig], ropes: dict[str, RopeConfig], **variant) -> ModelConfig:
    """The configuration of a model with these layers. variant: other fields of ModelConfig, or fields instead of the
    file's. The model is an embedding model if the file, the caller's pooling or the variant says so."""
    hidden = keys.integer("embedding_length")
    check_multiple(keys, "hidden size", hidden)
    encoder = variant.pop("encoder", None) or read_encoder(keys)
    epsilon = "layer_norm_rms_epsilon" if variant.get("norm", "rms") == "rms" else "layer_norm_epsilon"
    fields: dict[str, Any] = {
        "architecture": keys.prefix,
        "name": keys.string("general.name", ""),
        "vocab": vocabulary(keys),
        "hidden": hidden,
        "context": keys.integer("context_length"),
        "norm_eps": keys.number(f"attention.{epsilon}", minimum=0.0),
        "tied": "output.weight" not in keys.tensors,
        "layers": tuple(layers),
        "ropes": ropes,
        "encoder": encoder,
    }
    if encoder:
        check_encoder(keys, layers)
        fields |= {"tied": True, "unused": unread(keys, encoder)}
    return ModelConfig(**(fields | variant))


def read_uniform(
    keys: Keys,
    neox: bool,
    mixer: Callable[[Keys], Mixer] = read_attention,
    block: Callable[[Keys], Block] = read_feed_forward,
    norms: dict[str, Any] | None = None,
    rope: dict[str, Any] | None = None,
    **variant,
) -> ModelConfig:
    """The configuration of a model whose layers are all read by the same functions. mixer(keys), block(keys): the mixer
    and the block of a layer. norms: other fields of LayerConfig. rope: arguments of `read_rope`. variant: see
    `read_model`."""
    layers = [LayerConfig(mixer(own), block(own), **(norms or {})) for own in each_layer(keys)]
    return read_model(keys, layers, rotations(keys, layers, neox, **(rope or {})), **variant)


def check_multiple(keys: Keys, what: str, size: int, of: int = 32) -> None:
    """Raises UserError unless `size` is a multiple of `of`; 32 columns are a block of quantized values."""
    if size % of:
        raise keys.error(f"the {what} ({size}) must be a multiple of {of} to be compiled; use another model")


def vocabulary(keys: Keys) -> int:
    """The number of tokens. As in llama.cpp, it is the length of the token list, or `vocab_size` in files without a
    tokenizer."""
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) and tokens else keys.integer("vocab_size")
