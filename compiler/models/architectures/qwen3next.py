"""qwen3next: as qwen35moe, with value heads in the order of their key heads, and merged inputs of the delta nets."""

from mlc_amd.compiler.models.architectures.qwen35 import read_hybrid
from mlc_amd.compiler.models.architectures.qwen35moe import read_block
from mlc_amd.compiler.models.config import ModelConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.registry import architecture


@architecture("qwen3next")
def read(keys: Keys) -> ModelConfig:
    merged = any(name.endswith("ssm_in.weight") for name in keys.tensors)
    return read_hybrid(keys, read_block(keys), grouped=True, merged_gates=True, merged_inputs=merged)
