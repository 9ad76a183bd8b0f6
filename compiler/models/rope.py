"""Tables of values that depend on a token's position: RoPE's angles (so that kernels need neither sin nor cos nor a
scaling method), and attention's temperature.

In: a `RopeConfig` and the capacity of the context. Out: float32 [positions, dim], with cos and sin of each pair side by
side. They are computed in float64. ggml computes angles by repeated multiplication in float32, so its angles differ by
about 1e-7 * position.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mlc_amd.compiler.models.config import ModelConfig, RopeConfig, attentions
from mlc_amd.compiler.models.metadata import LOCAL_ROPE
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import RopeOptions
from mlc_amd.schedules.operators import PackedAttention


def position_table(config: ModelConfig, name: str, ctx: int, tensor: Callable[[str], np.ndarray]) -> np.ndarray:
    """The table of a name in `graph.table_columns`, float32 [ctx, columns]. tensor(name): returns a tensor of the
    file."""
    rope = config.ropes.get(name.removesuffix(".table"))
    if rope is None:
        return _temperatures(config, ctx)
    factors = rope.long_factors if rope.long_factors and ctx > rope.original_context else rope.factors
    return rope_table(rope, ctx, tensor(factors) if factors else None)


def _temperatures(config: ModelConfig, ctx: int) -> np.ndarray:
    """float32 [ctx, 1]: the factor on attention's queries, the same for all layers that have one."""
    t = next(a.temperature for a in attentions(config) if a.temperature)
    steps = np.floor((np.arange(ctx, dtype=np.float64) + t.offset) / t.length)
    return (1.0 + t.scale * np.log1p(steps)).astype(np.float32)[:, None]


def alibi_slopes(heads: int, largest: float) -> np.ndarray:
    """float32 [heads]: ALiBi's slopes; a head's score decreases by its slope for each token between a row and a key."""
    op = PackedAttention(heads=heads, kv_heads=heads, d=8, m=1, alibi=largest)
    exponents = [op.exponent(head, lambda holds, a, b: a if holds else b) for head in range(heads)]
    return np.exp2(np.array(exponents)).astype(np.float32)


def with_options(config: ModelConfig, options: RopeOptions) -> ModelConfig:
    """The configuration with the user's RoPE options, in all layers except layers with a window that have a RoPE of
    their own, as in llama.cpp (src/llama-context.cpp). Raises UserError for a model without RoPE, and for one whose
    attention depends on RoPE's scaling outside of the table."""
    if not options.rope_changes:
        return config
    if not config.ropes or config.encoder:
        raise UserError(
            f"{config.architecture} models have no RoPE that could be changed: leave --rope-* and --yarn-* out"
        )
    if any(rope.log_multiplier for rope in config.ropes.values()):
        raise UserError(
            f"RoPE of {config.architecture} models cannot be changed: the scale of their attention depends on it"
        )
    changed = {name: rope if name.endswith(LOCAL_ROPE) else _with(rope, options) for name, rope in config.ropes.items()}
    return replace(config, ropes=changed)


def _with(rope: RopeConfig, options: RopeOptions) -> RopeConfig:
    given = options.rope_scale or (options.rope_freq_scale and 1.0 / options.rope_freq_scale)
    scaling = options.rope_scaling or ("linear" if given and rope.scaling == "none" else rope.scaling)
    same = scaling == rope.scaling
    mixed = options.yarn_ext_factor
    if mixed is None:
        mixed = rope.ext_factor if same else float(scaling == "yarn")
    attention = 1.0 if mixed else options.yarn_attn_factor or 1.0
    return replace(
        rope,
        base=options.rope_freq_base or rope.base,
        scaling="yarn" if mixed else scaling,
        factor=1.0 if scaling == "none" else given or rope.factor,
        original_context=options.yarn_orig_ctx or rope.original_context,
        attn_factor=rope.attn_factor * attention,
        ext_factor=mixed,
        beta_fast=options.yarn_beta_fast or rope.beta_fast,
        beta_slow=options.yarn_beta_slow or rope.beta_slow,
    )


def rope_table(rope: RopeConfig, ctx: int, freq_factors: np.ndarray | None = None) -> np.ndarray:
    """float32 [ctx, rope.dim] CS: CS[p, 2i] is cos and CS[p, 2i+1] is sin of pair i at position p, both times the
    attention factor.

    freq_factors: rope_freqs.weight [dim/2], by which angles are divided; None for ones. Sources of the scaling: ggml's
    rope_yarn and ggml_rope_yarn_corr_dims (ggml/src/ggml-cpu/ops.cpp, ggml/src/ggml.c), with the arguments of llama.cpp
    (src/llama-context.cpp). Raises UserError if freq_factors has another length, or zeros."""
    pairs = np.arange(rope.dim // 2, dtype=np.float64)
    frequency = rope.base ** (-2.0 * pairs / rope.dim)  # radians per position
    if freq_factors is not None:
        factors = np.asarray(freq_factors, np.float64)
        if factors.shape != pairs.shape or not (np.isfinite(factors) & (factors != 0)).all():
            raise UserError(f"rope_freqs.weight must hold {len(pairs)} numbers other than 0; convert the model again")
        frequency = frequency / factors

    magnitude = rope.attn_factor
    interpolated = frequency / rope.factor  # factor is 1 when there is no scaling
    if rope.scaling == "yarn" and rope.ext_factor != 0.0:
        keep = _yarn_ramp(rope, pairs) * rope.ext_factor  # 1: the pair keeps its angle; 0: its angle is interpolated
        frequency = interpolated * (1.0 - keep) + frequency * keep
        scale = np.log(max(rope.factor, 1.0))
        magnitude *= (1.0 + 0.1 * scale) / (1.0 + 0.1 * rope.log_multiplier * scale)
    else:
        frequency = interpolated
    angle = (np.arange(ctx, dtype=np.float64) + rope.offset)[:, None] * frequency
    table = np.empty((ctx, rope.dim), np.float32)
    table[:, 0::2] = np.cos(angle) * magnitude
    table[:, 1::2] = np.sin(-angle if rope.back else angle) * magnitude
    return table


def _yarn_ramp(rope: RopeConfig, pairs: np.ndarray) -> np.ndarray:
    """For each pair: 1 if it rotates at least beta_fast times in the original context, 0 if at most beta_slow times,
    and values between in the range between."""

    def pair_turning(times: float) -> float:
        return rope.dim * np.log(rope.original_context / (times * 2.0 * np.pi)) / (2.0 * np.log(rope.base))

    low = max(0.0, np.floor(pair_turning(rope.beta_fast)))
    high = min(rope.dim - 1.0, np.ceil(pair_turning(rope.beta_slow)))
    return 1.0 - np.clip((pairs - low) / max(0.001, high - low), 0.0, 1.0)
