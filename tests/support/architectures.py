"""A tiny model of each architecture: metadata on top of the preset "tiny-qwen2", and the optional tensors that it has.

They cover what an architecture can be: a window smaller than the prompt, shared experts, biases, layers of different
kinds. No row's choice of experts is close. `referenced` makes other ones, of which llama.cpp's logits are known.
"""

from pathlib import Path

import numpy as np

from mlc_amd.compiler.gguf import GGUFModel, synthetic

SECTIONS: dict[str, object] = {"rope.dimension_sections": [6, 5, 5, 0]}
# Decoders of images: of texts their logits are those of others, as all sections of RoPE have the same angles.
SAME_TEXT = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe"}
ROPE_SCALED = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 16,
}  # fmt: skip
EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 64}
DELTA_NET = {
    "full_attention_interval": 2, "rope.dimension_count": 32, "ssm.state_size": 32, "ssm.group_count": 2,
    "ssm.time_step_rank": 4, "ssm.conv_kernel": 4, "ssm.inner_size": 128, "rope.dimension_sections": [6, 5, 5, 0],
}  # fmt: skip
BLOCKS = range(4)


def _biases(*names: str) -> tuple[str, ...]:
    """Of all layers."""
    return tuple(f"blk.*.{name}.bias" for name in names)


QKV_BIAS, OUTPUT_BIAS = _biases("attn_q", "attn_k", "attn_v"), _biases("attn_output")

MAMBA2 = {
    "ssm.inner_size": 512, "ssm.state_size": 32, "ssm.time_step_rank": 8, "ssm.group_count": 2, "ssm.conv_kernel": 4,
}  # fmt: skip

MODELS: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "cohere2": ({"attention.sliding_window": 24, "logit_scale": 0.25, "block_count": 4}, ()),
    "deepseek2": (
        EXPERTS
        | ROPE_SCALED
        | {"rope.scaling.yarn_log_multiplier": 0.1, "rope.dimension_count": 32, "attention.head_count_kv": 1}
        | {"attention.q_lora_rank": 96, "attention.kv_lora_rank": 64, "attention.key_length": 96}
        | {"attention.value_length": 64, "attention.key_length_mla": 96, "attention.value_length_mla": 48}
        | {"leading_dense_block_count": 1, "expert_shared_count": 1, "expert_gating_func": 2}
        | {"expert_feed_forward_length": 48}  # no whole blocks of 32
        | {"expert_weights_norm": True, "expert_weights_scale": 2.5, "expert_group_count": 4}
        | {"expert_group_used_count": 2},
        ("blk.*.exp_probs_b.bias",),
    ),
    "ernie4_5": ({}, ()),
    "ernie4_5-moe": (
        EXPERTS | {"leading_dense_block_count": 1, "expert_shared_feed_forward_length": 128},
        ("blk.*.exp_probs_b.bias",),
    ),
    "exaone4": ({}, ("rope_freqs.weight",)),
    "falcon-h1": (MAMBA2 | {"ssm.inner_size": 384, "ssm.time_step_rank": 6, "ssm.state_size": 48}, ()),
    "gemma": ({}, ()),
    "gemma2": ({"attention.sliding_window": 24, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}, ()),
    "gemma3": (
        {"attention.sliding_window": 24, "attention.sliding_window_pattern": 2, "rope.freq_base_swa": 1000.0}
        | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "attention.key_length": 48}
        | {"attention.value_length": 48, "rope.dimension_count": 48},
        (),
    ),
    "gemma4": (
        EXPERTS
        | {"block_count": 4, "attention.sliding_window": 24, "attention.shared_kv_layers": 2}
        | {"attention.sliding_window_pattern": [True, False, True, False], "attention.head_count_kv": [2, 1, 2, 1]}
        | {"attention.key_length_swa": 32, "attention.value_length_swa": 32, "rope.dimension_count_swa": 32}
        | {"rope.freq_base_swa": 1000.0, "embedding_length_per_layer_input": 32},
        (
            "blk.0.attn_v.weight", "blk.*.ffn_gate_up_exps.weight", "blk.*.ffn_down_exps.scale", "rope_freqs.weight",
            *(f"blk.{i}.layer_output_scale.weight" for i in BLOCKS), "blk.1.ffn_gate_inp.weight",
        ),
    ),
    "glm4": ({"rope.dimension_count": 32}, QKV_BIAS),
    "glm4moe": (
        EXPERTS
        | {"leading_dense_block_count": 1, "expert_gating_func": 2, "expert_weights_norm": True}
        | {"expert_weights_scale": 1.5, "rope.dimension_count": 32},
        ("blk.*.attn_q_norm.weight",),
    ),
    "gpt-oss": (
        EXPERTS | ROPE_SCALED | {"attention.sliding_window": 24},
        (*QKV_BIAS, *OUTPUT_BIAS, *_biases("ffn_gate_inp")),
    ),
    "granite": (
        {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0, "attention.scale": 0.025},
        (),
    ),
    "granitemoe": (
        EXPERTS
        | {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0, "attention.scale": 0.025}
        | {"feed_forward_length": 64, "expert_shared_feed_forward_length": 96},
        (),
    ),
    "granitehybrid": (
        EXPERTS | MAMBA2
        | {"block_count": 3, "attention.head_count_kv": [0, 2, 0], "rope.scaling.finetuned": False}
        | {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0, "attention.scale": 0.025}
        | {"feed_forward_length": 64, "expert_shared_feed_forward_length": 96, "ssm.group_count": 1},
        (),
    ),
    "hunyuan-dense": ({"rope.scaling.alpha": 1000.0}, ()),
    "kimi-linear": (
        EXPERTS
        | {"block_count": 4, "attention.head_count_kv": [0, 1, 0, 0], "kda.head_dim": 48, "ssm.conv_kernel": 4}
        | {"rope.dimension_count": 16, "attention.kv_lora_rank": 64, "attention.key_length": 80}
        | {"attention.value_length": 64, "attention.key_length_mla": 48, "attention.value_length_mla": 32}
        | {"leading_dense_block_count": 1, "expert_shared_count": 1, "expert_gating_func": 2}
        | {"expert_weights_scale": 2.446},
        ("output.weight", "blk.*.exp_probs_b.bias"),
    ),
    "lfm2": (
        {"block_count": 4, "attention.head_count_kv": [0, 2, 0, 2], "shortconv.l_cache": 3}
        | {"attention.sliding_window": 24},
        (),
    ),
    "lfm2moe": (
        EXPERTS | {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 4, "leading_dense_block_count": 1}
        | {"expert_gating_func": 2},
        (),
    ),
    "llama": ({}, ("output.weight",)),
    "llama-moe": (EXPERTS | {"feed_forward_length": 64}, ()),
    "llama4": (
        EXPERTS | {"expert_used_count": 3, "block_count": 4, "interleave_moe_layer_step": 2},
        ("rope_freqs.weight",),
    ),
    "mamba2": (MAMBA2, ()),
    "minimax-m2": (
        EXPERTS
        | {"expert_used_count": 3, "feed_forward_length": 64, "rope.dimension_count": 32, "expert_gating_func": 2},
        (),
    ),
    "mistral3": (
        ROPE_SCALED | {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1},
        (),
    ),
    "nemotron_h": (
        MAMBA2
        | {"block_count": 4, "attention.head_count_kv": [0, 0, 2, 0], "feed_forward_length": [0, 256, 0, 320]},
        (),
    ),
    "nemotron_h_moe": (
        EXPERTS | MAMBA2
        | {"block_count": 4, "attention.head_count_kv": [0, 0, 2, 0], "feed_forward_length": [0, 64, 0, 64]}
        | {"expert_shared_feed_forward_length": 96, "expert_weights_norm": True, "expert_weights_scale": 2.5}
        | {"moe_latent_size": 96},
        ("blk.*.exp_probs_b.bias",),
    ),
    "olmo2": (ROPE_SCALED | {"attention.sliding_window": 24, "block_count": 4}, ("output.weight",)),
    "olmoe": (EXPERTS | {"feed_forward_length": 64, "attention.head_count_kv": 4}, ("output.weight",)),
    "phi3": (
        {"rope.dimension_count": 48, "rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.19},
        ("blk.*.attn_qkv.weight", "rope_factors_long.weight", "rope_factors_short.weight"),
    ),
    "qwen2": ({}, QKV_BIAS),
    "qwen2vl": (SECTIONS, QKV_BIAS),
    "qwen2moe": (EXPERTS | {"expert_shared_feed_forward_length": 96}, QKV_BIAS),
    "qwen3": ({}, ()),
    "qwen3moe": (EXPERTS, ()),
    "qwen3vl": (SECTIONS, ()),
    "qwen3vlmoe": (EXPERTS | SECTIONS, ()),
    "qwen3next": (DELTA_NET | EXPERTS | {"expert_shared_feed_forward_length": 96}, ("blk.*.ssm_in.weight",)),
    "qwen35": (
        DELTA_NET | {"ssm.time_step_rank": 6, "ssm.inner_size": 192, "ssm.conv_kernel": 3}, ("output.weight",),
    ),
    "qwen35moe": (
        DELTA_NET | EXPERTS | {"expert_shared_feed_forward_length": 96},
        ("blk.0.ffn_gate_up_exps.weight", "blk.1.ffn_gate_up_exps.weight"),
    ),
    "seed_oss": ({}, QKV_BIAS),
    "smollm3": ({"block_count": 4}, ()),
    "starcoder2": (
        {},
        ("output_norm.bias", *QKV_BIAS, *OUTPUT_BIAS, *_biases("ffn_up", "ffn_down", "attn_norm", "ffn_norm")),
    ),
}  # fmt: skip

# Further decoders: their logits are llama.cpp's, of files with these weights in float32.
_LAYER_NORM_BIAS = ("output_norm.bias", *_biases("attn_norm", "ffn_norm"))
_UNGATED_BIAS = (*QKV_BIAS, *OUTPUT_BIAS, *_biases("ffn_up", "ffn_down"))
_SHARED = EXPERTS | {"leading_dense_block_count": 1, "expert_shared_count": 1, "expert_gating_func": 2}
_WINDOWS = {"attention.sliding_window": 24, "block_count": 4}
_ALTERNATING = {"attention.sliding_window_pattern": [1, 0, 1, 0]}
_SELECTION = _biases("exp_probs_b")
_QKV = ("blk.*.attn_qkv.weight",)
_INDEXED = _SHARED | {
    "attention.head_count_kv": 1, "attention.q_lora_rank": 96, "attention.kv_lora_rank": 64, "rope.dimension_count": 32,
    "attention.key_length": 96, "attention.value_length": 64, "attention.key_length_mla": 96,
    "attention.value_length_mla": 48, "attention.indexer.head_count": 16, "attention.indexer.key_length": 64,
    "attention.indexer.top_k": 16, "expert_weights_norm": True,
}  # fmt: skip
_MAMBA = {
    "ssm.inner_size": 512, "ssm.state_size": 32, "ssm.time_step_rank": 24, "ssm.group_count": 0, "ssm.conv_kernel": 4,
}  # fmt: skip
_PARTIAL = {"rope.dimension_count": 32}
LLAMACPP: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "afmoe": (_SHARED | _WINDOWS | {"expert_weights_norm": True}, _SELECTION),
    "arcee": ({}, ()),
    "arctic": (EXPERTS | {"feed_forward_length": 64}, ()),
    "baichuan": ({}, ("output.weight",)),
    "bailingmoe": (_SHARED | {"expert_used_count": 3}, ("output.weight",)),
    "bailingmoe2": (_SHARED | {"expert_weights_norm": True}, ("output.weight", "blk.*.attn_qkv.weight", *_SELECTION)),
    "bailingmoe3": (
        _SHARED | {"block_count": 3, "attention.head_count_kv": [0, 1, 0], "kda.head_dim": 32, "ssm.conv_kernel": 4}
        | {"kda.gate_lower_bound": -5.0, "rope.dimension_count": 32, "attention.kv_lora_rank": 64}
        | {"attention.q_lora_rank": 96, "attention.key_length": 96, "attention.value_length": 64}
        | {"attention.key_length_mla": 64, "attention.value_length_mla": 32, "expert_weights_norm": True}
        | {"swiglu_clamp_exp": [0.0, 0.5, 0.25], "swiglu_clamp_shexp": [0.5, 0.25, 0.0]},
        ("output.weight", *_SELECTION),
    ),
    "bloom": (
        {"attention.head_count": 6, "attention.head_count_kv": 6, "embedding_length": 384, "attention.key_length": 64},
        (*_QKV, "blk.*.attn_qkv.bias", "token_embd_norm.bias", *_LAYER_NORM_BIAS, *_UNGATED_BIAS),
    ),
    "chatglm": (_PARTIAL, ("output.weight", "blk.*.attn_qkv.weight", "blk.*.attn_qkv.bias")),
    "codeshell": ({}, ("output.weight", *_LAYER_NORM_BIAS, *_UNGATED_BIAS)),
    "cohere2moe": (
        _SHARED | _WINDOWS | {"attention.layer_norm_rms_epsilon": 0.0, "logit_scale": 0.25, "expert_shared_count": 2},
        (),
    ),
    "cogvlm": ({"attention.head_count_kv": 4}, ("output.weight", *_QKV)),
    "command-r": ({"logit_scale": 0.0625}, ()),
    "dbrx": (EXPERTS | {"feed_forward_length": 64, "attention.clamp_kqv": 1.0}, ("output.weight", *_QKV)),
    "deepseek32": (_INDEXED, ("output.weight", *_SELECTION)),
    "deci": (
        {"block_count": 4, "attention.head_count": [4, 0, 0, 2], "attention.head_count_kv": [2, 0, 0, 1]}
        | {"feed_forward_length": [768, 512, 0, 256]},
        (),
    ),
    "deepseek": (_SHARED | {"expert_weights_scale": 1.5}, ()),
    "dots3note": (
        _INDEXED | _WINDOWS | _ALTERNATING | {"attention.kv_lora_rank_swa": 32, "attention.key_length_mla_swa": 64}
        | {"attention.value_length_mla_swa": 32, "attention.indexer.types": [0, 1, 0, 1], "rope.freq_base_swa": 1000.0}
        | {"attention.key_length_swa": 64, "attention.value_length_swa": 32},
        ("output.weight", *_SELECTION, "blk.*.attn_k_norm.weight"),
    ),
    "deepseek4": (
        EXPERTS | ROPE_SCALED | {"block_count": 4, "expert_shared_count": 1, "expert_gating_func": 4,
            "expert_weights_norm": True, "expert_weights_scale": 1.5, "hash_layer_count": 1,
            "swiglu_clamp_exp": [0.5, 0.25, 1.0, 0.5], "swiglu_clamp_shexp": [0.25, 1.0, 0.5, 0.5],
            "attention.head_count_kv": 1, "rope.dimension_count": 32, "attention.sliding_window": 12,
            "attention.q_lora_rank": 96, "attention.output_group_count": 2, "attention.output_lora_rank": 64,
            "attention.compress_ratios": [0, 4, 128, 4], "attention.compress_rope_freq_base": 160000.0,
            "attention.indexer.head_count": 16, "attention.indexer.key_length": 64, "attention.indexer.top_k": 5,
            "hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 3, "hyper_connection.epsilon": 1e-6},
        ("output.weight", *(f"blk.{i}.exp_probs_b.bias" for i in (1, 2, 3))),
    ),
    "dots1": (_SHARED | {"expert_weights_norm": True, "attention.head_count_kv": 4}, ("output.weight", *_SELECTION)),
    "exaone": ({}, ("rope_freqs.weight",)),
    "exaone-moe": (
        _SHARED | _WINDOWS | {"expert_weights_norm": True, "expert_shared_feed_forward_length": 64},
        ("output.weight", *_SELECTION),
    ),
    "falcon": ({}, (*_QKV, "output_norm.bias", *_biases("attn_norm", "attn_norm_2"), "blk.*.attn_norm_2.weight")),
    "gpt2": ({}, (*_QKV, "blk.*.attn_qkv.bias", *_LAYER_NORM_BIAS, *_UNGATED_BIAS)),
    "grok": (EXPERTS | {"attn_logit_softcapping": 5.0}, ("blk.*.ffn_up.weight", "blk.*.layer_output_norm.weight")),
    "gptneox": (
        _PARTIAL | {"use_parallel_residual": True},
        ("output.weight", *_QKV, "blk.*.attn_qkv.bias", *_LAYER_NORM_BIAS, *_UNGATED_BIAS),
    ),
    "glm-dsa": (
        _INDEXED | {"block_count": 3, "attention.indexer.types": [1, 0, 1], "attention.indexer.head_count": 12},
        ("output.weight", *_SELECTION),
    ),
    "granite_swa": (
        _WINDOWS | _ALTERNATING | {"attention.rope_pattern": [1, 0, 1, 1], "logit_scale": 8.0}
        | {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.025},
        (),
    ),
    "grovemoe": (
        EXPERTS | {"expert_used_count": 3, "experts_per_group": 2, "expert_group_scale": 0.5}
        | {"expert_chunk_feed_forward_length": 48}, (),
    ),
    "hunyuan-moe": (EXPERTS | {"feed_forward_length": 64}, ()),
    "hunyuan_vl": (SECTIONS, ()),
    "hy_v3": (_SHARED | {"expert_weights_norm": True}, ("blk.1.ffn_gate_inp.weight", "blk.1.exp_probs_b")),
    "hy_v4": (
        _INDEXED | {"block_count": 3, "attention.indexer.types": [1, 0, 1], "swiglu_clamp_exp": [0.5, 0.25, 1.0]}
        | {"hyper_connection.count": 4, "hyper_connection.epsilon": 1e-6, "hyper_connection.magnitude": 2.0},
        ("output.weight", *_SELECTION),
    ),
    "kimi-k3": (
        _SHARED | {"block_count": 5, "attention.head_count_kv": [0, 1, 0, 0, 1], "ssm.conv_kernel": 4}
        | {"kda.head_dim": 48, "kda.gate_lower_bound": -5.0, "rope.dimension_count": 16, "attn_res.block_size": 2}
        | {"attention.q_lora_rank": 96, "attention.kv_lora_rank": 64, "attention.key_length": 80}
        | {"attention.value_length": 64, "attention.key_length_mla": 48, "attention.value_length_mla": 32}
        | {"activation.situ_beta": 2.0, "activation.situ_linear_beta": 3.0, "expert_latent_length": 64},
        ("output.weight", *_SELECTION, "blk.*.attn_gate.weight", "blk.*.ffn_routed_norm.weight"),
    ),
    "internlm2": ({}, ("output.weight",)),
    "jais": (
        {"attention.max_alibi_bias": 8.0},
        ("output.weight", *_QKV, "blk.*.attn_qkv.bias", *_LAYER_NORM_BIAS, *_UNGATED_BIAS, *_biases("ffn_gate")),
    ),
    "jais2": ({}, ("output.weight", *_LAYER_NORM_BIAS, *_UNGATED_BIAS)),
    "laguna": (
        _SHARED | _WINDOWS | _PARTIAL | {"expert_weights_norm": True, "rope.dimension_count_swa": 64},
        ("output.weight", *_SELECTION),
    ),
    "maincoder": ({}, ()),
    "mamba": (_MAMBA, ()),
    "jamba": (
        EXPERTS | _MAMBA | {"block_count": 3, "attention.head_count_kv": [0, 2, 0]}, ("blk.1.ffn_gate_inp.weight",),
    ),
    "maple": (EXPERTS | _WINDOWS | _ALTERNATING | {"swiglu_clamp_exp": [0.5, 0.25, 0.0, 1.0]}, ("output.weight",)),
    "mellum": (EXPERTS | _WINDOWS | ROPE_SCALED, ("output.weight",)),
    "minicpm": ({}, ()),
    "mimo2": (
        _SHARED | _WINDOWS | _ALTERNATING | {"attention.value_length": 48, "attention.value_scale": 0.7}
        | {"attention.head_count_kv": [1, 2, 1, 2]},
        ("output.weight", "blk.1.ffn_gate_inp.weight", "blk.2.ffn_gate_inp.weight", "blk.2.exp_probs_b.bias",
         "blk.0.attn_sinks.weight"),
    ),
    "minimax-m3": (
        _SHARED | _PARTIAL | {"expert_weights_norm": True, "expert_weights_scale": 1.5, "attention.indexer.top_k": 4}
        | {"attention.indexer.block_size": 4, "attention.indexer.head_count": 2, "attention.indexer.key_length": 32}
        | {"attention.indexer.local_blocks": 1},
        ("output.weight", *_SELECTION),
    ),
    "minicpm3": (
        _PARTIAL | {"attention.q_lora_rank": 96, "attention.kv_lora_rank": 64, "attention.key_length": 96}
        | {"attention.value_length": 64, "attention.head_count_kv": 4},
        ("rope_factors_long.weight", "rope_factors_short.weight"),
    ),
    "minimax-01": (
        EXPERTS | {"feed_forward_length": 64, "block_count": 4, "full_attention_interval": 2, "residual_scale": 1.5},
        (),
    ),
    "mpt": ({"attention.max_alibi_bias": 6.0, "attention.clamp_kqv": 1.0}, (*_QKV, "blk.*.ffn.act.scales")),
    "muse-glimmer": (_WINDOWS | {"logit_scale": 0.25, "final_logit_softcapping": 3.0}, ("output.weight",)),
    "nanbeige": ({}, ("output.weight",)),
    "nemotron": (_PARTIAL, ("output.weight", *_LAYER_NORM_BIAS)),
    "olmo": ({"attention.clamp_kqv": 1.0}, ()),
    "openelm": (
        {"attention.head_count": [4, 6], "attention.head_count_kv": [2, 3], "feed_forward_length": [512, 768]}, _QKV,
    ),
    "orion": ({}, ("output.weight", *_LAYER_NORM_BIAS)),
    "paddleocr": (SECTIONS, ()),
    "pangu-embedded": ({}, ("output.weight", *QKV_BIAS, *OUTPUT_BIAS)),
    "phi2": (_PARTIAL, ("output.weight", "output.bias", *_biases("attn_norm"), "output_norm.bias", *_UNGATED_BIAS)),
    "phimoe": (
        EXPERTS | {"feed_forward_length": 64},
        ("output.weight", "output.bias", *_LAYER_NORM_BIAS, *QKV_BIAS, *OUTPUT_BIAS),
    ),
    "plamo": ({}, ("output.weight",)),
    "plamo2": (_MAMBA | {"block_count": 3, "attention.head_count_kv": [0, 2, 0], "ssm.time_step_rank": 4}, _QKV),
    "plamo3": (_WINDOWS, _QKV),
    "qwen": ({"attention.head_count_kv": 4}, ("output.weight", *_QKV, "blk.*.attn_qkv.bias")),
    "refact": ({"attention.head_count_kv": 1}, ()),
    "qwen4exp": (
        EXPERTS | DELTA_NET | SECTIONS | {"attention.recurrent_layers": [1, 1, 0], "block_count": 3}
        | {"expert_shared_feed_forward_length": 96, "hyper_connection.count": 4, "hyper_connection.low_rank": 8}
        | {"attention.indexer.head_count": 3, "attention.indexer.key_length": 32, "attention.indexer.top_k": 16}
        | {"attention.compress_ratios": [0, 0, 4], "ple.layers": [1], "ple.ngram_size": 3, "ple.heads_per_ngram": 2}
        | {"ple.conv_kernel": 4, "ple.eos_token_id": 5, "embedding_length_per_layer_input": 64}
        | {"ple.layer_multipliers": [23456789012345, 34567890123457, 45678901234567]}
        | {"ple.head_offsets": [0, 97, 198, 301], "ple.head_vocab_sizes": [97, 101, 103, 107]},
        ("output.weight",),
    ),
    "smallthinker": (EXPERTS | {"expert_gating_func": 2, "block_count": 2}, ()),
    "spark2_5": (_WINDOWS | _ALTERNATING, ()),
    "step35": (
        EXPERTS | _WINDOWS | {"attention.sliding_window_pattern": [0, 1, 1, 0], "rope.freq_base_swa": 1000.0}
        | {"attention.head_count": [4, 6, 6, 4], "rope.dimension_count_swa": 64, "expert_weights_norm": True}
        | {"expert_weights_scale": 1.5, "swiglu_clamp_exp": [0.0, 0.0, 0.5, 0.25], "expert_gating_func": 2}
        | {"swiglu_clamp_shexp": [0.0, 0.0, 0.25, 0.5], "expert_shared_feed_forward_length": 96},
        ("output.weight", *_SELECTION, *(f"blk.{i}.ffn_gate_inp.weight" for i in (1, 2, 3)),
         "blk.*.attn_q_norm.weight", "blk.*.attn_gate.weight"),
    ),
    "stablelm": (_PARTIAL, ("output.weight", "blk.*.attn_q_norm.weight", "output_norm.bias", *_biases("attn_norm"))),
    "starcoder": ({}, (*_QKV, "blk.*.attn_qkv.bias", *_LAYER_NORM_BIAS, *_UNGATED_BIAS)),
    "talkie": ({"logit_scale": 0.5}, ("output.weight",)),
    "xverse": ({}, ("output.weight",)),
}  # fmt: skip
LLAMACPP["mistral4"] = MODELS["deepseek2"]
MODELS |= LLAMACPP


def tiny(name: str, form: str = "f16") -> GGUFModel:
    """The model of that name in MODELS, with random weights in that format."""
    keys, tensors = MODELS[name]
    return synthetic(f"tiny-qwen2:{form}", keys={"general.architecture": architecture_of(name)} | keys, tensors=tensors)


def architecture_of(name: str) -> str:
    """Of a name of MODELS."""
    return "llama" if name == "llama-moe" else name


def exact() -> dict[str, np.ndarray]:
    """By name of MODELS, the logits [positions, vocab] of `tiny` models after the tokens at `positions` of `ids`."""
    fixtures = (Path(__file__).parents[1] / "fixtures").glob("architectures*.npz")
    found = {name: array for path in fixtures for name, array in np.load(path).items()}
    return found | {name: found[other] for name, other in SAME_TEXT.items()}
