"""The tensors that the GGUF file of a supported model must contain.

In: a `ModelConfig`. Out: `expected_tensors`, the table of its tensors (also the list from which `synthetic.py` makes
models), and `check_tensors`, which compares a file with it. Names and shapes are llama.cpp's (src/llama-arch.cpp,
src/llama-model.cpp).
"""

from collections.abc import Iterator, Mapping
from typing import Protocol

from mlc_amd.compiler.gguf.config import ModelConfig
from mlc_amd.compiler.gguf.header import FETCH_AGAIN
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.formats import FORMATS


class TensorLike(Protocol):
    format: str
    shape: tuple[int, ...]


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor of that model, in file order; shape is (rows, columns) or (columns,), rows =
    outputs. Lazy, because `config.layers` of a damaged file can be absurd."""
    c, q, kv = config, config.heads * config.head_dim, config.kv_heads * config.head_dim
    yield "token_embd.weight", (c.vocab, c.hidden)
    if c.rope.freq_factors:
        yield "rope_freqs.weight", (c.rope.dim // 2,)
    for layer in range(c.layers):
        for present, name, shape in (
            (True, "attn_norm.weight", (c.hidden,)),
            (True, "attn_q.weight", (q, c.hidden)),
            (True, "attn_k.weight", (kv, c.hidden)),
            (True, "attn_v.weight", (kv, c.hidden)),
            (c.qkv_bias, "attn_q.bias", (q,)),
            (c.qkv_bias, "attn_k.bias", (kv,)),
            (c.qkv_bias, "attn_v.bias", (kv,)),
            (c.qk_norm, "attn_q_norm.weight", (c.head_dim,)),
            (c.qk_norm, "attn_k_norm.weight", (c.head_dim,)),
            (True, "attn_output.weight", (c.hidden, q)),
            (c.output_bias, "attn_output.bias", (c.hidden,)),
            (True, "ffn_norm.weight", (c.hidden,)),
            (True, "ffn_gate.weight", (c.ffn, c.hidden)),
            (True, "ffn_up.weight", (c.ffn, c.hidden)),
            (True, "ffn_down.weight", (c.hidden, c.ffn)),
        ):
            if present:
                yield f"blk.{layer}.{name}", shape
    yield "output_norm.weight", (c.hidden,)
    if not c.tied:
        yield "output.weight", (c.vocab, c.hidden)


def check_tensors(config: ModelConfig, tensors: Mapping[str, TensorLike], path: str) -> None:
    """UserError (with `path` in front) unless `tensors` are exactly those of `expected_tensors`, vectors as floats. An
    additional tensor is an error, too, as in llama.cpp: it belongs to a variant whose results would be wrong without
    it."""
    known = set()
    for name, shape in expected_tensors(config):
        if name not in tensors:
            raise UserError(f"{path}: tensor {name} is missing; {FETCH_AGAIN}")
        tensor = tensors[name]
        if tensor.shape != shape:
            raise UserError(
                f"{path}: tensor {name} has shape {tensor.shape}, expected {shape}; its metadata and tensors "
                "do not match: convert the model again"
            )
        if len(shape) == 1 and FORMATS[tensor.format].kind != "float":
            raise UserError(
                f"{path}: tensor {name} is {tensor.format}, but norms and biases must be floats; quantize the model "
                "again"
            )
        known.add(name)
    extra = next((name for name in tensors if name not in known), None)
    if extra is not None:
        raise UserError(
            f"{path}: tensor {extra!r} is not part of a {config.architecture} model as supported here; "
            "use a model of the plain architecture"
        )
