"""qwen3moe: Qwen 3's mixtures of experts. As qwen3, with experts in every layer."""

from mlc_amd.compiler.models.config import ModelConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import read_experts, read_uniform
from mlc_amd.compiler.models.registry import architecture


@architecture("qwen3moe")
def read(keys: Keys) -> ModelConfig:
    experts = read_experts(keys, keys.integer("expert_feed_forward_length"))
    return read_uniform(keys, neox=True, feed_forward=experts, head_norms=True)
