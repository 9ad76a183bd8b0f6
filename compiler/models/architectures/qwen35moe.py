"""qwen35moe: Qwen 3.5 and later with experts beside a gated shared expert in every layer."""

from mlc_amd.compiler.models.architectures.qwen35 import read_hybrid
from mlc_amd.compiler.models.config import ExpertsConfig, ModelConfig, SharedExpertConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import read_experts
from mlc_amd.compiler.models.registry import architecture


@architecture("qwen35moe")
def read(keys: Keys) -> ModelConfig:
    return read_hybrid(keys, read_block(keys))


def read_block(keys: Keys) -> ExpertsConfig:
    size = keys.integer("expert_feed_forward_length")
    shared = SharedExpertConfig(keys.integer("expert_shared_feed_forward_length", size), gated_output=True)
    return read_experts(keys, size, gating="softmax", shared=shared)
