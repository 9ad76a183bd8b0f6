"""nemotron_h_moe: NVIDIA Nemotron 3 Nano and Super. As nemotron_h, with experts without gates in the place of dense
blocks, beside a shared one; in some models the experts get fewer columns."""

from mlc_amd.compiler.models.architectures.nemotron_h import read_single
from mlc_amd.compiler.models.config import ModelConfig, SharedExpertConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import read_experts
from mlc_amd.compiler.models.registry import architecture


@architecture("nemotron_h_moe")
def read(keys: Keys) -> ModelConfig:
    shared = keys.integer("expert_shared_feed_forward_length", 0, minimum=0)
    experts = read_experts(
        keys,
        keys.integer("expert_feed_forward_length"),
        gating="sigmoid",
        act="relu",
        gated=False,
        latent=keys.integer("moe_latent_size", 0, minimum=0),
        normalize=keys.flag("expert_weights_norm", False),
        scale=keys.number("expert_weights_scale", 1.0, minimum=0.0) or 1.0,
        groups=keys.integer("expert_group_count", 1, minimum=0) or 1,
        groups_used=keys.integer("expert_group_used_count", 1, minimum=0) or 1,
        selection_bias=any(name.endswith("exp_probs_b.bias") for name in keys.tensors),
        shared=SharedExpertConfig(shared, act="relu_sq", gated=False) if shared else None,
    )
    return read_single(keys, lambda size: experts)
