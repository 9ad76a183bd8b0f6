"""A tiny encoder of each architecture: metadata on top of the preset "tiny-qwen2", and the optional tensors that it
has. `write_gguf` makes files of them that llama.cpp runs."""

import numpy as np

from mlc_amd.compiler.gguf import GGUFModel, synthetic
from mlc_amd.compiler.gguf.tensor import Tensor

BERT = {
    "attention.layer_norm_epsilon": 1e-12, "attention.causal": False, "tokenizer.ggml.token_type_count": 2,
    "pooling_type": 1, "context_length": 512, "feed_forward_length": 512,
}  # fmt: skip
NORM_BIAS = ("token_embd_norm.bias", *(f"blk.*.{which}_output_norm.bias" for which in ("attn", "layer")))
TYPES = ("token_types.weight", *NORM_BIAS)
QKV_BIAS = tuple(f"blk.*.attn_{which}.bias" for which in ("q", "k", "v", "output"))
FFN_BIAS = tuple(f"blk.*.ffn_{which}.bias" for which in ("up", "down"))
HEAD = ("cls.weight", "cls.bias", "cls.output.weight", "cls.output.bias")
WINDOW = {"attention.sliding_window": 30, "rope.freq_base_swa": 1000.0, "block_count": 4}
EXPERTS = {"expert_count": 8, "expert_used_count": 2, "moe_every_n_layers": 2, "block_count": 4}
LABELS = {"classifier.output_labels": ["yes", "no"], "pooling_type": 4}

# name: (architecture, metadata, optional tensors)
MODELS: dict[str, tuple[str, dict[str, object], tuple[str, ...]]] = {
    "bert": ("bert", BERT | {"pooling_type": 2}, (*TYPES, *QKV_BIAS, *FFN_BIAS)),
    "bert-rank": (
        "bert", BERT | {"pooling_type": 4, "attention.head_count_kv": 4}, (*NORM_BIAS, *QKV_BIAS, *FFN_BIAS, *HEAD),
    ),
    "nomic-bert": ("nomic-bert", BERT, TYPES),
    "nomic-bert-moe": ("nomic-bert-moe", BERT | EXPERTS, (*TYPES, *QKV_BIAS, *FFN_BIAS)),
    "jina-bert-v2": (
        "jina-bert-v2", BERT | {"attention.head_count": 4, "attention.head_count_kv": 4},
        (*TYPES, *QKV_BIAS, "blk.*.ffn_down.bias", "blk.*.ffn_gate.weight"),
    ),
    "jina-bert-v2-code": (
        "jina-bert-v2", BERT | {"attention.head_count_kv": 4},
        (
            *TYPES, *QKV_BIAS, "blk.*.ffn_down.bias", "blk.*.ffn_gate.weight",
            *(f"blk.*.attn_{which}_norm.{part}" for which in "qk" for part in ("weight", "bias")),
            "blk.*.attn_norm_2.weight", "blk.*.attn_norm_2.bias",
        ),
    ),
    "jina-bert-v3": ("jina-bert-v3", BERT, (*TYPES, *QKV_BIAS, *FFN_BIAS)),
    "modern-bert": (
        "modern-bert", BERT | WINDOW | {"attention.head_count_kv": 4},
        ("blk.*.attn_qkv.weight", "blk.*.attn_norm.weight"),
    ),
    "modern-bert-rank": (
        "modern-bert", BERT | WINDOW | {"attention.head_count_kv": 4, "pooling_type": 4},
        ("blk.*.attn_qkv.weight", "cls.weight", "cls.norm.weight", "cls.output.weight", "cls.output.bias"),
    ),
    "neo-bert": ("neo-bert", BERT, ("blk.*.attn_qkv.weight",)),
    "eurobert": ("eurobert", BERT, ()),
    "gemma-embedding": ("gemma-embedding", BERT | WINDOW | {"attention.sliding_window_pattern": 2}, ()),
    "gemma-embedding-dense": (
        "gemma-embedding", BERT | WINDOW | {"attention.sliding_window_pattern": 2}
        | {"dense_2_feat_in": 256, "dense_2_feat_out": 512, "dense_3_feat_in": 512, "dense_3_feat_out": 256},
        ("dense_2.weight", "dense_3.weight"),
    ),
    "llama-embed": ("llama-embed", BERT, ()),
    "qwen3-last": ("qwen3", {"pooling_type": 3, "context_length": 512}, ()),
    "qwen3-rank": ("qwen3", LABELS | {"context_length": 512}, ("cls.output.weight",)),
    "qwen2-mean": ("qwen2", {"pooling_type": 1, "context_length": 512, "attention.causal": False}, ()),
    "llama-none": ("llama", {"attention.causal": False, "context_length": 512}, ()),
}  # fmt: skip


def tiny(name: str, form: str = "f32") -> GGUFModel:
    """The model of that name in MODELS, with random weights in that format."""
    architecture, keys, tensors = MODELS[name]
    return synthetic(f"tiny-qwen2:{form}", keys={"general.architecture": architecture} | keys, tensors=tensors)


def relative_error(found: np.ndarray, exact: np.ndarray) -> float:
    """The length of the difference of all numbers, in lengths of the exact ones."""
    return float(np.linalg.norm(found - exact.astype(np.float64)) / np.linalg.norm(exact.astype(np.float64)))


def in_float32(model: GGUFModel) -> GGUFModel:
    """The same weights as float32."""

    def as_float32(one: Tensor) -> Tensor:
        return Tensor(one.name, "f32", one.shape, lambda start, stop: one.dequantize(start, stop).view(np.uint8))

    tensors = {name: as_float32(one) for name, one in model.stored.items()}
    return GGUFModel(model.path, model.metadata, tensors, model.config)


WITHOUT_ORACLE = ("gemma-embedding-dense",)  # llama.cpp v0.5.0 fails an assertion


def texts() -> list[list[int]]:
    """Token ids of texts of 1 to 512 tokens."""
    rng = np.random.default_rng(1)
    counts = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 100, 130, 257, 400, 512)
    return [rng.integers(0, 1000, count).tolist() for count in counts]
