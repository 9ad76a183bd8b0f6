"""ernie4_5-moe: ERNIE 4.5 with experts in some layers after the leading dense ones, chosen by probability and
a bias, beside a shared expert."""

from mlc_amd.compiler.models.config import LayerConfig, ModelConfig, SharedExpertConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import (
    ROPE,
    feed_forward,
    read_attention,
    read_experts,
    read_layers,
    read_model,
    read_rope,
)
from mlc_amd.compiler.models.registry import architecture


@architecture("ernie4_5-moe")
def read(keys: Keys) -> ModelConfig:
    count, mixer = read_layers(keys), read_attention(keys, output_bias=False)
    leading = keys.integer("leading_dense_block_count", 0, minimum=0)
    step = keys.integer("interleave_moe_layer_step", 1)
    sparse = [i >= leading and (i + 1) % step == 0 for i in range(count)]
    shared = keys.integer("expert_shared_feed_forward_length", 0, minimum=0)
    experts = read_experts(
        keys,
        keys.integer("expert_feed_forward_length"),
        gating="softmax",
        selection_bias=any(f"blk.{i}.exp_probs_b.bias" in keys.tensors for i in range(count)),
        shared=SharedExpertConfig(shared) if shared else None,
    )
    dense = feed_forward(keys, keys.integer("feed_forward_length"))
    layers = [LayerConfig(mixer, experts if is_sparse else dense) for is_sparse in sparse]
    return read_model(keys, layers, {ROPE: read_rope(keys, mixer.head_dim, neox=False)})
