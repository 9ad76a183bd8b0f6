"""qwen3: as qwen2 without biases, an RMS norm over each head of q and k before RoPE, and its own head size."""

from mlc_amd.compiler.models.config import ModelConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import read_uniform
from mlc_amd.compiler.models.registry import architecture


@architecture("qwen3")
def read(keys: Keys) -> ModelConfig:
    return read_uniform(keys, neox=True, head_norms=True)
