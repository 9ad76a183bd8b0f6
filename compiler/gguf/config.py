"""A model's hyperparameters, from GGUF metadata to typed fields.

In: the metadata and the tensor names of a GGUF file. Out: `ModelConfig`, the only form in which the rest of the
compiler sees them (JSON-serializable with `dataclasses.asdict`). Key names and defaults are llama.cpp's
(src/llama-arch.cpp, src/llama-model.cpp); what this compiler cannot run (mixtures of experts, layers that differ,
longrope ...) is refused with a `UserError` here, before any weight is read.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

from mlc_amd.compiler.gguf.header import shorten
from mlc_amd.runtime.errors import UserError


@dataclass(frozen=True)
class Architecture:
    """Differences between the supported architectures; the rest (RMSNorm, GQA, RoPE, SwiGLU) is common."""

    neox: bool  # RoPE rotates columns (i, i + dim/2); False: (2i, 2i + 1), as GGUF permutes llama's Q and K
    qkv_bias: bool | None  # attn_q/k/v.bias: always, never, or (None) when the file has them
    qk_norm: bool  # RMSNorm over each head of Q and K


ARCHITECTURES = {
    "llama": Architecture(neox=False, qkv_bias=None, qk_norm=False),  # Llama 2 and 3.x, Mistral, TinyLlama, SmolLM ...
    "qwen2": Architecture(neox=True, qkv_bias=True, qk_norm=False),  # Qwen2, Qwen2.5 and their distillations
    "qwen3": Architecture(neox=True, qkv_bias=False, qk_norm=True),  # Qwen3 (dense)
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; `compiler/models/rope.py` turns it into a table."""

    dim: int  # leading columns of a head that are rotated (even, <= head_dim)
    base: float  # theta of pair i is position * base^(-2i/dim)
    neox: bool  # pairs are (i, i + dim/2); False: (2i, 2i + 1)
    scaling: str = "none"  # "none", "linear" or "yarn"
    factor: float = 1.0  # context extension; positions are divided by it (yarn: those of the slow pairs)
    original_context: int = 0  # tokens before extension (yarn)
    attn_factor: float = 1.0  # factor on cos and sin
    ext_factor: float = 0.0  # yarn: weight of the unscaled angle in the fast pairs
    beta_fast: float = 32.0  # yarn: pairs that turn more often than this in original_context keep their angle
    beta_slow: float = 1.0  # yarn: pairs that turn less often than this are divided by factor
    freq_factors: bool = False  # rope_freqs.weight [dim/2] divides the angle of each pair (Llama 3.1 and later)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and variants of one decoder."""

    architecture: str  # key of ARCHITECTURES
    name: str  # general.name, or ""
    vocab: int  # tokens
    hidden: int  # columns of the residual stream
    layers: int
    heads: int  # query heads
    kv_heads: int  # key and value heads; divides heads
    head_dim: int  # columns of a head (key = value); heads * head_dim need not be hidden
    ffn: int  # columns between gate/up and down
    context: int  # tokens the model was trained for
    norm_eps: float  # RMSNorm's epsilon
    tied: bool  # no output.weight: logits use token_embd.weight
    qkv_bias: bool  # attn_q/k/v.bias exist
    qk_norm: bool  # attn_q_norm/k_norm exist
    rope: RopeConfig
    output_bias: bool = False  # attn_output.bias exists


def read_config(metadata: dict[str, object], tensor_names: Collection[str], path: str) -> ModelConfig:
    """The configuration of a model with that metadata and those tensors. UserError (with `path` in front) for a
    missing, mistyped or impossible value and for what is not supported. Sizes are checked against the tensors by
    `check.check_tensors`, not here."""
    keys = _Keys(metadata, path)
    name = keys.string("general.architecture")
    if name not in ARCHITECTURES:
        raise UserError(
            f"{path}: architecture {shorten(name)} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise UserError(f"{path}: this file holds a {shorten(kind)}, not a model; give the model's own GGUF file")
    architecture, keys.prefix = ARCHITECTURES[name], name
    if keys.integer("expert_count", 0, minimum=0):
        raise UserError(
            f"{path}: this is a mixture of experts ({name}.expert_count > 0); only dense models are supported"
        )
    if metadata.get(f"{name}.attention.causal", True) is not True:
        raise UserError(
            f"{path}: this is an embedding model ({name}.attention.causal is false); give a text-generation model"
        )

    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    if keys.integer("attention.value_length", hidden // heads) != head_dim:
        raise UserError(
            f"{path}: {name}.attention.value_length differs from key_length ({head_dim}); only equal lengths are "
            "supported"
        )
    context = keys.integer("context_length")
    config = ModelConfig(
        architecture=name,
        name=keys.string("general.name", ""),
        vocab=_vocabulary(keys),
        hidden=hidden,
        layers=keys.integer("block_count"),
        heads=heads,
        kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn=keys.integer("feed_forward_length"),
        context=context,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        tied="output.weight" not in tensor_names,
        qkv_bias="blk.0.attn_q.bias" in tensor_names if architecture.qkv_bias is None else architecture.qkv_bias,
        qk_norm=architecture.qk_norm,
        rope=_rope(keys, architecture, head_dim, context, "rope_freqs.weight" in tensor_names),
        output_bias="blk.0.attn_output.bias" in tensor_names,
    )
    for fault, meant in (
        (config.heads % config.kv_heads, f"heads ({config.heads}) must be a multiple of KV heads ({config.kv_heads})"),
        (config.head_dim % 32, f"the head size ({config.head_dim}) must be a multiple of 32"),
        (config.hidden % 32, f"the hidden size ({config.hidden}) must be a multiple of 32"),
        (config.ffn % 32, f"the feed-forward size ({config.ffn}) must be a multiple of 32"),
        (
            config.rope.dim % 2 or config.rope.dim > head_dim,
            f"RoPE's dimensions ({config.rope.dim}) must be even and <= {head_dim}",
        ),
    ):
        if fault:
            raise UserError(f"{path}: {meant} to be compiled; use another model")
    return config


def _vocabulary(keys: "_Keys") -> int:
    """As in llama.cpp: the length of the token list, or `vocab_size` in files without a tokenizer."""
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) and tokens else keys.integer("vocab_size")


def _rope(keys: "_Keys", architecture: Architecture, head_dim: int, context: int, freq_factors: bool) -> RopeConfig:
    scaling = keys.string("rope.scaling.type", "linear")  # llama.cpp's default; without a factor it scales nothing
    if scaling not in ("none", "linear", "yarn"):
        raise UserError(
            f"{keys.path}: RoPE scaling {shorten(scaling)} is not supported; supported are none, linear, yarn"
        )
    factor = (
        keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0, minimum=0.0), minimum=0.0) or 1.0
    )  # 0: none
    if scaling == "none" or (scaling == "linear" and factor == 1.0):
        scaling, factor = "none", 1.0
    base = keys.number("rope.freq_base", 10000.0)
    if base <= 1.0:
        raise UserError(f"{keys.path}: RoPE's frequency base is {base:g}, it must be above 1; convert the model again")
    return RopeConfig(
        dim=keys.integer("rope.dimension_count", head_dim),
        base=base,
        neox=architecture.neox,
        scaling=scaling,
        factor=factor,
        original_context=keys.integer("rope.scaling.original_context_length", context),
        attn_factor=keys.number("rope.scaling.attn_factor", 1.0),
        ext_factor=keys.number("rope.scaling.yarn_ext_factor", 1.0, minimum=0.0) if scaling == "yarn" else 0.0,
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        freq_factors=freq_factors,
    )


class _Keys:
    """Typed access to metadata; `prefix` (the architecture) is prepended to every key except `general.*`."""

    def __init__(self, metadata: dict[str, object], path: str):
        self.metadata, self.path, self.prefix = metadata, path, ""

    def _get(self, key: str, default: object) -> tuple[str, object]:
        full = key if key.startswith("general.") else f"{self.prefix}.{key}"
        value = self.metadata.get(full, default)
        if value is None:
            raise UserError(f"{self.path}: metadata key {full} is missing; convert the model again")
        return full, value

    def _wrong(self, key: str, value: object, expected: str) -> UserError:
        return UserError(
            f"{self.path}: metadata key {key} is {shorten(value)}, expected {expected}; convert the model again"
        )

    def string(self, key: str, default: str | None = None) -> str:
        key, value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        key, value = self._get(key, default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]  # one entry per layer, all the same
        if isinstance(value, list) and value:
            raise UserError(f"{self.path}: {key} differs between layers; only models with equal layers are supported")
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value < 1 << 31:
            raise self._wrong(key, value, f"an integer >= {minimum}")
        return value

    def number(self, key: str, default: float | None = None, minimum: float | None = None) -> float:
        """A finite number, above 0 unless `minimum` says otherwise."""
        key, value = self._get(key, default)
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not math.isfinite(value)
            or (value <= 0 if minimum is None else value < minimum)
        ):
            raise self._wrong(key, value, "a number above 0" if minimum is None else f"a number >= {minimum:g}")
        return float(value)
