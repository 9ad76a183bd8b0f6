"""llama: Llama 2 and 3.x, Mistral, TinyLlama, SmolLM. Grouped queries, interleaved RoPE pairs, SwiGLU; biases where the
file has them."""

from mlc_amd.compiler.models.config import ModelConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.transformer import decoder, read_uniform, tensors

__all__ = ["decoder", "read", "tensors"]


def read(keys: Keys) -> ModelConfig:
    return read_uniform(keys, neox=False, qkv_bias="blk.0.attn_q.bias" in keys.tensors)
