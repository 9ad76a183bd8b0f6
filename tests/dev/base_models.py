"""Small models that the fuzzing programs damage: one of each kind of layer, with random weights.

In: a name of `MODELS`. Out: a `GGUFModel`; as a program, its artifact: python -m tests.dev.base_models NAME
TARGET ARCH CONTEXT FOLDER
"""

import sys
from collections.abc import Mapping
from pathlib import Path

from mlc_amd.compiler.gguf import GGUFModel, synthetic
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.options import CompileOptions
from tests.support.llvm_levels import unoptimized

# Metadata of models that are small enough to be read thousands of times.
SIZES = {
    "block_count": 1, "embedding_length": 64, "feed_forward_length": 64, "attention.head_count": 2,
    "attention.head_count_kv": 1, "attention.key_length": 32, "attention.value_length": 32, "context_length": 128,
    "rope.dimension_count": 32, "vocab_size": 320,
}  # fmt: skip
_EXPERTS: dict[str, object] = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64}
_SIGMOID = {"leading_dense_block_count": 1, "expert_shared_count": 1, "expert_gating_func": 2}
_LATENT = {
    "attention.kv_lora_rank": 64, "attention.key_length": 80, "attention.value_length": 64, "rope.dimension_count": 16,
    "attention.key_length_mla": 48, "attention.value_length_mla": 32,
}  # fmt: skip
_PREDICTOR = ("attn_norm", *(f"nextn.{name}" for name in ("eh_proj", "enorm", "hnorm", "shared_head_norm")))
# Name: architecture, format, metadata besides SIZES, optional tensors
MODELS: dict[str, tuple[str, str, Mapping[str, object], tuple[str, ...]]] = {
    "dense": ("llama", "q4_0", {"block_count": 2}, ("output.weight",)),
    "f16": ("qwen3", "f16", {}, ()),
    "experts": ("qwen3moe", "q8_0", _EXPERTS, ()),
    "windows": ("gemma3", "q4_0", {"attention.sliding_window": 8, "attention.sliding_window_pattern": 2}, ()),
    "latent": (  # with a layer that guesses tokens
        "deepseek2",
        "q4_0",
        _EXPERTS | _SIGMOID | _LATENT | {"block_count": 3, "nextn_predict_layers": 1, "attention.q_lora_rank": 32},
        ("blk.*.exp_probs_b.bias", *(f"blk.2.{name}.weight" for name in _PREDICTOR)),
    ),
    "recurrent": (
        "qwen35",
        "q4_0",
        {"block_count": 2, "full_attention_interval": 2, "ssm.state_size": 32, "ssm.group_count": 2}
        | {"ssm.time_step_rank": 4, "ssm.conv_kernel": 4},
        (),
    ),
    "state-space": (
        "granitehybrid",
        "q8_0",
        {"block_count": 2, "attention.head_count_kv": [0, 1], "rope.scaling.finetuned": False}
        | {"ssm.inner_size": 128, "ssm.state_size": 32, "ssm.time_step_rank": 4, "ssm.group_count": 1}
        | {"ssm.conv_kernel": 4},
        (),
    ),
    "encoder": (
        "bert",
        "q8_0",
        {"pooling_type": 4, "attention.causal": False, "attention.layer_norm_epsilon": 1e-12}
        | {"tokenizer.ggml.token_type_count": 2},
        ("token_types.weight", "cls.weight", "cls.bias", "cls.output.weight", "blk.*.attn_q.bias", "blk.*.ffn_up.bias"),
    ),
    "linear": (
        "kimi-linear",
        "q4_0",
        _EXPERTS | _SIGMOID | _LATENT
        | {"block_count": 3, "attention.head_count_kv": [0, 1, 0], "kda.head_dim": 32, "ssm.conv_kernel": 4},
        ("output.weight", "blk.*.exp_probs_b.bias"),
    ),
}  # fmt: skip


def model(name: str) -> GGUFModel:
    """The model of that name in MODELS."""
    architecture, form, more, tensors = MODELS[name]
    keys = SIZES | {"general.architecture": architecture} | dict(more)
    return synthetic(f"tiny-qwen2:{form}", keys=keys, tensors=tensors)


def main(name: str, target: str, arch: str, context: str, folder: str) -> None:
    """Compiles a model to a folder."""
    with unoptimized():
        compile_model(model(name), Path(folder), CompileOptions(target=target, arch=arch, ctx=int(context)))


if __name__ == "__main__":
    main(*sys.argv[1:])
