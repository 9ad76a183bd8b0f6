"""Files of drafts with random weights, for tiny models of the test generator: one of each kind and variant."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from mlc_amd.compiler.gguf import GGUFModel, synthetic
from mlc_amd.compiler.models.config import ModelConfig
from mlc_amd.compiler.models.drafts.files import TOKENS, read_draft, tensors

SIZES = {"feed_forward_length": 192, "attention.head_count": 4, "attention.head_count_kv": 2, "context_length": 2048}
GEMMA4: dict[str, object] = {
    "general.architecture": "gemma4", "block_count": 4, "attention.sliding_window": 24,
    "attention.shared_kv_layers": 2, "attention.sliding_window_pattern": [True, False, True, False],
    "attention.head_count_kv": [2, 1, 2, 1], "attention.key_length_swa": 32, "attention.value_length_swa": 32,
    "rope.dimension_count_swa": 32, "rope.freq_base_swa": 1000.0, "embedding_length_per_layer_input": 32,
}  # fmt: skip


class Case(NamedTuple):
    """architecture: of the draft; model: keys of the model instead of its own; keys: of the draft; has: optional
    tensors that the draft has; vocab: tokens that it knows, 0: all."""

    architecture: str
    model: Mapping[str, object]
    keys: Mapping[str, object]
    has: tuple[str, ...] = ()
    vocab: int = 0


EAGLE3 = {"block_count": 1, "embedding_length": 128, "target_hidden_size": 256, "target_layers": [1, 2, 3]}
DFLASH = {"block_count": 2, "embedding_length": 256, "target_layers": [1, 3], "block_size": 6}
ASSISTANT = SIZES | {
    "block_count": 3, "nextn_predict_layers": 3, "embedding_length": 64, "embedding_length_out": 256,
    "attention.sliding_window": 24, "attention.sliding_window_pattern": [True, True, False],
    "attention.key_length": 64, "attention.value_length": 64, "attention.key_length_swa": 32,
    "attention.value_length_swa": 32, "rope.dimension_count": 64, "rope.dimension_count_swa": 32,
    "rope.freq_base_swa": 1000.0, "attention.shared_kv_layers": 3, "attention.head_count_kv": [2, 2, 1],
}  # fmt: skip
DEEPER: dict[str, object] = {"general.architecture": "qwen3", "block_count": 4}
CASES = {
    "eagle3": Case("eagle3", DEEPER, SIZES | EAGLE3, ("token_embd.weight", "output.weight", "rope_freqs.weight"), 400),
    "eagle3-shared": Case(
        "eagle3", {"general.architecture": "llama", "block_count": 4},
        SIZES | EAGLE3 | {"embedding_length": 256, "norm_before_fc": True, "norm_before_residual": True},
    ),
    "dflash": Case("dflash", DEEPER, SIZES | DFLASH),
    "dflash-window": Case(
        "dflash", DEEPER,
        SIZES | DFLASH | {"attention.sliding_window": 24, "attention.sliding_window_pattern": [True, False]}
        | {"hidden_activation": "gelu", "embedding_length": 256},
        ("blk.0.post_attention_norm.weight", "blk.0.post_ffw_norm.weight", "blk.1.layer_output_scale.weight"),
    ),
    "gemma4-assistant": Case("gemma4-assistant", GEMMA4, ASSISTANT, ("rope_freqs.weight",)),
}  # fmt: skip


def target(name: str, form: str = "f16") -> GGUFModel:
    """The model that the case's draft is for."""
    has = tuple(f"blk.{i}.layer_output_scale.weight" for i in range(4)) if name.startswith("gemma4") else ()
    more = ("rope_freqs.weight",) if has else ()
    return synthetic(f"tiny-qwen2:{form}", keys=CASES[name].model, tensors=(*has, *more))


def write_draft(name: str, model: ModelConfig, path: Path, metadata: Mapping[str, Any], seed: int = 1) -> Path:
    """Writes the draft of that case for a model, float32. metadata: of the model, whose tokenizer it takes."""
    case, rng = CASES[name], np.random.default_rng(seed)
    keys: dict[str, Any] = {f"{case.architecture}.{key}": value for key, value in case.keys.items()}
    keys |= {f"{case.architecture}.attention.layer_norm_rms_epsilon": 1e-5, "general.architecture": case.architecture}
    keys |= {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    keys["tokenizer.ggml.mask_token_id"] = 7
    attention = ("attn_q", "attn_k", "attn_v")
    names = {"attn_v.weight": ()} | dict.fromkeys(case.has, ())
    names |= {f"blk.{i}.{which}.weight": () for i in range(4) for which in attention}
    if case.architecture == "gemma4-assistant":
        names["token_embd.weight"] = ()
    if case.vocab:
        names[TOKENS] = (case.vocab,)
    draft = read_draft(keys, names, str(path))
    writer = gguf.GGUFWriter(path, case.architecture)
    for key, value in keys.items():
        if key != "general.architecture":
            add(writer, key, value)
    for tensor, shape in tensors(draft, model):
        vector = len(shape) == 1
        values = rng.uniform(0.7, 1.3, shape) if vector else rng.normal(size=shape) / np.sqrt(shape[-1])
        # the rounding of the cache, and of llama.cpp's table of GELU, would grow from guess to guess otherwise
        if name == "gemma4-assistant" and tensor.endswith(("post_ffw_norm.weight", "attn_q_norm.weight")):
            values *= 0.25
        writer.add_tensor(tensor, np.asarray(values, np.float32))
    if case.vocab:
        writer.add_tensor(TOKENS, np.sort(rng.permutation(model.vocab)[: case.vocab]).astype(np.int64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
    kinds[str] = gguf.GGUFValueType.STRING
    if isinstance(value, list):
        of = gguf.GGUFValueType.INT32 if type(value[0]) is int else kinds[type(value[0])]
        writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, of)
    else:
        writer.add_key_value(key, value, kinds[type(value)])
