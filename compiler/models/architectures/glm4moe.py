"""glm4moe: GLM 4.5. Partial RoPE, head norms in some models; after a few dense layers experts chosen by sigmoid and a
bias, beside a shared expert. A block for multi-token prediction stands at the end."""

from mlc_amd.compiler.models.config import LayerConfig, ModelConfig, Norms, SharedExpertConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import (
    ROPE,
    feed_forward,
    predicting_layers,
    read_attention,
    read_experts,
    read_model,
    read_rope,
)
from mlc_amd.compiler.models.registry import architecture


@architecture("glm4moe")
def read(keys: Keys) -> ModelConfig:
    predicting = predicting_layers(keys)
    mixer = read_attention(keys, head_norms="blk.0.attn_q_norm.weight" in keys.tensors)
    size = keys.integer("expert_feed_forward_length")
    experts = read_experts(
        keys,
        size,
        normalize=keys.flag("expert_weights_norm", False),
        scale=keys.number("expert_weights_scale", 1.0, minimum=0.0) or 1.0,
        selection_bias=True,
        shared=SharedExpertConfig(size * keys.integer("expert_shared_count", 1)),
    )
    dense = feed_forward(keys, keys.integer("feed_forward_length"))
    leading = keys.integer("leading_dense_block_count", 0, minimum=0)
    norms = Norms(before="post_attention_norm")
    layers = [
        LayerConfig(mixer, dense if i < leading else experts, feed_forward_norms=norms) for i in range(predicting.count)
    ]
    layers += predicting.layers(LayerConfig(mixer, experts, feed_forward_norms=norms))
    ropes = {ROPE: read_rope(keys, mixer.head_dim, neox=True)}
    return read_model(keys, layers, ropes, unused=predicting.unused)
