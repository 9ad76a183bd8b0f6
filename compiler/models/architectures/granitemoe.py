"""granitemoe: IBM Granite 3 and 4 with experts in every layer, beside a shared expert in some models."""

from mlc_amd.compiler.models.architectures.granite import read_granite
from mlc_amd.compiler.models.config import ModelConfig, SharedExpertConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import read_experts
from mlc_amd.compiler.models.registry import architecture


@architecture("granitemoe")
def read(keys: Keys) -> ModelConfig:
    shared = keys.integer("expert_shared_feed_forward_length", 0, minimum=0)
    experts = read_experts(
        keys,
        keys.integer("feed_forward_length"),
        gating="softmax",
        shared=SharedExpertConfig(shared) if shared else None,
    )
    return read_granite(keys, experts)
