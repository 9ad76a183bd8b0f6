"""qwen2: Qwen 2 and 2.5. As llama, with biases on q, k and v and RoPE pairs half a head apart."""

from mlc_amd.compiler.models.config import ModelConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import read_uniform
from mlc_amd.compiler.models.registry import architecture


@architecture("qwen2")
def read(keys: Keys) -> ModelConfig:
    return read_uniform(keys, neox=True, qkv_bias=True)
