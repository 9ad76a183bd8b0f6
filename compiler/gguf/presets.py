"""Presets of `synthetic`: sizes of published models, and of tiny ones for tests, as GGUF metadata."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

# keys that all presets have: place of the value among the arguments of `_sizes`
SIZES = {
    "block_count": 0, "embedding_length": 1, "feed_forward_length": 2, "attention.head_count": 3,
    "attention.head_count_kv": 4, "attention.key_length": 5, "attention.value_length": 5, "vocab_size": 6,
    "context_length": 7, "attention.layer_norm_rms_epsilon": 8, "attention.layer_norm_epsilon": 8, "rope.freq_base": 9,
    "rope.dimension_count": 5,
}  # fmt: skip


@dataclass(frozen=True)
class Preset:
    """keys: metadata without the architecture in front. tensors: optional ones that the model has; * stands for a
    layer's number. rope_freqs: pairs -> the values of rope_freqs.weight."""

    architecture: str
    keys: Mapping[str, object]
    tensors: tuple[str, ...] = ("output.weight",)
    rope_freqs: Callable[[int], np.ndarray] | None = None

    def present(self) -> set[str]:
        """Names of the optional tensors, with the layers' numbers."""
        layers = self.keys["block_count"]
        assert isinstance(layers, int)
        names = {name.replace("*", str(i)) for name in self.tensors for i in range(layers)}
        return names | ({"rope_freqs.weight"} if self.rope_freqs else set())


def _sizes(*sizes, more: Mapping[str, object] | None = None) -> dict[str, object]:
    return {key: sizes[place] for key, place in SIZES.items()} | dict(more or {})


def _llama3(factor: float) -> Callable[[int], np.ndarray]:
    """Llama 3.1's frequency factors, as llama.cpp's converter writes them (low_freq_factor 1, high_freq_factor 4, 8192
    tokens before): 1 for wavelengths below 8192/4, `factor` above 8192, between them a blend of the two."""

    def factors(pairs: int) -> np.ndarray:
        wavelength = 2 * np.pi * 5e5 ** (np.arange(pairs) / pairs)
        smooth = np.clip((8192 / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)

    return factors


def _partial_factors(share: float) -> Callable[[int], np.ndarray]:
    """Proportional RoPE (gemma4): only the first pairs rotate."""
    return lambda pairs: np.where(np.arange(pairs) < share * pairs, 1.0, 1e30).astype(np.float32)


_ATTENTION = "attn_q", "attn_k", "attn_v"


def _biases(*names: str) -> tuple[str, ...]:
    """The metadata that all layers need."""
    return tuple(f"blk.*.{name}.bias" for name in names)


def _experts(count: int, used: int, size: int) -> dict[str, object]:
    return {"expert_count": count, "expert_used_count": used, "expert_feed_forward_length": size}


def _states(size: int, groups: int, heads: int, head_dim: int) -> dict[str, int]:
    """The metadata of state spaces and delta nets."""
    sizes = {"ssm.state_size": size, "ssm.group_count": groups, "ssm.conv_kernel": 4}
    return sizes | {"ssm.time_step_rank": heads, "ssm.inner_size": heads * head_dim}


def _gpt_oss(layers: int, experts: int) -> Preset:
    more = _experts(experts, 4, 2880) | {
        "attention.sliding_window": 128,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
    }
    keys = _sizes(layers, 2880, 2880, 64, 8, 64, 201088, 131072, 1e-5, 150000.0, more=more)
    return Preset("gpt-oss", keys, ("output.weight", *_biases(*_ATTENTION, "attn_output", "ffn_gate_inp")))


_GEMMA4 = {
    "attention.sliding_window": 1024,
    "attention.sliding_window_pattern": [(i + 1) % 6 != 0 for i in range(30)],
    "attention.head_count_kv": [8 if (i + 1) % 6 else 2 for i in range(30)],
    "attention.key_length_swa": 256,
    "attention.value_length_swa": 256,
    "rope.dimension_count_swa": 256,
    "rope.freq_base_swa": 10000.0,
    "final_logit_softcapping": 30.0,
}
# attn_v is missing where all keys are seen
_GEMMA4_TENSORS = (
    "blk.*.ffn_gate_inp.weight",
    "blk.*.layer_output_scale.weight",
    "blk.*.ffn_gate_up_exps.weight",
    "blk.*.ffn_down_exps.scale",
    *(f"blk.{i}.attn_v.weight" for i in range(30) if (i + 1) % 6),
)
_LATENT = {
    "attention.key_length": 576,
    "attention.value_length": 512,
    "attention.kv_lora_rank": 512,
    "rope.dimension_count": 64,
}
_GLM47_FLASH = (
    _experts(64, 4, 1536)
    | _LATENT
    | {"attention.q_lora_rank": 768, "attention.key_length_mla": 256, "attention.value_length_mla": 256}
    | {"leading_dense_block_count": 1, "expert_shared_count": 1, "expert_gating_func": 2}
    | {"expert_weights_norm": True, "expert_weights_scale": 1.8}
)
_INDEXED = {
    "attention.indexer.key_length": 128, "attention.indexer.top_k": 2048, "leading_dense_block_count": 3,
    "expert_shared_count": 1, "expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5,
}  # fmt: skip
_GLM5 = (
    _experts(256, 8, 2048)
    | _LATENT
    | _INDEXED
    | {"attention.q_lora_rank": 2048, "attention.key_length_mla": 256, "attention.value_length_mla": 256}
    | {"attention.indexer.head_count": 32}
)
_STEP35 = (
    _experts(288, 8, 1280)
    | {"attention.sliding_window": 512, "attention.sliding_window_pattern": [int(i % 4 > 0) for i in range(45)]}
    | {"attention.head_count": [96 if i % 4 else 64 for i in range(45)], "rope.freq_base_swa": 10000.0}
    | {"expert_shared_feed_forward_length": 1280, "expert_weights_norm": True, "expert_weights_scale": 3.0}
    | {
        "expert_gating_func": 2,
        "swiglu_clamp_exp": [0.0] * 43 + [7.0] * 2,
        "swiglu_clamp_shexp": [0.0] * 43 + [16.0] * 2,
    }
)
_DEEPSEEK_V4_FLASH = (
    _experts(256, 6, 2048)
    | {"attention.compress_ratios": [0, 0] + [128 if i % 2 else 4 for i in range(2, 43)], "hash_layer_count": 3}
    | {"attention.q_lora_rank": 1024, "attention.output_group_count": 8, "attention.output_lora_rank": 1024}
    | {"attention.compress_rope_freq_base": 160000.0, "attention.sliding_window": 128, "rope.dimension_count": 64}
    | {"attention.indexer.head_count": 64, "attention.indexer.key_length": 128, "attention.indexer.top_k": 512}
    | {"hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 20, "hyper_connection.epsilon": 1e-6}
    | {"expert_shared_count": 1, "expert_gating_func": 4, "expert_weights_norm": True, "expert_weights_scale": 1.5}
    | {"swiglu_clamp_exp": 10.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 16.0}
    | {"rope.scaling.original_context_length": 65536}
)
_MUSE_GLIMMER = {
    "attention.sliding_window": 2048, "attention.sliding_window_pattern": 4, "logit_scale": 26**-0.5,
    "final_logit_softcapping": 20.0,
}  # fmt: skip
_MINIMAX_M3 = (
    _experts(128, 4, 3072)
    | {"attention.indexer.head_count": 4, "attention.indexer.key_length": 128, "attention.indexer.top_k": 16}
    | {"attention.indexer.block_size": 128, "attention.indexer.local_blocks": 1, "rope.dimension_count": 64}
    | {"leading_dense_block_count": 3, "expert_shared_count": 1, "expert_gating_func": 2}
    | {"expert_weights_norm": True, "expert_weights_scale": 2.0}
)
_DEEPSEEK_V32 = (
    _experts(256, 8, 2048)
    | _LATENT
    | _INDEXED
    | {"attention.q_lora_rank": 1536, "attention.key_length_mla": 192, "attention.value_length_mla": 128}
    | {"attention.indexer.head_count": 64, "expert_group_count": 8, "expert_group_used_count": 4}
    | {"rope.scaling.type": "yarn", "rope.scaling.factor": 40.0, "rope.scaling.original_context_length": 4096}
    | {"rope.scaling.yarn_log_multiplier": 0.1}
)
_KIMI_LINEAR = (
    _experts(256, 8, 1024)
    | _LATENT
    | {"attention.head_count_kv": [1 if i in (3, 7, 11, 15, 19, 23, 26) else 0 for i in range(27)]}
    | {"attention.key_length_mla": 192, "attention.value_length_mla": 128, "kda.head_dim": 128, "ssm.conv_kernel": 4}
    | {"leading_dense_block_count": 1, "expert_shared_count": 1, "expert_gating_func": 2}
    | {"expert_weights_scale": 2.446}
)
# 36 delta nets and 12 layers with attention. Rows of the table: the model's own sizes are primes above 20,000,000, its
# multipliers drawn numbers of this size
_QWEN4_EXP = (
    _experts(512, 10, 640)
    | _states(128, 16, 48, 128)
    | {"rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0], "full_attention_interval": 4}
    | {"expert_shared_feed_forward_length": 640, "hyper_connection.count": 4, "hyper_connection.low_rank": 320}
    | {"attention.indexer.head_count": 4, "attention.indexer.key_length": 128, "attention.indexer.top_k": 2048}
    | {"attention.compress_ratios": [4 if i % 4 == 3 else 0 for i in range(48)], "ple.layers": [1]}
    | {"ple.ngram_size": 3, "ple.heads_per_ngram": 8, "ple.conv_kernel": 4, "ple.eos_token_id": 248044}
    | {"embedding_length_per_layer_input": 160, "ple.image_token_id": 248056}
    | {"ple.layer_multipliers": [23456789012345, 34567890123457, 35678901234567]}
    | {"ple.head_offsets": [i * 20_000_000 for i in range(16)], "ple.head_vocab_sizes": [20_000_000] * 16}
)
_QWEN3_MOE = _experts(128, 8, 768)
_QWEN35 = _states(128, 16, 48, 128) | {"rope.dimension_count": 64}
_QWEN35_MOE = (
    _experts(256, 8, 512)
    | _states(128, 16, 32, 128)
    | {"rope.dimension_count": 64, "expert_shared_feed_forward_length": 512}
)
_LFM2_MOE = (
    _experts(32, 4, 1792)
    | {"attention.head_count_kv": [8 if i in (2, 6, 10, 14, 18, 21) else 0 for i in range(24)]}
    | {"shortconv.l_cache": 3, "leading_dense_block_count": 2, "expert_gating_func": 2}
)
# Most layers are state spaces, whose number of KV heads is 0
_GRANITE4_H_SMALL = {
    "attention.head_count_kv": [8 if i in (5, 15, 25, 35) else 0 for i in range(40)],
    "attention.scale": 1 / 128,
    "rope.scaling.finetuned": False,  # the model does without RoPE
    "expert_count": 72,
    "expert_used_count": 10,
    "expert_shared_feed_forward_length": 1536,
    "embedding_scale": 12.0,
    "residual_scale": 0.22,
    "logit_scale": 16.0,
} | _states(128, 1, 128, 64)
_NEMOTRON3_NANO_LAYERS = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"  # state space, experts, attention
_NEMOTRON3_NANO = (
    _experts(128, 6, 1856)
    | {
        "feed_forward_length": [1856 if layer == "E" else 0 for layer in _NEMOTRON3_NANO_LAYERS],
        "attention.head_count_kv": [2 if layer == "*" else 0 for layer in _NEMOTRON3_NANO_LAYERS],
        "expert_shared_feed_forward_length": 3712,
        "expert_shared_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
    }
    | _states(128, 8, 64, 64)
)
_LFM2 = {"attention.head_count_kv": [8 if i in (2, 5, 8, 10, 12, 14) else 0 for i in range(16)], "shortconv.l_cache": 3}
_GEMMA3 = {"attention.sliding_window": 1024, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
_PHI4 = {
    "rope.dimension_count": 96,
    "rope.scaling.original_context_length": 4096,
    "rope.scaling.attn_factor": 1.19,  # sqrt(1 + ln(131072 / 4096) / ln(4096)), as the converter writes it
}
_PHI4_TENSORS = ("blk.*.attn_qkv.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_BERT = {"pooling_type": 1, "attention.causal": False, "tokenizer.ggml.token_type_count": 2}
_BERT_TENSORS = (
    "token_types.weight",
    "token_embd_norm.bias",
    *_biases(*_ATTENTION, "attn_output", "ffn_up", "ffn_down", "attn_output_norm", "layer_output_norm"),
)
PRESETS = {
    # layers hidden ffn heads kv_heads head_dim vocab context eps rope_base
    "tiny": Preset("llama", _sizes(2, 256, 768, 4, 2, 64, 1024, 2048, 1e-5, 10000.0)),
    "tiny-qwen2": Preset("qwen2", _sizes(2, 256, 768, 4, 2, 64, 1024, 2048, 1e-6, 1e6), _biases(*_ATTENTION)),
    "bert-base": Preset(
        "bert", _sizes(12, 768, 3072, 12, 12, 64, 30522, 512, 1e-12, 10000.0, more=_BERT), _BERT_TENSORS
    ),
    "tiny-qwen3": Preset("qwen3", _sizes(2, 256, 768, 4, 2, 128, 1024, 2048, 1e-6, 1e6), ()),
    "llama3-1b": Preset("llama", _sizes(16, 2048, 8192, 32, 8, 64, 128256, 131072, 1e-5, 5e5), rope_freqs=_llama3(32)),
    "llama3-8b": Preset("llama", _sizes(32, 4096, 14336, 32, 8, 128, 128256, 131072, 1e-5, 5e5), rope_freqs=_llama3(8)),
    "llama3-70b": Preset(
        "llama", _sizes(80, 8192, 28672, 64, 8, 128, 128256, 131072, 1e-5, 5e5), rope_freqs=_llama3(8)
    ),
    "llama3-405b": Preset(
        "llama", _sizes(126, 16384, 53248, 128, 8, 128, 128256, 131072, 1e-5, 5e5), rope_freqs=_llama3(8)
    ),
    "llama2-7b": Preset("llama", _sizes(32, 4096, 11008, 32, 32, 128, 32000, 4096, 1e-5, 10000.0)),
    "qwen3-8b": Preset("qwen3", _sizes(36, 4096, 12288, 32, 8, 128, 151936, 40960, 1e-6, 1e6)),
    "qwen3-0.6b": Preset("qwen3", _sizes(28, 1024, 3072, 16, 8, 128, 151936, 40960, 1e-6, 1e6), ()),
    "qwen3-30b-a3b": Preset("qwen3moe", _sizes(48, 2048, 6144, 32, 4, 128, 151936, 40960, 1e-6, 1e6, more=_QWEN3_MOE)),
    "lfm2-1.2b": Preset("lfm2", _sizes(16, 2048, 8192, 32, 8, 64, 65536, 128000, 1e-5, 1e6, more=_LFM2), ()),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "gemma3-12b": Preset("gemma3", _sizes(48, 3840, 15360, 16, 8, 256, 262144, 131072, 1e-6, 1e6, more=_GEMMA3), ()),
    "gemma4-26b-a4b": Preset(
        "gemma4",
        _sizes(30, 2816, 2112, 16, 8, 512, 262144, 262144, 1e-6, 1e6, more=_GEMMA4 | _experts(128, 8, 704)),
        _GEMMA4_TENSORS,
        _partial_factors(0.25),
    ),
    "glm-4.7-flash": Preset(
        "deepseek2",
        _sizes(47, 2048, 10240, 20, 1, 256, 154880, 202752, 1e-5, 1e6, more=_GLM47_FLASH),
        ("output.weight", "blk.*.exp_probs_b.bias"),
    ),
    "glm-5": Preset(
        "glm-dsa",
        _sizes(78, 6144, 12288, 64, 1, 256, 154880, 202752, 1e-5, 1e6, more=_GLM5),
        ("output.weight", "blk.*.exp_probs_b.bias"),
    ),
    "deepseek-v3.2": Preset(
        "deepseek32",
        _sizes(61, 7168, 18432, 128, 1, 192, 129280, 163840, 1e-6, 10000.0, more=_DEEPSEEK_V32),
        ("output.weight", "blk.*.exp_probs_b.bias"),
    ),
    "deepseek-v4-flash": Preset(
        "deepseek4",
        _sizes(43, 4096, 2048, 64, 1, 512, 129280, 1048576, 1e-6, 10000.0, more=_DEEPSEEK_V4_FLASH),
        ("output.weight", *(f"blk.{i}.exp_probs_b.bias" for i in range(3, 43))),
    ),
    "minimax-m3": Preset(
        "minimax-m3",
        _sizes(60, 6144, 12288, 64, 4, 128, 200064, 1048576, 1e-6, 5e6, more=_MINIMAX_M3),
        ("output.weight", "blk.*.exp_probs_b.bias"),
    ),
    "muse-glimmer-30b": Preset(
        "muse-glimmer",
        _sizes(52, 6656, 19968, 32, 2, 128, 202048, 131072, 1e-5, 5e5, more=_MUSE_GLIMMER),
    ),
    "kimi-linear-48b-a3b": Preset(
        "kimi-linear",
        _sizes(27, 2304, 9216, 32, 1, 576, 163840, 1048576, 1e-5, 10000.0, more=_KIMI_LINEAR),
        ("output.weight", "blk.*.exp_probs_b.bias"),
    ),
    "step-3.5-flash": Preset(
        "step35",
        _sizes(45, 4096, 11264, 64, 8, 128, 128896, 262144, 1e-5, 5e6, more=_STEP35),
        (
            "output.weight",
            "blk.*.attn_gate.weight",
            "blk.*.attn_q_norm.weight",
            *(f"blk.{i}.{name}" for i in range(3, 45) for name in ("ffn_gate_inp.weight", "exp_probs_b.bias")),
        ),
    ),
    "lfm2-8b-a1b": Preset("lfm2moe", _sizes(24, 2048, 7168, 32, 8, 64, 65536, 128000, 1e-5, 1e6, more=_LFM2_MOE), ()),
    "qwen35-27b": Preset("qwen35", _sizes(64, 5120, 17408, 24, 4, 256, 248320, 262144, 1e-6, 1e7, more=_QWEN35)),
    "qwen35-35b-a3b": Preset("qwen35moe", _sizes(40, 2048, 0, 16, 2, 256, 248320, 262144, 1e-6, 1e7, more=_QWEN35_MOE)),
    "qwen38-flash-next": Preset(
        "qwen4exp", _sizes(48, 2560, 0, 24, 2, 256, 248320, 262144, 1e-6, 1e7, more=_QWEN4_EXP), ("output.weight",)
    ),
    "granite-4-h-small": Preset(
        "granitehybrid", _sizes(40, 4096, 768, 32, 8, 128, 100352, 131072, 1e-5, 10000.0, more=_GRANITE4_H_SMALL), ()
    ),
    "nemotron-3-nano": Preset(
        "nemotron_h_moe",
        _sizes(52, 2688, 1856, 32, 2, 128, 131072, 262144, 1e-5, 10000.0, more=_NEMOTRON3_NANO),
        ("output.weight", "blk.*.exp_probs_b.bias"),
    ),
    "mistral-small-24b": Preset("llama", _sizes(40, 5120, 32768, 32, 8, 128, 131072, 131072, 1e-5, 1e9)),
    "phi4-mini": Preset(
        "phi3", _sizes(32, 3072, 8192, 24, 8, 128, 200064, 131072, 1e-5, 10000.0, more=_PHI4), _PHI4_TENSORS
    ),
}
