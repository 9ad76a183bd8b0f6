"""qwen2moe: Qwen 1.5 and 2 with experts, whose weights do not add up to 1, and a gated shared expert."""

from mlc_amd.compiler.models.config import ModelConfig, SharedExpertConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import read_experts, read_uniform
from mlc_amd.compiler.models.registry import architecture


@architecture("qwen2moe")
def read(keys: Keys) -> ModelConfig:
    dense, used = keys.integer("feed_forward_length"), keys.integer("expert_used_count")
    experts = read_experts(
        keys,
        keys.integer("expert_feed_forward_length", max(1, dense // used)),
        normalize=False,
        shared=SharedExpertConfig(keys.integer("expert_shared_feed_forward_length", dense), gated_output=True),
    )
    return read_uniform(keys, neox=True, feed_forward=experts, qkv_bias=True)
