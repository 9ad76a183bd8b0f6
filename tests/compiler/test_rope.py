"""RoPE tables against a scalar transcription of ggml's published formulas, and against the closed forms where there are
some."""

import math

import architectures
import numpy as np
import pytest

from mlc_amd.compiler.gguf import synthetic
from mlc_amd.compiler.models.config import RopeConfig
from mlc_amd.compiler.models.rope import rope_table
from mlc_amd.runtime.errors import UserError


def ggml_rope_yarn(position, pair, rope, factor_of_pair):
    """(cos, sin): ggml_rope_cache_init, rope_yarn, rope_yarn_ramp (ggml-cpu/ops.cpp) and ggml_rope_yarn_corr_dims
    (ggml.c), one pair at a time, with the arguments of llama-context.cpp: attn_factor there is `attn` here, its own
    magnitude cancelled beforehand."""
    freq_scale = 1.0 / rope.factor
    theta_extrap = position * math.pow(rope.base, -2.0 * pair / rope.dim) / factor_of_pair
    theta_interp = freq_scale * theta_extrap
    theta, mscale = theta_interp, 1.0
    if rope.ext_factor != 0.0:

        def corr_dim(n_rot):
            return rope.dim * math.log(rope.original_context / (n_rot * 2 * math.pi)) / (2 * math.log(rope.base))

        start, end = math.floor(corr_dim(rope.beta_fast)), math.ceil(corr_dim(rope.beta_slow))
        low, high = max(0, start), min(rope.dim - 1, end)
        y = (pair - low) / max(0.001, high - low)
        ramp_mix = (1 - min(1, max(0, y))) * rope.ext_factor
        theta = theta_interp * (1 - ramp_mix) + theta_extrap * ramp_mix
        get_mscale = 1.0 if rope.factor <= 1.0 else 0.1 * math.log(rope.factor) + 1.0
        attn = get_mscale * (1.0 / (1.0 + 0.1 * math.log(rope.factor)))
        mscale = attn * (1.0 + 0.1 * math.log(1.0 / freq_scale))
    mscale *= rope.attn_factor
    return math.cos(theta) * mscale, math.sin(theta) * mscale


CASES = {
    "plain": RopeConfig(dim=64, base=10000.0, neox=False),
    "partial": RopeConfig(dim=32, base=500000.0, neox=True),
    "linear": RopeConfig(dim=64, base=10000.0, neox=False, scaling="linear", factor=4.0),
    "yarn": RopeConfig(
        dim=128, base=1e6, neox=True, scaling="yarn", factor=4.0, original_context=32768, ext_factor=1.0
    ),
    "yarn-all": RopeConfig(
        dim=64,
        base=10000.0,
        neox=False,
        scaling="yarn",
        factor=16.0,
        original_context=4096,
        attn_factor=1.3,
        ext_factor=0.7,
        beta_fast=24.0,
        beta_slow=2.0,
    ),
    "yarn-short": RopeConfig(
        dim=64, base=10000.0, neox=False, scaling="yarn", factor=2.0, original_context=100, ext_factor=1.0
    ),
    "yarn-one": RopeConfig(
        dim=64, base=10000.0, neox=False, scaling="yarn", factor=1.0, original_context=4096, ext_factor=1.0
    ),
    "yarn-shrink": RopeConfig(
        dim=64, base=10000.0, neox=False, scaling="yarn", factor=0.5, original_context=4096, ext_factor=1.0
    ),
    "yarn-no-ext": RopeConfig(
        dim=64, base=10000.0, neox=False, scaling="yarn", factor=4.0, original_context=4096, attn_factor=1.1
    ),
}


@pytest.mark.parametrize("factors", [False, True], ids=["", "freq_factors"])
@pytest.mark.parametrize("rope", CASES.values(), ids=CASES)
def test_against_ggml_formula(rope, factors):
    per_pair = np.linspace(1.0, 8.0, rope.dim // 2).astype(np.float32) if factors else None
    table = rope_table(rope, 3000, per_pair)
    assert table.shape == (3000, rope.dim) and table.dtype == np.float32
    for position in (0, 1, 7, 511, 2999):
        expected = [
            ggml_rope_yarn(position, i, rope, float(per_pair[i]) if factors else 1.0) for i in range(rope.dim // 2)
        ]
        np.testing.assert_allclose(table[position], np.array(expected).reshape(-1), rtol=0, atol=2e-7)


def test_position_zero_and_unit_circle():
    table = rope_table(CASES["plain"], 4096)
    assert (table[0, 0::2] == 1).all() and (table[0, 1::2] == 0).all()
    np.testing.assert_allclose(table[:, 0::2] ** 2 + table[:, 1::2] ** 2, 1.0, atol=3e-7)
    np.testing.assert_allclose(table[:, 1], np.sin(np.arange(4096)), atol=1e-7)  # pair 0 turns one radian a token


def test_linear_scaling_divides_positions():
    plain, linear = rope_table(CASES["plain"], 100), rope_table(CASES["linear"], 400)
    np.testing.assert_allclose(linear[::4], plain, atol=1e-6)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    rope = CASES["yarn"]
    magnitude = 1 + 0.1 * math.log(4.0)
    yarn = rope_table(rope, 64) / magnitude
    plain = rope_table(RopeConfig(dim=128, base=1e6, neox=True), 64)
    np.testing.assert_allclose(yarn[:, :2], plain[:, :2], atol=1e-6)
    np.testing.assert_allclose(yarn[::4, -2:], plain[:16, -2:], atol=1e-6)


def test_llama3_factors_of_a_synthetic_model():
    """rope_freqs.weight against the formula of Llama 3.1's apply_scaling: 1, the factor, and a blend between them."""
    model = synthetic("llama3-8b:q4_0")
    factors = model.tensors["rope_freqs.weight"].dequantize()
    for i, got in enumerate(factors):
        frequency = 500000.0 ** (-i / 64)
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            scaled = frequency
        elif wavelength > 8192:
            scaled = frequency / 8
        else:
            smooth = (8192 / wavelength - 1) / 3
            scaled = (1 - smooth) * frequency / 8 + smooth * frequency
        assert got == pytest.approx(frequency / scaled, rel=1e-6)
    assert rope_table(model.config.ropes["rope"], 16, factors).shape == (16, 128)


@pytest.mark.parametrize("factors", [np.ones(31), np.zeros(32), np.full(32, np.nan)], ids=["short", "zero", "nan"])
def test_bad_factors(factors):
    with pytest.raises(UserError, match=r"rope_freqs\.weight must hold 32 numbers"):
        rope_table(CASES["plain"], 8, factors)


def test_all_keys_of_compressed_attention_have_the_columns_that_rotate():
    keys = {"general.architecture": "deepseek4"} | architectures.MODELS["deepseek4"][0] | {"rope.dimension_count": 64}
    keys |= {"attention.key_length": 64, "attention.indexer.key_length": 32}
    with pytest.raises(UserError, match=r"RoPE's dimensions \(64\) must be even and <= 32"):
        synthetic("tiny-qwen2:f16", keys=keys)


def test_sizes_of_blocks_that_no_layer_has_count_for_nothing():
    keys = {"general.architecture": "deepseek4"} | architectures.MODELS["deepseek4"][0]
    longer = keys | {"attention.compress_ratios": [*keys["attention.compress_ratios"], *range(200, 300)]}
    tensors = architectures.MODELS["deepseek4"][1]
    found = [synthetic("tiny-qwen2:f16", keys=of, tensors=tensors).config.ropes for of in (keys, longer)]
    assert found[0] == found[1]
